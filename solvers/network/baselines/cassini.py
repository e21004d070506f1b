"""CASSINI (NSDI'24): time shifts that interleave the communication of jobs that share links.

Paths are those of ECMP, and all jobs share one priority level. The decision is the time for which
each job's first iteration is held back. The paper ranks a host scheduler's candidate placements by
``Alignment.mean_score`` and drops those whose affinity graph has a loop. Here the placement is
given, so a loop is cut instead, and counted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np

from tessera.formulation.answer.network.contention import Contention, LinkDemand, demand_of
from tessera.formulation.answer.network.plan import NetworkPlan
from tessera.formulation.base.tables import Floats, Ints
from tessera.solvers.network.baselines.circles import fit_circles
from tessera.solvers.network.baselines.ecmp import hash_bundles

DRIFT: Final = 0.05
"""Share of an iteration by which a job may be early or late before it is aligned again."""

_EVEN: Final = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Alignment:
    """Time shifts, and how well they fit the links from which they follow."""

    offset_s: Floats  # (J,) in [0, the job's iteration)
    link: Ints  # (L,) links from which the shifts follow
    score: Floats  # (L,) 1 if the jobs fit
    error: Floats  # (L,) the largest relative change of a length by the common grid
    loops: int  # job-link edges that were left out, since they closed a loop

    @property
    def mean_score(self) -> float:
        """Return the mean score over links; 1 if no link can overflow."""
        return float(self.score.mean()) if len(self.score) else 1.0

    def __str__(self) -> str:
        """Return the result in words."""
        text = f"{len(self.link)} links, mean score {self.mean_score:.3f}"
        if self.loops:
            text += f"; {self.loops} edges left out, because they would close loops"
        if (rough := int((self.error > DRIFT).sum())) > 0:
            text += (
                f"; {rough} links whose iterations have no common multiple on a grid of {DRIFT:.0%}"
            )
        return text


def align_shifts(demand: LinkDemand) -> Alignment:
    """Return the shifts that follow from each link's best rotations along the affinity graph.

    The graph joins jobs and links. A link is left out if its jobs together cannot exceed it. Of
    links with the same jobs, only the one with the highest peak is used. The busiest links come
    first. An edge that would close a loop is left out, and a link with only one edge left is
    skipped.
    """
    alone_s, active_s = demand.alone_s, demand.send_s
    begin_s, job = demand.start_s + demand.delay_s, demand.job
    share = demand.busy_s / active_s[job]
    graph = Affinity(demand.jobs)
    link, score, error, loops = [], [], [], 0
    for at, entries in _meetings(demand, share):
        jobs = job[entries]
        parts = graph.parts(jobs)
        loops += len(jobs) - len(parts)
        if len(parts) > 1:
            fit = fit_circles(alone_s[jobs], begin_s[jobs], active_s[jobs], share[entries])
            graph.join(jobs[parts], fit.shift_s[parts])
            link.append(at)
            score.append(fit.score)
            error.append(fit.error)
    return Alignment(
        offset_s=graph.offsets_s(alone_s),
        link=np.array(link, dtype=np.int64),
        score=np.array(score),
        error=np.array(error),
        loops=loops,
    )


def _meetings(demand: LinkDemand, share: Floats) -> list[tuple[int, Ints]]:
    """Return the links that may overflow, and the entries of ``demand`` on each.

    The links are sorted by falling offered load.
    """
    by_link = np.argsort(demand.link, kind="stable")
    first = np.searchsorted(demand.link[by_link], np.arange(demand.links + 1))
    peak = np.bincount(demand.link, weights=share, minlength=demand.links)
    overfull = np.flatnonzero((np.diff(first) > 1) & (peak > 1 + _EVEN))
    job = demand.job
    highest: dict[bytes, int] = {}
    for link in overfull.tolist():
        key = job[by_link[first[link] : first[link + 1]]].tobytes()
        if key not in highest or peak[link] > peak[highest[key]] + _EVEN:
            highest[key] = link
    kept = np.array(sorted(highest.values()), dtype=np.int64)
    kept = kept[np.argsort(-demand.offered[kept], kind="stable")]
    return [(link, by_link[first[link] : first[link + 1]]) for link in kept.tolist()]


class Affinity:
    """A graph of jobs and links without loops.

    The weight of an edge is the job's shift on the link.
    """

    def __init__(self, jobs: int) -> None:
        self._part = list(range(jobs))  # towards one job of each connected part
        self._links: list[list[tuple[int, float]]] = []
        self._of_job: list[list[tuple[int, float]]] = [[] for _ in range(jobs)]

    def parts(self, jobs: Ints) -> list[int]:
        """Return the indices of the jobs that a link may join: the first of each connected part."""
        first: dict[int, int] = {}
        for place, job in enumerate(jobs.tolist()):
            first.setdefault(self._root(job), place)
        return list(first.values())

    def join(self, jobs: Ints, shift_s: Floats) -> None:
        """Add a link of these jobs, no two of which are connected."""
        edges = list(zip(jobs.tolist(), shift_s.tolist(), strict=True))
        for job, weight_s in edges:
            self._of_job[job].append((len(self._links), weight_s))
            self._part[self._root(job)] = self._root(edges[0][0])
        self._links.append(edges)

    def offsets_s(self, period_s: Floats) -> Floats:
        """Return each job's shift, by a walk from the first job of each part, which is not shifted.

        From job j over link l to job k: t_k = t_j - t_j^l + t_k^l, modulo the iteration of k.
        """
        offset_s = np.full(len(period_s), np.nan)
        for first in range(len(period_s)):
            if not np.isnan(offset_s[first]):
                continue
            offset_s[first] = 0.0
            queue = deque([first])
            while queue:
                job = queue.popleft()
                for link, own_s in self._of_job[job]:
                    for other, other_s in self._links[link]:
                        if np.isnan(offset_s[other]):
                            offset_s[other] = (offset_s[job] - own_s + other_s) % period_s[other]
                            queue.append(other)
        return offset_s

    def _root(self, job: int) -> int:
        while self._part[job] != job:
            self._part[job] = self._part[self._part[job]]
            job = self._part[job]
        return job


def waits_s(
    began_s: Floats, offset_s: Floats, period_s: Floats, *, tolerance: float = DRIFT
) -> Floats:
    """Return the time for which each job holds back its next iteration to be in step again, (J,).

    ``began_s`` is the start of an iteration, on the clock on which jobs should begin at
    ``offset_s`` and then every ``period_s``. A job that is off by at most ``tolerance`` of its
    iteration continues immediately.
    """
    late_s = (began_s - offset_s) % period_s
    off_s = np.minimum(late_s, period_s - late_s)
    wait_s: Floats = np.where(off_s > tolerance * period_s, period_s - late_s, 0.0)
    return wait_s


def plan(contention: Contention, *, levels: int, seed: int = 0) -> NetworkPlan:
    """Return ECMP's paths, one priority level, and the time shifts of ``align_shifts``."""
    chosen = hash_bundles(contention, seed)
    jobs = len(contention.jobs)
    return NetworkPlan(
        chosen=chosen,
        priority=np.zeros(jobs),
        order=np.arange(jobs, dtype=np.int64),
        level=np.zeros(jobs, dtype=np.int64),
        levels=levels,
        offset_s=align_shifts(demand_of(contention, chosen)).offset_s,
    )
