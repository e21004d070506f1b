"""The sensitivity curves of one job."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from tessera.formulation.answer.codec import digest
from tessera.formulation.answer.job_curves import CurveStep, JobCurves, TypeCurves, curves_of_job
from tessera.formulation.answer.placement import Gang
from tessera.formulation.answer.sensitivity import Resource
from tessera.formulation.base.errors import InvalidInput, NotAllowed
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.round.policy import Policy
from tessera.formulation.state import focus
from tessera.formulation.state.focus import focus_on
from tessera.formulation.state.snapshot import Jobs, Snapshot
from tessera.solvers.schedulers.base import make_view
from tessera.solvers.schedulers.curves import curves_of
from tests.support.builders import a_job, a_node, a_random_snapshot, a_snapshot, an_estimate

BATCH = 256.0
GIB = 2**30
PLANS = ("", "dp", "offload", "pipeline")


def on(gpus: int, rate: float, *, plan: int = 1, gpu_type: int = 0, **more: Any) -> dict[str, Any]:
    """Return an estimate of the first workload, from samples/s."""
    return an_estimate(0, gpu_type, gpus, plan=plan, iter_time_s=BATCH / rate, **more)


TRADES = [
    on(1, 5.0, plan=2, cpus=8, host_bytes=64 * GIB),  # only offload fits one GPU
    on(2, 16.0, cpus=2, host_bytes=4 * GIB),
    on(2, 18.0, plan=2, cpus=16, host_bytes=64 * GIB),
    on(2, 17.0, plan=3, cpus=4, host_bytes=4 * GIB, degree=2),
    on(4, 15.0, cpus=4, host_bytes=8 * GIB),  # slower than on 2
    on(8, 48.0, cpus=8, host_bytes=16 * GIB),
    on(8, 40.0, cpus=8, host_bytes=16 * GIB, nodes=2),
    on(8, 44.0, plan=3, cpus=8, host_bytes=16 * GIB, nodes=2, degree=2),
]


def a_round(*estimates: dict[str, Any], nodes: Any = (), gangs: Any = None, **job: Any) -> Snapshot:
    return a_snapshot(
        nodes=nodes or [a_node(n, 0, 8, cpus=64, host_bytes=512 * GIB) for n in "ab"],
        jobs=[a_job("other", 0), a_job("j", 0, **{"requested_gpus": 2, **job})],
        estimates=estimates or TRADES,
        plans=PLANS,
        gangs=gangs,
    )


def curves(snapshot: Snapshot, gpus: int = 0) -> JobCurves:
    return curves_of_job(focus_on(snapshot, 1), Policy(), gpus)


def only_type(snapshot: Snapshot, gpus: int = 0) -> TypeCurves:
    (found,) = curves(snapshot, gpus).types
    return found


def rows(steps: tuple[CurveStep, ...]) -> list[tuple[float, ...]]:
    """Return (amount, rate, best rate, gain) of each step."""
    return [(s.amount, *(round(x, 9) for x in (s.cell.rate, s.best_rate, s.gain))) for s in steps]


def test_the_curve_of_gpus_is_that_of_the_best_plan_at_each_count() -> None:
    found = only_type(a_round())

    assert rows(found.gpus) == [
        (1, 5.0, 5.0, 13.0),
        (2, 18.0, 18.0, 5.0),  # to 8, because 4 are slower
        (4, 15.0, 18.0, 33 / 4),
        (8, 48.0, 48.0, 0.0),
    ]
    best = found.gpus[0].cell
    assert (best.plan, best.demand.cpus, best.demand.host_bytes) == (1, 8, 64 * GIB)  # of the focus
    assert found.gpus[3].cell.nodes == 1


def test_curves_of_cores_memory_and_shapes_have_the_fastest_plan_at_each_amount() -> None:
    found = only_type(a_round())
    assert found.at_gpus == 2
    assert rows(found.host["cpus"]) == [
        (2, 16.0, 16.0, 0.5),
        (4, 17.0, 17.0, round(1 / 12, 9)),
        (16, 18.0, 18.0, 0.0),  # more CPU cores let the offloading plan be the fastest
    ]
    assert rows(found.host["host_bytes"]) == [
        (4 * GIB, 17.0, 17.0, 0.0),
        (64 * GIB, 18.0, 18.0, 0.0),
    ]
    found = only_type(a_round(), 8)
    shapes = [(c.nodes, c.rate, c.pipeline_degree) for c in found.shapes]
    assert shapes == [(1, 48.0, 1), (2, 44.0, 2)]
    assert len(found.cells) == 3


@pytest.mark.parametrize(
    ("plan", "cpus", "guaranteed", "least"),
    [
        (1, 0, 16.0, (2, 2)),  # its own plan needs the least
        (3, 0, 17.0, (2, 4)),
        (2, 0, 18.0, (2, 16)),
        (-1, 0, 18.0, (2, 16)),  # not recorded: the best of the request
        (-1, 4, 18.0, None),  # which needs more cores than the request states
    ],
)
def test_the_minimum_demand_is_the_least_that_is_as_fast_as_the_submitted_plan(
    plan: int, cpus: int, guaranteed: float, least: tuple[int, int] | None
) -> None:
    found = curves(a_round(submitted_plan=plan, requested_cpus=cpus))

    assert found.guaranteed_rate == pytest.approx(guaranteed)
    minimum = found.types[0].minimum
    assert (minimum and (minimum.demand.gpus, minimum.demand.cpus)) == least


def test_each_gpu_type_has_its_curve_and_a_pinned_job_only_one() -> None:
    nodes = [a_node("a", 0, 8), a_node("b", 1, 8)]
    estimates = [on(2, 16.0), on(2, 10.0, gpu_type=1), on(4, 17.0, gpu_type=1)]

    both = curves(a_round(*estimates, nodes=nodes, requested_gpu_type=0))
    one = curves(a_round(*estimates, nodes=nodes, requested_gpu_type=0, pinned_gpu_type=True))

    assert [t.gpu_type for t in both.types] == [0, 1]
    assert [t.minimum is not None for t in both.types] == [True, False]  # 4 are above the request
    assert [t.gpu_type for t in one.types] == [0]


def test_the_present_cell_is_stated_on_the_nodes_that_the_job_has() -> None:
    gang = Gang(members=((0, (0, 1, 2, 3)), (1, (0, 1, 2, 3))))
    snapshot = a_round(state=JobState.RUNNING, cell=(0, 8, 1), gangs={1: gang})
    jobs = replace(snapshot.jobs, current_plan=np.array([0, 1]))

    found = curves(replace(snapshot, jobs=jobs))

    assert found.current is not None
    assert (found.current.nodes, found.current.rate) == (2, 40.0)
    assert found.types[0].at_gpus == 8


def test_a_count_without_a_cell_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(InvalidInput, match="no Cell of 3 GPUs; it has those of 1, 2, 4, 8"):
        curves(a_round(), 3)


def test_a_job_without_a_cell_is_refused_with_the_reason() -> None:
    with pytest.raises(NotAllowed, match="at least 16"):
        curves(a_round(min_gpus=16))
    snapshot = a_round()
    none = replace(snapshot, estimates=snapshot.estimates.at(np.zeros(8, np.bool_)))
    with pytest.raises(NotAllowed, match="m/0B/256 has no estimates"):
        curves(none)
    away = replace(snapshot.nodes, schedulable=np.zeros(2, np.bool_))
    with pytest.raises(NotAllowed, match="bring nodes back"):
        curves(replace(snapshot, nodes=away))


@pytest.mark.parametrize("seed", range(8))
def test_slopes_and_points_are_those_that_the_scheduler_climbs(seed: int) -> None:
    snapshot = a_random_snapshot(seed, jobs=6)
    view = make_view(snapshot, Policy())
    seen = curves_of(view, np.ones(len(view.draft.cell), np.bool_))

    for job, curve in seen.items():
        found = curves_of_job(focus_on(snapshot, job), Policy())
        own = next(t for t in found.types if t.gpu_type == curve.gpu_type)
        rising = [s for k, s in enumerate(own.gpus) if s.cell.rate == s.best_rate]
        rising = [s for s in rising if s.amount in {p.held[0] for p in curve.points}]

        assert [s.amount for s in rising] == [p.held[0] for p in curve.points]
        for at, (point, step) in enumerate(zip(curve.points, rising, strict=True)):
            to = curve.step_up(at, Resource.GPUS, 0.0)
            slope = curve.gain(at, to, Resource.GPUS) if to >= 0 else 0.0
            assert step.best_rate == pytest.approx(point.rate * found.reference_rate)
            assert step.gain == pytest.approx(slope * found.reference_rate)


def test_a_focus_depends_on_nothing_that_does_not_change_the_curves() -> None:
    snapshot = a_round(submitted_plan=3, retry_s=5.0, failures=2)
    base = digest(focus_on(snapshot, 1))
    jobs = snapshot.jobs
    later = replace(
        snapshot,
        now_s=5e3,
        epoch=9,
        round_number=7,
        plans=("", "another", *PLANS[1:]),
        estimates=replace(snapshot.estimates, plan=snapshot.estimates.plan + 1),
        jobs=replace(
            jobs,
            submitted_plan=np.array([-1, 4]),
            iterations_left=jobs.iterations_left / 2,
            weight=np.array([3.0, 4.0]),
            retry_s=jobs.retry_s * 0,
        ),
    )
    slower = replace(snapshot.estimates, iter_time_s=snapshot.estimates.iter_time_s * 2)

    assert digest(focus_on(later, 1)) == base
    assert digest(focus_on(replace(snapshot, estimates=slower), 1)) != base
    assert digest(focus_on(a_round(submitted_plan=2), 1)) != base


def test_a_focus_keeps_or_drops_each_column_of_jobs_on_purpose() -> None:
    """A new column that decides where a job may run must be kept: see ``focus._KEPT``."""
    dropped = {"version", "tenant", "priority", "weight", "guaranteed", "pinned", "deadline_s"}
    dropped |= {"admitted", "opportunistic", "since_s", "service_gpu_s", "restart_s"}
    dropped |= {"unsaved_since_s", "run_left_s", "preferred_selector"}
    dropped |= {"unmet", "array", "array_limit"}
    dropped |= {"failures", "retry_s", "unestimated", "assumed_efficiency"}
    dropped |= {"preemptible", "start_by_s", "progress_s"}
    stated = {"plan", "submitted_plan", "state", "workload", "generation"}
    stated |= {"iterations", "iterations_left", "submit_s", "queued_s"}
    kept = {*focus._KEPT, *Jobs.CELL, *stated}

    assert kept.isdisjoint(dropped)
    assert kept | dropped == {f.name for f in fields(Jobs)}
