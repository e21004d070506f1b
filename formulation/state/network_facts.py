"""The network facts of a snapshot: the traffic of Cells, and the network plan in force."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from tessera.formulation.base.tables import Bools, Floats, Ints, ShapeTable, Table
from tessera.formulation.state.traffic import DescribedTraffic


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traffics(ShapeTable):
    """The traffic of Cells in one iteration, sorted by ``ORDER``."""

    INDEX: ClassVar[str] = "traffic"
    workload: Ints  # index into Snapshot.workloads
    gpu_type: Ints
    gpus: Ints
    nodes: Ints
    pipeline_degree: Ints
    plan: Ints  # index into Snapshot.plans
    document: tuple[DescribedTraffic, ...]

    def require_readable(self) -> None:
        """Read every document. Raises InvalidInput if one does not describe traffic."""
        for document in self.document:
            _ = document.cell


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StandingNetworkPlan(Table):
    """The network plan in force, by job. A job that is absent has no part in it yet."""

    INDEX: ClassVar[str] = "network plan"
    job: Ints  # index into Snapshot.jobs; -1 if it has ended
    generation: Ints  # of the allocation that the row was made for
    rank: Ints  # 0 is the most urgent
    level: Ints
    tag: Ints  # DSCP code point for the allocation's lifetime; -1 if it has none


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrafficMeasurements(Table):
    """Measurements of running jobs by agents, one row for each job and node."""

    INDEX: ClassVar[str] = "measured"
    job: Ints  # index into Snapshot.jobs
    generation: Ints  # of the allocation that was measured
    node: Ints  # index into Snapshot.nodes
    period_s: Floats  # of an iteration
    sent_bytes: Floats  # from the node to others in an iteration
    unhindered: Bools  # no job was served before or with it on its links, so no job delayed it


NO_TRAFFIC: Final = Traffics.from_rows([])
NO_NETWORK_PLAN: Final = StandingNetworkPlan.from_rows([])
NO_TRAFFIC_MEASUREMENTS: Final = TrafficMeasurements.from_rows([])
