"""Problems that are stated in Python: what they accept, the snapshots that they make, and results."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tessera.formulation.answer.codec import digest, encode
from tessera.formulation.base.errors import NotFound
from tessera.formulation.base.tables import Ints
from tessera.formulation.job.reasons import ReasonCode
from tessera.formulation.round.draft import Draft
from tessera.formulation.round.objectives.values import ColumnValues
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.statement import build_problem
from tessera.modelling import Cell, InvalidInput, Problem, RoundResult
from tessera.modelling.problem import NOW_S
from tessera.service.cli import main
from tessera.solvers.schedulers.base import SchedulerView
from tests.support.builders import a_random_snapshot

SPEEDS: dict[Any, float] = {("h100", 4): 70.0, ("h100", 8): 120.0}


def a_problem(nodes: int = 1) -> Problem:
    problem = Problem()
    problem.add_gpus("h100", nodes=nodes, gpus_per_node=8)
    return problem


def two_jobs_for_one_node(weight: float = 2.0) -> Problem:
    problem = a_problem()
    problem.add_job("bert", SPEEDS, samples=1e6, weight=weight)
    problem.add_job("gpt", {("h100", 8): 100.0}, samples=1e6)
    return problem


def test_the_dozen_lines_of_the_page_place_a_job() -> None:
    result = two_jobs_for_one_node().solve("throughput")
    bert, gpt = result
    assert (bert.gpu_type, bert.gpus, bert.pipeline_degree) == ("h100", 8, 1)
    assert bert.samples_per_s == pytest.approx(120.0)
    assert bert.nodes == {"h100-0": tuple(range(8))}
    assert bert.runs
    assert not gpt.runs
    assert gpt.reason is not None
    assert result.prices["gpus/h100"] > 0
    assert result.objective == pytest.approx(result.bound)
    assert (result.status, result.gap, result.unit) == ("optimal", 0.0, "effective GPUs")


def test_the_optimum_is_that_of_every_choice_by_hand() -> None:
    problem = a_problem(nodes=2)
    problem.add_gpus("a100", nodes=1, gpus_per_node=4)
    speeds: list[Mapping[Any, float]] = [
        {("h100", 8): 100.0, ("h100", 16): 150.0, ("a100", 4): 30.0},
        {("h100", 4): 80.0, ("h100", 8): 110.0},
        {("a100", 2): 20.0, ("a100", 4): 40.0, ("h100", 4): 50.0},
    ]
    for k, one in enumerate(speeds):
        problem.add_job(f"job-{k}", one, samples=1e9, restart_s=0.0)
    room = {"h100": 16, "a100": 4}
    unit = [max(rate / key[1] for key, rate in one.items()) for one in speeds]

    def best(job: int, left: Mapping[str, int]) -> float:
        if job == len(speeds):
            return 0.0
        values = [best(job + 1, left)]
        for (kind, gpus), rate in speeds[job].items():
            if gpus <= left[kind]:
                rest = {**left, kind: left[kind] - gpus}
                values.append(rate / unit[job] + best(job + 1, rest))
        return max(values)

    assert problem.solve("throughput").objective == pytest.approx(best(0, room), rel=1e-5)


def test_a_job_that_runs_keeps_its_gpus_and_pays_no_restart() -> None:
    problem = a_problem(nodes=2)
    problem.add_job("old", SPEEDS, samples=1e6, runs_on={"h100-1": 4})
    problem.add_job("new", {("h100", 8): 1.0}, samples=1e6, weight=100.0)
    snapshot = problem.to_snapshot()
    held = [snapshot.allocations.row(k) for k in range(4)]
    assert [(row["job"], row["node"], row["gpu"]) for row in held] == [(0, 1, k) for k in range(4)]
    kept = problem.solve("throughput", max_changes=0)["old"]
    assert (kept.kind, kept.nodes, kept.restart_price) == ("keep", {"h100-1": (0, 1, 2, 3)}, 0.0)


def test_a_problem_from_a_snapshot_is_the_snapshot(tmp_path: Path) -> None:
    snapshot = a_random_snapshot(3, jobs=6)
    assert digest(Problem.from_snapshot(snapshot).to_snapshot()) == digest(snapshot)
    problem = two_jobs_for_one_node()
    problem.add_tenant("lab", weight=2.0, quotas={"h100": 4, "": 8})
    problem.save(tmp_path / "round.json")
    arguments = ["solve", str(tmp_path / "round.json"), "--objective", "throughput", "-o", "json"]
    output = CliRunner().invoke(main.app, arguments)
    ours = problem.solve("throughput").objective
    assert json.loads(output.stdout)["objective"] == pytest.approx(ours)
    loaded = Problem.load(tmp_path / "round.json")
    assert digest(loaded.to_snapshot()) == digest(problem.to_snapshot())
    before = encode(loaded.to_snapshot())
    loaded.add_gpus("h100", nodes=1, gpus_per_node=8)
    loaded.add_job("late", SPEEDS, samples=10.0, tenant="lab")
    grown = loaded.to_snapshot()
    assert grown.nodes.name == ("h100-0", "h100-1")
    assert grown.jobs.name == ("bert", "gpt", "late")
    assert encode(problem.to_snapshot()) == before


def test_jobs_with_equal_speeds_share_a_workload_and_more_of_a_cell_can_be_stated() -> None:
    problem = a_problem(nodes=2)
    problem.add_job("a", SPEEDS, samples=1.0)
    problem.add_job("b", SPEEDS, samples=2.0)
    wide = Cell(gpu_type="h100", gpus=8, pipeline_degree=2, nodes=2, plan="zero3")
    problem.add_job("c", {wide: 90.0}, samples=3.0)
    snapshot = problem.to_snapshot()
    assert snapshot.jobs.workload.tolist() == [0, 0, 1]
    assert snapshot.plans == ("", "zero3")
    assert snapshot.estimates.nodes.tolist() == [1, 1, 2]
    result = problem.solve("throughput")["c"]
    assert (result.pipeline_degree, result.plan, len(result.nodes)) == (2, "zero3", 2)
    assert build_problem(snapshot, Policy()).jobs == ("a", "b", "c")


def test_a_deadline_counts_from_now_and_is_promised() -> None:
    problem = a_problem()
    problem.add_job("soon", {("h100", 8): 100.0}, samples=100_000.0, deadline_s=2000.0)
    problem.add_job("never", {("h100", 8): 100.0}, samples=100_000.0, deadline_s=500.0)
    assert problem.to_snapshot().jobs.deadline_s.tolist() == [NOW_S + 2000.0, NOW_S + 500.0]
    result = problem.solve("deadline")
    assert result["soon"].deadline_promised
    reason = result["never"].reason
    assert reason is not None
    assert reason.code is ReasonCode.DEADLINE_UNREACHABLE


def test_an_explanation_names_who_displaced_the_job_and_a_step_that_helps() -> None:
    problem = two_jobs_for_one_node()
    explanation = problem.solve("throughput").explain("gpt")
    assert [str(one.job) for one in explanation.displaced_by] == ["bert"]
    weight = next(
        step.changes[0].amount for step in explanation.steps if "weight" in str(step.message)
    )
    heavier = a_problem()
    heavier.add_job("bert", SPEEDS, samples=1e6, weight=2.0)
    heavier.add_job("gpt", {("h100", 8): 100.0}, samples=1e6, weight=weight)
    assert heavier.solve("throughput")["gpt"].runs


def test_the_rows_of_a_result_are_a_table_without_any_library() -> None:
    rows = two_jobs_for_one_node().solve("throughput").rows()
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0].keys())
    writer.writeheader()
    writer.writerows(rows)
    assert [row["nodes"] for row in csv.DictReader(io.StringIO(text.getvalue()))] == ["h100-0", ""]


class LastFirst:
    """A scheduler for tests: the last job gets its first column, and nobody else any."""

    name = "last-first"

    def choose(self, seen: SchedulerView) -> Ints:
        choice = np.full(len(seen.draft.current), -1)
        choice[-1] = seen.draft.job_start[-2]
        return choice


class TooMuch:
    """A scheduler for tests that gives every job its last column, whatever the capacity."""

    name = "too-much"

    def choose(self, seen: SchedulerView) -> Ints:
        return seen.draft.job_start[1:] - 1


def latest(draft: Draft) -> ColumnValues:
    """Return a value that rises with the job's index, for tests."""
    gross = 1.0 + draft.job.astype(np.float64)
    return ColumnValues(gross=gross, price=np.zeros(len(gross)), unit="places")


def test_schedulers_and_objectives_of_ones_own_decide() -> None:
    problem = two_jobs_for_one_node()
    by_scheduler = problem.solve("throughput", scheduler=LastFirst())
    assert [job.runs for job in by_scheduler] == [False, True]
    assert math.isnan(by_scheduler.gap)
    by_objective = problem.solve(latest)
    assert [job.runs for job in by_objective] == [False, True]
    assert by_objective.objective == pytest.approx(2.0)
    assert by_objective.unit == "places"
    assert problem.solve("throughput", scheduler="fcfs")["bert"].runs


def solve(**options: Any) -> Callable[[Problem], RoundResult]:
    return lambda problem: problem.solve(**options)


def add(**changes: Any) -> Callable[[Problem], None]:
    job: dict[str, Any] = {"name": "x", "speeds": SPEEDS, "samples": 1.0}
    return lambda problem: problem.add_job(**(job | changes))


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (add(name="a job"), "job: 'a job' must be 1 to 100 letters"),
        (add(name="bert"), "bert was added already"),
        (add(speeds={}), r'must have a Cell that runs, e.g. {\("h100", 8\): 120.0}'),
        (add(speeds={("b200", 8): 1.0}), r"'b200' is not a GPU type of the problem \(h100\)"),
        (add(speeds={("h100", 8.0): 1.0}), "must be a whole number of at least 1, not 8.0"),
        (add(speeds={"h100": 1.0}), r'must be a GPU type and a number, e.g. \("h100", 8\)'),
        (add(speeds={("h100", 8): math.nan}), "must be a finite number above 0, not nan"),
        (add(samples=0.0), "x.samples: must be a finite number above 0, not 0.0"),
        (add(deadline_s=0.0), "x.deadline_s: must be above 0, because it counts from now"),
        (add(runs_on={"h100-7": 8}), "there is no node 'h100-7'; add_gpus names the nodes"),
        (add(runs_on={"h100-0": 9}), "h100-0 has 8 GPUs free, not 9"),
        (add(runs_on={"h100-0": 2}), "holds 2 x h100, for which the job has no speed"),
        (lambda p: p.add_gpus("h100", nodes=0, gpus_per_node=8), "nodes: must be a whole number"),
        (
            lambda p: p.add_gpus("h100", nodes=1, gpus_per_node=8, watts=700.0),
            "h100 has other dollars or watts already",
        ),
        (lambda p: p.add_tenant("lab", quotas={"b200": 8}), "quotas: 'b200' is not a GPU type"),
        (solve(objective="speed"), "'speed' is not an objective"),
        (solve(scheduler="lottery"), "unknown 'lottery'; choose one of fcfs"),
        (solve(time_limit_s=0.0), "time_limit_s: must be above 0"),
        (solve(colour="red"), "colour is not known; a round has"),
        (solve(scheduler=TooMuch()), "too-much broke a rule: capacity: gpus/h100: 16 are used"),
        (solve(objective=lambda _draft: None), "must be a function with a name"),
    ],
)
def test_a_mistake_is_named_and_changes_nothing(
    act: Callable[[Problem], object], message: str
) -> None:
    problem = two_jobs_for_one_node()
    before = digest(problem.to_snapshot())
    with pytest.raises(InvalidInput, match=message):
        act(problem)
    assert digest(problem.to_snapshot()) == before


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="the problem has no GPUs; call add_gpus"):
        Problem().solve()
    with pytest.raises(NotFound, match="job nobody"):
        two_jobs_for_one_node().solve("throughput")["nobody"]
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(InvalidInput, match="is not a saved snapshot"):
        Problem.load(tmp_path / "x.json")
    with pytest.raises(InvalidInput, match="cannot be read: No such file"):
        Problem.load(tmp_path / "y.json")
    with pytest.raises(InvalidInput, match="cannot be written"):
        a_problem().save(tmp_path / "no" / "z.json")
