"""Families of jobs on GPUs that are stated from a snapshot.

A workload has Cells of one degree on every GPU type, at up to three GPU counts. Speed-ups are
sub-linear and noisy. No job runs before the round.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from tessera.benchmarks.rounds.instances import (
    MAX_WORKLOADS,
    NODE_GPUS,
    REQUEST_SHARES,
    WorkloadRates,
    assemble_snapshot,
    draw_queued,
)
from tessera.formulation.base.tables import Floats, Ints
from tessera.formulation.state.snapshot import Snapshot

MAX_ODD_GPUS: Final = 16_383
"""The largest odd gang that fits into 16,384 GPUs."""
LARGE_TYPE_GPUS: Final = 48
"""GPUs of a type in ``few-large``."""
_SHARES: Final = np.array([0.5, 1.0, 2.0])
"""The GPU counts of a workload's Cells, as shares of the request."""
_IDENTICAL_REQUESTS: Final = (3, 4, 5, 6, 7, 9, 12)


def draw_identical(rng: np.random.Generator, jobs: int, gpus: int, types: int) -> Snapshot:
    """Draw jobs of one workload and as much work left, of one weight or of three.

    There is one GPU for each job unless ``gpus`` is given.
    """
    capacity = divide_evenly(gpus or max(jobs, types), types)
    request = np.array([rng.choice(_IDENTICAL_REQUESTS)])
    works = _draw_rates(
        rng, request, np.maximum(1, (request[:, None] * _SHARES).astype(int)), types
    )
    weights = rng.choice([1.0, 2.0, 4.0], jobs) if rng.random() < 0.5 else np.ones(jobs)
    queued = draw_queued(rng, np.arange(jobs), works.request, "alike")
    return assemble_snapshot(capacity, works, replace(queued, weight=weights))


def draw_odd_counts(rng: np.random.Generator, jobs: int, gpus: int, types: int) -> Snapshot:
    """Draw gangs of odd numbers of GPUs, up to 16,383, as many of each size as of its half.

    Each type has an odd number of GPUs, at least four times as many as the largest gang, unless
    ``gpus`` is given.
    """
    capacity = (
        divide_evenly(gpus, types)
        if gpus
        else 4 * MAX_ODD_GPUS + 2 * rng.integers(0, MAX_ODD_GPUS, types) + 1
    )
    number = _workloads(jobs)
    request = _make_odd(np.exp2(rng.uniform(0, np.log2(MAX_ODD_GPUS + 1), number)))
    count = np.minimum(_make_odd(request[:, None] * _SHARES), MAX_ODD_GPUS)
    return _of_workloads(rng, jobs, capacity, _draw_rates(rng, request, count, types))


def draw_many_types(rng: np.random.Generator, jobs: int, gpus: int, types: int) -> Snapshot:
    """Draw jobs as in the family ``real`` on many types, each with a few nodes of 8 GPUs.

    There are about two GPUs for each job unless ``gpus`` is given, and at least a node of each type.
    """
    if gpus:
        capacity = divide_evenly(gpus, types)
    else:
        nodes = max(types, 2 * jobs // NODE_GPUS)
        share = rng.dirichlet(np.full(types, 4.0))
        capacity = NODE_GPUS * np.maximum(1, (nodes * share).astype(np.int64))
    number = _workloads(jobs)
    request = rng.choice(list(REQUEST_SHARES), number, p=list(REQUEST_SHARES.values()))
    count = np.maximum(1, (request[:, None] * _SHARES).astype(np.int64))
    return _of_workloads(rng, jobs, capacity, _draw_rates(rng, request, count, types))


def draw_few_large(rng: np.random.Generator, jobs: int, gpus: int, types: int) -> Snapshot:
    """Draw odd gangs of a tenth to a half of a type's GPUs, of which a type has 48.

    Few fit on a type, and what they leave over decides.
    """
    capacity = divide_evenly(gpus or LARGE_TYPE_GPUS * types, types)
    least = int(capacity.min())
    request = _make_odd(
        rng.integers(max(1, least // 10), max(1, least // 2) + 1, _workloads(jobs)).astype(float)
    )
    count = _make_odd(request[:, None] * _SHARES)
    return _of_workloads(rng, jobs, capacity, _draw_rates(rng, request, count, types))


def divide_evenly(gpus: int, types: int) -> Ints:
    """Return the GPUs of each type, int64[types], which differ by at most one."""
    return gpus // types + (np.arange(types) < gpus % types)


def _workloads(jobs: int) -> int:
    return max(8, min(MAX_WORKLOADS, jobs // 2))


def _make_odd(count: Floats) -> Ints:
    """Return the odd number that is at most one above each count's whole part."""
    return np.maximum(count.astype(np.int64), 1) | 1


def _draw_rates(rng: np.random.Generator, request: Ints, count: Ints, types: int) -> WorkloadRates:
    """Draw speeds of workloads with these requests and GPU counts (int64[workloads, counts])."""
    number = len(request)
    shape = (number, types, count.shape[1], 1)
    again = np.zeros_like(count, dtype=np.bool_)
    again[:, 1:] = count[:, 1:] == count[:, :-1]
    gpus = np.broadcast_to(count[:, None, :, None], shape)
    speed = rng.uniform(5, 50, (number, 1)) * rng.uniform(0.5, 2.0, (number, types))
    exponent = rng.uniform(0.7, 0.95, (number, 1, 1, 1))
    rate = speed[:, :, None, None] * gpus**exponent * rng.uniform(0.8, 1.0, shape)
    return WorkloadRates(
        request=request, rate=np.where(again[:, None, :, None], 0.0, rate), count=count
    )


def _of_workloads(
    rng: np.random.Generator, jobs: int, capacity: Ints, works: WorkloadRates
) -> Snapshot:
    return assemble_snapshot(
        capacity, works, draw_queued(rng, np.arange(jobs), works.request, "real")
    )
