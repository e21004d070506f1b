"""What agents say, and what they are told."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.formulation.network.outcome import NetworkDecision
from tessera.formulation.records.jobs import AllocationRecord, JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """An agent's word that it lives. ``network_remarks``: what keeps network plans from having an effect on
    its nodes; None: as before."""

    cluster: str
    agent: str
    incarnation: str
    network_remarks: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedGang:
    """What an agent says of one member of a gang. ``phase``: starting running stopping succeeded failed."""

    job: str
    generation: int
    node: str
    phase: str
    iterations_done: float = -1.0  # of the whole job, from the leading member; negative: not known
    iter_time_s: float = 0.0  # 0: not known
    error: str = ""
    period_s: float = 0.0  # of an iteration, by the byte counters of the node; 0: not measured
    sent_bytes: float = 0.0  # by this node in an iteration


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredGang:
    """A gang that should run, whole; an agent is sent the members on its own nodes."""

    spec: JobSpec
    generation: int
    allocation: AllocationRecord
    iterations_done: float
    network: NetworkDecision | None = None  # its part in the plan in force; None: there is none yet
    job_number: int = 0  # rises with each job that is submitted; 0: not known

    @property
    def leader(self) -> str:
        """Return the node of the member that reports progress."""
        return self.allocation.shares[0][0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Desired:
    """All gangs that should run on an agent's nodes at a revision of the cluster's allocations."""

    revision: int
    gangs: tuple[DesiredGang, ...]
    network_levels: int = 0  # of the plan in force; 0: there is none
    deleted_nodes: tuple[str, ...] = ()  # of the agent's hello, since it started
