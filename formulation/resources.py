"""The values that cross the border between the service and its store: what users name and read."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tessera.formulation.decisions import CHANGES_GPUS, Decision
from tessera.formulation.goals import GoalResult
from tessera.formulation.lifecycle import JobState
from tessera.formulation.network.outcome import NetworkDecision, NetworkOutcome
from tessera.formulation.reasons import Reason
from tessera.formulation.runtimes import PROFILER
from tessera.formulation.snapshot import (
    NO_LEGS,
    PROFILING,
    GpuType,
    Legs,
    Snapshot,
    Source,
    Workload,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What makes a call safe to repeat: its id, its method and a digest of its body (AIP-155)."""

    id: str
    method: str
    digest: str  # SHA-256 of the deterministic encoding of the request, hex


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
class Heartbeat:
    """An agent's word that it lives. ``network_remarks``: what keeps network plans from having an effect on
    its nodes; None: as before."""

    cluster: str
    agent: str
    incarnation: str
    network_remarks: tuple[str, ...] | None = None


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
class JobSpec:
    """A job as asked for."""

    name: str
    workload: Workload
    iterations: int
    requested_gpus: int
    requested_type: str = ""  # "": any
    pinned_type: bool = False  # the requested type is a demand
    avoid_nodes: tuple[str, ...] = ()
    tenant: str = ""
    queue: int = 1
    weight: float = 1.0
    guaranteed: bool = False
    movable: bool = True
    deadline_s: float = math.inf
    restart_s: float = 60.0
    labels: dict[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    max_retries: int = 3
    profile: bool = False  # its workload's layers are to be measured, on one GPU of each type
    min_gpus: int = 0  # it runs on no fewer GPUs; 0: no bound
    max_gpus: int = 0  # it runs on no more GPUs; 0: no bound

    @property
    def runtime(self) -> str:
        """Return what runs it: ``PROFILER`` for a profiling task; "": what agents run by default."""
        return PROFILER if self.workload.model == PROFILING else ""

    def contradicted_bound(self) -> tuple[str, str] | None:
        """Return the field and the problem of a bound on GPUs that contradicts the request, if one does."""
        if not 0 <= self.min_gpus <= self.requested_gpus:
            return "min_gpus", (
                f"is {self.min_gpus}, but the job requests {self.requested_gpus} GPUs: give at most that,"
                " or 0 for no bound"
            )
        if self.max_gpus and self.max_gpus < self.requested_gpus:
            return "max_gpus", (
                f"is {self.max_gpus}, but the job requests {self.requested_gpus} GPUs: give at least that,"
                " or 0 for no bound"
            )
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSpec:
    """A tenant's settings. ``quotas`` has GPUs by type; "" is any type."""

    name: str
    weight: float = 1.0
    borrow_gpus: int = -1  # beyond its quota; -1: any number
    lends: bool = True
    quotas: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LegRecord:
    """A part of the schedule that an admitted job was promised; times in seconds since 1970."""

    start_s: float
    end_s: float
    gpu_type: str
    gpus: int
    pipeline_degree: int
    plan: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationRecord:
    """The Cell that a job runs on and its GPUs as (node, GPU indices)."""

    gpu_type: str
    gpus: int
    pipeline_degree: int
    plan: str
    rate: float  # samples/s
    generation: int
    shares: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A job as stored."""

    cluster: str
    spec: JobSpec
    version: int
    state: JobState
    created_s: float
    started_s: float | None
    ended_s: float | None
    iterations_done: float
    generation: int
    retries: int
    last_error: str
    allocation: AllocationRecord | None
    reason: Reason | None  # why the last round left it waiting
    reason_round: int
    admitted: bool = False  # its deadline is promised
    certificate: tuple[LegRecord, ...] = ()  # the schedule that meets it
    opportunistic: bool = False
    service_gpu_s: float = 0.0
    queued_s: float = 0.0  # when it last began to wait
    retry_s: float = 0.0  # it failed, and is not tried again before then, since 1970; 0: it may be


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEventRecord:
    """Something that happened to a job: a ``JobEvent`` and the state that it led to."""

    at_s: float  # since 1970
    event: str
    state: JobState
    detail: str  # e.g. what a round decided, and why; "": nothing to add


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateRecord:
    """An estimate as stored. ``iter_time_s`` inf: tried, does not run."""

    workload: Workload
    gpu_type: str
    gpus: int
    nodes: int  # 0 on the way in: the fewest that the cluster's nodes allow
    pipeline_degree: int
    plan: str
    iter_time_s: float
    source: Source
    provenance: str = ""
    sd: float | None = None  # of the logarithm of iter_time_s; None: not known
    traffic: str = ""  # of its plan, CellTraffic (``network.traffic``) as JSON; "": not known


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model of a user's own, so that its Cells can be estimated, and how it is trained."""

    model: str  # as workloads name it
    params: str
    architecture: str  # YAML or JSON, read by ``tessera.estimator.architectures.files``
    sequence: int = 0  # in place of the architecture's; 0: the architecture's
    dtype: str = ""  # f32, bf16 or f16 in place of the architecture's; "": the architecture's
    flash: bool = False  # attention does not keep its scores
    micro_batches: int = 16
    state_bytes: float = 16.0  # of a parameter with its gradient and optimizer states
    checkpointing: bool = False
    zero: int = 0  # stage of ZeRO
    step: str = ""  # JAX step that profiling measures, module:function; "": none
    step_arguments: tuple[str, ...] = ()  # of its function, "key=value"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRow:
    """A kind of layer of a workload, as a task measured it on one device of a GPU type."""

    workload: Workload
    gpu_type: str
    task: str  # who measured
    source: str  # what was measured: a step with its arguments
    kind: str
    layers: int  # of the model that are of this kind
    samples: float
    tp: int
    dtype: str
    forward_s: float
    backward_s: float
    method: str
    repeats: int
    device_s: float  # what measuring held of the device
    device: str
    versions: tuple[tuple[str, str], ...]  # by name
    date: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilingJob:
    """A profiling task as it stands. ``service_gpu_s``: what it has held of GPUs."""

    name: str
    gpu_type: str
    state: JobState
    last_error: str
    service_gpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementRecord:
    """A Cell that ran: the median of what its job's leader reported, warmed up."""

    workload: Workload
    gpu_type: str
    gpus: int
    nodes: int
    pipeline_degree: int
    plan: str
    iter_time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A GPU type of a cluster and the nodes that it comes in there."""

    gpu_type: GpuType
    node_gpus: int  # of the largest node; 0: there is none
    gpus: int  # of all nodes, drained ones too


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A workload of live jobs whose estimates, if there are any, the service derives itself."""

    workload: Workload
    requests: tuple[int, ...]  # GPU counts that its jobs ask for, rising
    counts: tuple[int, ...]  # GPU counts of its analytic estimates and of its jobs' bounds, rising
    derived_from: str  # digest of what its estimates were computed from; "": there are none
    profile: bool = False  # one of its jobs asks for profiling


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimation:
    """All that a cluster's estimates are computed from."""

    kinds: tuple[Kind, ...]
    models: tuple[ModelSpec, ...]  # by (model, params)
    measurements: tuple[MeasurementRecord, ...]  # the latest, oldest first
    wanted: tuple[Wanted, ...]  # in order of submission
    profiles: tuple[ProfileRow, ...] = ()  # of models with live jobs, oldest first
    profiling: tuple[ProfilingJob, ...] = ()  # all tasks, in order of submission


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSummary:
    """What is known of a round beside its decisions. Numbers in units of the objective."""

    cluster: str
    number: int  # 0: a dry run
    epoch: int
    created_s: float
    options: dict[str, str | float | int | bool]
    status: str
    outcome: str  # committed, dry_run, refused
    objective: float
    bound: float
    gap: float
    placed_score: float
    greedy_objective: float
    verified: bool
    violations: tuple[str, ...]
    snapshot_digest: str
    solver: str
    work: tuple[tuple[str, float], ...]
    goals: tuple[GoalResult, ...]
    prices: dict[str, float]
    used_gpus: dict[str, int]
    seconds: dict[str, float]
    running: int
    waiting: int
    started: int
    suspended: int
    changed: int
    samples_per_s: float
    unit: str
    versions: tuple[str, ...]
    bound_is_trivial: bool = False  # nothing was proven: see GoalResult


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    """A decision as stored, by names."""

    job: str
    kind: str
    allocation: AllocationRecord | None
    reason: Reason | None
    restart_price: float
    applied: bool
    skipped: str  # why it was not applied; "" where it was
    admitted: bool = False
    opportunistic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """A round with its decisions."""

    summary: RoundSummary
    decisions: tuple[DecisionRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCommit:
    """What the round loop asks the store to commit, all or nothing."""

    snapshot: Snapshot
    encoded: bytes  # the snapshot's canonical JSON, by codec.encode
    decisions: tuple[Decision, ...]  # empty where the round was refused
    summary: RoundSummary
    legs: Legs = NO_LEGS  # the schedules of admitted jobs
    request: Request | None = None
    network: NetworkOutcome | None = None  # None: the network is not described


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Ages and counts up to which a store keeps what is over. Infinity: for ever."""

    requests_s: float = math.inf
    """Request ids: a call that is repeated later is carried out again."""
    rounds_s: float = math.inf
    """Rounds with their decisions, and network plans."""
    least_rounds: int = 0
    """Rounds of each cluster that stay, however old they are."""
    most_rounds: float = math.inf
    """Rounds of each cluster that stay, however young the others are."""
    most_snapshots: float = math.inf
    """Latest rounds of each cluster whose snapshots stay."""
    jobs_s: float = math.inf
    """Jobs since their end, with their histories; older entries of live jobs' histories; measurements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Upper bounds on what users can create: clusters in all, and the rest for each cluster."""

    clusters: int = 1000
    nodes: int = 20_000
    models: int = 1000
    tenants: int = 10_000

    def of(self, kind: str) -> int:
        """Return the bound of a kind; a cluster has no more agents than nodes."""
        return int(getattr(self, "nodes" if kind == "agents" else kind))


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkCommit:
    """A network plan made between rounds, for the allocations as they were in ``snapshot``."""

    snapshot: Snapshot
    outcome: NetworkOutcome
    cause: str  # start, end, topology, measured
    seconds: float  # that planning took


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyRecord:
    """A cluster's network as stored; ``document`` is canonical JSON."""

    document: str
    version: int


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CellFilter:
    """The Cells to delete: those that match everything that is given."""

    workload: Workload | None = None  # None: of all workloads
    gpu_type: str = ""  # "": on all types
    gpus: int = 0  # 0: with any number of GPUs


def decision_record(snapshot: Snapshot, decision: Decision, skipped: str = "") -> DecisionRecord:
    """Return ``decision`` by names; ``skipped`` says why it was not applied, if it was not."""
    job, jobs = decision.job, snapshot.jobs
    allocation = None
    if decision.gang is not None:
        fresh = decision.kind in CHANGES_GPUS
        allocation = AllocationRecord(
            gpu_type=snapshot.gpu_types[decision.gpu_type].name,
            gpus=decision.gpus,
            pipeline_degree=decision.pipeline_degree,
            plan=snapshot.plans[decision.plan],
            rate=decision.rate,
            generation=int(jobs.generation[job]) + (1 if fresh else 0),
            shares=tuple((snapshot.nodes.name[n], gpus) for n, gpus in decision.gang.members),
        )
    return DecisionRecord(
        job=jobs.name[job], kind=decision.kind, allocation=allocation, reason=decision.reason,
        restart_price=decision.restart_price, applied=not skipped, skipped=skipped,
        admitted=decision.admitted, opportunistic=decision.opportunistic,
    )  # fmt: skip
