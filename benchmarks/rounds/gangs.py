"""Seeded rounds in which gangs have odd sizes, so that counts that suffice may not fit on nodes.

The cluster is fresh: nodes of 8 GPUs of two types, on which nothing runs. The largest requests add
up to twice the GPUs. Each workload has one job. Its speed-up is sub-linear, and its speed differs
by type. Estimates are of the fewest nodes only, so the rates of all wider shapes are inferred. The
families:

``rigid``
    Each job runs on one GPU count: 1, 2, 3, 4, 5, 6 or 8. All weights are 1.
``odd``
    Each job runs on one GPU count: 3, 5, 6, 7 or 12. All weights are 1.
``elastic``
    Each job runs on four GPU counts, e.g. 1, 3, 5 or 6. Weights are 1, 2 and 4.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.values import EstimateSource, GpuType, Workload
from tessera.formulation.state.snapshot import Allocations, Estimates, Jobs, Nodes, Snapshot

GANG_FAMILIES: Final = ("rigid", "odd", "elastic")
NODE_GPUS: Final = 8
GPU_TYPES: Final = 2
BATCH: Final = 256
DEMAND: Final = 2
"""GPUs that the jobs request at most, as a multiple of the cluster's."""
DIGITS: Final = 6
"""Significant digits of drawn numbers, so that they are the same when they are stored."""
_STORED: Final = Path(__file__).with_name("gangs.json")
_COUNTS: Final[dict[str, tuple[tuple[int, ...], ...]]] = {
    "rigid": tuple((n,) for n in (1, 2, 3, 4, 5, 6, 8)),
    "odd": tuple((n,) for n in (3, 5, 6, 7, 12)),
    "elastic": ((1, 2, 3, 5), (1, 3, 5, 6), (2, 3, 6, 7), (3, 5, 7, 9), (3, 5, 6, 10)),
}
"""Family -> the GPU counts of the Cells of a workload, one of these drawn for each."""
_WEIGHTS: Final = {"rigid": (1.0,), "odd": (1.0,), "elastic": (1.0, 2.0, 4.0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class GangJob:
    """A job: its GPU counts, its weight, and seconds of an iteration by GPU type and count."""

    gpus: tuple[int, ...]
    weight: float
    iterations_left: float
    iter_time_s: tuple[tuple[float, ...], ...]


def draw_gangs(family: str, gpus: int, seed: int) -> tuple[GangJob, ...]:
    """Draw the jobs of a round on ``gpus`` GPUs.

    Raises:
        InvalidInput: there is no such family, or the GPUs are not whole nodes of each type.
    """
    if family not in GANG_FAMILIES:
        raise InvalidInput("family", f"must be one of {', '.join(GANG_FAMILIES)}")
    if gpus < 1 or gpus % (NODE_GPUS * GPU_TYPES):
        raise InvalidInput("gpus", f"must be a multiple of {NODE_GPUS * GPU_TYPES}")
    rng = np.random.default_rng([seed, gpus, GANG_FAMILIES.index(family)])
    jobs: list[GangJob] = []
    while sum(max(job.gpus) for job in jobs) < DEMAND * gpus:
        counts = _COUNTS[family][int(rng.integers(len(_COUNTS[family])))]
        speed = rng.uniform(5, 50) * rng.uniform(0.5, 2.0, GPU_TYPES)
        exponent = rng.uniform(0.7, 0.95)
        noise = rng.uniform(0.9, 1.0, (GPU_TYPES, len(counts)))
        times_s = BATCH / (speed[:, None] * np.array(counts) ** exponent * noise)
        jobs.append(
            GangJob(
                gpus=counts,
                weight=float(rng.choice(_WEIGHTS[family])),
                iterations_left=float(rng.integers(1_000, 100_000)),
                iter_time_s=tuple(
                    tuple(float(f"{time:.{DIGITS}g}") for time in row) for row in times_s.tolist()
                ),
            )
        )
    return tuple(jobs)


def gang_round(jobs: tuple[GangJob, ...], gpus: int) -> Snapshot:
    """Return the round of these queued jobs on a fresh cluster with ``gpus`` GPUs."""
    none, number, nodes = np.zeros(0, np.int64), len(jobs), gpus // NODE_GPUS
    return Snapshot(
        cluster="gangs",
        epoch=1,
        round_number=1,
        now_s=0.0,
        gpu_types=tuple(GpuType(name=f"t{t}", memory_bytes=2**35) for t in range(GPU_TYPES)),
        nodes=Nodes(
            name=tuple(f"n{n}" for n in range(nodes)),
            gpu_type=np.repeat(np.arange(GPU_TYPES), nodes // GPU_TYPES),
            gpus=np.full(nodes, NODE_GPUS),
            rack=("r",) * nodes,
            schedulable=np.ones(nodes, np.bool_),
            version=np.ones(nodes, np.int64),
        ),
        workloads=tuple(
            Workload(model="m", params=str(w), global_batch=BATCH) for w in range(number)
        ),
        plans=("",),
        estimates=_estimates(jobs),
        jobs=Jobs(
            name=tuple(f"j{n}" for n in range(number)),
            tenant=("t",) * number,
            workload=np.arange(number),
            iterations=np.full(number, 1e5),
            iterations_left=np.array([job.iterations_left for job in jobs]),
            requested_gpus=np.array([max(job.gpus) for job in jobs]),
            weight=np.array([job.weight for job in jobs]),
            submit_s=np.zeros(number),
            queued_s=np.zeros(number),
        ),
        allocations=Allocations(job=none, node=none, gpu=none, hold=none, generation=none),
    )


def _estimates(jobs: tuple[GangJob, ...]) -> Estimates:
    rows = [
        (workload, gpu_type, gpus, time_s)
        for workload, job in enumerate(jobs)
        for gpu_type, times_s in enumerate(job.iter_time_s)
        for gpus, time_s in zip(job.gpus, times_s, strict=True)
    ]
    workload, gpu_type, gpus, time_s = map(np.array, zip(*rows, strict=True))
    return Estimates(
        workload=workload,
        gpu_type=gpu_type,
        gpus=gpus,
        nodes=-(-gpus // NODE_GPUS),
        pipeline_degree=np.ones_like(gpus),
        plan=np.zeros_like(gpus),
        iter_time_s=time_s,
        source=np.full_like(gpus, EstimateSource.ANALYTIC),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRound:
    """A stored round, with values of its answers in effective GPUs.

    ``optimum`` is that of columns and nodes together (``tests/support/oracles/joint_optimum.py``); if not
    ``proven``, it is the best answer found in a minute. ``placed_before`` is the value of the answer
    that commit a285674 places. Its objective had another unit, so it was given raw throughput and
    weights that make both objectives equal.
    """

    family: str
    gpus: int
    seed: int
    jobs: tuple[GangJob, ...]
    optimum: float
    proven: bool
    placed_before: float


def read_stored_rounds() -> tuple[StoredRound, ...]:
    """Return the stored rounds. Each has the jobs that ``draw_gangs`` draws from its seed."""
    return tuple(
        StoredRound(
            family=row["family"],
            gpus=row["gpus"],
            seed=row["seed"],
            jobs=tuple(
                GangJob(
                    gpus=tuple(gpus),
                    weight=weight,
                    iterations_left=left,
                    iter_time_s=tuple(tuple(times_s) for times_s in by_type),
                )
                for gpus, weight, left, by_type in row["jobs"]
            ),
            optimum=row["optimum"],
            proven=row["proven"],
            placed_before=row["placed_before"],
        )
        for row in json.loads(_STORED.read_text(encoding="utf-8"))
    )
