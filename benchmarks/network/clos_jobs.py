"""Thousands of random jobs on a two-layer Clos, and graphs denser than those of networks."""

from __future__ import annotations

from typing import Final

import numpy as np

from tessera.benchmarks.network.fabrics import host_names
from tessera.formulation.answer.network.contention import Contention, LinkDemand
from tessera.formulation.answer.network.flows import NetworkJob, build_contention
from tessera.formulation.base.tables import Floats, Ints
from tessera.formulation.state.topologies.builders import build_clos
from tessera.formulation.state.topologies.shapes import A100_HOST, GBIT_BYTES
from tessera.formulation.state.traffic import Exchange, Pattern, Traffic

GPU_COUNTS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
MIXED_SHARES: Final = (0.20, 0.10, 0.10, 0.25, 0.12, 0.08, 0.05, 0.06, 0.03, 0.01)
"""Shares of jobs by number of GPUs, chosen to resemble the trace of Crux (6).

There a tenth of the jobs have 128 GPUs or more, the largest has 512, and a third share links with
other jobs.
"""
CROSSING_SHARES: Final = (0.0, 0.0, 0.0, 0.0, 0.45, 0.30, 0.15, 0.07, 0.02, 0.01)
"""Shares of jobs by number of GPUs where no job fits on one host."""
HOSTS_PER_TOR: Final = 32
AGGREGATIONS: Final = 16
TOR_BYTES_PER_S: Final = 800 * GBIT_BYTES
HOST_GPUS: Final = A100_HOST.gpus
HOST_FACTOR: Final = 1.1
"""The number of hosts of the cluster, as a multiple of the hosts that jobs hold."""


def pack_jobs(jobs: int, seed: int) -> Contention:
    """Return jobs of mixed sizes on neighbouring hosts."""
    return _crowd(jobs, MIXED_SHARES, False, seed)


def scatter_jobs(jobs: int, seed: int) -> Contention:
    """Return jobs of mixed sizes on randomly chosen hosts."""
    return _crowd(jobs, MIXED_SHARES, True, seed)


def crossing_jobs(jobs: int, seed: int) -> Contention:
    """Return jobs on two or more randomly chosen hosts each."""
    return _crowd(jobs, CROSSING_SHARES, True, seed)


def half_shared(jobs: int, seed: int) -> LinkDemand:
    """Return jobs of which half of all pairs share links. Each job loads 8 of 100 links."""
    rng = np.random.default_rng(seed)
    links = np.sort(rng.permuted(np.tile(np.arange(100), (jobs, 1)), axis=1)[:, :8], axis=1)
    return _drawn(links.astype(np.int64), rng)


def one_link(jobs: int, seed: int) -> LinkDemand:
    """Return jobs that all share one link."""
    return _drawn(np.zeros((jobs, 1), np.int64), np.random.default_rng(seed))


def _drawn(links: Ints, rng: np.random.Generator) -> LinkDemand:
    jobs, each = len(links), links.shape[1]
    work_flop: Floats = rng.lognormal(0.0, 1.5, jobs)
    ones: Floats = np.ones(jobs)
    return LinkDemand(
        work_flop=work_flop,
        compute_s=ones,
        start_s=ones,
        delay_s=np.zeros(jobs),
        link_start=np.arange(jobs + 1) * each,
        link=links.ravel(),
        busy_s=np.ones(jobs * each),
        links=int(links.max(initial=0)) + 1,
    )


def _crowd(jobs: int, shares: tuple[float, ...], anywhere: bool, seed: int) -> Contention:
    rng = np.random.default_rng(seed)
    gpus = rng.choice(GPU_COUNTS, jobs, p=shares)
    rooms = _rooms(gpus)
    names = host_names(int(HOST_FACTOR * (max(map(max, rooms)) + 1)) + 1)
    place = rng.permutation(len(names)) if anywhere else np.arange(len(names))
    topology = build_clos(
        names,
        A100_HOST,
        tors=-(-len(names) // HOSTS_PER_TOR),
        aggregations=AGGREGATIONS,
        tor_bytes_per_s=TOR_BYTES_PER_S,
    )
    taken = np.zeros(len(names), np.int64)
    result = []
    for number, (size, room) in enumerate(zip(gpus.tolist(), rooms, strict=True)):
        each = min(size, HOST_GPUS)
        gang = []
        for host in place[room].tolist():
            gang.append((names[host], tuple(range(taken[host], taken[host] + each))))
            taken[host] += each
        result.append(
            NetworkJob(name=f"job-{number}", gang=tuple(gang), traffic=_traffic(size, rng))
        )
    return build_contention(topology, result)[0]


def _rooms(gpus: Ints) -> list[list[int]]:
    """Return each job's hosts, numbered from 0. Small jobs share hosts; larger jobs do not."""
    following, shared, free = 0, 0, 0
    result: list[list[int]] = []
    for size in gpus.tolist():
        if size < HOST_GPUS:
            if free < size:
                shared, free, following = following, HOST_GPUS, following + 1
            free -= size
            result.append([shared])
        else:
            count = size // HOST_GPUS
            result.append(list(range(following, following + count)))
            following += count
    return result


def _traffic(gpus: int, rng: np.random.Generator) -> Traffic:
    """Return the traffic of an iteration.

    It computes for 0.2 to 4 s (log uniform) at 60 to 160 Tflop/s per GPU. Gradients of 1 to 26 GB
    (log uniform) are reduced in one ring over hosts for each GPU of a host. The exchange begins
    half-way through compute or later.
    """
    compute_s = float(np.exp(rng.uniform(np.log(0.2), np.log(4.0))))
    gradient_bytes = float(np.exp(rng.uniform(np.log(1e9), np.log(26e9))))
    rate, begins = rng.uniform(60e12, 160e12), rng.uniform(0.5, 1.0)
    exchanges: tuple[Exchange, ...] = ()
    rings = min(gpus, HOST_GPUS)
    if (hosts := gpus // rings) > 1:
        members = np.arange(gpus, dtype=np.int64).reshape(hosts, rings).T
        sent_bytes = 2 * gradient_bytes / rings * (hosts - 1) / hosts
        exchanges = (Exchange(pattern=Pattern.RING, members=members, sent_bytes=sent_bytes),)
    return Traffic(
        work_flop=gpus * compute_s * float(rate),
        compute_s=compute_s,
        start_s=compute_s * float(begins),
        exchanges=exchanges,
    )
