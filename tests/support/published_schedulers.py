"""Rounds on nodes of 8 GPUs for published schedulers, and their decisions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tessera.formulation.answer.placement import Gang
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.round.policy import Policy
from tessera.formulation.state.snapshot import Snapshot
from tessera.formulation.state.tenants import Quotas, Tenants
from tessera.solvers.base import Budget
from tessera.solvers.schedulers.base import PublishedScheduler, make_view
from tests.support.builders import a_snapshot, an_estimate, some_nodes

RUNNING = JobState.RUNNING
BATCH = 256.0
FOREVER = Budget(remaining_s=lambda: math.inf)
MINE = ("arena", "morphling", "synergy", "antman")


def rates(workload: int, gpu_type: int, by_gpus: dict[int, float], **plan: int) -> list[Any]:
    """Return estimates from samples/s by GPU count, all inside one node of 8."""
    return [
        an_estimate(workload, gpu_type, gpus, iter_time_s=BATCH / rate, **plan)
        for gpus, rate in by_gpus.items()
    ]


def a_round(
    jobs: Sequence[dict[str, Any]],
    estimates: Sequence[list[Any]],
    nodes: Sequence[tuple[int, int, int]] = ((0, 1, 8),),
    gangs: dict[int, Gang] | None = None,
) -> Snapshot:
    return a_snapshot(
        nodes=some_nodes(*nodes),
        jobs=jobs,
        gangs=gangs,
        estimates=[e for group in estimates for e in group],
    )


def choose_cells(
    scheduler: PublishedScheduler, snapshot: Snapshot, policy: Policy | None = None
) -> dict[str, tuple[int, int] | None]:
    """Return the (GPU type, GPUs) on which each job is to run, or None for a job that waits."""
    view = make_view(snapshot, policy or Policy())
    choice = scheduler.choose(view)
    return {
        name: None if c < 0 else (int(view.draft.gpu_type[c]), int(view.draft.gpus[c]))
        for name, c in zip(snapshot.jobs.name, choice.tolist(), strict=True)
    }


def with_quota(snapshot: Snapshot, tenant: str, gpus: int) -> Snapshot:
    return replace(
        snapshot,
        tenants=Tenants(
            name=(tenant,),
            weight=np.ones(1),
            borrow_gpus=np.array([-1]),
            keeps_idle_quota=np.array([False]),
        ),
        quotas=Quotas(tenant=np.array([0]), gpu_type=np.array([-1]), gpus=np.array([gpus])),
    )


LINEAR = {1: 10.0, 2: 20.0, 4: 40.0, 8: 80.0}
FLAT = {1: 10.0, 2: 11.0, 4: 12.0, 8: 13.0}
