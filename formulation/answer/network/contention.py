"""All jobs of a network: their traffic, the paths that they may choose, and the load on links.

Indices are flat (CSR): the bundles of job j are ``bundle_start[j] : bundle_start[j + 1]``, and so
on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Bools, Floats, Ints, concatenate_ranges, run_starts


def _no_vertices() -> Ints:
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contention:
    """The J jobs that train, with their traffic over E links.

    A bundle is traffic that takes one path (a queue pair). The fixed links of a job are those that
    it loads whichever paths are chosen. A bundle's candidates differ in the other links.
    """

    jobs: tuple[str, ...]
    work_flop: Floats  # (J,) of one iteration, all GPUs
    compute_s: Floats  # (J,)
    start_s: Floats  # (J,) earliest communication, from the iteration's start
    gpus: Ints  # (J,)
    fixed_start: Ints  # (J + 1,)
    fixed_link: Ints  # (F,)
    fixed_bytes: Floats  # (F,) of one iteration
    fixed_delay_s: Floats  # (J,) of one iteration, for any choice of paths
    bundle_start: Ints  # (J + 1,)
    bundle_bytes: Floats  # (B,) of one iteration
    bundle_messages: Ints  # (B,) in sequence in one iteration
    candidate_start: Ints  # (B + 1,) each bundle has at least one
    candidate: Ints  # (C,) a path
    path_start: Ints  # (P + 1,)
    path_link: Ints  # in order
    path_delay_s: Floats  # (P,) of one message
    link_bytes_per_s: Floats  # (E,)
    bundle_source: Ints = field(default_factory=_no_vertices)  # (B,) vertices, for setting paths
    bundle_target: Ints = field(default_factory=_no_vertices)  # both are empty if not requested

    def __post_init__(self) -> None:
        """Refuse meaningless values, because later code relies on these checks."""
        jobs = len(self.jobs)
        for name in ("work_flop", "compute_s", "start_s", "fixed_delay_s"):
            values = getattr(self, name)
            wrong = np.flatnonzero(~((values >= 0) & np.isfinite(values)))
            if len(values) != jobs or len(wrong):
                at = f", and that of {self.jobs[wrong[0]]} is not" if len(wrong) else ""
                raise InvalidInput(name, f"must be a number of at least 0 for each job{at}")
        if (self.start_s > self.compute_s).any() or (self.compute_s <= 0).any():
            raise InvalidInput("start_s", "must be at most compute_s, which must be above 0")
        if not (self.link_bytes_per_s > 0).all():
            raise InvalidInput("link_bytes_per_s", "must be above 0")
        for name in ("fixed_bytes", "bundle_bytes"):
            values = getattr(self, name)
            if not ((values >= 0) & np.isfinite(values)).all():
                raise InvalidInput(name, "must be numbers of at least 0")
        if len(self.bundle_bytes) and np.diff(self.candidate_start).min() < 1:
            raise InvalidInput("candidate_start", "leaves a bundle without a path")

    @property
    def bundle_job(self) -> Ints:
        """Return the job of each bundle, (B,)."""
        return np.repeat(np.arange(len(self.jobs), dtype=np.int64), np.diff(self.bundle_start))

    @property
    def fixed_job(self) -> Ints:
        """Return the job of each fixed link, (F,)."""
        return np.repeat(np.arange(len(self.jobs), dtype=np.int64), np.diff(self.fixed_start))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinkDemand:
    """The links that jobs load once paths are chosen. Engines and baselines work on this.

    ``busy_s`` is M / B: the seconds that one iteration needs of the link at full bandwidth. The
    links of a job rise.
    """

    work_flop: Floats  # (J,)
    compute_s: Floats  # (J,)
    start_s: Floats  # (J,)
    delay_s: Floats  # (J,) part of comm_s that needs no bandwidth
    link_start: Ints  # (J + 1,)
    link: Ints  # (N,)
    busy_s: Floats  # (N,) above 0
    links: int  # of the network

    @property
    def jobs(self) -> int:
        """Return the number of jobs."""
        return len(self.work_flop)

    @property
    def job(self) -> Ints:
        """Return the job of each (job, link) entry, (N,)."""
        return np.repeat(np.arange(self.jobs, dtype=np.int64), np.diff(self.link_start))

    @property
    def send_s(self) -> Floats:
        """Return the seconds of communication at full speed, on the slowest link, (J,)."""
        slowest = np.zeros(self.jobs)
        np.maximum.at(slowest, self.job, self.busy_s)
        return slowest

    @property
    def comm_s(self) -> Floats:
        """Return t_j, the seconds of communication without contention, (J,) (Crux 3.1).

        It is 0 for a job without traffic.
        """
        comm_s: Floats = self.send_s + self.delay_s
        return comm_s

    @property
    def alone_s(self) -> Floats:
        """Return the length of an iteration without contention, (J,)."""
        comm_s = self.comm_s
        alone_s: Floats = np.where(
            comm_s > 0, np.maximum(self.compute_s, self.start_s + comm_s), self.compute_s
        )
        return alone_s

    @property
    def intensity(self) -> Floats:
        """Return GPU intensity W / t, flop/s, (J,). It is inf for a job without traffic (Crux eq. 2)."""
        comm_s = self.comm_s
        intensity = np.full(self.jobs, np.inf)
        np.divide(self.work_flop, comm_s, out=intensity, where=comm_s > 0)
        return intensity

    @property
    def offered(self) -> Floats:
        """Return the load of jobs without contention on each link, seconds per second, (links,)."""
        duty = self.busy_s / self.alone_s[self.job]
        return np.bincount(self.link, weights=duty, minlength=self.links).astype(np.float64)

    def contended(self) -> Bools:
        """Return whether each job shares a link with another, (J,)."""
        users = np.bincount(self.link, minlength=self.links)
        shares_link = np.zeros(self.jobs, dtype=np.bool_)
        shares_link[self.job[users[self.link] > 1]] = True
        return shares_link

    def among(self, jobs: Ints) -> LinkDemand:
        """Return the demand of these jobs only, in this order. Links keep their numbers."""
        counts = np.diff(self.link_start)[jobs]
        at = concatenate_ranges(self.link_start[jobs], counts)
        return LinkDemand(
            work_flop=self.work_flop[jobs],
            compute_s=self.compute_s[jobs],
            start_s=self.start_s[jobs],
            delay_s=self.delay_s[jobs],
            link_start=run_starts(counts),
            link=self.link[at],
            busy_s=self.busy_s[at],
            links=self.links,
        )


def demand_of(contention: Contention, chosen: Ints) -> LinkDemand:
    """Return the demand where bundle b takes its candidate ``chosen[b]``, counted from 0.

    Raises:
        InvalidInput: a bundle has no such candidate.
    """
    c = contention
    most = np.diff(c.candidate_start)
    if len(chosen) != len(most) or ((chosen < 0) | (chosen >= most)).any():
        raise InvalidInput("chosen", "must name one candidate of each bundle, from 0")
    path = c.candidate[c.candidate_start[:-1] + chosen]
    hops = np.diff(c.path_start)[path]
    job = np.concatenate([c.fixed_job, np.repeat(c.bundle_job, hops)])
    link = np.concatenate([c.fixed_link, c.path_link[concatenate_ranges(c.path_start[path], hops)]])
    sent = np.concatenate([c.fixed_bytes, np.repeat(c.bundle_bytes, hops)])
    count = len(c.link_bytes_per_s)
    # Sum the bytes of each job on each link.
    key, which = np.unique(job * count + link, return_inverse=True)
    total = np.bincount(which, weights=sent, minlength=len(key))
    key, total = key[total > 0], total[total > 0]
    delay_s = np.zeros(len(c.jobs))
    np.maximum.at(delay_s, c.bundle_job, c.bundle_messages * c.path_delay_s[path])
    return LinkDemand(
        work_flop=c.work_flop,
        compute_s=c.compute_s,
        start_s=c.start_s,
        delay_s=c.fixed_delay_s + delay_s,
        link_start=np.searchsorted(key, np.arange(len(c.jobs) + 1) * count),
        link=key % count,
        busy_s=total / c.link_bytes_per_s[key % count],
        links=count,
    )


def join_parts(parts: Sequence[Contention]) -> Contention:
    """Return the jobs of all parts, in order. There must be at least one part.

    Parts are of one network.

    Raises:
        InvalidInput: parts differ in their links.
    """
    first = parts[0]
    if any(not np.array_equal(p.link_bytes_per_s, first.link_bytes_per_s) for p in parts):
        raise InvalidInput("link_bytes_per_s", "must be the same for all parts")
    paths = np.cumsum([0, *(len(p.path_delay_s) for p in parts[:-1])]).tolist()
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(p, name) for p in parts]) for name in _FLAT
    }
    arrays |= {name: _starts([getattr(p, name) for p in parts]) for name in _STARTS}
    arrays["candidate"] = np.concatenate(
        [p.candidate + n for p, n in zip(parts, paths, strict=True)]
    )
    have_ends = all(len(p.bundle_source) == len(p.bundle_bytes) for p in parts)
    for name in ("bundle_source", "bundle_target"):
        arrays[name] = (
            np.concatenate([getattr(p, name) for p in parts]) if have_ends else _no_vertices()
        )
    return replace(first, jobs=tuple(name for part in parts for name in part.jobs), **arrays)


_FLAT = (
    "work_flop",
    "compute_s",
    "start_s",
    "gpus",
    "fixed_link",
    "fixed_bytes",
    "fixed_delay_s",
    "bundle_bytes",
    "bundle_messages",
    "path_link",
    "path_delay_s",
)
_STARTS = ("fixed_start", "bundle_start", "candidate_start", "path_start")


def _starts(parts: Sequence[Ints]) -> Ints:
    before = np.cumsum([0, *(int(part[-1]) for part in parts[:-1])]).tolist()
    rest = [part[1:] + n for part, n in zip(parts, before, strict=True)]
    return np.concatenate([[0], *rest]).astype(np.int64)
