"""Explanations: the reason, who displaced the job, and steps that a further round confirms."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tessera.formulation.answer.decisions import DecisionKind
from tessera.formulation.answer.explanations.applying import apply_changes
from tessera.formulation.answer.explanations.changes import Change, ChangeKind
from tessera.formulation.answer.explanations.records import Claim, DisplacedBy, Explanation
from tessera.formulation.answer.explanations.words import describe_changes
from tessera.formulation.answer.placement import Gang
from tessera.formulation.base.errors import DeadlineTooShort, InvalidInput
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.job.reasons import CAUSES, Cause, ReasonCode
from tessera.formulation.state.snapshot import Nodes, Snapshot
from tessera.solvers.base import Budget
from tessera.solvers.registry import make_solver
from tessera.solvers.rounds.explaining.explain import explain_job
from tessera.solvers.rounds.explaining.ladders import LADDERS
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import RoundOutcome, plan_round
from tests.support.builders import a_job, a_node, a_snapshot, an_estimate
from tests.support.driver import with_avoided_nodes, with_quotas

OPTIONS = RoundOptions(objective="throughput")
GIB = 2**30


def decide(snapshot: Snapshot, options: RoundOptions) -> RoundOutcome:
    return plan_round(snapshot, options, make_solver(), Budget(remaining_s=lambda: math.inf))


def explain(
    snapshot: Snapshot,
    name: str,
    options: RoundOptions = OPTIONS,
    plan: Callable[[Snapshot, RoundOptions], RoundOutcome] = decide,
) -> Explanation:
    outcome = decide(snapshot, options)
    assert outcome.violations == ()
    return explain_job(snapshot, options, snapshot.jobs.name.index(name), outcome, plan)


def two_jobs_for_one_gpu(**more: Any) -> Snapshot:
    """Return a cluster of one GPU, which job ``strong`` wins from ``weak`` by its weight."""
    return a_snapshot(
        nodes=[a_node("n0", gpus=1)],
        estimates=[an_estimate()],
        jobs=[a_job("strong", weight=3.0), a_job("weak", **more)],
    )


def kinds(explanation: Explanation) -> list[ChangeKind]:
    return [step.changes[0].kind for step in explanation.steps]


def the_change(explanation: Explanation, kind: ChangeKind) -> Change:
    return next(s.changes[0] for s in explanation.steps if s.changes[0].kind is kind)


def test_a_job_behind_another_learns_the_queue_that_would_do_and_who_goes_before_it() -> None:
    snapshot = two_jobs_for_one_gpu(priority=2, weight=3.0, queued_s=-1.0)
    explanation = explain(snapshot, "weak")
    assert explanation.reason.code is ReasonCode.OUTPRICED
    assert CAUSES[explanation.reason.code] is Cause.CAPACITY
    assert ChangeKind.WEIGHT not in kinds(explanation)
    change = the_change(explanation, ChangeKind.PRIORITY)
    assert (change.amount, change.before) == (1, 2)
    (displacer,) = explanation.displaced_by
    assert (str(displacer.job), displacer.gpus, displacer.gpu_type) == ("strong", 1, "a100")
    assert displacer.by is DisplacedBy.PLAN
    assert displacer.value_per_gpu == pytest.approx(explanation.value_per_gpu)
    changed, options = apply_changes(snapshot, OPTIONS, 1, [change])
    assert decide(changed, options).decisions[1].gang is not None


def test_a_job_that_shrinks_gives_way_and_learns_what_keeps_its_rate() -> None:
    snapshot = a_snapshot(
        nodes=[a_node("n0", gpus=2)],
        estimates=[
            an_estimate(0, gpus=1),
            an_estimate(0, gpus=2, iter_time_s=0.6),
            an_estimate(1, gpus=1),
        ],
        jobs=[
            a_job("old", state=JobState.RUNNING, cell=(0, 2, 1), generation=1),
            a_job("new", 1, weight=2.0),
        ],
        gangs={0: Gang(members=((0, (0, 1)),))},
    )
    explanation = explain(snapshot, "old")
    assert explanation.kind is DecisionKind.RESIZE
    assert explanation.reason.code is ReasonCode.GAVE_WAY
    assert "new got GPUs that it held" in str(explanation.reason.message)
    assert explanation.steps[0].claim is Claim.KEEPS_RATE


def test_a_replanned_job_learns_what_its_replan_costs_and_gains() -> None:
    """The job runs, so the reason that its round gives needs no step."""
    snapshot = a_snapshot(
        nodes=[a_node("n0", gpus=2)],
        estimates=[
            an_estimate(gpus=2, iter_time_s=1.0),
            an_estimate(gpus=2, degree=2, iter_time_s=0.2),
        ],
        jobs=[a_job("old", state=JobState.RUNNING, cell=(0, 2, 1), generation=1, iterations=1e6)],
        gangs={0: Gang(members=((0, (0, 1)),))},
    )
    explanation = explain(snapshot, "old")
    assert explanation.kind is DecisionKind.REPLAN
    assert explanation.reason.code is ReasonCode.REPLANNED
    assert explanation.steps == ()


def test_a_job_that_had_to_leave_a_drained_node_is_told_so() -> None:
    snapshot = a_snapshot(
        nodes=[a_node("n0", gpus=1, schedulable=False), a_node("n1", gpus=1)],
        estimates=[an_estimate()],
        jobs=[a_job("j", state=JobState.RUNNING, cell=(0, 1, 1), generation=1)],
        gangs={0: Gang(members=((0, (0,)),))},
    )
    explanation = explain(snapshot, "j")
    assert explanation.reason.code is ReasonCode.NODE_LEFT
    assert kinds(explanation) == [ChangeKind.UNDRAIN]
    assert explanation.steps[0].claim is Claim.STAYS


@pytest.mark.parametrize(
    ("job", "code", "step", "subject"),
    [
        ({"state": JobState.HELD}, ReasonCode.HELD, ChangeKind.RELEASE, ""),
        ({"retry_s": 2_000.0, "failures": 2}, ReasonCode.BACK_OFF, ChangeKind.RETRY, ""),
        ({"weight": 0.0}, ReasonCode.NO_WEIGHT, ChangeKind.WEIGHT, ""),
        ({"min_gpus": 4}, ReasonCode.PINS_CONTRADICT, ChangeKind.MIN_GPUS, ""),
        (
            {"requested_gpu_type": 1, "pinned_gpu_type": True},
            ReasonCode.PINS_CONTRADICT,
            ChangeKind.ANY_TYPE,
            "",
        ),
        ({"workload": 1}, ReasonCode.NO_ESTIMATE, ChangeKind.ADD_CELL, "a100"),
        ({"workload": 2}, ReasonCode.NODES_AWAY, ChangeKind.UNDRAIN, "away"),
        ({"workload": 3}, ReasonCode.FITS_NOWHERE, ChangeKind.ADD_GPUS, "a100"),
    ],
)
def test_each_reason_has_a_step_that_leads_out_of_it(
    job: dict[str, Any], code: ReasonCode, step: ChangeKind, subject: str
) -> None:
    snapshot = a_snapshot(
        nodes=[a_node("n0", gpus=2), a_node("away", 1, gpus=2, schedulable=False)],
        estimates=[an_estimate(0), an_estimate(2, 1), an_estimate(3, gpus=8)],
        jobs=[a_job("j", **({"workload": 0} | job))],
        workloads=4,
    )
    explanation = explain(snapshot, "j")
    assert explanation.reason.code is code
    change = explanation.steps[0].changes[0]
    assert (change.kind, change.subject) == (step, subject)
    assert explanation.steps[0].claim is Claim.RUNS


def needing(*, cpus: int = 0, host_gib: int = 0, gpus: int = 1, **more: Any) -> Snapshot:
    """Return a job on two nodes of 4 GPUs, 8 CPU cores and 64 GiB, which needs that in all."""
    return a_snapshot(
        nodes=[a_node(name, gpus=4, cpus=8, host_bytes=64 * GIB, **more) for name in ("n0", "n1")],
        estimates=[an_estimate(gpus=gpus, cpus=cpus, host_bytes=host_gib * GIB)],
        jobs=[a_job("j")],
    )


@pytest.mark.parametrize(
    ("snapshot", "changes"),
    [
        (needing(cpus=9), [("ADD_CPUS", "n0", 9, 8)]),
        (needing(host_gib=80), [("ADD_HOST_MEMORY", "n0", 80 * GIB, 64 * GIB)]),
        (
            needing(cpus=16, host_gib=80),
            [("ADD_CPUS", "n0", 16, 8), ("ADD_HOST_MEMORY", "n0", 80 * GIB, 64 * GIB)],
        ),
        (needing(cpus=17, gpus=8), [("ADD_CPUS", "n0", 9, 8), ("ADD_CPUS", "n1", 9, 8)]),
    ],
)
def test_a_job_that_needs_more_cores_or_memory_than_nodes_have_learns_how_much(
    snapshot: Snapshot, changes: list[tuple[str, str, int, int]]
) -> None:
    explanation = explain(snapshot, "j")
    assert explanation.reason.code is ReasonCode.FITS_NOWHERE
    assert "too few CPU cores or too little host memory" in str(explanation.reason.message)
    step = explanation.steps[0]
    assert [(c.kind, c.subject, c.amount, c.before) for c in step.changes] == changes
    assert step.claim is Claim.RUNS


def test_a_job_that_waits_for_the_cores_of_others_learns_how_many_more_would_do() -> None:
    snapshot = a_snapshot(
        nodes=[a_node("n0", gpus=4, cpus=8)],
        estimates=[an_estimate(cpus=5)],
        jobs=[a_job("strong", weight=3.0), a_job("weak")],
    )
    explanation = explain(snapshot, "weak")
    assert the_change(explanation, ChangeKind.ADD_CPUS).amount == 10


def test_a_release_that_only_leads_to_another_reason_says_which() -> None:
    explanation = explain(two_jobs_for_one_gpu(state=JobState.HELD), "weak")
    (step,) = explanation.steps
    assert (step.claim, step.then) == (Claim.OTHER_REASON, ReasonCode.OUTPRICED)
    assert "wait for another reason, OUTPRICED" in str(step.message)


def test_a_job_over_its_tenants_quota_learns_the_quota_that_would_do() -> None:
    snapshot = with_quotas(
        a_snapshot(
            nodes=[a_node("n0", gpus=4)],
            estimates=[an_estimate(gpus=2)],
            jobs=[a_job("first"), a_job("second")],
        ),
        {"t": {-1: 2}},
        borrow={"t": 0},
    )
    outcome = decide(snapshot, OPTIONS)
    waits = next(d.job for d in outcome.decisions if d.gang is None)
    explanation = explain(snapshot, snapshot.jobs.name[waits])
    assert explanation.reason.code is ReasonCode.QUOTA_SPENT
    quota = the_change(explanation, ChangeKind.QUOTA)
    assert (quota.subject, quota.amount, quota.before) == ("t", 4, 2)


def test_a_job_that_avoids_every_node_learns_that_it_must_not() -> None:
    snapshot = with_avoided_nodes(
        a_snapshot(nodes=[a_node("n0", gpus=1)], estimates=[an_estimate()], jobs=[a_job("j")]),
        (0, 0),
    )
    explanation = explain(snapshot, "j")
    assert explanation.reason.code is ReasonCode.PINS_CONTRADICT
    assert kinds(explanation)[0] is ChangeKind.ANY_NODE


def test_a_guaranteed_job_displaces_by_its_guarantee() -> None:
    snapshot = a_snapshot(
        nodes=[a_node("n0", gpus=1)],
        estimates=[an_estimate()],
        jobs=[
            a_job(
                "owed",
                state=JobState.RUNNING,
                cell=(0, 1, 1),
                generation=1,
                guaranteed=True,
                requested_gpu_type=0,
            ),
            a_job("j", weight=9.0),
        ],
        gangs={0: Gang(members=((0, (0,)),))},
    )
    explanation = explain(snapshot, "j")
    assert ChangeKind.WEIGHT not in kinds(explanation)
    assert the_change(explanation, ChangeKind.END).subject == "owed"
    assert [d.by for d in explanation.displaced_by] == [DisplacedBy.GUARANTEE]


def test_without_time_the_reason_stays_and_the_explanation_is_incomplete() -> None:
    def never(_snapshot: Snapshot, _options: RoundOptions) -> RoundOutcome:
        raise DeadlineTooShort("no time")

    snapshot = two_jobs_for_one_gpu()
    explanation = explain(snapshot, "weak", plan=never)
    assert explanation.reason == decide(snapshot, OPTIONS).decisions[1].reason
    assert explanation.steps == ()
    assert not explanation.is_complete


def test_every_code_has_a_cause_and_every_kind_of_change_a_ladder_and_words() -> None:
    assert set(CAUSES) == set(ReasonCode)
    assert set(LADDERS) == set(ChangeKind) - {ChangeKind.LOSE}  # it helps nobody
    for kind in ChangeKind:
        subject = "gap" if kind is ChangeKind.POLICY else "x"
        change = Change(kind=kind, subject=subject, amount=2, size=2, before=1)
        assert describe_changes([change], "j")


def test_a_change_of_what_the_snapshot_lacks_is_refused() -> None:
    change = Change(kind=ChangeKind.UNDRAIN, subject="nowhere")
    with pytest.raises(InvalidInput, match="the snapshot has no nowhere"):
        apply_changes(two_jobs_for_one_gpu(), OPTIONS, 0, [change])


def test_cores_of_nodes_that_are_away_count_as_away() -> None:
    snapshot = needing(cpus=9)
    rows = [snapshot.nodes.row(n) for n in range(2)]
    rows[1] |= {"cpus": 16, "schedulable": False}
    explanation = explain(replace(snapshot, nodes=Nodes.from_rows(rows)), "j")
    assert explanation.reason.code is ReasonCode.NODES_AWAY
    assert kinds(explanation)[0] is ChangeKind.UNDRAIN


def test_a_job_that_runs_needs_no_step() -> None:
    explanation = explain(two_jobs_for_one_gpu(), "strong")
    assert explanation.reason.code is ReasonCode.STARTED
    assert explanation.steps == ()
    assert explanation.is_complete
