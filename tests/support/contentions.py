"""Random contentions on a two-layer Clos: rings with a queue pair from each host to the next."""

from __future__ import annotations

import numpy as np

from tessera.formulation.answer.network.contention import Contention
from tessera.formulation.base.tables import Floats, Ints


def a_contention(
    seed: int,
    *,
    jobs: int = 5,
    tors: int = 3,
    aggregations: int = 2,
    hosts_a_tor: int = 5,
    load: float = 1.0,
    idle: int = 0,
) -> Contention:
    """Return jobs on random hosts, each of which sends to the next of its ring once per iteration.

    Links have 1 byte/s each: the hosts' NICs outwards and inwards, ToRs to aggregation switches,
    and back. ``load`` scales bytes. The last ``idle`` jobs send nothing.
    """
    rng = np.random.default_rng(seed)
    hosts = tors * hosts_a_tor
    path_start, path_link, pair_paths = _paths(hosts, tors, aggregations)
    compute_s = rng.uniform(0.2, 4.0, jobs)
    fixed_links: list[list[int]] = []
    fixed_bytes: list[list[float]] = []
    bundles: list[list[tuple[float, Ints]]] = []
    sizes = rng.integers(2, 6, jobs)
    for job in range(jobs):
        ring = rng.choice(hosts, size=int(sizes[job]), replace=False)
        sent = 0.0 if job >= jobs - idle else float(rng.uniform(0.2, 2.0)) * load
        fixed_links.append([])
        fixed_bytes.append([])
        bundles.append([])
        for source, target in zip(ring.tolist(), np.roll(ring, -1).tolist(), strict=True):
            fixed_links[-1] += [source, hosts + target]
            fixed_bytes[-1] += [sent, sent]
            pair = source // hosts_a_tor, target // hosts_a_tor
            if pair[0] != pair[1]:
                bundles[-1].append((sent, pair_paths[pair]))
    every = [bundle for of_job in bundles for bundle in of_job]
    return Contention(
        jobs=tuple(f"job-{i}" for i in range(jobs)),
        work_flop=8.0 * sizes * compute_s * rng.uniform(0.5, 1.0, jobs),
        compute_s=compute_s,
        start_s=compute_s * rng.uniform(0.0, 1.0, jobs),
        gpus=8 * sizes,
        fixed_start=_starts([len(each) for each in fixed_links]),
        fixed_link=np.array([e for each in fixed_links for e in each], dtype=np.int64),
        fixed_bytes=_floats([b for each in fixed_bytes for b in each]),
        fixed_delay_s=np.zeros(jobs),
        bundle_start=_starts([len(each) for each in bundles]),
        bundle_bytes=_floats([sent for sent, _ in every]),
        bundle_messages=np.ones(len(every), dtype=np.int64),
        candidate_start=_starts([len(paths) for _, paths in every]),
        candidate=np.concatenate([np.zeros(0, np.int64), *(paths for _, paths in every)]),
        path_start=path_start,
        path_link=path_link,
        path_delay_s=np.zeros(len(path_start) - 1),
        link_bytes_per_s=np.ones(2 * hosts + 2 * tors * aggregations),
    )


def _paths(
    hosts: int, tors: int, aggregations: int
) -> tuple[Ints, Ints, dict[tuple[int, int], Ints]]:
    """Return all paths between two ToRs, of two links each, and those of each pair of ToRs."""
    links: list[int] = []
    paths: dict[tuple[int, int], Ints] = {}
    up, down = 2 * hosts, 2 * hosts + tors * aggregations
    for source in range(tors):
        for target in range(tors):
            if source != target:
                first = len(links) // 2
                paths[source, target] = np.arange(first, first + aggregations)
                for agg in range(aggregations):
                    links += [up + source * aggregations + agg, down + target * aggregations + agg]
    return np.arange(len(links) // 2 + 1) * 2, np.array(links, dtype=np.int64), paths


def _starts(counts: list[int]) -> Ints:
    return np.cumsum([0, *counts]).astype(np.int64)


def _floats(values: list[float]) -> Floats:
    return np.array(values, dtype=np.float64)
