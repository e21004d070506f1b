"""Reservations: what is refused, which nodes are chosen, which jobs are kept out, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera.formulation.answer.decisions import DecisionKind
from tessera.formulation.answer.placement import Gang, Placement
from tessera.formulation.answer.reservation_check import find_reservation_violations
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.job.reasons import ReasonCode
from tessera.formulation.records.reservations import NodeSize, ReservationSpec, require_room
from tessera.formulation.round.policy import Policy
from tessera.formulation.state.reservations import with_reservations
from tessera.formulation.state.reserved import Entitlements, Reservations, ReservedNodes
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.base import Budget
from tessera.solvers.exact.greedy import Greedy
from tessera.solvers.rounds.plan import RoundOutcome, plan_round
from tests.support.builders import a_job, a_snapshot, an_estimate, some_nodes
from tests.support.driver import reason_of

NODES = {f"n{i}": NodeSize(gpu_type="a100", gpus=8) for i in range(4)}
NOW_S = 1_000.0


def a_spec(
    name: str = "r", start_s: float = 0.0, end_s: float = 10.0, **rest: Any
) -> ReservationSpec:
    what: dict[str, Any] = {} if "nodes" in rest else {"gpu_type": "a100", "gpus": 8}
    serves: dict[str, Any] = {} if rest.get("maintenance") else {"tenant": "t"}
    return ReservationSpec(name=name, start_s=start_s, end_s=end_s, **what | serves | rest)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"end_s": 0.0}, "end_time: r must end after it begins"),
        ({"end_s": 1e9}, "end_time: r lasts longer than a year"),
        ({"nodes": ("n1",), "gpus": 2}, "gpus: state either GPUs of a type, or nodes"),
        ({"gpus": 0}, "gpus: state both the GPU type and how many GPUs"),
        ({"nodes": ("n1", "n1")}, "nodes: n1 is named twice"),
        ({"tenant": ""}, "tenant: state which jobs it serves"),
        ({"label_key": "k"}, "tenant: state which jobs it serves"),
        ({"maintenance": True, "gpus": 8}, "maintenance: maintenance is of nodes"),
        ({"maintenance": True, "nodes": ("n1",), "tenant": "t"}, "maintenance: maintenance is of"),
    ],
)
def test_a_reservation_without_a_meaning_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        a_spec(**changes)


def test_reservations_that_together_exceed_the_cluster_are_refused_by_name() -> None:
    others = [
        a_spec("early", 0.0, 10.0, gpus=16),
        a_spec("late", 10.0, 20.0, gpus=24),
        a_spec("fans", 12.0, 15.0, nodes=("n0",), maintenance=True),
    ]
    require_room(a_spec(start_s=0.0, end_s=10.0, gpus=16), others, NODES)
    require_room(a_spec(start_s=5.0, end_s=12.0, gpus=8), others, NODES)
    with pytest.raises(InvalidInput, match=r"only 0 of 32 x a100 .*late .*fans"):
        require_room(a_spec(start_s=5.0, end_s=13.0, gpus=8), others, NODES)
    with pytest.raises(InvalidInput, match=r"nodes: n0 is reserved by fans"):
        require_room(a_spec(start_s=14.0, end_s=16.0, nodes=("n0",)), others, NODES)
    with pytest.raises(InvalidInput, match=r"33 x a100 are requested, but the cluster has 32"):
        require_room(a_spec(gpus=33), [], NODES)
    with pytest.raises(InvalidInput, match=r"nodes: the cluster has no node n9"):
        require_room(a_spec(nodes=("n1", "n9")), [], NODES)


def reserved(snapshot: Snapshot, *specs: ReservationSpec) -> Snapshot:
    """Return the snapshot with reservations, whose times count from its moment."""
    index = {name: i for i, name in enumerate(snapshot.nodes.name)}
    nodes = [(r, index[n]) for r, one in enumerate(specs) for n in one.nodes]
    jobs = [
        (r, j)
        for r, one in enumerate(specs)
        for j, t in enumerate(snapshot.jobs.tenant)
        if one.serves((t,), {})
    ]
    of_nodes, of_jobs = (np.array(rows, np.int64).reshape(-1, 2) for rows in (nodes, jobs))
    return replace(
        snapshot,
        reservations=Reservations(
            name=tuple(one.name for one in specs),
            start_s=np.array([NOW_S + one.start_s for one in specs]),
            end_s=np.array([NOW_S + one.end_s for one in specs]),
            gpu_type=np.array([0 if one.gpu_type else -1 for one in specs]),
            gpus=np.array([one.gpus for one in specs]),
            maintenance=np.array([one.maintenance for one in specs]),
        ),
        reserved_nodes=ReservedNodes(reservation=of_nodes[:, 0], node=of_nodes[:, 1]),
        entitlements=Entitlements(reservation=of_jobs[:, 0], job=of_jobs[:, 1]),
    )


def a_cluster(*jobs: dict[str, Any], gangs: dict[int, Gang] | None = None) -> Snapshot:
    """Return two nodes of four GPUs. Jobs train a sample in a second on each GPU."""
    return a_snapshot(
        nodes=some_nodes((0, 2, 4)),
        jobs=jobs,
        estimates=[an_estimate(gpus=n, iter_time_s=1.0 / n) for n in (1, 2, 4)],
        gangs=gangs,
        batch=1,
    )


def decide(snapshot: Snapshot, **policy: Any) -> RoundOutcome:
    outcome = plan_round(
        snapshot, Policy(**policy), Greedy(), Budget(remaining_s=lambda: float("inf"))
    )
    assert not outcome.violations
    return outcome


def held_by(outcome: RoundOutcome, job: int) -> dict[int, int]:
    """Return node -> GPUs of ``job``."""
    gang = outcome.placed.placement.gangs.get(job)
    return {} if gang is None else {node: len(gpus) for node, gpus in gang.members}


def test_a_job_leaves_a_node_whose_window_begins_and_the_entitled_one_gets_it() -> None:
    gang = Gang(members=((0, (0, 1, 2, 3)),))
    runs = a_job("runs", tenant="other", state=JobState.RUNNING, cell=(0, 4, 1), max_gpus=4)
    waits = a_job("waits", min_gpus=4, requested_gpus=4)
    fills = a_job("fills", tenant="other", min_gpus=4, requested_gpus=4, weight=0.5)
    snapshot = a_cluster(runs, waits, fills, gangs={0: gang})
    outcome = decide(reserved(snapshot, a_spec(nodes=("a100-0",))))
    assert held_by(outcome, 0) == {1: 4}
    assert held_by(outcome, 1) == {0: 4}
    reason = reason_of(outcome.decisions[2])
    assert reason.code is ReasonCode.HELD_FOR_RESERVATION
    assert dict(reason.evidence)["ends"] == "1970-01-01T00:16:50Z"
    assert "it ends at 1970-01-01T00:16:50Z" in str(reason.message)


def test_a_reservation_of_gpus_prefers_the_nodes_of_entitled_jobs_and_then_empty_ones() -> None:
    runs: dict[str, Any] = {"state": JobState.RUNNING, "cell": (0, 1, 1)}
    own, other = a_job("own", **runs), a_job("other", tenant="other", **runs)
    gangs = {0: Gang(members=((1, (0,)),)), 1: Gang(members=((0, (0,)),))}
    chosen = with_reservations(reserved(a_cluster(own, other, gangs=gangs), a_spec(gpus=4)))
    assert chosen.reserved_nodes.node.tolist() == [1]
    alone = with_reservations(
        reserved(a_cluster(other, gangs={0: Gang(members=((0, (0,)),))}), a_spec(gpus=7))
    )
    assert alone.reserved_nodes.node.tolist() == [1]  # the other three GPUs are only counted


@pytest.mark.parametrize(
    ("changes", "starts_on_the_node"),
    [
        ({}, True),  # it can be moved when the window begins
        ({"pinned": True}, False),
        ({"pinned": True, "iterations_left": 50.0}, True),  # it ends before
        ({"restart_s": 60.0}, False),  # a start and a move would take longer than is left
        ({"restart_s": 40.0}, True),
    ],
)
def test_before_a_window_only_jobs_start_that_can_leave_or_end_in_time(
    changes: dict[str, Any], starts_on_the_node: bool
) -> None:
    stated: dict[str, Any] = {"tenant": "other", "min_gpus": 1, "max_gpus": 1}
    job = a_job("j", **stated | changes)
    window = a_spec(start_s=100.0, end_s=200.0, nodes=("a100-0", "a100-1"), maintenance=True)
    outcome = decide(reserved(a_cluster(job), window))
    assert bool(held_by(outcome, 0)) is starts_on_the_node
    if not starts_on_the_node:
        assert reason_of(outcome.decisions[0]).code is ReasonCode.HELD_FOR_RESERVATION


def test_a_job_that_runs_on_a_node_stays_until_its_window_begins() -> None:
    gang = Gang(members=((0, (0,)),))
    runs = a_job(
        "runs", tenant="other", pinned=True, state=JobState.RUNNING, cell=(0, 1, 1), max_gpus=1
    )
    snapshot = a_cluster(runs, gangs={0: gang})
    window = a_spec(start_s=1.0, end_s=200.0, nodes=("a100-0",), maintenance=True)
    assert decide(reserved(snapshot, window)).decisions[0].kind is DecisionKind.KEEP
    begun = reserved(snapshot, replace(window, start_s=-1.0))
    assert held_by(decide(begun), 0) == {1: 1}
    ended = reserved(snapshot, replace(window, start_s=-2.0, end_s=-1.0))
    assert decide(ended).decisions[0].kind is DecisionKind.KEEP


def test_the_check_finds_what_rounds_must_not_do() -> None:
    stuck = a_job("stuck", tenant="other", pinned=True)
    snapshot = a_cluster(stuck, a_job("free", tenant="other"))
    outcome = decide(snapshot)
    problem, solution = outcome.problem, outcome.solution
    on_first = Placement(gangs={0: Gang(members=((0, (0, 1, 2, 3)),))})

    def rules(*specs: ReservationSpec) -> list[str]:
        found = find_reservation_violations(reserved(snapshot, *specs), problem, solution, on_first)
        return [violation.detail for violation in found]

    assert rules(a_spec(nodes=("a100-0",))) == ["stuck is on a100-0, which r has for others"]
    assert rules(a_spec(nodes=("a100-1",))) == []
    assert rules(a_spec(gpus=5)) == ["r: other jobs have 4 x a100, but 3 are left"]
    assert rules(a_spec(gpus=5, tenant="other")) == []
    assert rules(a_spec("a", gpus=3), a_spec("b", gpus=3)) == [
        "a, b: other jobs have 4 x a100, but 2 are left"
    ]
    later = a_spec(start_s=10.0, end_s=20.0, nodes=("a100-0",))
    assert rules(later) == ["stuck may not be moved, but would last into r"]


def test_a_job_that_fits_only_on_reserved_gpus_is_told_the_reservation_and_its_end() -> None:
    outcome = decide(
        reserved(a_cluster(a_job("big", tenant="other", min_gpus=4)), a_spec(gpus=5)),
    )
    reason = reason_of(outcome.decisions[0])
    assert reason.code is ReasonCode.HELD_FOR_RESERVATION
    assert dict(reason.evidence)["reservation"] == "r"
    assert "until 1970-01-01T00:16:50Z" in str(reason.message)
