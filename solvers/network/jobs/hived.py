"""HiveD (OSDI'20) with one virtual cluster that owns everything.

It uses buddy cells along the hierarchy of the cluster. A cell is split when a part of it is taken,
and is whole again when all of it is free. Both follow from the free GPUs, so no other state is
kept: the free list of a level is its wholly free cells in split ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from tessera.formulation.answer.placement import Gang
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Bools, Ints, run_starts
from tessera.formulation.state.topologies.topology import Topology
from tessera.solvers.network.jobs.cells import CellLevel, cell_hierarchy

Free: TypeAlias = Sequence[Sequence[int]]
"""The free GPUs of each host, as rising indices; hosts are those of the topology."""

LEVELS_ABOVE_HOSTS = (CellLevel.RACK, CellLevel.POD, CellLevel.CLUSTER)


class HiveD:
    """A placer that puts each gang into the smallest cell that holds it.

    Among several such cells, it takes the most used one. A gang larger than a host takes whole
    hosts and, for the rest, a part of one more. If no cell offers that, the gang waits (``waits``).
    Otherwise it takes free GPUs in the smallest cell that has enough, spread as little as the
    hierarchy allows.
    """

    def __init__(self, topology: Topology, *, waits: bool = False) -> None:
        self._cell = cell_hierarchy(topology)
        self._waits = waits
        sizes = np.array([len(topology.gpus_of(h)) for h in range(len(topology.hosts))])
        self._begin = run_starts(sizes)  # of each host
        # the first GPU of each cell
        self._gpu = [np.unique(cell, return_index=True)[1] for cell in self._cell]
        self._size = np.bincount(self._cell[CellLevel.HOST])

    def __call__(self, free: Free, gpus: int) -> Gang | None:
        """Return the GPUs of the gang, or None if it must wait.

        Raises:
            InvalidInput: ``gpus`` is below 1.
        """
        if gpus < 1:
            raise InvalidInput("gpus", f"is {gpus}; it must be at least 1")
        mask = np.zeros(self._cell.shape[1], dtype=np.bool_)
        for host, indices in enumerate(free):
            mask[self._begin[host] + np.array(indices, dtype=np.int64)] = True
        left = [
            np.bincount(cell[mask], minlength=len(self._gpu[at]))
            for at, cell in enumerate(self._cell)
        ]
        taken = self._in_one(tuple(CellLevel)[: CellLevel.RACK], mask, left, gpus)
        if taken is None:
            taken = self._of_hosts(mask, left, gpus)
        if taken is None and not self._waits:
            taken = self._in_one(LEVELS_ABOVE_HOSTS, mask, left, gpus)
        return None if taken is None else self._gang(taken)

    def _in_one(
        self, levels: tuple[CellLevel, ...], mask: Bools, left: list[Ints], gpus: int
    ) -> Ints | None:
        """Return free GPUs of one cell of the lowest level that has enough, or None."""
        for level in levels:
            holding = np.flatnonzero(left[level] >= gpus)
            if len(holding):
                inside = mask & (self._cell[level] == self._most_used(level, holding, left))
                return self._close(np.flatnonzero(inside), level, gpus, left)
        return None

    def _of_hosts(self, mask: Bools, left: list[Ints], gpus: int) -> Ints | None:
        """Return whole hosts, and a part of one more for the rest, all in one cell above hosts."""
        largest = int(self._size.max(initial=1))
        count, rest = divmod(gpus, largest)
        if count == 0:
            return None
        free = left[CellLevel.HOST]
        whole = np.flatnonzero(free == largest)
        part = np.flatnonzero((free >= max(rest, 1)) & (free < largest))
        for level in LEVELS_ABOVE_HOSTS:
            above = self._cell[level][self._gpu[CellLevel.HOST]]
            idle = np.bincount(above[whole], minlength=len(self._gpu[level]))
            broken = np.bincount(above[part], minlength=len(self._gpu[level])) > 0
            spare = (idle > count) | ((idle == count) & broken)
            holding = np.flatnonzero(spare if rest else idle >= count)
            if len(holding) == 0:
                continue
            cell = self._most_used(level, holding, left)
            units = self._gpu[CellLevel.HOST][whole[above[whole] == cell]]
            hosts = self._cell[CellLevel.HOST][self._close(units, level, count, left)]
            taken = np.flatnonzero(np.isin(self._cell[CellLevel.HOST], hosts))
            if rest == 0:
                return taken
            others = np.setdiff1d(np.flatnonzero((free >= rest) & (above == cell)), hosts)
            rack = self._cell[CellLevel.RACK]
            far = ~np.isin(rack[self._gpu[CellLevel.HOST][others]], rack[taken])
            last = others[np.lexsort((others, free[others], far))[0]]
            inside = np.flatnonzero(mask & (self._cell[CellLevel.HOST] == last))
            return np.concatenate([taken, self._close(inside, CellLevel.HOST, rest, left)])
        return None

    def _most_used(self, level: CellLevel, among: Ints, left: list[Ints]) -> int:
        """Return the cell with the fewest free GPUs.

        Among equal cells, it is the one in the most used cell above, and so on.
        """
        gpu = self._gpu[level][among]
        above = [left[up][self._cell[up][gpu]] for up in range(CellLevel.CLUSTER, level - 1, -1)]
        return int(among[np.lexsort((among, *above))[0]])

    def _close(self, units: Ints, level: int, wanted: int, left: list[Ints]) -> Ints:
        """Return ``wanted`` of the units, in as few cells as possible.

        Units are free GPUs, or the first GPUs of hosts; all of them lie in one cell of ``level``.
        The best child holds all wanted units, and the tightest such child is preferred. Without
        such a child, the child with the most units is used up, and the rest is sought in the
        others.
        """
        taken = [units[:0]]
        while wanted < len(units):
            level -= 1
            child, which, count = np.unique(
                self._cell[level][units], return_inverse=True, return_counts=True
            )
            used = left[level][child]
            while count.max() < wanted:
                most = int(np.lexsort((child, used, -count))[0])
                taken.append(units[which == most])
                wanted -= int(count[most])
                count[most] = 0
            holds = np.flatnonzero(count >= wanted)
            best = holds[np.lexsort((child[holds], used[holds], count[holds]))[0]]
            units = units[which == best]
        return np.concatenate([*taken, units])

    def _gang(self, taken: Ints) -> Gang:
        taken = np.sort(taken)
        host = np.searchsorted(self._begin, taken, side="right") - 1
        return Gang(
            members=tuple(
                (h, tuple((taken[host == h] - self._begin[h]).tolist()))
                for h in np.unique(host).tolist()
            )
        )
