"""Demands of jobs and capacities of nodes: GPUs of one type, CPU cores, bytes of host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from tessera.formulation.base.tables import Ints, Table

NOT_STATED: Final = -1
"""CPU cores or host memory of a node that did not state them. They limit nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The demand of a job on a Cell, in all or on one node. Its GPUs are of the Cell's type."""

    gpus: int
    cpus: int = 0  # cores
    host_bytes: int = 0

    def on_node(self, gpus: int) -> Demand:
        """Return the demand on a node with ``gpus`` of its GPUs: this share of it, rounded up."""
        return Demand(
            gpus=gpus,
            cpus=-(-self.cpus * gpus // self.gpus),
            host_bytes=-(-self.host_bytes * gpus // self.gpus),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The resources that a node has, or has left."""

    gpus: int
    cpus: int | None = None  # cores; if None, they are not stated and limit nothing
    host_bytes: int | None = None  # the same

    def fits(self, demand: Demand) -> bool:
        """Return whether the capacity suffices for ``demand``."""
        return (
            demand.gpus <= self.gpus
            and (self.cpus is None or demand.cpus <= self.cpus)
            and (self.host_bytes is None or demand.host_bytes <= self.host_bytes)
        )

    def minus(self, demand: Demand) -> Capacity:
        """Return the capacity that is left once ``demand`` is taken."""
        return Capacity(
            gpus=self.gpus - demand.gpus,
            cpus=None if self.cpus is None else self.cpus - demand.cpus,
            host_bytes=None if self.host_bytes is None else self.host_bytes - demand.host_bytes,
        )

    def plus(self, demand: Demand) -> Capacity:
        """Return the capacity once ``demand`` is given back."""
        return Capacity(
            gpus=self.gpus + demand.gpus,
            cpus=None if self.cpus is None else self.cpus + demand.cpus,
            host_bytes=None if self.host_bytes is None else self.host_bytes + demand.host_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Demands(Table):
    """The total demand of each of many Cells or columns."""

    INDEX: ClassVar[str] = "demands"
    gpus: Ints
    cpus: Ints  # cores
    host_bytes: Ints

    @property
    def of_gpus_alone(self) -> bool:
        """Return whether only GPUs are needed."""
        return not (self.cpus.any() or self.host_bytes.any())

    def of(self, index: int) -> Demand:
        """Return one demand."""
        return Demand(
            gpus=int(self.gpus[index]),
            cpus=int(self.cpus[index]),
            host_bytes=int(self.host_bytes[index]),
        )
