"""Rounds with allowed GPU types, required and preferred labels, on obvious small cases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tessera.formulation.answer.check import find_placement_violations
from tessera.formulation.answer.decisions import DecisionKind
from tessera.formulation.answer.explanations.changes import ChangeKind
from tessera.formulation.answer.explanations.records import Explanation
from tessera.formulation.answer.placement import Gang
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.job.reasons import ReasonCode
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.problem import RowKind
from tessera.formulation.round.statement import state_round
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.registry import make_solver
from tessera.solvers.rounds.explaining.explain import explain_job
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import RoundOutcome, plan_round
from tests.support.builders import a_job, a_node, a_snapshot, an_estimate
from tests.support.driver import (
    FOREVER,
    decide_round,
    reason_of,
    with_allowed_types,
    with_avoided_nodes,
    with_selectors,
)

TWO_TYPES = (an_estimate(0, 0, 4, iter_time_s=1.0), an_estimate(0, 1, 4, iter_time_s=2.0))


def two_types(*jobs: dict[str, Any], gangs: dict[int, Gang] | None = None) -> Snapshot:
    """Return a snapshot with two nodes of four GPUs of each of two types; the first type is faster."""
    nodes = [a_node(f"n{i}", i // 2, gpus=4) for i in range(4)]
    return a_snapshot(nodes=nodes, estimates=TWO_TYPES, jobs=jobs, gangs=gangs)


def four_nodes(*jobs: dict[str, Any], gangs: dict[int, Gang] | None = None) -> Snapshot:
    """Return a snapshot with four nodes of four GPUs, for jobs on one, two or four GPUs."""
    estimates = [an_estimate(0, 0, n, iter_time_s=8.0 / n) for n in (1, 2, 4)]
    estimates.append(an_estimate(1, 0, 4, iter_time_s=2.0))  # a workload that runs on four only
    return a_snapshot(
        nodes=[a_node(f"n{i}", gpus=4) for i in range(4)],
        estimates=estimates,
        jobs=jobs,
        gangs=gangs,
    )


def a_running_job(name: str, gpus: int, workload: int = 0, **fields: Any) -> dict[str, Any]:
    return a_job(
        name,
        workload,
        **{"state": JobState.RUNNING, "cell": (0, gpus, 1), "generation": 1, **fields},
    )


def whole(node: int) -> Gang:
    return Gang(members=((node, (0, 1, 2, 3)),))


def nodes_of(outcome: RoundOutcome, job: int) -> set[int]:
    return {node for node, _ in outcome.placed.placement.gangs[job].members}


def decide(snapshot: Snapshot, options: RoundOptions) -> RoundOutcome:
    return plan_round(snapshot, options, make_solver(), FOREVER)


def explain(snapshot: Snapshot, name: str) -> Explanation:
    options = RoundOptions(objective="throughput")
    job = snapshot.jobs.name.index(name)
    return explain_job(snapshot, options, job, decide(snapshot, options), decide)


# allowed types


def test_a_running_job_leaves_a_type_that_is_not_allowed_any_more() -> None:
    snapshot = two_types(a_running_job("j", 4), gangs={0: whole(0)})
    (decision,) = decide_round(with_allowed_types(snapshot, (0, 1)), Policy()).decisions
    assert (decision.kind, decision.cell.gpu_type) == (DecisionKind.RETYPE, 1)
    full = two_types(
        a_running_job("j", 4),
        *(a_running_job(f"b{i}", 4, cell=(1, 4, 1), guaranteed=True) for i in range(2)),
        gangs={0: whole(0), 1: whole(2), 2: whole(3)},
    )
    outcome = decide_round(with_allowed_types(full, (0, 1), (1, 1), (2, 1)), Policy())
    assert outcome.decisions[0].kind is DecisionKind.SUSPEND


def test_the_checker_refuses_a_type_that_a_job_may_not_run_on() -> None:
    snapshot = two_types(a_job("j"))
    outcome = decide_round(snapshot, Policy())
    parts = (outcome.problem, outcome.solution, outcome.placed.placement)
    broken = find_placement_violations(with_allowed_types(snapshot, (0, 1)), *parts)
    assert [v.rule for v in broken] == ["allowed type"]
    assert not find_placement_violations(with_allowed_types(snapshot, (0, 0)), *parts)


def test_a_job_whose_types_have_no_gpus_learns_which_type_to_allow() -> None:
    snapshot = with_allowed_types(two_types(a_job("j")), (0, 1))
    away = replace(
        snapshot, nodes=replace(snapshot.nodes, schedulable=np.array([True, True, False, False]))
    )
    explanation = explain(away, "j")
    assert explanation.reason.code is ReasonCode.NODES_AWAY
    assert "may run on v100 only, but too few of these GPUs are schedulable: 0 of 8" in (
        str(explanation.reason.message)
    )
    changes = {step.changes[0].kind: step for step in explanation.steps}
    step = changes[ChangeKind.ALLOW_TYPE]
    assert step.changes[0].subject == "v100,a100"
    assert "`tessera update j --allowed-gpu-types v100,a100`; the job would then run" in str(
        step.message
    )


# required labels


def test_jobs_are_not_chosen_for_gpus_that_their_selectors_exclude() -> None:
    """Two jobs want the four GPUs of one node, and the second of them came later."""
    jobs = [a_job(f"j{i}", 1, queued_s=queued_s) for i, queued_s in enumerate((2.0, 0.0, 1.0))]
    snapshot = with_selectors(four_nodes(*jobs, a_job("free", 1)), {0: [1], 1: [1], 2: [1, 3]})
    stated = state_round(snapshot, Policy()).problem
    rows = {row.subject: row.capacity for row in stated.rows if row.kind is RowKind.SELECTED}
    assert rows == {"a100 with s=0": 4, "a100 with s=2": 8}
    outcome = decide_round(snapshot, Policy(), "cp-sat")
    assert [d.gang is not None for d in outcome.decisions] == [False, True, True, True]
    assert not outcome.placed.unplaced
    assert (nodes_of(outcome, 1), nodes_of(outcome, 2)) == ({1}, {3})


def test_avoided_nodes_and_selectors_leave_what_both_allow() -> None:
    snapshot = with_selectors(four_nodes(a_job("j", 1)), {0: [0, 1]})
    assert nodes_of(decide_round(with_avoided_nodes(snapshot, (0, 0)), Policy()), 0) == {1}
    none = decide_round(with_avoided_nodes(snapshot, (0, 0), (0, 1), (0, 2)), Policy())
    reason = reason_of(none.decisions[0])
    assert reason.code is ReasonCode.PINS_CONTRADICT
    assert "the job runs only on nodes with s=0 and avoids n0, n1, n2" in str(reason.message)


def test_the_checker_refuses_a_node_that_a_selector_does_not_match() -> None:
    snapshot = four_nodes(a_job("j", 1))
    outcome = decide_round(snapshot, Policy())
    (node,) = nodes_of(outcome, 0)
    parts = (outcome.problem, outcome.solution, outcome.placed.placement)
    others = with_selectors(snapshot, {0: {0, 1, 2, 3} - {node}})
    assert [v.rule for v in find_placement_violations(others, *parts)] == ["node selector"]
    assert not find_placement_violations(with_selectors(snapshot, {0: [node]}), *parts)


def test_a_job_whose_nodes_are_taken_learns_that_and_what_would_help() -> None:
    """The job on its only node may not be moved, and three other nodes are free."""
    jobs = [a_running_job("r", 4, 1, pinned=True, guaranteed=True), a_job("w", 1)]
    explanation = explain(with_selectors(four_nodes(*jobs, gangs={0: whole(2)}), {1: [2]}), "w")
    assert explanation.reason.code is ReasonCode.NODES_TAKEN
    assert "no nodes with s=0 have GPUs free as the job needs them" in str(
        explanation.reason.message
    )
    step = explanation.steps[0]
    assert step.changes[0].kind is ChangeKind.ANY_LABELS
    assert "`tessera update w --node-selector none`; the job would then run" in str(step.message)


def test_a_node_more_helps_a_job_only_if_it_has_the_labels() -> None:
    """A further node has the labels of the first one, which the job's selector matches or not."""
    jobs = [a_running_job("r", 4, 1, pinned=True, guaranteed=True), a_job("w", 1)]
    for own, kinds in ((0, {ChangeKind.ADD_GPUS}), (2, set())):
        snapshot = with_selectors(four_nodes(*jobs, gangs={0: whole(own)}), {1: [own]})
        steps = explain(snapshot, "w").steps
        assert {s.changes[0].kind for s in steps} & {ChangeKind.ADD_GPUS} == kinds


# preferred labels


def test_of_equal_placements_preferred_nodes_win() -> None:
    snapshot = with_selectors(four_nodes(a_job("j", 1)), {0: [3]}, "preferred_selector")
    assert nodes_of(decide_round(snapshot, Policy()), 0) == {3}


def test_fewer_nodes_come_before_preferred_ones() -> None:
    """Two preferred nodes have two free GPUs each, and one other node has four."""
    jobs = [
        *(a_running_job(f"r{i}", 2, pinned=True, guaranteed=True) for i in range(2)),
        a_job("w", 1),
    ]
    gangs = {i: Gang(members=((i, (0, 1)),)) for i in range(2)}
    snapshot = with_selectors(four_nodes(*jobs, gangs=gangs), {2: [0, 1]}, "preferred_selector")
    assert len(nodes_of(decide_round(snapshot, Policy()), 2)) == 1
