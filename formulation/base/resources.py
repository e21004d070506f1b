"""The resources of nodes: GPUs of one type, and resources of the host, such as CPU cores.

``HOST_RESOURCES`` is the table of the latter. A new one is a row of that table, and a field of the
classes in this module and in ``state.host_tables``. All other modules go through the table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from tessera.formulation.base import limits

NOT_STATED: Final = -1
"""The amount of a resource of a node that did not state it. It limits nothing."""

_MEBIBYTE, _GIBIBYTE = 1 << 20, 1 << 30

Amounts: TypeAlias = tuple[Any, ...]
"""The amounts of all host resources, in the order of the table. Each is a number or a column."""


class HostResource(NamedTuple):
    """A resource of nodes other than GPUs."""

    name: str  # of its fields and columns, and of the fields of messages
    noun: str  # what its fields count, e.g. "bytes of host memory"
    unit: int  # in which it is shown
    unit_noun: str  # e.g. "GiB of host memory"
    label: str  # of an amount in the unit, as evidence
    row: str  # the kind of its coupling rows
    row_unit: int
    """Unit of its coupling rows. Counted in bytes, the sum over columns may exceed 2^53. Needs and
    capacity are rounded down, so the row never refuses what fits exactly."""
    change: str  # the kind of change that adds some of it to a node
    max_on_node: int
    max_needed: int  # by a job in all

    def show(self, amount: int, sign: str = "") -> str:
        """Return an amount in the unit. With the ``sign`` "+", a positive one has its sign."""
        return f"{amount:{sign}d}" if self.unit == 1 else f"{amount / self.unit:{sign}.3g}"

    def in_words(self, amount: int) -> str:
        """Return an amount in words, e.g. ``64 GiB of host memory``."""
        is_single = amount == self.unit
        noun = self.unit_noun.removesuffix("s") if is_single else self.unit_noun
        return f"{self.show(amount)} {noun}"


HOST_RESOURCES: Final = (
    HostResource(
        name="cpus",
        noun="CPU cores",
        unit=1,
        unit_noun="CPU cores",
        label="CPU cores",
        row="cpus",
        row_unit=1,
        change="ADD_CPUS",
        max_on_node=limits.MAX_CPUS_PER_NODE,
        max_needed=limits.MAX_CPUS,
    ),
    HostResource(
        name="host_bytes",
        noun="bytes of host memory",
        unit=_GIBIBYTE,
        unit_noun="GiB of host memory",
        label="host GiB",
        row="host memory",
        row_unit=_MEBIBYTE,
        change="ADD_HOST_MEMORY",
        max_on_node=limits.MAX_MEMORY_BYTES,
        max_needed=2**60,
    ),
)
"""The resources of nodes in addition to GPUs. CPU cores are first: schedulers trade them for GPUs."""

HOST_NAMES: Final = tuple(resource.name for resource in HOST_RESOURCES)

GIVEN_PREFIX: Final = "current_"
"""Prefix of the columns of ``Jobs`` that have what a job was given with its Cell."""

REPORTED_PREFIX: Final = "reported_"
"""Prefix of the amounts that the agent of a node found there."""

NO_NEEDS: Final = (0,) * len(HOST_RESOURCES)


def amounts_of(holder: object, prefix: str = "") -> Amounts:
    """Return the amounts of the host resources that are fields of ``holder``."""
    return tuple(getattr(holder, prefix + name) for name in HOST_NAMES)


def name_amounts(amounts: Iterable[Any], prefix: str = "") -> dict[str, Any]:
    """Return the ``amounts`` of the host resources by the names of their fields."""
    return {prefix + name: amount for name, amount in zip(HOST_NAMES, amounts, strict=True)}


def amounts_in_words(amounts: Iterable[int]) -> str:
    """Return the amounts in words, e.g. ``16 CPU cores and 64 GiB of host memory``."""
    pairs = zip(HOST_RESOURCES, amounts, strict=True)
    return " and ".join(resource.in_words(amount) for resource, amount in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNeeds:
    """The needs of a job on the hosts of its nodes."""

    cpus: int = 0  # cores
    host_bytes: int = 0  # bytes of host memory

    def plus_host(self, needs: HostNeeds) -> HostNeeds:
        """Return the sum of the needs."""
        return HostNeeds(cpus=self.cpus + needs.cpus, host_bytes=self.host_bytes + needs.host_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCapacity:
    """The amounts that a host has, or has left. An amount that is not stated is None, and limits nothing."""

    cpus: int | None = None  # cores
    host_bytes: int | None = None  # bytes of host memory

    @property
    def limits_nothing(self) -> bool:
        """Return whether nothing is stated."""
        return self.cpus is None and self.host_bytes is None

    def has(self, needs: HostNeeds) -> bool:
        """Return whether the host has as much."""
        return (self.cpus is None or needs.cpus <= self.cpus) and (
            self.host_bytes is None or needs.host_bytes <= self.host_bytes
        )


UNSTATED_HOST: Final = HostCapacity()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedCapacity:
    """The amounts that the agent of a node found there. An amount that it does not report is None."""

    reported_cpus: int | None = None
    reported_host_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand(HostNeeds):
    """The demand of a job on a Cell, in all or on one node. Its GPUs are of the Cell's type."""

    gpus: int

    def on_node(self, gpus: int) -> Demand:
        """Return the demand on a node with ``gpus`` of its GPUs: this share of it, rounded up."""
        return Demand(
            gpus=gpus,
            cpus=-(-self.cpus * gpus // self.gpus),
            host_bytes=-(-self.host_bytes * gpus // self.gpus),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity(HostCapacity):
    """The resources that a node has, or has left."""

    gpus: int

    def fits(self, demand: Demand) -> bool:
        """Return whether the capacity suffices for ``demand``."""
        return demand.gpus <= self.gpus and self.has(demand)

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
