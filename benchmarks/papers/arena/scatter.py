"""Placement of starts as in Arena's artifact.

Jobs start in order of arrival, in whole shapes, on the nodes with the most free GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from tessera.formulation.decisions import Decision, DecisionKind
from tessera.formulation.placement import Gang
from tessera.formulation.snapshot import Snapshot
from tessera.formulation.tables import Bools, Ints
from tessera.solvers.rounds.plan import RoundOutcome

_SCALED: Final = (DecisionKind.RESIZE, DecisionKind.RETYPE, DecisionKind.REPLAN)


class FreeGpus:
    """The free GPUs of each node, from which starts take theirs."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._nodes = snapshot.nodes
        first = np.append(0, np.cumsum(snapshot.nodes.gpus))
        free = np.ones(int(first[-1]), dtype=np.bool_)
        free[first[snapshot.allocations.node] + snapshot.allocations.gpu] = False
        self._free: list[Bools] = [free[a:b] for a, b in pairwise(first)]
        self.count: Ints = np.array([int(f.sum()) for f in self._free], dtype=np.int64)

    def reserve(self, gang: Gang) -> None:
        """Mark these GPUs as taken. Some may already be taken."""
        for node, gpus in gang.members:
            self._free[node][list(gpus)] = False
            self.count[node] = int(self._free[node].sum())

    def take(self, gpu_type: int, gpus: int) -> Gang | None:
        """Take ``gpus`` GPUs of a type on the fewest nodes, with equal numbers on each.

        If they do not fit, return None.
        """
        mine = np.flatnonzero((self._nodes.gpu_type == gpu_type) & self._nodes.schedulable)
        if not len(mine):
            return None
        each = min(gpus, int(self._nodes.gpus[mine].max()))
        freest = mine[np.argsort(-self.count[mine], kind="stable")][: -(-gpus // each)]
        if gpus % each or len(freest) * each < gpus or (self.count[freest] < each).any():
            return None
        return Gang(members=tuple((int(n), self._grab(int(n), each)) for n in sorted(freest)))

    def _grab(self, node: int, gpus: int) -> tuple[int, ...]:
        taken = np.flatnonzero(self._free[node])[:gpus]
        self._free[node][taken] = False
        self.count[node] -= gpus
        return tuple(taken.tolist())


def scatter_starts(snapshot: Snapshot, outcome: RoundOutcome) -> tuple[Decision, ...]:
    """Return the decisions with every start placed again.

    Jobs are placed in order of arrival. The first that does not fit on its type blocks the type for
    all later jobs. Jobs that were chosen but could not be placed are included. If only starts were
    chosen, no running job is moved to make room for them. Otherwise changes are as placed, and the
    GPUs that they release are free for starts in the next round.
    """
    free, blocked = FreeGpus(snapshot), set[int]()
    result: list[Decision] = []
    only_starts = not any(d.kind in _SCALED for d in outcome.decisions)
    for decision in outcome.decisions:
        if (
            decision.gang is not None
            and decision.kind is not DecisionKind.START
            and not only_starts
        ):
            free.reserve(decision.gang)
    for decision in outcome.decisions:
        chosen = _chosen(outcome, decision)
        if chosen is None:
            stays = only_starts and decision.kind is DecisionKind.MOVE
            result.append(Decision(job=decision.job, kind=DecisionKind.KEEP) if stays else decision)
            continue
        kind, gpus = chosen.cell.gpu_type, chosen.cell.gpus
        gang = free.take(kind, gpus) if kind not in blocked else None
        if gang is None:
            blocked.add(kind)
            result.append(
                Decision(job=decision.job, kind=DecisionKind.WAIT, reason=decision.reason)
            )
        else:
            result.append(chosen._replace(gang=gang))
    return tuple(result)


def _chosen(outcome: RoundOutcome, decision: Decision) -> Decision | None:
    """Return the start that the policy chose for the job, or None if it did not choose one."""
    if decision.kind is DecisionKind.START:
        return decision
    column = outcome.placed.wanted.get(decision.job)
    if decision.kind is not DecisionKind.WAIT or column is None:
        return None
    cell = outcome.problem.cells.key_at(int(outcome.problem.cell[column]))
    return Decision(job=decision.job, kind=DecisionKind.START, cell=cell)


def starts_of(decisions: Sequence[Decision]) -> set[int]:
    """Return the jobs that start."""
    return {d.job for d in decisions if d.kind is DecisionKind.START}
