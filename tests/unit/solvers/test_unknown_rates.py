"""Rounds with jobs whose model nobody knows: they run on what they request, at an unknown rate."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera.formulation.answer.codec import decode, encode
from tessera.formulation.answer.decisions import Decision, DecisionKind
from tessera.formulation.answer.placement import Gang
from tessera.formulation.answer.unknown_rates import assume_rates, has_unknown_rate
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.values import BEST_FOUND, EstimateSource, GpuType
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.job.reasons import ReasonCode
from tessera.formulation.round.grammar import OBJECTIVES
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.rates import unit_rate
from tessera.formulation.state.cells import build_cells
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.base import Budget
from tessera.solvers.exact.portfolio import Portfolio
from tessera.solvers.rounds.plan import RoundOptions, RoundOutcome, plan_round
from tessera.solvers.schedulers.registry import scheduler_names, scheduler_of
from tests.support.builders import a_job, a_snapshot, an_estimate, some_nodes
from tests.support.driver import reason_of

A100, V100 = 0, 1
KNOWN, UNKNOWN = 0, 1
NODES = some_nodes((A100, 2, 8), (V100, 2, 8))
CELLS = [
    an_estimate(KNOWN, kind, n, -(-n // 8), iter_time_s=8.0 * (1 + kind) / n**0.8)
    for kind in (A100, V100)
    for n in (1, 2, 4, 8, 16)
]
FOREVER = Budget(remaining_s=lambda: math.inf)


def an_unknown_job(name: str = "u", gpus: int = 4, kind: int = A100, **more: Any) -> dict[str, Any]:
    stated = {"requested_gpus": gpus, "requested_gpu_type": kind, "unestimated": True}
    return a_job(name, UNKNOWN, **stated | {"iterations_left": 1000.0} | more)


def a_known_job(name: str, gpus: int = 4, **more: Any) -> dict[str, Any]:
    stated = {"requested_gpus": gpus, "max_gpus": gpus, "iterations_left": 1000.0}
    return a_job(name, KNOWN, **stated | more)


def a_round(*jobs: dict[str, Any], cells: Any = CELLS, **more: Any) -> Snapshot:
    given: dict[str, Any] = {"workloads": 2, "nodes": NODES} | more
    snapshot = a_snapshot(jobs=list(jobs), estimates=cells, **given)
    kinds = ("a100", "v100")
    return replace(
        snapshot, gpu_types=tuple(GpuType(name=name, memory_bytes=2**35) for name in kinds)
    )


def decide(snapshot: Snapshot, policy: Policy | None = None) -> RoundOutcome:
    outcome = plan_round(snapshot, policy or RoundOptions(), Portfolio(), FOREVER)
    assert not outcome.violations
    return outcome


def decision_of(outcome: RoundOutcome, snapshot: Snapshot, name: str) -> Decision:
    return outcome.decisions[snapshot.jobs.name.index(name)]


def test_a_job_of_an_unknown_model_starts_on_what_it_requests_without_a_rate() -> None:
    snapshot = a_round(an_unknown_job(gpus=4, kind=V100), a_known_job("k"))
    mine = decision_of(decide(snapshot), snapshot, "u")
    assert mine.kind is DecisionKind.START
    assert mine.cell == (V100, 4, BEST_FOUND, snapshot.plans.index(""))
    assert mine.rate == 0.0
    assert mine.gang is not None
    assert mine.gang.gpus == 4


def test_it_is_neither_resized_nor_moved_to_another_type_while_it_runs() -> None:
    gang = Gang(members=((0, (0, 1)),))
    runs = an_unknown_job(gpus=2, state=JobState.RUNNING, cell=(A100, 2, BEST_FOUND))
    snapshot = a_round(runs, gangs={0: gang})
    mine = decision_of(decide(snapshot), snapshot, "u")
    assert (mine.kind, mine.gang, mine.rate) == (DecisionKind.KEEP, gang, 0.0)


def test_a_job_whose_estimates_were_deleted_stays_on_the_cell_that_it_runs_on() -> None:
    gang = Gang(members=((0, (0, 1, 2, 3)),))
    runs = an_unknown_job(gpus=2, kind=V100, state=JobState.RUNNING, cell=(A100, 4, 2))
    snapshot = a_round(runs, gangs={0: gang})
    mine = decision_of(decide(snapshot), snapshot, "u")
    assert (mine.kind, mine.cell.gpus) == (DecisionKind.KEEP, 4)


def test_it_restarts_on_the_same_cell_if_its_node_is_away() -> None:
    nodes = [NODES[0] | {"schedulable": False}, *NODES[1:]]
    runs = an_unknown_job(gpus=2, state=JobState.RUNNING, cell=(A100, 2, BEST_FOUND))
    snapshot = a_round(runs, gangs={0: Gang(members=((0, (0, 1)),))}, nodes=nodes)
    mine = decision_of(decide(snapshot), snapshot, "u")
    assert mine.kind is DecisionKind.MOVE
    assert (mine.cell.gpu_type, mine.cell.gpus) == (A100, 2)


def test_jobs_of_one_unknown_workload_run_on_their_own_requests() -> None:
    jobs = [an_unknown_job("a", 8), an_unknown_job("b", 2), an_unknown_job("c", 4, V100)]
    snapshot = a_round(*jobs)
    outcome = decide(snapshot)
    assert [(d.cell.gpu_type, d.cell.gpus) for d in outcome.decisions] == [
        (A100, 8),
        (A100, 2),
        (V100, 4),
    ]


def test_without_a_gpu_type_it_waits_for_an_estimate() -> None:
    snapshot = a_round(an_unknown_job("u"), an_unknown_job("any", kind=-1))
    outcome = decide(snapshot)
    assert decision_of(outcome, snapshot, "u").kind is DecisionKind.START
    reason = reason_of(decision_of(outcome, snapshot, "any"))
    assert reason.code is ReasonCode.NO_ESTIMATE
    assert "states a GPU type runs without" in str(reason.next_step)


def test_it_waits_while_its_estimates_may_still_come() -> None:
    snapshot = a_round(an_unknown_job(unestimated=False))
    assert reason_of(decide(snapshot).decisions[0]).code is ReasonCode.ESTIMATING


def test_with_an_estimate_it_is_a_job_like_any_other() -> None:
    known = an_estimate(UNKNOWN, A100, 8, iter_time_s=1.0)
    snapshot = a_round(an_unknown_job(gpus=2), cells=[*CELLS, known])
    assert not has_unknown_rate(snapshot).any()
    mine = decide(snapshot).decisions[0]
    assert (mine.cell.gpus, mine.rate) == (8, 256.0)


def test_its_value_is_that_of_the_median_job_of_its_size() -> None:
    snapshot = a_round(an_unknown_job(gpus=4), a_known_job("a"), a_known_job("b"))
    filled = assume_rates(snapshot)
    cells = build_cells(filled)
    unit = unit_rate(filled, cells)
    effective = [
        float(r / unit[0 if w > 1 else 1])
        for w, t, n, r in zip(cells.workload, cells.gpu_type, cells.gpus, cells.rate, strict=True)
        if (t, n) == (A100, 4)
    ]
    assert effective == pytest.approx([4**0.8, 4**0.8])
    assert filled.estimates.iter_time_s[-1] == pytest.approx(8.0 / 4**0.8)
    assert filled.estimates.source[-1] == EstimateSource.ASSUMED


def test_the_median_counts_jobs_and_not_workloads() -> None:
    slow = an_estimate(2, A100, 4, iter_time_s=100.0)
    jobs = [a_known_job("a"), a_known_job("b"), a_job("s", 2)]
    snapshot = a_round(an_unknown_job(gpus=4), *jobs, cells=[*CELLS, slow], workloads=3)
    assert assume_rates(snapshot).estimates.iter_time_s[-1] == pytest.approx(8.0 / 4**0.8)


def test_a_size_that_no_job_has_takes_the_median_of_its_type_and_else_of_all() -> None:
    on_v100 = [cell for cell in CELLS if cell["gpu_type"] == V100]
    snapshot = a_round(an_unknown_job(gpus=3, kind=V100), a_known_job("k"), cells=on_v100)
    elsewhere = a_round(an_unknown_job(gpus=3, kind=A100), a_known_job("k"), cells=on_v100)
    gpu_s = sorted(cell["iter_time_s"] * cell["gpus"] for cell in on_v100)
    for case in (snapshot, elsewhere):
        assert assume_rates(case).estimates.iter_time_s[-1] == pytest.approx(gpu_s[2] / 3)


def test_without_any_known_job_an_iteration_is_assumed_to_take_a_second() -> None:
    filled = assume_rates(a_round(an_unknown_job(), cells=[]))
    assert filled.estimates.iter_time_s.tolist() == [1.0]
    assert filled.jobs.assumed_efficiency.tolist() == [1.0]


@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
def test_every_objective_gives_it_a_finite_value_and_decides(objective: str) -> None:
    jobs = [
        an_unknown_job("u", guaranteed=True),
        an_unknown_job("done", iterations_left=0.0),
        an_unknown_job("long", iterations=1e12, iterations_left=1e12),
        a_known_job("k", weight=0.1),
    ]
    snapshot = a_round(*jobs)
    kinds = tuple(replace(kind, dollars_per_hour=2.0) for kind in snapshot.gpu_types)
    outcome = decide(replace(snapshot, gpu_types=kinds), RoundOptions(objective=objective))
    assert decision_of(outcome, snapshot, "u").kind is DecisionKind.START
    assert math.isfinite(outcome.placed_score)


@pytest.mark.parametrize("name", scheduler_names())
def test_every_published_scheduler_gives_it_its_request_or_nothing(name: str) -> None:
    deadline: dict[str, Any] = {"deadline_s": 5000.0}
    jobs = [
        an_unknown_job("u", **deadline),
        an_unknown_job("v", gpus=8, kind=V100),
        a_known_job("k", **deadline),
        a_known_job("l"),
    ]
    snapshot = a_round(*jobs)
    scheduler = scheduler_of(name)
    assert scheduler is not None
    policy = RoundOptions(scheduler=name)
    outcome = plan_round(snapshot, policy, Portfolio(), FOREVER, scheduler=scheduler)
    assert not outcome.violations
    for decision, gpus in zip(outcome.decisions[:2], (4, 8), strict=True):
        assert decision.gang is None or (decision.cell.gpus, decision.rate) == (gpus, 0.0)
    assert any(d.gang is not None for d in outcome.decisions)


def test_a_guaranteed_job_is_guaranteed_the_cell_that_it_requests() -> None:
    gang = Gang(members=((0, (0, 1, 2, 3)),))
    runs = an_unknown_job(
        gpus=4, guaranteed=True, weight=1e-6, state=JobState.RUNNING, cell=(A100, 4, BEST_FOUND)
    )
    others = [a_known_job(f"k{i}", 16, weight=100.0) for i in range(8)]
    snapshot = a_round(runs, *others, gangs={0: gang})
    mine = decision_of(decide(snapshot), snapshot, "u")
    assert (mine.kind, mine.cell.gpus) == (DecisionKind.KEEP, 4)


@pytest.mark.parametrize("mode", ["myopic", "look-ahead", "planned", "keep", "ignore"])
def test_it_runs_without_a_promise_of_its_deadline(mode: str) -> None:
    jobs = [an_unknown_job("u", deadline_s=1_001.0), a_known_job("k", deadline_s=1e6)]
    snapshot = a_round(*jobs)
    outcome = decide(snapshot, RoundOptions(objective="deadline", deadlines=mode))
    mine = decision_of(outcome, snapshot, "u")
    assert (mine.kind, mine.admitted) == (DecisionKind.START, False)
    if outcome.admission is not None:
        assert not (outcome.admission.schedule_segments.job == 0).any()


def test_a_waiting_job_says_that_its_deadline_is_not_promised() -> None:
    jobs = [an_unknown_job("u", 16, queued_s=1.0, deadline_s=5000.0), a_known_job("k", 16)]
    snapshot = a_round(*jobs)
    reason = reason_of(decision_of(decide(snapshot), snapshot, "u"))
    assert dict(reason.evidence)["deadline"] == "not promised, because the rate is unknown"


def test_a_stored_snapshot_replays_to_the_same_decisions() -> None:
    snapshot = a_round(an_unknown_job(), an_unknown_job("v", 8, V100), a_known_job("k"))
    again = decode(encode(snapshot))
    assert isinstance(again, Snapshot)
    assert decide(again).decisions == decide(snapshot).decisions
    assert b"assumed_efficiency" not in encode(snapshot)
    assert b"unestimated" not in encode(a_round(a_known_job("k")))


def test_a_snapshot_must_have_the_plan_by_which_such_jobs_run() -> None:
    with pytest.raises(InvalidInput, match="plans"):
        replace(a_round(an_unknown_job()), plans=("p",))


def test_snapshots_without_such_jobs_are_not_changed() -> None:
    snapshot = a_round(a_known_job("k"))
    assert assume_rates(snapshot) is snapshot
    assert np.isnan(snapshot.jobs.assumed_efficiency).all()
