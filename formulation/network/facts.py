"""What a snapshot holds of the network: what Cells send, and the priorities that are in force."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from tessera.formulation.network.traffic import DescribedTraffic
from tessera.formulation.tables import Bools, CellTable, Floats, Ints, Table


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traffics(CellTable):
    """What Cells send in one iteration, in the order of the snapshot's estimates."""

    INDEX: ClassVar[str] = "traffic"
    workload: Ints  # index into Snapshot.workloads
    gpu_type: Ints
    gpus: Ints
    nodes: Ints
    pipeline_degree: Ints
    plan: Ints  # index into Snapshot.plans
    document: tuple[DescribedTraffic, ...]

    def require_readable(self) -> None:
        """Read every document. Raises InvalidInput: one describes no traffic."""
        for one in self.document:
            _ = one.cell


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Standing(Table):
    """The network plan in force, by job; a job that is not here has no part in it yet."""

    INDEX: ClassVar[str] = "standing"
    job: Ints  # index into Snapshot.jobs; -1: it has ended since
    generation: Ints  # of the allocation that it was made for
    rank: Ints  # 0 is the most urgent
    level: Ints
    tag: Ints  # DSCP code point, as long as the allocation lasts; -1: none


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Measured(Table):
    """What agents measured of jobs that run, one row a job and node."""

    INDEX: ClassVar[str] = "measured"
    job: Ints  # index into Snapshot.jobs
    generation: Ints  # of the allocation that was measured
    node: Ints  # index into Snapshot.nodes
    period_s: Floats  # of an iteration
    sent_bytes: Floats  # from the node to others in an iteration
    unhindered: (
        Bools  # no job that it met was served before it or beside it, so the period is its own
    )


NO_TRAFFIC: Final = Traffics.from_rows([])
NO_STANDING: Final = Standing.from_rows([])
NO_MEASURED: Final = Measured.from_rows([])
