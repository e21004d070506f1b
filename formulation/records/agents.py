"""The messages between agents and the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tessera.formulation.answer.network.outcome import NetworkDecision
from tessera.formulation.job.execution_plan import ExecutionPlan
from tessera.formulation.job.exit_reasons import ExitReason
from tessera.formulation.records.jobs import AllocationRecord, JobSpec, RestartTimes

VALIDATION: Final = "validation"
"""The kind of fault of a node whose test after a repair has not passed yet. It drains no node."""

FREE_TEXT_KINDS: Final = frozenset({"site", VALIDATION})
"""Kinds of faults whose details are texts of the site's programs, and may vary from report to report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthFault:
    """A present fault of a GPU. If ``gpu`` is negative, it is one of the whole node."""

    gpu: int
    kind: str
    detail: str

    @property
    def sentence(self) -> str:
        """Return the fault in words."""
        return self.detail if self.gpu < 0 else f"GPU {self.gpu}: {self.detail}"

    @property
    def identity(self) -> tuple[int, str, str]:
        """Return a key by which the fault is recognised in later reports."""
        return self.gpu, self.kind, "" if self.kind in FREE_TEXT_KINDS else self.detail


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHealth:
    """The present faults of a node that is watched. Without any, it is healthy."""

    node: str
    faults: tuple[HealthFault, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A sign of life of an agent.

    ``network_remarks`` says why network plans have no effect on its nodes. If it is None, the
    remarks are unchanged.
    """

    cluster: str
    agent: str
    incarnation: str
    network_remarks: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedGang:
    """An agent's report on one member of a gang.

    ``phase`` is one of starting, running, stopping, succeeded and failed.
    """

    job: str
    generation: int
    node: str
    phase: str
    iterations_done: float = -1.0  # of the whole job, from the leader; negative if it is not known
    iter_time_s: float = 0.0  # 0 if it is not known
    error: str = ""
    period_s: float = 0.0  # length of an iteration by the node's byte counters; 0 if not measured
    sent_bytes: float = 0.0  # bytes sent by this node in an iteration
    runtime: str = ""  # name of the runtime that reported iter_time_s; "" if the agent does not say
    loss: float | None = None  # of the last iteration that reported one
    memory_bytes: int = 0  # the most that a rank of this member has held; 0 if it is not known
    checkpoint_iterations: float | None = None  # of the newest complete checkpoint
    checkpoint_age_s: float | None = 0.0  # None if it is not known
    resumed_iterations: float | None = None
    """Iterations from which this generation went on. None before it trains, and if it never does."""
    restart_times: RestartTimes | None = None  # of this start, once its first iteration is done
    exit_reason: ExitReason | None = None  # of a failed member; None if it is not known
    remark: str = ""  # a sentence for the job's user
    executed_plan: ExecutionPlan | None = None
    """The plan by which the program runs, if it tuned at this start and has finished."""
    executed_iter_time_s: float = 0.0  # as measured by tuning; 0 if it is not known
    planned_iter_time_s: float = 0.0  # of the job's plan: 0 if not known, inf if it does not run


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredGang:
    """A whole gang that should run. An agent is sent the members on its own nodes."""

    spec: JobSpec
    generation: int
    allocation: AllocationRecord
    iterations_done: float
    network: NetworkDecision | None = None
    """Its part in the network plan in force. It is None if there is no plan yet."""
    job_number: int = 0  # rises with each submitted job; 0 if it is not known
    tuning_plans: tuple[str, ...] = ()
    """Canonical JSON of the plans that its program may try at this start, the best estimate first."""

    @property
    def leader(self) -> str:
        """Return the node of the member that reports progress."""
        return self.allocation.shares[0][0]


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredState:
    """All gangs that should run on an agent's nodes at a revision of the cluster's allocations."""

    revision: int
    gangs: tuple[DesiredGang, ...]
    network_levels: int = 0  # of the network plan in force; 0 if there is no plan
    deleted_nodes: tuple[str, ...] = ()
    """Nodes of the agent's hello that were deleted after it started."""
