"""Who meets whom: the communication contention DAG (Crux 4.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy import sparse

from formulation.errors import InvalidInput
from formulation.network.contention import Demand
from formulation.tables import Floats, Ints, ranges
from solvers.kernels.jit import fixed
from solvers.network.kernels.compression import Narrow, heights, insides, meetings

TOTAL: Final = 2**53
"""All weights add up to at most this: sums are exact, as integers and as floats."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dag:
    """Jobs that share a link with another, V of them; an edge from each to every less urgent one of these.

    A part is a set of jobs that are connected; parts have nothing to do with each other. Vertices are
    numbered part by part, the more urgent first, so edges rise. Of two on one level the intensity of the
    more urgent is lost: that is the weight of each edge that leaves it.
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
        """Return one part by itself."""
        low, high = self.part_start[index : index + 2]
        first, last = self.start[low], self.start[high]
        return Dag(
            job=self.job[low:high], intensity=self.intensity[low:high], weight=self.weight[low:high],
            start=fixed(self.start[low : high + 1] - first),
            target=fixed(self.target[first:last] - np.int32(low)), part_start=np.array([0, high - low]),
        )  # fmt: skip

    @property
    def at_stake(self) -> float:
        """Return the intensity of all edges, flop/s: what one level for all loses."""
        return float(np.diff(self.start) @ self.intensity)

    def height(self) -> Ints:
        """Return how many edges the longest path from each vertex has, (V,)."""
        return heights(self.start, self.target)

    def inside(self, level: Ints) -> Ints:
        """Return how many edges from each vertex lie inside a level where vertices have these, (V,)."""
        return insides(self.start, self.target, fixed(level))

    def lost(self, level: Ints) -> float:
        """Return the intensity of edges inside levels, flop/s: what compression wants to be least."""
        return float(self.inside(level) @ self.intensity)


def dag_of(demand: Demand, order: Ints) -> Dag:
    """Return the contention DAG of jobs in this order, the most urgent first.

    Raises:
        InvalidInput: the order does not name each job once, or the intensity of a job that meets others is no
            finite number.
    """
    jobs = demand.jobs
    if len(order) != jobs or not np.array_equal(np.sort(order), np.arange(jobs)):
        raise InvalidInput("order", f"must name each of {jobs} jobs once")
    job, part_start = _parts(demand, order)
    intensity = demand.intensity[job]
    if wrong := job[~((intensity >= 0) & np.isfinite(intensity))].tolist():
        raise InvalidInput("intensity", f"of job {wrong[0]} is no finite number; measure it again")
    start, target = _edges(demand, job)
    return Dag(
        job=job, intensity=intensity, weight=fixed(_integers(intensity, np.diff(start))),
        start=fixed(start), target=fixed(target), part_start=part_start,
    )  # fmt: skip


def _parts(demand: Demand, order: Ints) -> tuple[Ints, Ints]:
    """Return the jobs that meet others, part by part and by urgency, and where parts begin."""
    jobs, nodes = demand.jobs, demand.jobs + demand.links
    used = sparse.csr_array(
        (np.ones(len(demand.link), np.int8), (demand.job, demand.link + jobs)), shape=(nodes, nodes)
    )
    label = sparse.csgraph.connected_components(used, directed=False)[1][:jobs]
    meeting = order[demand.contended()[order]]
    meeting = meeting[np.argsort(label[meeting], kind="stable")]
    changes = np.flatnonzero(np.diff(label[meeting])) + 1
    ends = [len(meeting)] if len(meeting) else []
    return meeting, np.concatenate([[0], changes, ends]).astype(np.int64)


def _edges(demand: Demand, job: Ints) -> tuple[Ints, Narrow]:
    """Return the edges as CSR over vertices, which are these jobs."""
    counts = np.diff(demand.link_start)[job]
    link = demand.link[ranges(demand.link_start[job], counts)]
    vertex = np.repeat(np.arange(len(job)), counts)
    by_link = np.argsort(link, kind="stable")
    users = np.bincount(link, minlength=demand.links)
    of_vertices = fixed(np.concatenate([[0], np.cumsum(counts)])), fixed(link)
    of_links = fixed(np.concatenate([[0], np.cumsum(users)])), fixed(vertex[by_link])
    start, none = np.zeros(len(job) + 1, np.int64), np.empty(0, np.int32)
    target = np.empty(meetings(*of_vertices, *of_links, start, none), np.int32)
    meetings(*of_vertices, *of_links, start, target)
    return start, target


def _integers(intensity: Floats, edges: Ints) -> Ints:
    """Return weights of the same ratios, rounded up; over all edges they sum to at most ``TOTAL``."""
    top = float(intensity.max(initial=0.0))
    if top == 0:
        return np.zeros(len(intensity), np.int64)
    share = intensity / top
    room = TOTAL - edges.sum()  # what rounding up may add
    found: Ints = np.ceil(share * (room / max(float(share @ edges), 1.0))).astype(np.int64)
    return found
