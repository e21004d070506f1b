"""The columns of tables on the resources of hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tessera.formulation.base.resources import NOT_STATED, Demand, amounts_of, name_amounts
from tessera.formulation.base.tables import Bools, Ints, Table, usual


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CapacityTable(Table):
    """Base of the table of nodes: what each host has, or ``NOT_STATED``."""

    cpus: Ints = usual(NOT_STATED)  # cores
    host_bytes: Ints = usual(NOT_STATED)  # bytes of host memory

    def states_more(self) -> Bools:
        """Return whether each node states a capacity other than its GPUs, bool[nodes]."""
        is_stated: Bools = np.logical_or.reduce([has != NOT_STATED for has in amounts_of(self)])
        return is_stated


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NeedsTable(Table):
    """Base of the tables that have what jobs need of hosts in all, e.g. on each of many Cells."""

    cpus: Ints = usual(0)  # cores
    host_bytes: Ints = usual(0)  # bytes of host memory

    @property
    def of_gpus_alone(self) -> bool:
        """Return whether only GPUs are needed."""
        return not any(needs.any() for needs in amounts_of(self))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GivenTable(Table):
    """Base of the table of jobs: what each job was given with its Cell.

    It is ``NOT_STATED`` if the job has none, or if its Cell's estimates count.
    """

    current_cpus: Ints = usual(NOT_STATED)  # cores
    current_host_bytes: Ints = usual(NOT_STATED)  # bytes of host memory

    def is_given(self) -> Bools:
        """Return whether each job was given resources of hosts, bool[jobs]."""
        is_given: Bools = self.current_cpus != NOT_STATED
        return is_given


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Demands(NeedsTable):
    """The total demand of each of many Cells or columns."""

    INDEX: ClassVar[str] = "demands"
    gpus: Ints

    def of(self, index: int) -> Demand:
        """Return one demand."""
        needs = name_amounts(int(needs[index]) for needs in amounts_of(self))
        return Demand(gpus=int(self.gpus[index]), **needs)
