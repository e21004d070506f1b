"""The readable part of a network plan: the jobs that each job meets, and its routes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

import numpy as np

from tessera.formulation.answer.network.contention import Contention, LinkDemand
from tessera.formulation.answer.network.outcome import Route
from tessera.formulation.answer.network.plan import NetworkPlan
from tessera.formulation.base.tables import Ints
from tessera.formulation.state.topologies.topology import Topology

MAX_MET_JOBS: Final = 10
"""Largest number of jobs that are named as met by a job. They are the nearest in rank; it may meet more."""


def find_met_jobs(demand: LinkDemand, plan: NetworkPlan) -> dict[int, list[int]]:
    """Return, by job, the ``MAX_MET_JOBS`` jobs nearest in rank with which it shares a link, by rank.

    Jobs that are served before it or on the same level are preferred, so that at least one of them
    is named if there is any.
    """
    rank = plan.rank
    # Sort the users of each link by rank, so that near ranks are near in the arrays.
    order = np.lexsort((rank[demand.job], demand.link))
    link, job = demand.link[order], demand.job[order]
    met: defaultdict[int, set[int]] = defaultdict(set)
    for apart in range(1, MAX_MET_JOBS + 1):
        same = np.flatnonzero(link[apart:] == link[:-apart])
        for a, b in set(zip(job[same].tolist(), job[same + apart].tolist(), strict=True)):
            met[a].add(b)
            met[b].add(a)
    return {k: _nearest(others, rank, plan.level, k) for k, others in met.items()}


def _nearest(others: Iterable[int], rank: Ints, level: Ints, job: int) -> list[int]:
    """Return the ``MAX_MET_JOBS`` of ``others`` nearest to the job in rank, by rank.

    Those on lower levels are used last.
    """

    def apart(other: int) -> tuple[bool, int, int]:
        return bool(level[other] < level[job]), abs(int(rank[other] - rank[job])), other

    return sorted(sorted(others, key=apart)[:MAX_MET_JOBS], key=lambda other: int(rank[other]))


def routes_of(topology: Topology, c: Contention, plan: NetworkPlan, job: int) -> Iterable[Route]:
    """Yield the routes of a job's traffic that has a choice of paths.

    Links that all candidates of a bundle share are not among a candidate's, so a route may have
    gaps.
    """
    name, links = topology.vertices.name, topology.links
    for bundle in range(*c.bundle_start[job : job + 2].tolist()):
        path = int(c.candidate[c.candidate_start[bundle] + plan.chosen[bundle]])
        ends = list[int]()
        for hop in c.path_link[slice(*c.path_start[path : path + 2].tolist())].tolist():
            at, to = int(links.source[hop]), int(links.target[hop])
            ends += [to] if ends and ends[-1] == at else [at, to]
        yield Route(
            source=name[c.bundle_source[bundle]],
            target=name[c.bundle_target[bundle]],
            via=tuple(name[v] for v in ends),
            sent_bytes=float(c.bundle_bytes[bundle]),
        )
