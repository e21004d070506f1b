"""What jobs need of nodes, and what nodes have: GPUs of one type, CPU cores, bytes of host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from tessera.formulation.tables import Ints, Table

NOT_STATED: Final = -1
"""CPU cores or bytes of a node of which nobody said how many it has: they limit nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a job on a Cell needs in all, or on one node. The type of its GPUs is the Cell's."""

    gpus: int
    cpus: int = 0  # cores
    host_bytes: int = 0

    def on_node(self, gpus: int) -> Demand:
        """Return what it needs on a node that holds ``gpus`` of its GPUs: as large a part, rounded up."""
        return Demand(
            gpus=gpus,
            cpus=-(-self.cpus * gpus // self.gpus),
            host_bytes=-(-self.host_bytes * gpus // self.gpus),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What a node has, or has left."""

    gpus: int
    cpus: int | None = None  # cores; None: not stated, which limits nothing
    host_bytes: int | None = None  # the same

    def fits(self, demand: Demand) -> bool:
        """Return whether there is enough of everything that ``demand`` needs here."""
        return (
            demand.gpus <= self.gpus
            and (self.cpus is None or demand.cpus <= self.cpus)
            and (self.host_bytes is None or demand.host_bytes <= self.host_bytes)
        )

    def minus(self, demand: Demand) -> Capacity:
        """Return what is left once ``demand`` is taken."""
        return Capacity(
            gpus=self.gpus - demand.gpus,
            cpus=None if self.cpus is None else self.cpus - demand.cpus,
            host_bytes=None if self.host_bytes is None else self.host_bytes - demand.host_bytes,
        )

    def plus(self, demand: Demand) -> Capacity:
        """Return what there is once ``demand`` is given back."""
        return Capacity(
            gpus=self.gpus + demand.gpus,
            cpus=None if self.cpus is None else self.cpus + demand.cpus,
            host_bytes=None if self.host_bytes is None else self.host_bytes + demand.host_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Demands(Table):
    """What each of many Cells, or columns, needs in all."""

    INDEX: ClassVar[str] = "demands"
    gpus: Ints
    cpus: Ints  # cores
    host_bytes: Ints

    @property
    def of_gpus_alone(self) -> bool:
        """Return whether nothing but GPUs is needed."""
        return not (self.cpus.any() or self.host_bytes.any())

    def at(self, index: Ints) -> Demands:
        """Return the demands of ``index`` (int64[any], each may be named often)."""
        gpus, none = self.gpus[index], np.zeros(len(index), np.int64)
        if self.of_gpus_alone:
            return Demands(gpus=gpus, cpus=none, host_bytes=none)
        return Demands(gpus=gpus, cpus=self.cpus[index], host_bytes=self.host_bytes[index])

    def of(self, index: int) -> Demand:
        """Return one demand."""
        return Demand(
            gpus=int(self.gpus[index]),
            cpus=int(self.cpus[index]),
            host_bytes=int(self.host_bytes[index]),
        )
