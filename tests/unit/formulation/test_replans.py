"""Replans: same GPUs, another plan. What they cost and earn, when they are made, and their words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera.formulation.answer.decisions import Decision, DecisionKind
from tessera.formulation.answer.placement import Gang
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.job.reasons import ReasonCode
from tessera.formulation.round.columns import first_draft
from tessera.formulation.round.lookahead import rates_if_kept
from tessera.formulation.round.policy import MAX_SPACING, Policy
from tessera.formulation.round.promises.stability import replans_are_rare_and_pay_back
from tessera.formulation.state.replans import Replan, charge_unsaved_training, start_duration_s
from tessera.formulation.state.snapshot import Snapshot
from tests.support.builders import a_job, a_node, a_snapshot, an_estimate, some_nodes
from tests.support.driver import decide_round, reason_of

PLANS = ("", "slow", "fast")
SLOW, FAST = 1, 2
NOW_S = 1000.0  # of snapshots
SOLVERS = ("greedy", "cp-sat", "pricing")


def a_running_job(**overrides: Any) -> dict[str, Any]:
    """Return a job of workload 0 that has run by the slow plan on 4 GPUs since an unknown time."""
    fields: dict[str, Any] = {"state": JobState.RUNNING, "cell": (0, 4, 1), "since_s": 0.0}
    return a_job("mine", **(fields | {"restart_s": 30.0, "current_plan": SLOW} | overrides))


def two_plans(speed_up: float, **of_fast: Any) -> list[dict[str, Any]]:
    """Return a plan of 64 samples/s on 4 GPUs, and another that is ``speed_up`` as fast."""
    slow = an_estimate(gpus=4, plan=SLOW, iter_time_s=4.0, **of_fast.pop("of_slow", {}))
    return [slow, an_estimate(gpus=4, plan=FAST, iter_time_s=4.0 / speed_up, **of_fast)]


def a_round(
    estimates: Sequence[dict[str, Any]],
    *others: dict[str, Any],
    gang: Gang | None = None,
    nodes: Sequence[dict[str, Any]] = tuple(some_nodes((0, 1, 8))),
    **overrides: Any,
) -> Snapshot:
    """Return a round in which the job runs on the last four GPUs of the first node."""
    gangs = {0: gang or Gang(members=((0, (4, 5, 6, 7)),))}
    jobs = [a_running_job(**overrides), *others]
    return a_snapshot(nodes=nodes, jobs=jobs, estimates=estimates, gangs=gangs, plans=PLANS)


def decide(snapshot: Snapshot, policy: Policy | None = None, solver: str = "greedy") -> Decision:
    """Return the first job's decision."""
    return decide_round(snapshot, policy or Policy(), solver).decisions[0]


# what is decided


def test_another_plan_on_the_same_gpus_is_a_replan_with_its_price_and_reason() -> None:
    decision = decide(a_round(two_plans(1.8), restart_s=60.0))
    assert (decision.kind, decision.cell.plan) == (DecisionKind.REPLAN, FAST)
    assert decision.gang == Gang(members=((0, (4, 5, 6, 7)),))
    assert decision.restart_price > 0
    reason = reason_of(decision)
    assert reason.code is ReasonCode.REPLANNED
    assert reason.message == (
        "the plan fast is 1.8 x as fast on the same 4 GPUs; the restart of 60 s pays back in 2.25"
        " minutes"
    )
    evidence = {key: str(value) for key, value in reason.evidence}
    assert (evidence["plan"], evidence["former plan"]) == ("fast", "slow")
    assert float(evidence["restart s"]) == 60
    assert float(evidence["restart GPU-s"]) == 240
    assert float(evidence["lost samples"]) == 0
    assert float(evidence["gained samples/s"]) == pytest.approx(0.8 * 64)
    assert float(evidence["pays back s"]) == pytest.approx(60 * 1.8 / 0.8)


@pytest.mark.parametrize("own", [(4, 5, 6, 7), (1, 2, 5, 6)])
def test_a_replan_keeps_its_very_gpus_where_others_would_fill_the_cluster_better(
    own: tuple[int, ...],
) -> None:
    """A smaller node has exactly four GPUs free. Others want four GPUs, too."""
    nodes = [*some_nodes((0, 1, 8)), a_node("small", 0, 4)]
    estimates = [*two_plans(1.8), an_estimate(1, gpus=4, iter_time_s=1.0)]
    gang = Gang(members=((0, own),))
    decision = decide(a_round(estimates, a_job("new", 1), nodes=nodes, gang=gang))
    assert decision.kind is DecisionKind.REPLAN
    assert decision.gang == gang


def test_a_change_of_cpus_alone_is_a_replan_that_gives_them_back() -> None:
    """Each number of CPU cores is a plan of its own. Another job needs the cores that are freed."""
    plans = [
        an_estimate(gpus=4, plan=SLOW, iter_time_s=4.0, cpus=16, host_bytes=2**30),
        an_estimate(gpus=4, plan=FAST, iter_time_s=4.4, cpus=4, host_bytes=2**30),
        an_estimate(1, gpus=4, iter_time_s=1.0, cpus=12),
    ]
    nodes = [a_node("n", 0, 8) | {"cpus": 16}]
    alone = a_round(plans, nodes=nodes)
    assert decide(alone).kind is DecisionKind.KEEP
    shared = a_round(plans, a_job("new", 1), nodes=nodes)
    outcome = decide_round(shared, Policy(), "cp-sat")
    mine, new = outcome.decisions
    assert (mine.kind, new.kind) == (DecisionKind.REPLAN, DecisionKind.START)
    assert mine.gang == Gang(members=((0, (4, 5, 6, 7)),))
    reason = reason_of(mine)
    assert reason.message == (
        "the plan fast is 0.909 x as fast on the same 4 GPUs, but it gives back 12 CPU cores; its"
        " price is the restart of 30 s"
    )
    assert dict(reason.evidence)["CPU cores"] == "-12"


# when it is decided


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(
    ("horizon_s", "speed_up", "pays"),
    [
        (600.0, 1.12, True),  # back after 280 s
        (270.0, 1.12, False),
        (1e4, 1.06, True),  # back after 530 s, within 20 restart times
        (1e4, 1.05, False),  # 630 s: it might be replanned before that
    ],
)
def test_a_plan_is_taken_only_if_it_pays_back_within_the_horizon_and_the_spacing(
    solver: str, horizon_s: float, speed_up: float, pays: bool
) -> None:
    policy = Policy(restart_horizon_s=horizon_s)
    decision = decide(a_round(two_plans(speed_up)), policy, solver)
    assert decision.kind is (DecisionKind.REPLAN if pays else DecisionKind.KEEP)


@pytest.mark.parametrize(("sd", "kind"), [(0.1, DecisionKind.REPLAN), (0.3, DecisionKind.KEEP)])
def test_a_plan_must_pay_back_even_if_it_is_slower_by_a_standard_deviation(
    sd: float, kind: DecisionKind
) -> None:
    """It is 1.3 times as fast, and exp(0.1 x sqrt(2)) is 1.15."""
    assert decide(a_round(two_plans(1.3, sd=sd, of_slow={"sd": sd}))).kind is kind


@pytest.mark.parametrize(
    ("left_s", "speed_up", "kind"),
    [
        (130.0, 2.0, DecisionKind.REPLAN),  # back after 60 s, and ends after 95 s
        (110.0, 2.0, DecisionKind.KEEP),  # by the fast plan, it would only run for 55 s
        (20.0, 20.0, DecisionKind.KEEP),  # it would end before the restart is over
    ],
)
def test_a_job_is_not_replanned_shortly_before_its_end(
    left_s: float, speed_up: float, kind: DecisionKind
) -> None:
    snapshot = a_round(two_plans(speed_up), iterations_left=left_s / 4)
    assert decide(snapshot).kind is kind


@pytest.mark.parametrize(
    ("age_s", "spacing", "kind"),
    [
        (599.0, 20.0, DecisionKind.KEEP),
        (600.0, 20.0, DecisionKind.REPLAN),
        (599.0, 19.0, DecisionKind.REPLAN),
        (1.0, 0.0, DecisionKind.REPLAN),
        (999.0, MAX_SPACING, DecisionKind.KEEP),
    ],
)
def test_a_job_runs_its_restart_time_many_times_before_it_is_replanned(
    age_s: float, spacing: float, kind: DecisionKind
) -> None:
    snapshot = a_round(two_plans(1.5), since_s=NOW_S - age_s)
    assert decide(snapshot, Policy(replan_spacing=spacing, change_spacing=0)).kind is kind


@pytest.mark.parametrize("spacing", [-1.0, math.nan, math.inf, 2 * MAX_SPACING])
def test_a_spacing_without_meaning_is_refused(spacing: float) -> None:
    with pytest.raises(InvalidInput, match="must be 0 \\(no limit\\) or a number of restart times"):
        Policy(replan_spacing=spacing)


def test_the_limit_holds_for_replans_alone() -> None:
    """More GPUs, fewer GPUs and other shapes stay columns of a job that has just started."""
    estimates = [*two_plans(1.5), an_estimate(gpus=8, plan=FAST, iter_time_s=1.0)]
    estimates += [an_estimate(gpus=2, plan=FAST), an_estimate(gpus=4, nodes=2, plan=FAST)]
    snapshot = a_round(estimates, since_s=NOW_S - 1, nodes=some_nodes((0, 2, 8)))
    draft = first_draft(snapshot, Policy(), every_cell=True)
    kept = replans_are_rare_and_pay_back(draft)
    gone = {*zip(draft.gpus.tolist(), draft.cells.plan[draft.cell].tolist(), strict=True)}
    gone -= {*zip(kept.gpus.tolist(), kept.cells.plan[kept.cell].tolist(), strict=True)}
    assert gone == {(4, FAST)}


@pytest.mark.parametrize(
    ("deadlines", "admitted", "bound"),
    [
        ("ignore", False, True),
        ("keep", False, True),
        ("keep", True, False),
        ("myopic", False, False),
    ],
)
def test_a_deadline_that_is_or_may_be_promised_goes_before_the_limit(
    deadlines: str, admitted: bool, bound: bool
) -> None:
    snapshot = a_round(two_plans(1.5), since_s=NOW_S - 1, deadline_s=NOW_S + 1e6, admitted=admitted)
    draft = first_draft(snapshot, Policy(deadlines=deadlines))
    assert (len(replans_are_rare_and_pay_back(draft).cell) < len(draft.cell)) == bound


def test_a_job_that_cannot_stay_changes_at_once_and_says_so() -> None:
    plans = [an_estimate(gpus=4, plan=SLOW, iter_time_s=math.inf), *two_plans(1.5)[1:]]
    decision = decide(a_round(plans, since_s=NOW_S - 1))
    assert decision.kind is DecisionKind.REPLAN
    assert reason_of(decision).message == (
        "the job can no longer run by its former plan, and goes on by the plan fast on the same 4"
        " GPUs; its price is the restart of 30 s"
    )


# training that is in no checkpoint


def test_training_that_a_restart_would_repeat_is_part_of_its_price() -> None:
    """It has trained for 90 s since its last checkpoint, and writes none when it is stopped."""
    saved = decide(a_round(two_plans(1.5)))
    unsaved = decide(a_round(two_plans(1.5), unsaved_since_s=NOW_S - 90))
    assert unsaved.kind is DecisionKind.REPLAN
    assert unsaved.restart_price == pytest.approx(4 * saved.restart_price)
    reason = reason_of(unsaved)
    assert reason.message == (
        "the plan fast is 1.5 x as fast on the same 4 GPUs; the restart of 30 s and the 5,760 samples"
        " since its last checkpoint pay back in 6 minutes"
    )
    assert dict(reason.evidence)["restart GPU-s"] == "480"
    late = a_round(two_plans(1.5), unsaved_since_s=NOW_S - 990)
    assert decide(late, Policy(restart_horizon_s=3000.0)).kind is DecisionKind.KEEP


def test_a_start_does_not_take_longer_because_the_next_one_would() -> None:
    """A job that has trained for long is past its start, however much a restart would repeat."""
    charged = charge_unsaved_training(
        a_round(two_plans(1.5), since_s=NOW_S - 90, unsaved_since_s=NOW_S - 90)
    )
    assert start_duration_s(charged).tolist() == [30.0]
    _, left_s = rates_if_kept(first_draft(charged, Policy()), np.array([0]))
    assert left_s.tolist() == [0.0]


# words


def test_the_sentence_names_digests_by_their_first_digits_and_counts_days() -> None:
    replan = Replan(
        plan="0123456789abcdef" * 4,
        pipeline_degree=1,
        former_plan="",
        gpus=1,
        restart_s=7200.0,
        unsaved_s=0.0,
        former_rate=100.0,
        rate=104.0,
    )
    assert replan.explain().message == (
        "the plan 0123456789ab is 1.04 x as fast on the same 1 GPU; the restart of 2 hours pays back"
        " in 2.17 days"
    )
    degree = replace(replan, plan="", pipeline_degree=2, rate=90.0, host_bytes=-(2**31))
    assert degree.explain().message == (
        "the best plan of pipeline degree 2 is 0.9 x as fast on the same 1 GPU, but it gives back 2"
        " GiB of host memory; its price is the restart of 2 hours"
    )
    assert degree.pays_back_s == math.inf
