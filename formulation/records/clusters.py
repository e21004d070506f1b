"""Clusters, their nodes and tenants, as requested and as stored."""

from __future__ import annotations

from dataclasses import dataclass, field

from tessera.formulation.base.resources import HostCapacity, ReportedCapacity
from tessera.formulation.base.values import GpuType
from tessera.formulation.job.runtime_offers import NO_OFFERS, AgentOffers
from tessera.formulation.state.topologies.described import DescribedTopology


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRecord:
    """A cluster as stored."""

    name: str
    gpu_types: tuple[GpuType, ...]
    version: int
    created_s: float
    nodes: int
    gpus: int
    last_round: int  # 0 if there was no round
    epoch: int
    last_round_s: float | None = None
    """Seconds since 1970. It is None if there was no round, or if it was pruned."""
    node_gpus: tuple[int, ...] = ()
    """GPUs of the largest node of each GPU type. It is 0 if there is no such node."""
    idle: bool = False
    """Whether all of its jobs have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOutlook:
    """The things that time alone will bring to a cluster."""

    event_in_s: float
    """Seconds until the next event that a round can act on: a back-off or a node's probation ends, or
    a reservation begins or ends. It is 0 if jobs hold GPUs of a node that has fallen silent, and inf
    if no event is known.
    """
    start_in_s: float
    """Seconds until the next planned start, or inf. One that is late does not count."""
    promises_due_in_s: float
    """Seconds until promised deadline schedules need a round, or inf. It is 0 if they need it now."""
    look_in_s: float
    """Seconds until the next node falls silent unless it is heard, or inf without nodes."""
    schedulable: str
    """A text that stands for the set of nodes that are heard. Another set has another text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec(HostCapacity):
    """A node as requested. If ``version`` is None, any stored version matches."""

    name: str
    gpu_type: str
    gpus: int
    rack: str = ""
    version: int | None = None
    labels: dict[str, str] = field(default_factory=dict)  # by which jobs select nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord(ReportedCapacity):
    """A node as stored.

    What its agent found on the host counts where ``spec`` states nothing.

    ``silent_s`` is the time since the last sign of life of its agent, by the database's clock. It
    is inf if there never was one.
    """

    spec: NodeSpec
    draining: bool
    version: int
    free_gpus: int
    jobs: tuple[str, ...]
    silent_s: float
    network_remarks: tuple[str, ...] = ()
    """The reasons why network plans have no effect there, as its agent reports them."""
    drain_reason: str = ""
    drained_by: str = ""
    drained_s: float | None = None
    """Seconds since 1970. It is None if the node is not drained, or the time is not known."""
    faults: tuple[str, ...] = ()
    """Sentences on the faults that its agent reports at present."""
    probation_end_s: float | None = None
    """Seconds since 1970. It is None if the node is not on probation."""
    agent_labels: dict[str, str] = field(default_factory=dict)
    """The labels that its agent gives it, which count where ``spec`` has none with the same key."""

    offers: AgentOffers = NO_OFFERS
    """The runtimes that its agent can start, and those that it cannot."""

    @property
    def drained(self) -> bool:
        """Return whether the node is draining and no job holds a GPU there any more."""
        return self.draining and self.free_gpus == self.spec.gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSpec:
    """A tenant's settings. ``quotas`` has GPUs by type; "" is any type."""

    name: str
    weight: float = 1.0
    borrow_gpus: int = -1  # beyond its quota; -1 for any number
    keeps_idle_quota: bool = False
    quotas: dict[str, int] = field(default_factory=dict)
    parent: str = ""
    """The tenant above it, whose quotas its jobs count against, too. "" without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyRecord:
    """A cluster's network as stored."""

    described: DescribedTopology
    version: int
