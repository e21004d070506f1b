"""The communication contention DAG (Crux 4.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy import sparse

from tessera.formulation.answer.network.contention import LinkDemand
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats, Ints, run_starts
from tessera.solvers.kernels.jit import as_fixed_array
from tessera.solvers.network.kernels.compression import (
    Narrow,
    edges_inside_levels,
    list_edges,
    vertex_heights,
)
from tessera.solvers.sums import dot

MAX_TOTAL_WEIGHT: Final = 2**53
"""All weights add up to at most this, so sums are exact as integers and as floats."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dag:
    """The V jobs that share a link with another, with an edge to every less urgent one of these.

    A part is a set of connected jobs; parts do not affect each other. Vertices are numbered part by
    part, the more urgent first, so edges rise. If two jobs are on one level, the intensity of the
    more urgent one is lost. That is the weight of each edge that leaves it.
    """

    job: Ints  # (V,)
    intensity: Floats  # (V,) flop/s
    weight: Ints  # (V,) the intensity as an integer
    start: Ints  # (V + 1,) edges that leave each vertex
    target: Narrow  # (edges,)
    part_start: Ints  # (parts + 1,)

    @property
    def parts(self) -> int:
        """Return the number of parts."""
        return len(self.part_start) - 1

    @property
    def edges(self) -> int:
        """Return the number of edges."""
        return len(self.target)

    def part(self, index: int) -> Dag:
        """Return a single part."""
        low, high = self.part_start[index : index + 2]
        first, last = self.start[low], self.start[high]
        return Dag(
            job=self.job[low:high],
            intensity=self.intensity[low:high],
            weight=self.weight[low:high],
            start=as_fixed_array(self.start[low : high + 1] - first),
            target=as_fixed_array(self.target[first:last] - np.int32(low)),
            part_start=np.array([0, high - low]),
        )

    @property
    def at_stake(self) -> float:
        """Return the intensity of all edges, flop/s, which is the loss of one level for all."""
        return float(np.diff(self.start) @ self.intensity)

    def height(self) -> Ints:
        """Return the number of edges of the longest path from each vertex, (V,)."""
        return vertex_heights(self.start, self.target)

    def inside(self, level: Ints) -> Ints:
        """Return the number of edges from each vertex that end on its own level, (V,)."""
        return edges_inside_levels(self.start, self.target, as_fixed_array(level))

    def lost(self, level: Ints) -> float:
        """Return the intensity of the edges inside levels, flop/s, which compression minimizes."""
        return float(self.inside(level) @ self.intensity)


def dag_of(demand: LinkDemand, order: Ints) -> Dag:
    """Return the contention DAG of jobs in this order, the most urgent first.

    Raises:
        InvalidInput: the order does not name each job once, or the intensity of a job that shares a
            link is not a finite number.
    """
    jobs = demand.jobs
    if len(order) != jobs or not np.array_equal(np.sort(order), np.arange(jobs)):
        raise InvalidInput("order", f"must name each of {jobs} jobs once")
    user, link, links = _shared(demand)
    job, part_start = _parts(user, link, links, order)
    intensity = demand.intensity[job]
    if wrong := job[~((intensity >= 0) & np.isfinite(intensity))].tolist():
        raise InvalidInput(
            "intensity", f"of job {wrong[0]} is not a finite number; measure it again"
        )
    vertex = np.zeros(jobs, np.int64)
    vertex[job] = np.arange(len(job))
    start, target = _edges(vertex[user], link, links, len(job))
    return Dag(
        job=job,
        intensity=intensity,
        weight=as_fixed_array(_integers(intensity, np.diff(start))),
        start=as_fixed_array(start),
        target=as_fixed_array(target),
        part_start=part_start,
    )


def _shared(demand: LinkDemand) -> tuple[Ints, Ints, int]:
    """Return the job and link of each entry of a link that several jobs load.

    Such links are numbered again from 0.
    """
    several = np.bincount(demand.link, minlength=demand.links) > 1
    number = np.cumsum(several) - 1
    keep = several[demand.link]
    return demand.job[keep], number[demand.link[keep]], int(several.sum())


def _parts(user: Ints, link: Ints, links: int, order: Ints) -> tuple[Ints, Ints]:
    """Return the jobs that share links with others, and where the parts begin.

    The jobs are sorted by part and by urgency.
    """
    jobs = len(order)
    used = sparse.csr_array(
        (np.ones(len(user), np.int8), (user, link + jobs)), shape=(jobs + links, jobs + links)
    )
    label = sparse.csgraph.connected_components(used, directed=False)[1]
    meets = np.zeros(jobs, np.bool_)
    meets[user] = True
    meeting = order[meets[order]]
    meeting = meeting[np.argsort(label[meeting], kind="stable")]
    changes = np.flatnonzero(np.diff(label[meeting])) + 1
    ends = [len(meeting)] if len(meeting) else []
    return meeting, np.concatenate([[0], changes, ends]).astype(np.int64)


def _edges(vertex: Ints, link: Ints, links: int, count: int) -> tuple[Ints, Narrow]:
    """Return the edges between vertices that share a link, as CSR."""
    by_vertex = np.argsort(vertex, kind="stable")
    vertex, link = vertex[by_vertex], link[by_vertex]
    of_vertices = (
        as_fixed_array(run_starts(np.bincount(vertex, minlength=count))),
        as_fixed_array(link),
    )
    by_link = np.argsort(link, kind="stable")
    of_links = (
        as_fixed_array(run_starts(np.bincount(link, minlength=links))),
        as_fixed_array(vertex[by_link]),
    )
    start, none = np.zeros(count + 1, np.int64), np.empty(0, np.int32)
    target = np.empty(list_edges(*of_vertices, *of_links, start, none), np.int32)
    list_edges(*of_vertices, *of_links, start, target)
    return start, target


def _integers(intensity: Floats, edges: Ints) -> Ints:
    """Return weights in the same ratios, rounded up.

    Over all edges they sum to at most ``MAX_TOTAL_WEIGHT``.
    """
    counts = edges > 0  # a vertex without edges has no weight, however high its intensity is
    top = float(intensity.max(initial=0.0, where=counts))
    if top == 0:
        return np.zeros(len(intensity), np.int64)
    share = np.where(counts, intensity, 0.0) / top
    room = MAX_TOTAL_WEIGHT - edges.sum()  # less what rounding up may add
    weight: Ints = np.ceil(share * (room / max(dot(share, edges), 1.0))).astype(np.int64)
    return weight
