"""The facts of a round on reservations: windows of time in which GPUs serve some jobs, or none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from tessera.formulation.base.tables import Bools, Floats, Ints, Table


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reservations(Table):
    """Reservations, by start and name. Those that have ended have no effect.

    One is either of ``gpus`` GPUs of ``gpu_type``, or of the nodes that ``ReservedNodes`` has.
    """

    INDEX: ClassVar[str] = "reservations"
    name: tuple[str, ...]
    start_s: Floats  # seconds since 1970
    end_s: Floats
    gpu_type: Ints  # index into Snapshot.gpu_types; -1 for one of nodes
    gpus: Ints  # 0 for one of nodes
    maintenance: Bools  # if true, its nodes serve no job

    def are_active(self, now_s: float) -> Bools:
        """Return whether each window has begun and not ended, bool[reservations]."""
        active: Bools = (self.start_s <= now_s) & (now_s < self.end_s)
        return active

    def next_change_s(self, now_s: float) -> float:
        """Return the first time after ``now_s`` at which a window begins or ends, or inf.

        A round is due then. Times are in seconds since 1970.
        """
        moments = np.concatenate([self.start_s, self.end_s])
        return float(moments[moments > now_s].min(initial=np.inf))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReservedNodes(Table):
    """The nodes that reservations name."""

    INDEX: ClassVar[str] = "reserved nodes"
    reservation: Ints  # index into Snapshot.reservations
    node: Ints  # index into Snapshot.nodes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entitlements(Table):
    """The jobs that reservations serve."""

    INDEX: ClassVar[str] = "entitlements"
    reservation: Ints  # index into Snapshot.reservations
    job: Ints  # index into Snapshot.jobs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExcludedJobs(Table):
    """The jobs that must leave a reservation's GPUs to others.

    They must not run on them from the beginning of its window on. A column of a job that ends
    before is not affected.
    """

    INDEX: ClassVar[str] = "excluded jobs"
    reservation: Ints  # index into Snapshot.reservations
    job: Ints  # index into Snapshot.jobs
    by_node: Bools  # if false, only its GPUs are counted, because it can be moved away in time


NO_RESERVATIONS: Final = Reservations.from_rows([])
NO_RESERVED_NODES: Final = ReservedNodes.from_rows([])
NO_ENTITLEMENTS: Final = Entitlements.from_rows([])
NO_EXCLUDED_JOBS: Final = ExcludedJobs.from_rows([])
