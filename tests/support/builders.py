"""Builders of small, complete values with defaults, so that a test names only its subject."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tessera.formulation.answer.placement import Gang
from tessera.formulation.base.resources import NOT_STATED
from tessera.formulation.base.values import EstimateSource, GpuType, Hold, Workload
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.problem import Problem
from tessera.formulation.round.statement import Statement, draft_columns, state_draft
from tessera.formulation.state.snapshot import (
    STATE_CODE,
    Allocations,
    Estimates,
    Jobs,
    Nodes,
    Snapshot,
)

TYPES = ("a100", "v100", "a40", "a10")


def a_node(
    name: str,
    gpu_type: int = 0,
    gpus: int = 8,
    rack: str = "r0",
    *,
    schedulable: bool = True,
    cpus: int = NOT_STATED,
    host_bytes: int = NOT_STATED,
) -> dict[str, Any]:
    return {
        "name": name,
        "gpu_type": gpu_type,
        "gpus": gpus,
        "rack": rack,
        "schedulable": schedulable,
        "version": 1,
        "cpus": cpus,
        "host_bytes": host_bytes,
    }


def some_nodes(*groups: tuple[int, int, int], nodes_per_rack: int = 4) -> list[dict[str, Any]]:
    """Return nodes for groups of (gpu_type, number of nodes, GPUs per node)."""
    return [
        a_node(f"{TYPES[t]}-{i}", t, gpus, f"{TYPES[t]}-rack-{i // nodes_per_rack}")
        for t, count, gpus in groups
        for i in range(count)
    ]


def an_estimate(
    workload: int = 0,
    gpu_type: int = 0,
    gpus: int = 1,
    nodes: int = 1,
    *,
    degree: int = 1,
    plan: int = 0,
    iter_time_s: float = 1.0,
    sd: float = math.nan,
    cpus: int = 0,
    host_bytes: int = 0,
) -> dict[str, Any]:
    return {
        "workload": workload,
        "gpu_type": gpu_type,
        "gpus": gpus,
        "nodes": nodes,
        "pipeline_degree": degree,
        "plan": plan,
        "iter_time_s": iter_time_s,
        "source": int(EstimateSource.MEASURED),
        "sd": sd,
        "complete": False,
        "cpus": cpus,
        "host_bytes": host_bytes,
    }


def a_job(name: str, workload: int = 0, **overrides: Any) -> dict[str, Any]:
    """Return a queued job.

    Pass ``state=JobState.RUNNING, cell=(type, gpus, degree)`` for a running one.
    """
    state: JobState = overrides.pop("state", JobState.QUEUED)
    gpu_type, gpus, degree = overrides.pop("cell", (-1, 0, 0))
    row: dict[str, Any] = {
        "name": name,
        "version": 1,
        "state": STATE_CODE[state],
        "workload": workload,
        "iterations": 1e6,
        "iterations_left": 1e6,
        "requested_gpus": 1,
        "requested_gpu_type": -1,
        "pinned_gpu_type": False,
        "min_gpus": 0,
        "max_gpus": 0,
        "plan": -1,
        "plan_first": False,
        "submitted_plan": -1,
        "requested_cpus": 0,
        "required_selector": -1,
        "preferred_selector": -1,
        "run_left_s": math.inf,
        "current_cpus": -1,
        "current_host_bytes": -1,
        "runtime": -1,
        "tenant": "t",
        "priority": 1,
        "weight": 1.0,
        "guaranteed": False,
        "pinned": False,
        "deadline_s": math.inf,
        "admitted": False,
        "opportunistic": False,
        "preemptible": False,
        "start_by_s": math.inf,
        "submit_s": 0.0,
        "queued_s": 0.0,
        "since_s": 0.0,
        "service_gpu_s": 0.0,
        "restart_s": 0.0,
        "generation": 0,
        "current_type": gpu_type,
        "current_gpus": gpus,
        "current_degree": degree,
        "current_plan": 0,
        "unmet": 0,
        "array": -1,
        "array_limit": 0,
        "failures": 0,
        "retry_s": 0.0,
        "unsaved_since_s": 0.0,
        "progress_s": 0.0,
        "unestimated": False,
        "assumed_efficiency": math.nan,
    }
    unknown = set(overrides) - set(row)
    assert not unknown, f"no such job fields: {unknown}"
    return row | overrides


def a_snapshot(
    *,
    nodes: Sequence[dict[str, Any]],
    jobs: Sequence[dict[str, Any]],
    estimates: Sequence[dict[str, Any]],
    gangs: dict[int, Gang] | None = None,
    hold: Hold = Hold.HELD,
    workloads: int | None = None,
    batch: int = 256,
    round_number: int = 1,
    plans: Sequence[str] = ("",),
) -> Snapshot:
    """Return a snapshot. ``gangs`` maps jobs, by index, to the GPUs that they hold."""
    known = max([e["workload"] for e in estimates] + [j["workload"] for j in jobs], default=0) + 1
    count = workloads or known
    rows = [
        {"job": job, "node": node, "gpu": gpu, "hold": int(hold), "generation": 1}
        for job, gang in (gangs or {}).items()
        for node, gpus in gang.members
        for gpu in gpus
    ]
    types = max([n["gpu_type"] for n in nodes] + [e["gpu_type"] for e in estimates], default=0) + 1
    return Snapshot(
        cluster="test",
        epoch=1,
        round_number=round_number,
        now_s=1_000.0,
        gpu_types=tuple(GpuType(name=t, memory_bytes=2**35) for t in TYPES[:types]),
        nodes=Nodes.from_rows(list(nodes)),
        workloads=tuple(
            Workload(model="m", params=f"{i}B", global_batch=batch) for i in range(count)
        ),
        plans=tuple(plans),
        estimates=Estimates.from_rows(list(estimates)),
        jobs=Jobs.from_rows(list(jobs)),
        allocations=Allocations.from_rows(rows),
    )


def a_random_snapshot(
    seed: int,
    *,
    jobs: int,
    groups: Sequence[tuple[int, int, int]] = ((0, 4, 4), (1, 2, 8)),
    workloads: int = 8,
    max_gpus: int = 16,
    restart_s: float = 60.0,
) -> Snapshot:
    """Return a cluster of queued jobs with noisy sub-linear speed-ups."""
    rng = np.random.default_rng(seed)
    nodes = some_nodes(*groups)
    size = {t: gpus for t, _, gpus in groups}
    estimates = []
    for w in range(workloads):
        base = rng.uniform(5, 50)
        for t in size:
            speed = base * rng.uniform(0.5, 2.0)
            gpus = 1
            while gpus <= max_gpus:
                for degree in (1, 2, 4):
                    if degree <= gpus:
                        rate = speed * gpus ** rng.uniform(0.7, 0.95) * rng.uniform(0.8, 1.0)
                        estimates.append(
                            an_estimate(
                                w,
                                t,
                                gpus,
                                -(-gpus // size[t]),
                                degree=degree,
                                iter_time_s=256 / rate,
                            )
                        )
                gpus *= 2
    rows = [
        a_job(
            f"job-{j}",
            int(rng.integers(workloads)),
            restart_s=restart_s,
            requested_gpus=int(2 ** rng.integers(0, int(math.log2(max_gpus)) + 1)),
            iterations_left=float(rng.integers(100, 100_000)),
            submit_s=float(j),
        )
        for j in range(jobs)
    ]
    return a_snapshot(nodes=nodes, jobs=rows, estimates=estimates, workloads=workloads)


def a_random_problem(seed: int, **size: Any) -> Problem:
    """Return the throughput problem of a random snapshot."""
    return state_freely(a_random_snapshot(seed, **size), Policy()).problem


def state_freely(
    snapshot: Snapshot, policy: Policy, wide_jobs: frozenset[int] = frozenset()
) -> Statement:
    """Return the statement of a round that promises nothing, so that no column is missing."""
    return state_draft(draft_columns(snapshot, policy, widened=wide_jobs), ())
