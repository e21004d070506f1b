"""Every job that does not run has one reason, with evidence and a next step."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera.formulation.answer.decisions import DecisionKind, make_decisions
from tessera.formulation.answer.explain import explain_waiting_jobs
from tessera.formulation.answer.placement import Gang, Placement
from tessera.formulation.answer.solution import Solution, SolveStatus
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.job.reasons import Reason, ReasonCode
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.statement import build_problem, state_round
from tessera.formulation.state.snapshot import Snapshot
from tests.support.builders import a_job, a_snapshot, an_estimate, some_nodes

ESTIMATES = [
    an_estimate(gpus=2),
    an_estimate(1, gpus=2, iter_time_s=math.inf),
    an_estimate(3, gpus=64),
]


def reason_of(job: dict[str, Any], **known: Any) -> Reason:
    """Return why ``job`` waits on one empty 4-GPU node."""
    snapshot = a_snapshot(nodes=some_nodes((0, 1, 4)), jobs=[job], estimates=ESTIMATES, workloads=4)
    problem = build_problem(snapshot, Policy(objective="throughput"))
    if "value" in known:
        problem = replace(problem, value=np.full_like(problem.value, known["value"]))
    solution = Solution(
        status=SolveStatus.FEASIBLE,
        choice=np.array([-1]),
        objective=0,
        bound=0.0,
        solver="t",
        prices=np.array(known.get("prices", [])),
    )
    given_up = frozenset(known.get("given_up", []))
    return explain_waiting_jobs(snapshot, problem, solution, known.get("unplaced", {}), given_up)[0]


@pytest.mark.parametrize(
    ("code", "job", "known"),
    [
        (ReasonCode.HELD, a_job("j", state=JobState.HELD), {}),
        (ReasonCode.LEAVING, a_job("j", state=JobState.CANCELLING), {}),
        (ReasonCode.NO_ESTIMATE, a_job("j", workload=2), {}),
        (ReasonCode.NO_FEASIBLE_CELL, a_job("j", workload=1), {}),
        (ReasonCode.FITS_NOWHERE, a_job("j", workload=3), {}),
        (
            ReasonCode.FRAGMENTED,
            a_job("j"),
            {"unplaced": {0: "needs 2 on a node, the freest has 1"}},
        ),
        (ReasonCode.PROMISE_GIVEN_UP, a_job("j"), {"given_up": [0]}),
        (ReasonCode.BUDGET_SPENT, a_job("j"), {}),
        (ReasonCode.OUTPRICED, a_job("j"), {"prices": [1.4e6]}),
        (ReasonCode.BUDGET_SPENT, a_job("j"), {"prices": [0.6e6]}),
        (ReasonCode.NOT_WORTH_RESTART, a_job("j"), {"value": 0}),
    ],
)
def test_the_dominant_reason_is_given(
    code: ReasonCode, job: dict[str, Any], known: dict[str, Any]
) -> None:
    reason = reason_of(job, **known)
    assert reason.code is code
    assert reason.message
    assert reason.next_step


@pytest.mark.parametrize(
    ("gpus", "tried", "step"),
    [
        (4, 4, "submit the job with a batch that 4 GPUs divide evenly, e.g. 248 or 252"),
        (
            1,
            2,
            "let the job run on more GPUs, up to all that are there: `tessera update j --max-gpus 4`",
        ),
        (1, 4, "submit the job with a smaller batch, or add GPUs with more memory"),
    ],
)
def test_what_may_help_a_job_whose_cells_all_fail_follows_from_what_was_tried(
    gpus: int, tried: int, step: str
) -> None:
    fails = an_estimate(gpus=tried, iter_time_s=math.inf)
    snapshot = a_snapshot(
        nodes=some_nodes((0, 1, 4)), jobs=[a_job("j", requested_gpus=gpus)], estimates=[fails]
    )
    workload = replace(snapshot.workloads[0], global_batch=251)
    snapshot = replace(snapshot, workloads=(workload, *snapshot.workloads[1:]))
    problem = build_problem(snapshot, Policy(objective="throughput"))
    solution = Solution(
        status=SolveStatus.FEASIBLE, choice=np.array([-1]), objective=0, bound=0.0, solver="t"
    )
    (reason,) = explain_waiting_jobs(snapshot, problem, solution, {}, frozenset()).values()
    assert reason.code is ReasonCode.NO_FEASIBLE_CELL
    assert str(reason.next_step).startswith(step)


def test_an_outpriced_job_gets_its_value_and_the_price() -> None:
    reason = reason_of(a_job("j"), prices=[1.4e6])
    evidence = {key: str(value) for key, value in reason.evidence}
    assert (float(evidence["value"]), float(evidence["price"])) == (2.0, 2.8)


def test_a_job_that_pays_but_does_not_fit_gets_the_number_of_free_gpus() -> None:
    snapshot = a_snapshot(
        nodes=some_nodes((0, 1, 4)), estimates=[an_estimate(gpus=3)], jobs=[a_job("a"), a_job("b")]
    )
    problem = build_problem(snapshot, Policy())
    solution = Solution(
        status=SolveStatus.FEASIBLE,
        choice=np.array([0, -1]),
        objective=0,
        bound=0.0,
        solver="t",
        prices=np.array([0.3e6]),
    )
    reason = explain_waiting_jobs(snapshot, problem, solution, {}, frozenset())[1]
    assert reason.code is ReasonCode.NO_CAPACITY
    assert "all but 1 of the 4 a100 GPUs are taken" in str(reason.message)


def a_running_round() -> Snapshot:
    jobs = [
        a_job("kept", state=JobState.RUNNING, cell=(0, 2, 1)),
        a_job("queued"),
        a_job("dropped", state=JobState.RUNNING, cell=(0, 2, 1)),
    ]
    gangs = {0: Gang(members=((0, (0, 1)),)), 2: Gang(members=((0, (2, 3)),))}
    estimates = [
        an_estimate(gpus=2),
        an_estimate(gpus=4, iter_time_s=0.7),
        an_estimate(gpu_type=1, gpus=2),
        an_estimate(gpus=2, degree=2, iter_time_s=0.9),
    ]
    nodes = some_nodes((0, 2, 4), (1, 1, 4))
    return a_snapshot(nodes=nodes, jobs=jobs, estimates=estimates, gangs=gangs)


@pytest.mark.parametrize(
    ("kind", "cell", "gang"),
    [
        (DecisionKind.KEEP, (0, 2, 1), ((0, (0, 1)),)),
        (DecisionKind.MOVE, (0, 2, 1), ((1, (0, 1)),)),
        (DecisionKind.MOVE, (0, 2, 2), ((0, (2, 3)),)),
        (DecisionKind.REPLAN, (0, 2, 2), ((0, (0, 1)),)),
        (DecisionKind.RESIZE, (0, 4, 1), ((1, (0, 1, 2, 3)),)),
        (DecisionKind.RETYPE, (1, 2, 1), ((2, (0, 1)),)),
    ],
)
def test_decisions_are_named_by_what_changed(
    kind: DecisionKind, cell: tuple[int, int, int], gang: tuple[tuple[int, tuple[int, ...]], ...]
) -> None:
    snapshot = a_running_round()
    statement = state_round(snapshot, Policy())
    problem = statement.problem
    of = problem.cells
    column = next(
        c
        for c in problem.columns_of(0)
        if (
            of.gpu_type[problem.cell[c]],
            of.gpus[problem.cell[c]],
            of.pipeline_degree[problem.cell[c]],
        )
        == cell
    )
    solution = Solution(
        status=SolveStatus.FEASIBLE,
        choice=np.array([column, -1, -1]),
        objective=0,
        bound=0.0,
        solver="t",
    )
    reasons = explain_waiting_jobs(snapshot, problem, solution, {}, frozenset())
    placement = Placement(gangs={0: Gang(members=gang)})
    decisions = make_decisions(snapshot, statement, solution, placement, reasons)
    assert [d.kind for d in decisions] == [kind, DecisionKind.WAIT, DecisionKind.SUSPEND]
    assert (decisions[0].reason is not None) == (kind is DecisionKind.REPLAN)
    assert decisions[0].rate == pytest.approx(float(of.rate[problem.cell[column]]))
    assert all(d.reason is not None for d in decisions[1:])
