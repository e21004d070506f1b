"""Families of jobs whose columns use several rows: host resources, and tenants inside tenants.

They are stated as problems, because no snapshot states them: estimates have no host resources yet,
and quotas do not nest.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from tessera.benchmarks.rounds.families.knapsacks import knapsack_rows
from tessera.benchmarks.rounds.families.problems import state_options
from tessera.benchmarks.rounds.families.snapshots import divide_evenly
from tessera.benchmarks.rounds.instances import REQUEST_SHARES
from tessera.formulation.problem import VALUE_SCALE, CouplingRow, Problem, RowKind
from tessera.formulation.tables import Floats, Ints

ORGANISATIONS: Final = 4
TEAMS: Final = 4
"""The number of tenants inside each organisation."""
GIB_PER_GPU: Final = (16, 32, 64, 128)
CPUS_PER_GPU: Final = (2, 4, 8, 16)
SCARCITY: Final = 0.9
"""Host resources of a type, as a share of what its GPUs would use with the mean needs of jobs."""
_SHARES: Final = np.array([0.5, 1.0, 2.0])


def draw_three_resources(rng: np.random.Generator, jobs: int, gpus: int, types: int) -> Problem:
    """Draw jobs that need GPUs, CPU cores and host memory of a type, of which all are scarce.

    A job needs 2 to 16 cores and 16 to 128 GiB for each GPU, with a tenth of noise. There is one GPU
    for each job unless ``gpus`` is given.
    """
    room = divide_evenly(gpus or max(jobs, types), types)
    count, gpu_type, value = _draw_options(rng, jobs, types)
    needs = np.stack([rng.choice(CPUS_PER_GPU, jobs), rng.choice(GIB_PER_GPU, jobs)], axis=1)
    noise = rng.uniform(0.9, 1.1, (*count.shape, 2))
    host = np.rint(count[:, :, None] * needs[:, None, :] * noise).astype(np.int64)
    amount = np.concatenate([count[:, :, None], np.maximum(host, 1)], axis=2)
    row = gpu_type[:, :, None] + types * np.arange(3)
    means = (np.mean(CPUS_PER_GPU), np.mean(GIB_PER_GPU))
    rows = knapsack_rows(room)
    for kind, mean in zip((RowKind.CPUS, RowKind.HOST_MEMORY), means, strict=True):
        rows += [
            CouplingRow(kind=kind, subject=f"t{t}", capacity=int(SCARCITY * mean * n))
            for t, n in enumerate(room.tolist())
        ]
    return state_options(value, amount, rows, row)


def draw_nested_quotas(rng: np.random.Generator, jobs: int, gpus: int, types: int) -> Problem:
    """Draw jobs of teams inside organisations, both with limits, on limited types.

    A column uses three rows: its type, its organisation and its team. The limits of organisations
    add up to about 0.9 of the GPUs, and those of an organisation's teams to 1.2 of its own. There is
    one GPU for each job unless ``gpus`` is given.
    """
    room = divide_evenly(gpus or max(jobs, types), types)
    count, gpu_type, value = _draw_options(rng, jobs, types)
    team = rng.integers(0, ORGANISATIONS * TEAMS, jobs)
    share = rng.dirichlet(np.full(ORGANISATIONS, 8.0))
    inside = rng.dirichlet(np.full(TEAMS, 8.0), ORGANISATIONS)
    held = (0.9 * room.sum() * share).astype(np.int64)
    parts = (1.2 * held[:, None] * inside).astype(np.int64)
    rows = knapsack_rows(room)
    rows += [_limit(f"org-{o}", n) for o, n in enumerate(held.tolist())]
    rows += [
        _limit(f"org-{k // TEAMS}.{k % TEAMS}", n) for k, n in enumerate(parts.ravel().tolist())
    ]
    row = np.stack(
        [
            gpu_type,
            np.broadcast_to(types + team[:, None] // TEAMS, gpu_type.shape),
            np.broadcast_to(types + ORGANISATIONS + team[:, None], gpu_type.shape),
        ],
        axis=2,
    )
    return state_options(value, np.repeat(count[:, :, None], 3, axis=2), rows, row)


def _limit(subject: str, capacity: int) -> CouplingRow:
    return CouplingRow(kind=RowKind.HELD, subject=subject, capacity=capacity)


def _draw_options(rng: np.random.Generator, jobs: int, types: int) -> tuple[Ints, Ints, Ints]:
    """Draw GPU counts, GPU types and values of options, each int64[jobs, types * counts].

    Requests and speed-ups are those of the family ``real``.
    """
    request = rng.choice(list(REQUEST_SHARES), jobs, p=list(REQUEST_SHARES.values()))
    count = np.maximum(1, (request[:, None] * _SHARES).astype(np.int64))
    speed = rng.choice([1.0, 1.0, 1.0, 2.0, 4.0], (jobs, 1)) * rng.uniform(0.5, 2.0, (jobs, types))
    exponent = rng.uniform(0.7, 0.95, (jobs, 1, 1))
    gain: Floats = speed[:, :, None] * count[:, None, :] ** exponent
    gain *= rng.uniform(0.8, 1.0, gain.shape)
    shape = (jobs, types * len(_SHARES))
    return (
        np.broadcast_to(count[:, None, :], gain.shape).reshape(shape),
        np.repeat(np.broadcast_to(np.arange(types), (jobs, types)), len(_SHARES), axis=1),
        np.rint(VALUE_SCALE * gain).astype(np.int64).reshape(shape),
    )
