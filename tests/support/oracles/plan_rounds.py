"""Small rounds with execution plans that need CPUs and host memory, and all answers to them.

The oracle shares no code with the statement that it judges. It reads the estimates itself, keeps
dominated Cells, and tries every combination of plans and resources.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, Final, NamedTuple

import numpy as np

from tessera.formulation.base.resources import NOT_STATED
from tessera.formulation.base.tables import Bools
from tessera.formulation.base.values import EstimateSource, GpuType, Workload
from tessera.formulation.state.snapshot import Allocations, Estimates, Jobs, Nodes, Snapshot

NODE_GPUS: Final = 4
COUNTS: Final = (1, 2, 3, 4, 8)
PLANS: Final = ("", "dp", "offload", "pp2", "zero")
MAX_JOBS: Final = 4
CELLS_PER_JOB: Final = 6
GIBIBYTE: Final = 1 << 30
UNSTATED_SHARE: Final = 0.15
"""The share of the nodes that do not state their CPUs, and the same of host memory."""


class PlanOption(NamedTuple):
    """A Cell that a job may run on, with all that it needs."""

    gpu_type: int
    gpus: int
    cpus: int
    host_bytes: int
    value: float  # effective GPUs


def draw_plan_round(rng: np.random.Generator) -> Snapshot:
    """Draw a round of one to four waiting jobs with up to six plans and counts each.

    A plan's CPUs and host memory have nothing to do with its speed, so that some plans are
    dominated, and some are not although they are slower. Restarts are free.
    """
    types, jobs = int(rng.integers(1, 3)), int(rng.integers(1, MAX_JOBS + 1))
    nodes = [
        _node(rng, gpu_type, number)
        for gpu_type in range(types)
        for number in range(int(rng.integers(1, 3)))
    ]
    estimates = [row for job in range(jobs) for row in _cells(rng, job, types)]
    return Snapshot(
        cluster="plans",
        epoch=1,
        round_number=1,
        now_s=1_000.0,
        gpu_types=tuple(GpuType(name=f"type-{t}", memory_bytes=2**35) for t in range(types)),
        nodes=Nodes.from_rows(nodes),
        workloads=tuple(Workload(model="m", params=f"{j}B", global_batch=8) for j in range(jobs)),
        plans=PLANS,
        estimates=Estimates.from_rows(estimates),
        jobs=Jobs.from_rows([_job(rng, job, types) for job in range(jobs)]),
        allocations=Allocations.from_rows([]),
    )


def _node(rng: np.random.Generator, gpu_type: int, number: int) -> dict[str, Any]:
    states = rng.random(2) >= UNSTATED_SHARE
    return {
        "name": f"n{gpu_type}-{number}",
        "gpu_type": gpu_type,
        "gpus": NODE_GPUS,
        "rack": "r",
        "schedulable": True,
        "version": 1,
        "cpus": int(rng.integers(2, 20)) if states[0] else NOT_STATED,
        "host_bytes": int(rng.integers(4, 40)) * GIBIBYTE if states[1] else NOT_STATED,
    }


def _cells(rng: np.random.Generator, job: int, types: int) -> list[dict[str, Any]]:
    every = list(itertools.product(range(types), COUNTS, range(len(PLANS))))
    chosen = rng.choice(len(every), size=min(CELLS_PER_JOB, len(every)), replace=False)
    base = rng.uniform(1, 10)
    rows = []
    for gpu_type, gpus, plan in sorted(every[k] for k in chosen.tolist()):
        rate = base * gpus ** rng.uniform(0.4, 1.0) * rng.uniform(0.7, 1.3)
        rows.append(
            {
                "workload": job,
                "gpu_type": gpu_type,
                "gpus": gpus,
                "nodes": -(-gpus // NODE_GPUS),
                "pipeline_degree": 1,
                "plan": plan,
                "iter_time_s": 8 / rate,
                "source": int(EstimateSource.MEASURED),
                "cpus": int(rng.integers(0, 4)) * gpus,
                "host_bytes": int(rng.integers(0, 9)) * GIBIBYTE,
            }
        )
    return rows


def _job(rng: np.random.Generator, job: int, types: int) -> dict[str, Any]:
    return {
        "name": f"job-{job}",
        "workload": job,
        "iterations": 1e6,
        "iterations_left": 1e6,
        "requested_gpus": int(rng.choice(COUNTS)),
        "requested_gpu_type": int(rng.integers(-1, types)),
        "submitted_plan": int(rng.integers(-1, len(PLANS))),
        "guaranteed": bool(rng.random() < 0.4),
        "weight": float(rng.choice([0.5, 1.0, 2.0])),
        "submit_s": float(job),
        "queued_s": float(job),
        "restart_s": 0.0,
    }


def best_throughput(snapshot: Snapshot, must_run: Bools) -> float:
    """Return the largest weighted sum of effective GPUs of any answer, by trying all of them.

    An answer gives each job one Cell or none; the jobs that ``must_run`` (bool[jobs]) have one. On
    the nodes of each GPU type together, it needs no more GPUs, CPUs and host memory than these have.
    A guaranteed job has a Cell only if that is as fast as its request with its submitted plan (Eq.
    32). The result is -inf if there is no answer.
    """
    pools = [_pool(snapshot, kind) for kind in range(len(snapshot.gpu_types))]
    options: list[list[PlanOption | None]] = []
    for job, must in enumerate(must_run.tolist()):
        waits: list[PlanOption | None] = [] if must else [None]
        options.append([*waits, *_options(snapshot, job, pools)])
    values = (
        sum(option.value for option in answer if option is not None)
        for answer in itertools.product(*options)
        if _all_fit(answer, pools)
    )
    return max(values, default=-math.inf)


def _pool(snapshot: Snapshot, kind: int) -> tuple[float, float, float]:
    """Return the GPUs, CPUs and host memory of a pool; inf where a node does not state them."""
    rows = [snapshot.nodes.row(i) for i in range(len(snapshot.nodes))]
    own = [row for row in rows if row["gpu_type"] == kind]
    totals = []
    for name in ("gpus", "cpus", "host_bytes"):
        has = [row[name] for row in own]
        totals.append(math.inf if NOT_STATED in has else float(sum(has)))
    return totals[0], totals[1], totals[2]


def _all_fit(
    answer: tuple[PlanOption | None, ...], pools: list[tuple[float, float, float]]
) -> bool:
    for kind, pool in enumerate(pools):
        chosen = [option for option in answer if option is not None and option.gpu_type == kind]
        needs = [sum(option[k] for option in chosen) for k in (1, 2, 3)]
        if any(need > has for need, has in zip(needs, pool, strict=True)):
            return False
    return True


def _options(
    snapshot: Snapshot, job: int, pools: list[tuple[float, float, float]]
) -> list[PlanOption]:
    row, e = snapshot.jobs.row(job), snapshot.estimates
    estimates = [e.row(i) for i in range(len(e))]
    own = [
        cell
        for cell in estimates
        if cell["workload"] == row["workload"] and cell["gpus"] <= pools[cell["gpu_type"]][0]
    ]
    if not own:
        return []
    unit = max(8 / cell["iter_time_s"] / cell["gpus"] for cell in own)
    least = _owed_rate(row, own) if row["guaranteed"] else 0.0
    return [
        PlanOption(
            cell["gpu_type"],
            cell["gpus"],
            cell["cpus"],
            cell["host_bytes"],
            row["weight"] * 8 / cell["iter_time_s"] / unit,
        )
        for cell in own
        if 8 / cell["iter_time_s"] >= least * (1 - 1e-9)
    ]


def _owed_rate(row: dict[str, Any], cells: list[dict[str, Any]]) -> float:
    """Return the rate of a request with the submitted plan, or inf if it has no Cell."""
    asked = [
        cell
        for cell in cells
        if cell["gpus"] == row["requested_gpus"]
        and row["requested_gpu_type"] in (-1, cell["gpu_type"])
    ]
    asked = [cell for cell in asked if cell["plan"] == row["submitted_plan"]] or asked
    by_type: dict[int, float] = {}
    for cell in asked:
        kind, rate = cell["gpu_type"], 8 / cell["iter_time_s"]
        by_type[kind] = max(by_type.get(kind, 0.0), rate)
    return min(by_type.values(), default=math.inf)
