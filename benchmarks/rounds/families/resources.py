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
from tessera.formulation.base.tables import Floats, Ints
from tessera.formulation.round.problem import VALUE_SCALE, CouplingRow, Problem, RowKind

TENANTS: Final = {False: (4, 4), True: (2, 2)}
"""Whether limits are for each type -> the number of organisations, and of teams in each."""
MAX_REQUEST: Final = 16
"""The largest request, in GPUs. Requests are otherwise those of the family ``real``."""
GIB_PER_GPU: Final = (16, 32, 64, 128)
CPUS_PER_GPU: Final = (2, 4, 8, 16)
_SHARES: Final = np.array([0.5, 1.0, 2.0])


def draw_three_resources(rng: np.random.Generator, jobs: int, gpus: int, types: int) -> Problem:
    """Draw jobs that need GPUs, CPU cores and host memory of a type, of which all are scarce.

    A job needs 2 to 16 cores and 16 to 128 GiB for each GPU, with a tenth of noise. Nodes have the
    means of these. There is one GPU for each job unless ``gpus`` is given.
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
            CouplingRow(kind=kind, subject=f"t{t}", capacity=int(mean * n))
            for t, n in enumerate(room.tolist())
        ]
    return state_options(value, amount, rows, row)


def draw_nested_quotas(rng: np.random.Generator, jobs: int, gpus: int, types: int) -> Problem:
    """Draw jobs of teams inside organisations, both with limits, on limited types.

    A column uses three rows: its type, its organisation and its team. In half of the rounds a limit
    is for the GPUs of all types, and in the others there is a limit for each type. The limits of
    organisations add up to about 0.9 of the GPUs, and those of an organisation's teams to 1.2 of its
    own. There is one GPU for each job unless ``gpus`` is given.
    """
    room = divide_evenly(gpus or max(jobs, types), types)
    count, gpu_type, value = _draw_options(rng, jobs, types)
    of_types = bool(rng.random() < 0.5)
    organisations, teams = TENANTS[of_types]
    team = rng.integers(0, organisations * teams, (jobs, 1))
    pools = room if of_types else room.sum(keepdims=True)
    where = gpu_type if of_types else np.zeros_like(gpu_type)
    share = rng.dirichlet(np.full(organisations, 8.0))
    inside = rng.dirichlet(np.full(teams, 8.0), organisations).ravel()
    held = (0.9 * pools[:, None] * share).astype(np.int64)
    parts = (1.2 * np.repeat(held, teams, axis=1) * inside).astype(np.int64)
    rows = knapsack_rows(room) + _limits("organisation", held) + _limits("team", parts)
    first = types + held.size
    row = np.stack(
        [
            gpu_type,
            types + where * organisations + team // teams,
            first + where * organisations * teams + team,
        ],
        axis=2,
    )
    return state_options(value, np.repeat(count[:, :, None], 3, axis=2), rows, row)


def _limits(name: str, capacity: Ints) -> list[CouplingRow]:
    """Return rows of limits. ``capacity`` is int64[pools, tenants]."""
    tenants = capacity.shape[1]
    return [
        CouplingRow(kind=RowKind.HELD, subject=f"{name}-{k % tenants}/t{k // tenants}", capacity=n)
        for k, n in enumerate(capacity.ravel().tolist())
    ]


def _draw_options(rng: np.random.Generator, jobs: int, types: int) -> tuple[Ints, Ints, Ints]:
    """Draw GPU counts, GPU types and values of options, each int64[jobs, types * counts].

    Requests of up to 16 GPUs and speed-ups are those of the family ``real``.
    """
    sizes = np.array([n for n in REQUEST_SHARES if n <= MAX_REQUEST])
    shares = np.array([REQUEST_SHARES[n] for n in sizes.tolist()])
    request = rng.choice(sizes, jobs, p=shares / shares.sum())
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
