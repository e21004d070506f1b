"""The named families of rounds: their shapes, seeds and errors, and how the bench judges them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tessera.benchmarks.rounds import bench_solve, contest
from tessera.benchmarks.rounds.contest import ProcessOutcome, SolvedRound
from tessera.benchmarks.rounds.entries import ContestEntry, draw_round, state_drawn
from tessera.benchmarks.rounds.families import NAMED_FAMILIES, draw_family
from tessera.formulation.answer.check import find_violations
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.problem import Problem, RowKind
from tessera.formulation.round.statement import build_problem
from tessera.formulation.state.snapshot import Snapshot
from tessera.simulator.data import DATA_VARIABLE, MissingData
from tessera.solvers.base import Budget
from tessera.solvers.exact.greedy import Greedy
from tests.support.odd_problems import dynamic_optimum

OF_SNAPSHOTS = ("identical", "odd-counts", "forty-types", "few-large")
OF_PROBLEMS = ("subset-sum", "inverse", "small-values", "nested-quotas", "three-resources", "mmkp")
DRAWN = (*OF_SNAPSHOTS, *OF_PROBLEMS)
"""The families that need no data."""

ARENA_PROFILES = """\
model,params,global_batch,gpu_type,num_nodes,gpus_per_node,iter_time_s,status
bert,1.3B,128,a40,1,1,9.0,ok
bert,1.3B,128,a40,1,2,5.0,ok
bert,1.3B,128,a100,1,4,1.5,ok
moe,690M,256,v100,2,16,0.5,ok
moe,690M,256,a10,1,1,,failed
"""


def a_problem_of(family: str, **sizes: int) -> Problem:
    """Return a round of the family as a problem."""
    drawn = draw_family(family, **sizes)
    return drawn if isinstance(drawn, Problem) else build_problem(drawn, Policy())


def a_snapshot_of(family: str, **sizes: int) -> Snapshot:
    """Return a round of a family that is stated from snapshots."""
    drawn = draw_family(family, **sizes)
    assert isinstance(drawn, Snapshot)
    return drawn


def content(problem: Problem) -> tuple[Any, ...]:
    """Return the parts of a problem that make it differ from another."""
    arrays = (problem.value, problem.row, problem.amount, problem.usage_start, problem.capacity)
    return (*(array.tolist() for array in arrays), problem.rows)


@pytest.mark.parametrize("family", DRAWN)
def test_a_seed_names_one_round_of_a_family(family: str) -> None:
    first, again = (content(a_problem_of(family, jobs=30, seed=5)) for _ in range(2))

    assert first == again
    assert first != content(a_problem_of(family, jobs=30, seed=6))


@pytest.mark.parametrize("family", DRAWN)
def test_gpus_and_types_that_are_given_replace_the_familys_own(family: str) -> None:
    problem = a_problem_of(family, jobs=12, gpus=1_201, types=3)
    room = [row.capacity for row in problem.rows if row.kind is RowKind.GPUS]

    assert len(room) == 3
    # the capacities of subset sums are odd, whatever is given
    assert 1_201 <= sum(room) <= 1_201 + 3 * (family == "subset-sum")


@pytest.mark.parametrize("family", [f for f in DRAWN if f != "mmkp"])
def test_greedys_answer_to_every_family_breaks_no_rule(family: str) -> None:
    problem = a_problem_of(family, jobs=40, seed=3)
    answer = Greedy().solve(problem, Budget(remaining_s=lambda: math.inf))

    assert answer.objective > 0
    assert not find_violations(problem, answer)


def test_no_answer_fills_an_odd_knapsack_with_even_weights() -> None:
    problem = a_problem_of("subset-sum", jobs=4, gpus=1_001)

    assert dynamic_optimum(problem) == 1_000


def test_arenas_family_has_the_profiled_cells_of_its_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "arena").mkdir()
    (tmp_path / "arena" / "alpa_optimal.csv").write_text(ARENA_PROFILES)
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))

    snapshot = a_snapshot_of("arena", jobs=25)

    assert snapshot.schedulable_gpus().sum() == 1_280
    assert len(snapshot.estimates) == 4
    assert {w.key for w in snapshot.workloads} == {"bert/1.3B/128", "moe/690M/256"}
    assert set(snapshot.jobs.requested_gpus.tolist()) <= {1, 2, 4, 32}
    assert a_snapshot_of("arena", jobs=3, gpus=640).schedulable_gpus().sum() == 640


def test_arenas_family_names_the_data_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))

    with pytest.raises(MissingData, match=r"alpa_optimal\.csv"):
        draw_family("arena")


@pytest.mark.parametrize(
    ("family", "sizes", "field"),
    [
        ("nonsense", {}, "family"),
        ("identical", {"jobs": -1}, "jobs"),
        ("mmkp", {"types": -2}, "jobs"),
        ("few-large", {"gpus": 39}, "gpus"),
        ("arena", {"types": 3}, "types"),
    ],
)
def test_a_size_without_a_meaning_is_refused(
    family: str, sizes: dict[str, int], field: str
) -> None:
    with pytest.raises(InvalidInput) as refusal:
        draw_family(family, **sizes)
    assert refusal.value.field == field


def test_a_family_with_values_of_its_own_takes_no_objective() -> None:
    entry = ContestEntry(solver="greedy", jobs=5, gpus=0, types=0, family="mmkp")
    drawn = draw_round(entry)

    assert state_drawn(drawn, entry.objective).problem is drawn
    with pytest.raises(InvalidInput, match="leave the objective out"):
        state_drawn(drawn, "jct")


@pytest.mark.full
@pytest.mark.parametrize("family", ["identical", "mmkp"])
def test_a_round_of_a_family_is_solved_and_judged_by_its_aim(family: str) -> None:
    entry = ContestEntry(solver="portfolio", jobs=20, gpus=0, types=0, family=family)
    reports: list[dict[str, Any]] = []

    contest.take_part(entry, reports.append)
    (solved,) = [SolvedRound(**line["round"]) for line in reports if "round" in line]
    figures = bench_solve._figures(entry, ProcessOutcome(rounds=(solved,), ended="done"), [solved])

    assert solved.verified
    assert solved.jobs == figures["jobs"] == 20
    assert solved.cpu_s > 0
    assert figures["gap_of_aim"] == pytest.approx(solved.gap / NAMED_FAMILIES[family].aim)
    assert figures["cpu_of_aim"] == pytest.approx(solved.cpu_s / 5.0)
    assert figures["cp_sat_share"] == float(solved.cp_sat)
    assert "hard_gap" not in figures
    assert "gap" in bench_solve._waived(entry)


def test_a_family_that_is_to_be_solved_to_the_optimum_has_an_infinite_share_of_its_aim() -> None:
    reports: list[dict[str, Any]] = []
    drawn = ContestEntry(solver="greedy", jobs=20, gpus=0, types=0, family="identical")
    contest.take_part(drawn, reports.append)
    (solved,) = [SolvedRound(**line["round"]) for line in reports if "round" in line]
    entry, done = replace(drawn, family="arena"), ProcessOutcome(rounds=(), ended="done")

    for gap, share in ((0.0, 0.0), (1e-9, math.inf)):
        figures = bench_solve._figures(entry, done, [replace(solved, gap=gap)])
        assert figures["gap_of_aim"] == share


def test_a_round_is_sized_by_its_family_or_by_its_number_of_jobs() -> None:
    unsized = ContestEntry(solver="greedy", jobs=0, gpus=0, types=0)

    usual = bench_solve._sized(unsized, None)
    assert (usual.jobs, usual.gpus, usual.types) == (2_048, 2_048, 4)
    named = bench_solve._sized(replace(unsized, family="few-large"), None)
    assert (named.jobs, named.gpus, named.types) == (0, 0, 0)
    assert bench_solve._sized(replace(unsized, jobs=3, types=7), 0.5).gpus == 7
    with pytest.raises(InvalidInput):
        bench_solve._sized(replace(unsized, family="few-large", gpus=3), None)
    with pytest.raises(InvalidInput, match="tight, alike, identical"):
        bench_solve._sized(replace(unsized, family="nonsense"), None)
