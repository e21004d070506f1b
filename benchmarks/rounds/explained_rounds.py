"""Random small rounds in which jobs wait or change for many reasons, and their policies."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import numpy as np

from tessera.benchmarks.rounds.small_rounds import (
    GPU_COUNTS,
    draw_snapshot,
    with_equal_shares,
)
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.state.permissions import (
    AllowedGpuTypes,
    AvoidedNodes,
    Selectors,
    UnmatchedNodes,
)
from tessera.formulation.state.snapshot import STATE_CODE, Snapshot
from tessera.formulation.state.tenants import Quotas, Tenants
from tessera.solvers.rounds.options import RoundOptions

MIN_JOBS: Final = 4
MAX_JOBS: Final = 9

POLICIES: Final[tuple[RoundOptions, ...]] = (
    RoundOptions(),
    RoundOptions(objective="throughput"),
    RoundOptions(objective="jct"),
    RoundOptions(objective="cost"),
    RoundOptions(objective="finish-time-fairness then throughput"),
    RoundOptions(objective="max-min within 5% then throughput"),
    RoundOptions(objective="deadline"),
    RoundOptions(objective="throughput", deadlines="myopic"),
    RoundOptions(deadlines="planned"),
    RoundOptions(keep_requests=False),
    RoundOptions(promise_starts=False),
    RoundOptions(change_spacing=100.0),
    RoundOptions(max_changes=0),
    RoundOptions(max_changes=1, objective="jct"),
    RoundOptions(keep_requests=False, change_spacing=0.0),
    RoundOptions(objective="jct", default_run_s=10_000.0),
    RoundOptions(priority_weights="1:4,2:1,3:0"),
    RoundOptions(scheduler="fcfs"),
    RoundOptions(scheduler="sia"),
)
"""The policies of the rounds. They take turns."""


def draw_explained_round(rng: np.random.Generator, number: int) -> tuple[Snapshot, RoundOptions]:
    """Draw round ``number``: 4 to 9 jobs for few GPUs, with everything that may keep a job waiting.

    Each feature is in about a third of the rounds: quotas with limits on borrowing and lending,
    guaranteed jobs, pinned and allowed types, avoided and drained nodes, node selectors, held and
    failed jobs, jobs without estimates, bounds on GPUs, weights of 0.
    """
    jobs, gpus = int(rng.integers(MIN_JOBS, MAX_JOBS + 1)), int(rng.choice([4, 8, 12]))
    snapshot = with_equal_shares(draw_snapshot(rng, jobs, gpus))
    for add in (
        *(_with_wishes, _with_quotas, _with_drained_nodes, _with_avoids, _without_estimates),
        *(with_allowed_types, with_selectors),
    ):
        snapshot = add(rng, snapshot)
    return snapshot, POLICIES[number % len(POLICIES)]


def _share(rng: np.random.Generator, jobs: int, share: float) -> np.ndarray:
    """Return which jobs have a feature, bool[jobs]. In two of three rounds none has it."""
    return (rng.random(jobs) < share) & (rng.random() < 1 / 3)


def _with_wishes(rng: np.random.Generator, snapshot: Snapshot) -> Snapshot:
    jobs, count = snapshot.jobs, len(snapshot.jobs)
    waits = jobs.among([JobState.QUEUED])
    held, failed = waits & _share(rng, count, 0.2), waits & _share(rng, count, 0.3)
    state = np.where(held, STATE_CODE[JobState.HELD], jobs.state)
    bounded = _share(rng, count, 0.4)
    e = snapshot.estimates
    most = np.array([e.gpus[e.workload == w].max() for w in jobs.workload.tolist()])
    pinned = _share(rng, count, 0.5)
    weight = np.where(_share(rng, count, 0.2), 0.0, rng.choice([0.5, 1.0, 2.0], count))
    return replace(
        snapshot,
        jobs=replace(
            jobs,
            state=state,
            retry_s=np.where(failed, snapshot.now_s + rng.integers(10, 900, count), 0.0),
            failures=failed.astype(np.int64),
            min_gpus=np.where(bounded & waits, most, 0),
            max_gpus=np.where(bounded & ~waits, most, 0),
            requested_gpu_type=np.where(pinned, rng.integers(0, 2, count), -1),
            pinned_gpu_type=pinned,
            weight=weight,
            guaranteed=_share(rng, count, 0.5),
            pinned=_share(rng, count, 0.3),
            priority=rng.integers(1, 4, count),
        ),
    )


def _with_quotas(rng: np.random.Generator, snapshot: Snapshot) -> Snapshot:
    if rng.random() > 1 / 3:
        return snapshot
    tenants = Tenants.from_rows(
        [
            {
                "name": f"t{i}",
                "weight": float(rng.choice([0.0, 0.5, 1.0, 2.0], p=[0.1, 0.3, 0.3, 0.3])),
                "borrow_gpus": int(rng.choice([-1, 0, 2])),
                "keeps_idle_quota": bool(rng.random() >= 0.7),
            }
            for i in range(3)
        ]
    )
    quotas = Quotas.from_rows(
        [
            {
                "tenant": i,
                "gpu_type": int(rng.choice([-1, 0, 1])),
                "gpus": int(rng.integers(0, 9)),
            }
            for i in range(3)
            if rng.random() < 0.7
        ]
    )
    return replace(snapshot, tenants=tenants, quotas=quotas)


def _with_drained_nodes(rng: np.random.Generator, snapshot: Snapshot) -> Snapshot:
    away = _share(rng, len(snapshot.nodes), 0.5)
    return replace(snapshot, nodes=replace(snapshot.nodes, schedulable=~away))


def _with_avoids(rng: np.random.Generator, snapshot: Snapshot) -> Snapshot:
    if rng.random() > 1 / 3:
        return snapshot
    pairs = np.argwhere(rng.random((len(snapshot.jobs), len(snapshot.nodes))) < 0.3)
    rows = [{"job": job, "node": node} for job, node in pairs.tolist()]
    return replace(snapshot, avoided_nodes=AvoidedNodes.from_rows(rows))


def with_allowed_types(rng: np.random.Generator, snapshot: Snapshot) -> Snapshot:
    """Let some jobs run on one random GPU type only."""
    jobs = np.flatnonzero(_share(rng, len(snapshot.jobs), 0.5))
    types = rng.integers(0, len(snapshot.gpu_types), len(jobs))
    return replace(snapshot, allowed_gpu_types=AllowedGpuTypes(job=jobs, gpu_type=types))


def with_selectors(rng: np.random.Generator, snapshot: Snapshot) -> Snapshot:
    """Let some jobs require one of three selectors, each of which matches some nodes."""
    count, nodes = len(snapshot.jobs), len(snapshot.nodes)
    chosen = _share(rng, count, 0.5)
    if not chosen.any():
        return snapshot
    selector, node = np.nonzero(rng.random((3, nodes)) < 0.4)
    required = np.where(chosen, rng.integers(0, 3, count), -1)
    return replace(
        snapshot,
        selectors=Selectors(text=("zone=a", "zone=b", "zone=c")),
        unmatched_nodes=UnmatchedNodes(selector=selector, node=node),
        jobs=replace(snapshot.jobs, required_selector=required),
    )


def _without_estimates(rng: np.random.Generator, snapshot: Snapshot) -> Snapshot:
    """Take the estimates of some waiting jobs away, or state that none of their Cells runs."""
    jobs, e = snapshot.jobs, snapshot.estimates
    lost = jobs.among([JobState.QUEUED]) & _share(rng, len(jobs), 0.3)
    fails = lost & (rng.random(len(jobs)) < 0.3)
    unknown = lost & ~fails
    iter_time_s = np.where(np.isin(e.workload, jobs.workload[fails]), math.inf, e.iter_time_s)
    kept = ~np.isin(e.workload, jobs.workload[unknown])
    return replace(
        snapshot,
        estimates=replace(e, iter_time_s=iter_time_s).at(kept),
        jobs=replace(
            jobs,
            unestimated=unknown,
            requested_gpus=np.where(
                unknown, rng.choice(GPU_COUNTS[:3], len(jobs)), jobs.requested_gpus
            ),
        ),
    )
