"""Drawn rounds: families, instances and gangs, and how the benchmarks judge and print them."""

from __future__ import annotations

import io
import math
import queue
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tessera.benchmarks.deadlines.bench_deadline import (
    ELASTICFLOW,
    LOOK_AHEAD,
    PAPER_ELASTICFLOW,
    PLANNED,
    figures_of,
)
from tessera.benchmarks.deadlines.bench_deadline import _run_sweep as swept_of
from tessera.benchmarks.deadlines.bench_deadline import _sweep_tasks as asked_of
from tessera.benchmarks.harness.command import table_blocks
from tessera.benchmarks.rounds import bench_solve, contest
from tessera.benchmarks.rounds.bench_placement import POLICY
from tessera.benchmarks.rounds.contest import ProcessOutcome, SolvedRound, _read
from tessera.benchmarks.rounds.entries import ContestEntry, draw_round, state_drawn
from tessera.benchmarks.rounds.families import NAMED_FAMILIES, draw_family
from tessera.benchmarks.rounds.gangs import (
    GANG_FAMILIES,
    draw_gangs,
    gang_round,
    read_stored_rounds,
)
from tessera.benchmarks.rounds.instances import FAMILIES, churn_round, make_instance
from tessera.benchmarks.service.bench_reads import percentile_99
from tessera.formulation.answer.check import find_doubly_held, find_violations
from tessera.formulation.answer.codec import digest
from tessera.formulation.answer.placement import current_gangs
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Ints
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.problem import Problem, RowKind
from tessera.formulation.round.statement import build_problem
from tessera.formulation.state.snapshot import Snapshot
from tessera.simulator.comparison.runs import RunRequest
from tessera.simulator.comparison.workload import SYNTHETIC, WorkloadSpec
from tessera.simulator.data import DATA_VARIABLE, MissingData
from tessera.simulator.run import Conditions, Decider, simulate
from tessera.simulator.sweeps.runner import Sweep
from tessera.solvers.base import Budget
from tessera.solvers.exact.answers import is_answer
from tessera.solvers.exact.greedy import Greedy
from tessera.solvers.lookahead import exact
from tessera.solvers.registry import make_solver
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import plan_round
from tests.support.odd_problems import dynamic_optimum
from tests.support.oracles.joint_optimum import find_joint_optimum
from tests.support.worlds import StoppedClock, a_scenario, an_arrival, some_specs

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


def test_stored_rounds_are_those_that_are_drawn_from_their_seeds() -> None:
    stored = read_stored_rounds()
    assert {one.family for one in stored} == set(GANG_FAMILIES)
    for one in stored:
        assert one.jobs == draw_gangs(one.family, one.gpus, one.seed)
        assert one.placed_before <= one.optimum + 0.02  # weights of the old code are coarser


@pytest.mark.parametrize("family", GANG_FAMILIES)
def test_a_stored_optimum_is_found_again_and_no_answer_is_above_it(family: str) -> None:
    one = next(one for one in read_stored_rounds() if one.family == family and one.proven)
    snapshot = gang_round(one.jobs, one.gpus)
    again = find_joint_optimum(snapshot, POLICY, 120.0)
    assert again.proven
    assert again.value == pytest.approx(one.optimum, rel=1e-6)
    budget = Budget(remaining_s=lambda: math.inf)
    outcome = plan_round(snapshot, POLICY, make_solver(), budget)
    assert not outcome.violations
    assert outcome.placed_score <= one.optimum * (1 + 1e-6)


def problem_and_choice(snapshot: Snapshot) -> tuple[Problem, Ints]:
    """Return the round's problem and greedy's choice."""
    problem = build_problem(snapshot, Policy())
    return problem, Greedy().solve(problem, Budget(remaining_s=lambda: math.inf)).choice


@pytest.mark.parametrize("family", FAMILIES)
def test_a_seed_names_one_round(family: str) -> None:
    first, again = (make_instance(40, 70, 3, 5, family=family, running=0.5) for _ in range(2))

    assert digest(first) == digest(again)
    assert digest(first) != digest(make_instance(40, 70, 3, 6, family=family, running=0.5))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("gpus", "types"), [(64, 4), (301, 10), (7, 7)])
def test_a_cluster_has_the_requested_gpus_spread_evenly(family: str, gpus: int, types: int) -> None:
    capacity = make_instance(20, gpus, types, family=family).schedulable_gpus()

    assert capacity.sum() == gpus
    assert capacity.max() - capacity.min() <= 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("running", [0.5, 1.0])
def test_running_jobs_hold_gpus_of_their_own_cell_only(family: str, running: float) -> None:
    snapshot = make_instance(200, 128, 4, 1, family=family, running=running)
    problem = build_problem(snapshot, Policy())
    gangs = current_gangs(snapshot)

    assert not find_doubly_held(snapshot)
    assert len(gangs) == (problem.current >= 0).sum() > 0
    assert is_answer(problem, problem.current)
    for job, gang in gangs.items():
        assert gang.gpus == snapshot.jobs.current_gpus[job] == snapshot.jobs.requested_gpus[job]
        nodes = [node for node, _ in gang.members]
        assert set(snapshot.nodes.gpu_type[nodes]) == {snapshot.jobs.current_type[job]}


def test_cells_cover_half_and_twice_of_every_request_and_every_degree() -> None:
    snapshot = make_instance(400, 4000, 2, 3)
    e = snapshot.estimates
    assert snapshot.jobs.requested_gpus.max() == 64
    for job in range(400):
        wanted = int(snapshot.jobs.requested_gpus[job])
        mine = e.workload == snapshot.jobs.workload[job]
        assert set(e.gpus[mine]) == {max(1, wanted // 2), wanted, 2 * wanted}
        most = e.pipeline_degree[mine & (e.gpus == 2 * wanted)]
        assert set(most) == {2**k for k in range(int(math.log2(2 * wanted)) + 1)}


@pytest.mark.parametrize("family", FAMILIES)
def test_after_churn_remaining_jobs_keep_what_they_were_given(family: str) -> None:
    snapshot = make_instance(100, 100, 4, 2, family=family, running=0.5)
    problem, choice = problem_and_choice(snapshot)

    later = churn_round(snapshot, problem, choice, 0.1, 7, family)

    before, after = snapshot.jobs.name, later.jobs.name
    kept = [j for j, name in enumerate(before) if name in set(after)]
    assert len(kept) == 90
    assert len(after) == 100 == len(set(after))
    for position, job in enumerate(kept):  # arrivals come last
        column = int(choice[job])
        cell = int(problem.cell[column])
        gpus = int(problem.cells.gpus[cell]) if column >= 0 else 0
        assert after[position] == before[job]
        assert int(later.jobs.current_gpus[position]) == gpus
        assert later.jobs.iterations_left[position] <= snapshot.jobs.iterations_left[job]
    assert not find_doubly_held(later)
    following = build_problem(later, Policy())
    assert is_answer(following, following.current)
    assert (following.current >= 0).sum() == (choice[kept] >= 0).sum()


@pytest.mark.parametrize(
    ("jobs", "gpus", "types", "family"),
    [(5, 8, 2, "easy"), (5, 1, 2, "real"), (-1, 8, 2, "real"), (5, 8, 0, "real")],
)
def test_meaningless_rounds_are_refused(jobs: int, gpus: int, types: int, family: str) -> None:
    with pytest.raises(InvalidInput):
        make_instance(jobs, gpus, types, family=family)


def test_lines_that_a_library_prints_are_not_reports() -> None:
    lines: queue.Queue[str] = queue.Queue()
    _read(io.StringIO('{"started": true}\nHighsMipSolverData: run\n\n{"done": {}}\n'), lines)
    assert [lines.get_nowait() for _ in range(3)] == ['{"started": true}\n', '{"done": {}}\n', ""]
    assert lines.empty()


SMALL = WorkloadSpec(trace=SYNTHETIC, gpus_share=0.03, jobs=6, load=2.0)


def cp_sat_was_asked(monkeypatch: pytest.MonkeyPatch, *, search: bool) -> bool:
    """Return whether CP-SAT was called when two jobs arrived, only one of which could be promised.

    A part of the lighter one would fit, too, so prices do not prove that one is best.
    """

    def never(*_: object) -> NoReturn:
        raise LookupError

    monkeypatch.setattr(exact, "solve_admission", never)
    jobs = [an_arrival(f"j{k}", deadline_s=1500.0, weight=4.0 - k / 2) for k in range(2)]
    decide = Decider(RoundOptions(objective="deadline"), search=search)
    scenario = a_scenario(*jobs, nodes=some_specs(("a100", 1, 1)))
    try:
        simulate(scenario, decide, Conditions(), StoppedClock())
    except LookupError:
        return True
    return False


def test_without_search_only_the_first_fit_makes_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cp_sat_was_asked(monkeypatch, search=True)
    assert not cp_sat_was_asked(monkeypatch, search=False)


def test_elasticflow_as_published_takes_part_if_its_data_is_known() -> None:
    costs = RunRequest(work=SMALL, policy="")
    requests = asked_of(costs, [PLANNED, ELASTICFLOW], 1)
    assert list(requests) == [PLANNED, ELASTICFLOW]
    assert requests[PLANNED].policy == PLANNED
    assert PAPER_ELASTICFLOW not in requests


def test_the_margins_of_planned_and_of_look_ahead_are_separate_figures() -> None:
    requests = asked_of(
        RunRequest(work=SMALL, policy="", search=False), [LOOK_AHEAD, PLANNED, "edf"], 1
    )
    figures = figures_of(swept_of(requests, (1.5,), range(1), Sweep(workers=0)))
    assert figures["planned_worst_margin_tightness"] == 1.5
    assert float(figures["planned_worst_margin_vs_any"]) >= 0
    assert figures["admitted_missed"] == 0


def test_columns_that_do_not_fit_go_into_another_table_with_the_first_column() -> None:
    rows = [
        {"policy": "fcfs", "a": 1.0, "b": "x" * 10},
        {"policy": "arena", "a": 12345.678, "c": 2},
    ]
    # column policy needs 8 characters, a 10 (1.23e+04), b 12, c 3
    assert table_blocks(rows, 100) == [["policy", "a", "b", "c"]]
    assert table_blocks(rows, 30) == [["policy", "a", "b"], ["policy", "c"]]
    assert table_blocks(rows, 29) == [["policy", "a"], ["policy", "b", "c"]]


def test_a_column_wider_than_the_screen_is_still_printed() -> None:
    assert table_blocks([{"policy": "x" * 50, "a": "y" * 50, "b": 1}], 20) == [
        ["policy", "a"],
        ["policy", "b"],
    ]


def test_the_99th_percentile_is_a_value_that_was_measured_and_never_below_it() -> None:
    assert percentile_99([5.0]) == 5.0
    assert percentile_99([float(k) for k in range(1, 101)]) == 100.0
    assert percentile_99([float(k) for k in range(1, 1001)]) == 991.0
