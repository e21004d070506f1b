"""Clusters, their nodes and tenants, as asked for and as stored."""

from __future__ import annotations

from dataclasses import dataclass, field

from tessera.formulation.topologies.described import DescribedTopology
from tessera.formulation.values import GpuType


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRecord:
    """A cluster as stored."""

    name: str
    gpu_types: tuple[GpuType, ...]
    version: int
    created_s: float
    nodes: int
    gpus: int
    last_round: int  # 0: none
    epoch: int
    last_round_s: float | None = None  # seconds since 1970; None: no round, or it was pruned
    node_gpus: tuple[int, ...] = ()  # by GPU type: GPUs of its largest node; 0: it has no node
    idle: bool = False  # it has no job that has not ended


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """A node as asked for; ``version`` None: whatever is stored."""

    name: str
    gpu_type: str
    gpus: int
    rack: str = ""
    version: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """A node as stored. ``silent_s``: since its agent was heard, by the database's clock; inf: never."""

    spec: NodeSpec
    draining: bool
    version: int
    free_gpus: int
    jobs: tuple[str, ...]
    silent_s: float
    network_remarks: tuple[
        str, ...
    ] = ()  # what its agent says keeps network plans from having an effect
    drain_reason: str = ""
    drained_by: str = ""
    drained_s: float | None = None  # since 1970; None: it is not drained, or the time is not known

    @property
    def drained(self) -> bool:
        """Return whether the node is draining and no job holds a GPU there any more."""
        return self.draining and self.free_gpus == self.spec.gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSpec:
    """A tenant's settings. ``quotas`` has GPUs by type; "" is any type."""

    name: str
    weight: float = 1.0
    borrow_gpus: int = -1  # beyond its quota; -1: any number
    lends: bool = True
    quotas: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyRecord:
    """A cluster's network as stored."""

    described: DescribedTopology
    version: int
