"""A solution brought down to nodes and GPU indices."""

from __future__ import annotations

from dataclasses import dataclass, field

from formulation.snapshot import Hold, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    """The GPUs of one job: (node, GPU indices on it) in order of node; indices rise.

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
    """Where each chosen job runs: job index -> gang."""

    gangs: dict[int, Gang] = field(default_factory=dict)
    migrated: frozenset[int] = frozenset()
    """Jobs that keep their Cell but change GPUs (defragmentation): each pays its restart price."""


def current_gangs(snapshot: Snapshot) -> dict[int, Gang]:
    """Return the GPUs that each job owns now, held or reserved (not those it is giving back)."""
    members: dict[int, dict[int, list[int]]] = {}
    a = snapshot.allocations
    for job, node, gpu, hold in zip(
        a.job.tolist(), a.node.tolist(), a.gpu.tolist(), a.hold.tolist(), strict=True
    ):
        if job >= 0 and hold != Hold.RELEASING:
            members.setdefault(job, {}).setdefault(node, []).append(gpu)
    return {
        job: Gang(members=tuple((node, tuple(sorted(g))) for node, g in sorted(nodes.items())))
        for job, nodes in members.items()
    }
