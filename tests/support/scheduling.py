"""Rounds small enough to see the choices of a published scheduler."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tessera.formulation.answer.placement import Gang
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.round.policy import Policy
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.base import Budget
from tessera.solvers.exact.greedy import Greedy
from tessera.solvers.rounds.plan import RoundOutcome, plan_round
from tessera.solvers.schedulers.base import PublishedScheduler, Scheduler, make_view
from tests.support.builders import (
    a_job,
    a_node,
    a_snapshot,
    an_estimate,
)

A100, V100 = 0, 1
BATCH = 256
LINEAR = {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}
FOREVER = Budget(remaining_s=lambda: math.inf)

Speeds = Mapping[int, Mapping[int, float]]  # GPU type -> GPUs -> samples/s


def rates(workload: int, speeds: Speeds) -> list[dict[str, Any]]:
    return [
        an_estimate(workload, gpu_type, gpus, iter_time_s=BATCH / rate)
        for gpu_type, by_count in speeds.items()
        for gpus, rate in by_count.items()
    ]


def cluster(
    jobs: Sequence[dict[str, Any]], *speeds: Speeds, a100: int = 8, v100: int = 0
) -> Snapshot:
    """Return a snapshot with one node of each type that has GPUs.

    Workload w has ``speeds[w]``, and running jobs hold GPUs.
    """
    nodes = [
        a_node(f"n{t}", t, gpus) for t, gpus in ((A100, a100), (V100, v100)) if gpus or t == A100
    ]
    taken, gangs = {A100: 0, V100: 0}, {}
    for j, job in enumerate(jobs):
        kind, gpus = job["current_type"], job["current_gpus"]
        if gpus:
            first = taken[kind]
            gangs[j] = Gang(members=((kind, tuple(range(first, first + gpus))),))
            taken[kind] += gpus
    estimates = [row for w, speed in enumerate(speeds) for row in rates(w, speed)]
    return a_snapshot(nodes=nodes, jobs=jobs, estimates=estimates, gangs=gangs, batch=BATCH)


def a_waiting_job(name: str, workload: int = 0, *, gpus: int = 1, **more: Any) -> dict[str, Any]:
    return a_job(name, workload, requested_gpus=gpus, **more)


def a_running_job(
    name: str, workload: int = 0, *, on: tuple[int, int], gpus: int | None = None, **more: Any
) -> dict[str, Any]:
    """Return a job that runs on (type, GPUs), which it also requested unless ``gpus`` differs."""
    more = {"generation": 1, "since_s": 900.0} | more
    return a_job(
        name, workload, state=JobState.RUNNING, cell=(*on, 1), requested_gpus=gpus or on[1], **more
    )


def chosen_cells(
    policy: PublishedScheduler, snapshot: Snapshot, **options: Any
) -> list[tuple[int, int] | None]:
    """Return the (type, GPUs) of each job, or None for a job that waits."""
    view = make_view(snapshot, Policy(**options))
    return [
        (int(view.draft.gpu_type[c]), int(view.draft.gpus[c])) if c >= 0 else None
        for c in policy.choose(view).tolist()
    ]


def gpus_of(policy: PublishedScheduler, snapshot: Snapshot, **options: Any) -> list[int]:
    """Return the GPUs of each job, or 0 for a job that waits."""
    return [cell[1] if cell else 0 for cell in chosen_cells(policy, snapshot, **options)]


def decide_round(policy: PublishedScheduler, snapshot: Snapshot) -> RoundOutcome:
    return plan_round(
        snapshot,
        Policy(objective="throughput"),
        Greedy(),
        FOREVER,
        scheduler=Scheduler(published=policy),
    )
