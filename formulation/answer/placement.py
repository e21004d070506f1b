"""The placement of a solution on nodes and GPU indices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from tessera.formulation.base.values import Hold
from tessera.formulation.state.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    """The GPUs of one job: (node, GPU indices on it), ordered by node. The indices rise.

    Nodes are indices into ``Snapshot.nodes``.
    """

    members: tuple[tuple[int, tuple[int, ...]], ...]

    @property
    def gpus(self) -> int:
        """Return the number of GPUs."""
        return sum(len(indices) for _, indices in self.members)

    @property
    def nodes(self) -> int:
        """Return the number of nodes."""
        return len(self.members)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The gang of each chosen job, by job index."""

    gangs: dict[int, Gang] = field(default_factory=dict)
    migrated: frozenset[int] = frozenset()
    """Jobs that keep their Cell but change GPUs (defragmentation). Each pays its restart cost."""


def current_gangs(snapshot: Snapshot) -> dict[int, Gang]:
    """Return the GPUs that each job owns now, held or reserved, without those being released."""
    a = snapshot.allocations
    own = np.flatnonzero((a.job >= 0) & (a.hold != Hold.RELEASING))
    share = a.job[own] * len(snapshot.nodes) + a.node[own]
    own = own[np.argsort(share * (1 + a.gpu.max(initial=0)) + a.gpu[own], kind="stable")]
    job, node, gpu = a.job[own], a.node[own], a.gpu[own].tolist()
    new_job = np.diff(job, prepend=-1) != 0
    first = np.flatnonzero(new_job | (np.diff(node, prepend=-1) != 0))  # of each share
    spans = pairwise([*first.tolist(), len(gpu)])
    shares = [
        (n, tuple(gpu[start:end]))
        for n, (start, end) in zip(node[first].tolist(), spans, strict=True)
    ]
    begins = np.flatnonzero(new_job[first])  # the first share of each job
    spans = pairwise([*begins.tolist(), len(shares)])
    return {
        owner: Gang(members=tuple(shares[start:end]))
        for owner, (start, end) in zip(job[first[begins]].tolist(), spans, strict=True)
    }


def changed_gangs(gangs: Mapping[int, Gang], now: Mapping[int, Gang]) -> set[int]:
    """Return the jobs of ``gangs`` that own other GPUs, or none, in ``now``."""
    return {
        job
        for job, gang in gangs.items()
        if now.get(job) is not gang and now.get(job) != gang  # most keep the same gang object
    }
