"""The nodes that each job may run on, and those that it prefers."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from tessera.formulation.base.tables import Bools
from tessera.formulation.state.snapshot import Snapshot

Nodes = frozenset[int]


class NodeChoices:
    """The nodes that jobs must not run on, as sets that jobs with one selector share."""

    def __init__(self, snapshot: Snapshot) -> None:
        unmatched: defaultdict[int, set[int]] = defaultdict(set)
        table = snapshot.unmatched_nodes
        for selector, node in zip(table.selector.tolist(), table.node.tolist(), strict=True):
            unmatched[selector].add(node)
        self._unmatched = {selector: frozenset(nodes) for selector, nodes in unmatched.items()}
        avoids: defaultdict[int, set[int]] = defaultdict(set)
        for job, node in zip(
            snapshot.avoided_nodes.job.tolist(), snapshot.avoided_nodes.node.tolist(), strict=True
        ):
            avoids[job].add(node)
        self._avoids = {job: frozenset(nodes) for job, nodes in avoids.items()}
        self._required: list[int] = snapshot.jobs.required_selector.tolist()
        self._preferred: list[int] = snapshot.jobs.preferred_selector.tolist()
        self._joined: dict[int, Nodes] = {}
        self._masks: dict[Nodes, Bools] = {}
        self._count = len(snapshot.nodes)

    def avoided(self, job: int) -> Nodes:
        """Return the nodes that ``job`` avoids, or that its selector does not match."""
        unmatched = self._unmatched.get(self._required[job], frozenset())
        avoids = self._avoids.get(job)
        if avoids is None:
            return unmatched
        if job not in self._joined:
            self._joined[job] = avoids | unmatched
        return self._joined[job]

    def make_mask(self, job: int) -> Bools | None:
        """Return the nodes that ``job`` may run on, bool[nodes], or None if it may run on all."""
        nodes = self.avoided(job)
        if nodes and nodes not in self._masks:
            mask = np.ones(self._count, dtype=np.bool_)
            mask[list(nodes)] = False
            self._masks[nodes] = mask
        return self._masks.get(nodes)

    def in_order(self, job: int) -> tuple[Nodes, ...]:
        """Return the nodes to leave out, in the order in which to look for GPUs for ``job``.

        First only nodes that it prefers are left, then all that it may run on.
        """
        avoided = self.avoided(job)
        others = self._unmatched.get(self._preferred[job])
        return (avoided,) if others is None else (avoided | others, avoided)
