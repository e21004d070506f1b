"""Better paths of few jobs, found by trying them on the fluid engine together with their order (not in Crux).

Jobs that could share a link under some choice of paths belong together. Where such a group is small, one
bundle after another is tried on each of its other candidates, under the present order and under those in
which two neighbours have changed places. The first that gains is gone on from, until none of a whole turn
does.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from formulation.network.contention import Contention, demand_of
from formulation.tables import Ints, ranges
from solvers.network.fluid import works
from solvers.network.swaps import GAIN, Moves, Window, compact, order_moves

TRIALS: Final = 400
"""Choices of paths that are tried for a group, at most."""


def tried(
    contention: Contention, chosen: Ints, order: Ints, *, most_jobs: int = 8,
    trials: int = TRIALS, window: Window | None = None,
) -> tuple[Ints, Ints]:  # fmt: skip
    """Return the candidate of each bundle, (B,), and the order, (J,), after trying those of small groups."""
    chosen, order = chosen.copy(), order.copy()
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    for group in possible_groups(contention):
        if 2 <= len(group) <= most_jobs:
            places = np.sort(rank[group])
            jobs = order[places]
            part, bundles = among(contention, jobs)
            chosen[bundles], by_rank = _climbed(part, chosen[bundles], trials, window or Window())
            order[places] = jobs[by_rank]
    return chosen, order


def possible_groups(contention: Contention) -> list[Ints]:
    """Return jobs that could meet, directly or through others, on some choice of paths; by the first job."""
    c = contention
    jobs, links = len(c.jobs), len(c.link_bytes_per_s)
    hops = np.diff(c.path_start)[c.candidate]
    owner = np.repeat(np.repeat(c.bundle_job, np.diff(c.candidate_start)), hops)
    link = np.concatenate([c.fixed_link, c.path_link[ranges(c.path_start[c.candidate], hops)]])
    owner = np.concatenate([np.repeat(np.arange(jobs), np.diff(c.fixed_start)), owner])
    graph = coo_matrix((np.ones(len(link)), (owner, jobs + link)), (jobs + links, jobs + links))
    _, label = connected_components(graph, directed=False)
    by_label = np.argsort(label[:jobs], kind="stable")
    parts = np.split(by_label, np.flatnonzero(np.diff(label[by_label])) + 1)
    return sorted((part for part in parts if len(part)), key=lambda part: int(part[0]))


def among(contention: Contention, jobs: Ints) -> tuple[Contention, Ints]:
    """Return the contention of these jobs alone, in this order, and which bundles they have."""
    c = contention
    fixed_counts, bundle_counts = np.diff(c.fixed_start)[jobs], np.diff(c.bundle_start)[jobs]
    fixed = ranges(c.fixed_start[jobs], fixed_counts)
    bundles = ranges(c.bundle_start[jobs], bundle_counts)
    counts = np.diff(c.candidate_start)[bundles]
    part = Contention(
        jobs=tuple(c.jobs[job] for job in jobs.tolist()), work_flop=c.work_flop[jobs],
        compute_s=c.compute_s[jobs], start_s=c.start_s[jobs], gpus=c.gpus[jobs],
        fixed_start=_starts(fixed_counts), fixed_link=c.fixed_link[fixed],
        fixed_bytes=c.fixed_bytes[fixed], fixed_delay_s=c.fixed_delay_s[jobs],
        bundle_start=_starts(bundle_counts), bundle_bytes=c.bundle_bytes[bundles],
        bundle_messages=c.bundle_messages[bundles], candidate_start=_starts(counts),
        candidate=c.candidate[ranges(c.candidate_start[bundles], counts)],
        path_start=c.path_start, path_link=c.path_link, path_delay_s=c.path_delay_s,
        link_bytes_per_s=c.link_bytes_per_s,
    )  # fmt: skip
    return part, bundles


def _climbed(part: Contention, chosen: Ints, trials: int, window: Window) -> tuple[Ints, Ints]:
    """Return the paths of these jobs, given the most urgent first, and their order."""
    jobs = len(part.jobs)
    every = np.arange(jobs)
    level = np.arange(jobs - 1, -1, -1)
    demand = compact(demand_of(part, chosen), every)
    horizon_s, warm_s = window.of(demand)
    work = float(works(demand, level[None], horizon_s=horizon_s, warm_s=warm_s)[0])
    most = np.diff(part.candidate_start)
    moves = [(b, k) for b in np.argsort(-part.bundle_bytes, kind="stable") for k in range(most[b])]
    left, idle = trials, 0
    for at in range(trials + len(moves)):
        if idle > len(moves) or not left or not moves:
            break
        idle += 1
        bundle, place = moves[at % len(moves)]
        if chosen[bundle] == place:
            continue
        left -= 1
        other = chosen.copy()
        other[bundle] = place
        rows = np.concatenate([level[None], order_moves(level, Moves.ADJACENT)])
        demand = compact(demand_of(part, other), every)
        found = works(demand, rows, horizon_s=horizon_s, warm_s=warm_s)
        best = int(np.argmax(found))
        if found[best] > work * (1 + GAIN):
            chosen, level, work, idle = other, rows[best], float(found[best]), 0
    return chosen, np.argsort(-level, kind="stable")


def _starts(counts: Ints) -> Ints:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
