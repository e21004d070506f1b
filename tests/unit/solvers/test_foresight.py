"""Foresight: what it compares, what it takes, and how it ends."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera.db.documents import summary_from, summary_json
from tessera.formulation.errors import DeadlineTooShort, InvalidInput
from tessera.formulation.foresight import OWN_ANSWER
from tessera.formulation.lifecycle import JobState
from tessera.formulation.placement import Gang
from tessera.formulation.policy import MAX_FORESIGHT, Policy
from tessera.formulation.snapshot import Snapshot
from tessera.formulation.statement import build_problem
from tessera.service.rpc.convert.rounds import of_summary
from tessera.solvers.base import Budget
from tessera.solvers.foresight import FORESIGHT
from tessera.solvers.foresight.world import state_future
from tessera.solvers.kernels.foresight import follow_answer
from tessera.solvers.kernels.jit import as_fixed_array
from tessera.solvers.registry import make_solver
from tessera.solvers.rounds.plan import RoundOutcome, plan_round
from tests.support.builders import a_job, a_snapshot, an_estimate, some_nodes
from tests.support.summaries import a_summary

ENDLESS = Budget(remaining_s=lambda: math.inf)


def two_jobs(**changes: Any) -> Snapshot:
    """Return a short and a long job on one GPU each, of a node with one GPU."""
    return a_snapshot(
        nodes=some_nodes((0, 1, 1)),
        estimates=[an_estimate(gpus=1, iter_time_s=1.0)],
        jobs=[
            a_job("long", iterations=5000, iterations_left=5000, **changes),
            a_job("short", iterations=1000, iterations_left=1000),
        ],
        batch=1,
    )


def decide(
    snapshot: Snapshot, foresight: int, budget: Budget = ENDLESS, **options: str
) -> RoundOutcome:
    policy = Policy(**({"objective": "throughput"} | options), foresight=foresight)  # type: ignore[arg-type]
    return plan_round(snapshot, policy, make_solver("portfolio"), budget)


def running(result: RoundOutcome, snapshot: Snapshot) -> list[str]:
    return [snapshot.jobs.name[d.job] for d in result.decisions if d.gang is not None]


def test_foresight_runs_the_short_job_first_where_the_objective_does_not_care() -> None:
    snapshot = two_jobs()
    assert running(decide(snapshot, 0), snapshot) == ["long"]
    seen = decide(snapshot, 16)
    assert running(seen, snapshot) == ["short"]
    assert seen.foresight is not None
    own, *_ = seen.foresight.answers
    # the long job first: 5000 and 6000 s; the short one first: 1000 and 6000 s
    assert own.completion_s == pytest.approx(5500)
    assert min(one.completion_s for one in seen.foresight.answers) == pytest.approx(3500)
    assert seen.foresight.gain == pytest.approx(1 - 3500 / 5500)


def test_foresight_says_what_it_gives_up_and_keeps_the_bound_of_the_objective() -> None:
    snapshot = two_jobs(weight=1.5)
    plain, seen = decide(snapshot, 0), decide(snapshot, 16)
    assert running(seen, snapshot) == ["short"]
    assert seen.foresight is not None
    assert seen.foresight.sacrifice == pytest.approx(0.5)
    assert seen.solution.bound == plain.solution.bound
    assert seen.goals[0].objective == pytest.approx(plain.goals[0].objective - 0.5)
    assert seen.goals[0].bound == pytest.approx(plain.goals[0].bound)
    assert seen.goals[0].gap == pytest.approx(seen.solution.gap)
    assert seen.solution.status == "feasible"
    assert seen.greedy_objective == plain.greedy_objective


def test_a_guaranteed_job_that_runs_is_not_stopped_for_the_future() -> None:
    snapshot = two_jobs()
    jobs = [snapshot.jobs.row(0), snapshot.jobs.row(1)]
    jobs[0] = a_job(
        "long",
        iterations=5000,
        iterations_left=5000,
        guaranteed=True,
        state=JobState.RUNNING,
        cell=(0, 1, 1),
    )
    held = a_snapshot(
        nodes=some_nodes((0, 1, 1)),
        estimates=[an_estimate(gpus=1)],
        jobs=[jobs[0], a_job("short", iterations=1000, iterations_left=1000)],
        gangs={0: Gang(members=((0, (0,)),))},
        batch=1,
    )
    assert running(decide(held, 16), held) == ["long"]


def test_without_foresight_nothing_is_rolled_forward_and_no_work_is_recorded() -> None:
    plain = decide(two_jobs(), 0)
    assert plain.foresight is None
    assert FORESIGHT not in dict(plain.solution.work)


def test_ties_go_to_the_objectives_own_answer() -> None:
    snapshot = a_snapshot(
        nodes=some_nodes((0, 1, 1)),
        estimates=[an_estimate(gpus=1)],
        jobs=[a_job("a"), a_job("b")],
        batch=1,
    )
    seen = decide(snapshot, 16).foresight
    assert seen is not None
    assert seen.chosen == OWN_ANSWER
    assert seen.sacrifice == 0


def test_a_round_without_jobs_has_nothing_to_compare() -> None:
    empty = a_snapshot(nodes=some_nodes((0, 1, 1)), estimates=[], jobs=[], workloads=1)
    seen = decide(empty, 16)
    assert seen.foresight is None
    assert seen.decisions == ()


def test_jobs_whose_cells_do_not_run_are_left_out() -> None:
    snapshot = a_snapshot(
        nodes=some_nodes((0, 1, 1)),
        estimates=[an_estimate(0), an_estimate(1, iter_time_s=math.inf)],
        jobs=[a_job("a"), a_job("never", workload=1)],
        workloads=2,
        batch=1,
    )
    seen = decide(snapshot, 16).foresight
    assert seen is not None
    assert all(math.isfinite(one.completion_s) for one in seen.answers)


def test_foresight_ends_when_the_time_is_over_and_repeats_what_it_did() -> None:
    snapshot, left = two_jobs(), iter([100.0] * 4 + [0.0] * 1000)
    seen = decide(snapshot, 64, Budget(remaining_s=lambda: next(left)))
    assert seen.foresight is not None
    assert 1 <= seen.foresight.rollouts < decide(snapshot, 64).foresight.rollouts  # type: ignore[union-attr]
    again = decide(snapshot, 64, replace(ENDLESS, work=dict(seen.solution.work)))
    assert again.foresight == seen.foresight
    assert again.decisions == seen.decisions


def test_foresight_ends_when_nobody_waits_for_the_round() -> None:
    calls = iter(range(1000))
    with pytest.raises(DeadlineTooShort):
        decide(two_jobs(), 64, replace(ENDLESS, cancelled=lambda: next(calls) > 10))


@pytest.mark.parametrize("number", [-1, MAX_FORESIGHT + 1])
def test_a_meaningless_number_of_answers_is_refused(number: int) -> None:
    with pytest.raises(InvalidInput, match="foresight"):
        Policy(foresight=number)


def test_a_job_that_keeps_its_cell_pays_no_restart_in_a_rollout() -> None:
    snapshot = a_snapshot(
        nodes=some_nodes((0, 1, 2)),
        estimates=[an_estimate(gpus=1), an_estimate(gpus=2, iter_time_s=0.5)],
        jobs=[
            a_job(
                "a",
                iterations=1000,
                iterations_left=1000,
                restart_s=100,
                state=JobState.RUNNING,
                cell=(0, 1, 1),
                since_s=-1000.0,
            )
        ],
        gangs={0: Gang(members=((0, (0,)),))},
        batch=1,
    )
    problem = build_problem(snapshot, Policy(objective="throughput"))
    future = state_future(snapshot, Policy(objective="throughput"), problem)
    by_gpus = {int(problem.cells.gpus[problem.cell[c]]): c for c in problem.columns_of(0)}

    def end_s(column: int) -> float:
        return float(follow_answer(future, as_fixed_array(np.array([column])), 0.25))

    assert end_s(by_gpus[1]) == pytest.approx(1000)
    assert end_s(by_gpus[2]) == pytest.approx(100 + 500)


def test_what_a_round_compared_is_stored_and_sent() -> None:
    compared = decide(two_jobs(weight=1.5), 16).foresight
    summary = a_summary(foresight=compared)
    assert summary_from(json.loads(summary_json(summary))) == summary
    sent = of_summary(summary).foresight
    assert [answer.name for answer in sent.answers] == [one.name for one in compared.answers]  # type: ignore[union-attr]
    assert sent.sacrifice == pytest.approx(0.5)
    assert not of_summary(a_summary()).HasField("foresight")
