"""Rounds of one model on four Cells, for tests of the values that objectives give columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tessera.formulation.answer.placement import Gang
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.round.columns import first_draft
from tessera.formulation.round.draft import Draft
from tessera.formulation.round.objectives import column_values, with_needs
from tessera.formulation.round.policy import Policy
from tessera.formulation.state.snapshot import Snapshot
from tessera.formulation.state.tenants import NO_TENANTS, Tenants
from tests.support.builders import a_job, a_snapshot, an_estimate, some_nodes

BATCH = 256
CELLS = [
    an_estimate(gpus=1, iter_time_s=4.0),  # 64 samples/s
    an_estimate(gpus=2, iter_time_s=2.5),  # 102.4
    an_estimate(gpus=4, iter_time_s=1.6),  # 160
    an_estimate(gpu_type=1, gpus=2, iter_time_s=5.0),  # 51.2
]
RATES = [64.0, 102.4, 160.0, 51.2]
GANG = {0: Gang(members=((0, (0, 1)),))}
"""The first job's gang of two GPUs."""


def a_round(
    *jobs: dict[str, Any],
    dollars: Sequence[float] = (3.0, 1.0),
    watts: Sequence[float] = (700, 300),
    tenants: dict[str, float] | None = None,
    **rest: Any,
) -> Snapshot:
    """Return a snapshot of 8 a100 and 8 v100 at 1000 s."""
    snapshot = a_snapshot(
        nodes=some_nodes((0, 2, 4), (1, 2, 4)), jobs=jobs, estimates=CELLS, **rest
    )
    types = tuple(
        replace(t, dollars_per_hour=d, watts=w)
        for t, d, w in zip(snapshot.gpu_types, dollars, watts, strict=True)
    )
    weights = tenants or {}
    settings_ = (
        NO_TENANTS
        if not weights
        else Tenants(
            name=tuple(weights),
            weight=np.array(list(weights.values())),
            borrow_gpus=np.full(len(weights), -1),
            keeps_idle_quota=np.zeros(len(weights), np.bool_),
        )
    )
    return replace(snapshot, gpu_types=types, tenants=settings_)


def a_draft(*jobs: dict[str, Any], policy: Policy | None = None, **rest: Any) -> Draft:
    return with_needs(first_draft(a_round(*jobs, **rest), policy or Policy()))


def a_running_job(name: str = "j", **more: Any) -> dict[str, Any]:
    """Return a job that runs on 2 x a100."""
    fields: dict[str, Any] = {"requested_gpus": 2, "state": JobState.RUNNING, "cell": (0, 2, 1)}
    return a_job(name, **(fields | more))


def values_of(draft: Draft, objective: str) -> list[float]:
    valued = column_values(draft, objective)
    return [round(v, 6) for v in (valued.gross - valued.price).tolist()]
