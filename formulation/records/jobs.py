"""Jobs as requested and as stored, with their allocations and promises."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Final, TypeVar, get_args, get_type_hints

from tessera.formulation.base.selectors import SelectorText
from tessera.formulation.base.texts import Text
from tessera.formulation.base.values import PROFILING, Cell, EstimateSource, Workload
from tessera.formulation.job.arrays import ArrayMember
from tessera.formulation.job.dependencies import Dependency, DependencyRecord
from tessera.formulation.job.execution_plan import ExecutionPlan
from tessera.formulation.job.exit_reasons import ExitReason
from tessera.formulation.job.launch import DEFAULT_LAUNCH, LaunchSpec
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.job.reasons import Reason
from tessera.formulation.job.runtimes import PROFILER, implied_runtime
from tessera.formulation.job.techniques import Technique
from tessera.formulation.records.forecasts import JobForecast

Value = TypeVar("Value")

Changeable = Annotated[Value, "changeable"]
"""The type of a field that may change after a job was submitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A job as requested."""

    name: str
    workload: Workload
    iterations: int
    requested_gpus: int
    requested_gpu_type: str = ""  # "" for any type
    pinned_gpu_type: Changeable[bool] = False  # the requested type is required
    avoid_nodes: Changeable[tuple[str, ...]] = ()
    allowed_gpu_types: Changeable[
        tuple[str, ...]
    ] = ()  # the GPU types that it may run on; empty for all
    node_selector: Changeable[SelectorText] = ""
    """The requirements on the labels of its nodes (``formulation.base.selectors``). "" for none."""
    preferred_labels: Changeable[SelectorText] = ""
    """A selector whose nodes it prefers among equal placements. "" for none."""
    longest_run_s: Changeable[float] = math.inf
    """Seconds for which it may hold GPUs over all its starts, after which it fails. inf for no limit."""
    tenant: str = ""
    priority: Changeable[int] = 1
    weight: Changeable[float] = 1.0
    guaranteed: bool = False
    pinned: Changeable[bool] = False
    preemptible: Changeable[bool] = False  # a round may suspend or shrink it at any time for others
    deadline_s: Changeable[float] = math.inf
    restart_s: float = 60.0
    labels: Changeable[dict[str, str]] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    max_retries: int = 3
    profile: bool = False  # measure its workload's layers, on one GPU of each type
    min_gpus: Changeable[int] = 0  # smallest number of GPUs that it runs on; 0 if there is no bound
    max_gpus: Changeable[int] = 0  # largest number of GPUs that it runs on; 0 if there is no bound
    plan: ExecutionPlan | None = None
    """The execution plan that the user states for the job, or None if rounds choose its plans."""
    plan_first: bool = False
    """Whether only the first start must use the stated plan. If not, every one must."""
    submitted_plan: ExecutionPlan | str = ""
    """The execution plan that the job was submitted with, or only its id, as in traces. It binds
    nothing, but a guaranteed job is owed the speed of this plan on its request. "" if not recorded."""
    requested_cpus: int = 0  # cores that it requests in all; 0 if that is not stated
    techniques: tuple[Technique, ...] = ()
    """The techniques of execution plans that its script can use. If empty, those of its runtime."""
    launch: LaunchSpec = DEFAULT_LAUNCH
    """The way in which its program is started. A stored job always names its runtime."""
    after: tuple[Dependency, ...] = ()
    """The jobs that must end before it may start."""
    array: ArrayMember | None = None
    """Its place in the array that it was submitted with, or None if it is a job of its own."""

    @property
    def runtime(self) -> str:
        """Return the runtime: the stated one, or else the one that the job's command implies.

        A profiling task's is always ``PROFILER``.
        """
        if self.workload.model == PROFILING:
            return PROFILER
        return self.launch.runtime or implied_runtime(self.command)

    @property
    def selectors(self) -> tuple[str, str]:
        """Return the selector of the nodes that it needs, and the one of those that it prefers."""
        return self.node_selector, self.preferred_labels

    @property
    def submitted_plan_id(self) -> str:
        """Return the id of the submitted plan, or "" without one."""
        plan = self.submitted_plan
        return plan.digest if isinstance(plan, ExecutionPlan) else plan

    def contradicted_type(self) -> tuple[str, str] | None:
        """Return the field and the problem of allowed types that contradict the requested one.

        Return None if they do not.
        """
        if not self.allowed_gpu_types or self.requested_gpu_type in ("", *self.allowed_gpu_types):
            return None
        return "allowed_gpu_types", (
            f"are {', '.join(self.allowed_gpu_types)}, but the job requests {self.requested_gpu_type}; allow"
            " that, too, or request one of these"
        )

    def contradicted_bound(self) -> tuple[str, str] | None:
        """Return the field and the problem of a bound on GPUs that contradicts the request.

        Return None if no bound does.
        """
        if not 0 <= self.min_gpus <= self.requested_gpus:
            return "min_gpus", (
                f"is {self.min_gpus}, but the job requests {self.requested_gpus} GPUs; set it to at most"
                " that, or to 0 for no bound"
            )
        if self.max_gpus and self.max_gpus < self.requested_gpus:
            return "max_gpus", (
                f"is {self.max_gpus}, but the job requests {self.requested_gpus} GPUs; set it to at least"
                " that, or to 0 for no bound"
            )
        return None


CHANGEABLE_FIELDS: Final = frozenset(
    name
    for name, hint in get_type_hints(JobSpec, include_extras=True).items()
    if "changeable" in get_args(hint)
)
"""The fields of JobSpec that may change after submission."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRecord:
    """A part of an admitted job's deadline schedule. Times are in seconds since 1970."""

    start_s: float
    end_s: float
    cell: Cell


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStartRecord:
    """The start that is reserved for a waiting job. Times are in seconds since 1970."""

    start_s: float
    end_s: float
    cell: Cell
    nodes: tuple[tuple[str, int], ...]  # names with the GPUs on each, in order of name


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationRecord:
    """The Cell that a job runs on, with its GPUs: ``shares`` are (node, GPU indices)."""

    cell: Cell
    rate: float  # samples/s
    generation: int
    shares: tuple[tuple[str, tuple[int, ...]], ...]
    plan: ExecutionPlan | None = None
    """The execution plan that ``cell`` names, or None if the best plan was not recorded."""
    iter_time_s: float = 0.0
    """The iteration time that the job's process has reported once warm. 0 if it is not known."""
    iter_time_source: EstimateSource | None = None
    """MEASURED or REPLAYED. It is None if ``iter_time_s`` is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartTimes:
    """The durations of the parts of a job's start, in seconds. 0 means that it is not known."""

    checkpoint_s: float = 0.0  # from the request to stop until the last checkpoint was complete
    stop_s: float = 0.0  # from the request to stop until all processes had ended
    launch_s: float = 0.0  # from the start of the gang until the program ran on all ranks
    first_iteration_s: float = 0.0  # from then until the first iteration was done

    @property
    def total_s(self) -> float | None:
        """Return the duration of the restart, or None if the start is not complete.

        A job's first start, and one after a failure, has no stop. It says nothing about the price
        of a restart.
        """
        parts = (self.stop_s, self.launch_s, self.first_iteration_s)
        return sum(parts) if all(parts) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecord:
    """A report of a job's program on its training, in its newest parts."""

    loss: float | None = None
    memory_bytes: int = 0  # the most that a rank has held of a GPU; 0 if it is not known
    checkpoint_iterations: float | None = None  # of the newest complete checkpoint
    checkpoint_s: float | None = None  # when that was completed, since 1970; None if not known
    restart_times: RestartTimes | None = None  # of the last start whose first iteration was done
    restart_s: float = 0.0
    """The seconds that a restart costs, the median of the last complete starts. 0: not measured."""
    exit_reason: ExitReason | None = None  # of the last failure
    remark: str = ""  # on what the agent noticed last


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
    schedule: tuple[SegmentRecord, ...] = ()  # its deadline schedule
    start_by_s: float = math.inf
    """The time by which it is promised to start, in seconds since 1970. inf if it is not."""
    planned_start: PlannedStartRecord | None = None
    """The start that the last round reserved for it, or None if it reserved none."""
    opportunistic: bool = False
    service_gpu_s: float = 0.0
    run_s: float = 0.0  # seconds for which it has held GPUs over all its starts
    queued_s: float = 0.0  # time at which it last began to wait
    retry_s: float = 0.0
    """Time before which it is not tried again after a failure, in seconds since 1970, or 0."""
    training: TrainingRecord | None = None
    """It is None before the first report of a program that trains."""
    forecast: JobForecast | None = None
    """It is None before the first forecast of the job."""
    dependencies: tuple[DependencyRecord, ...] = ()
    """Those of ``spec.after`` in the same order, with what has become of their jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEventRecord:
    """An event of a job: a ``JobEvent`` and the state that it led to."""

    at_s: float  # since 1970
    event: str
    state: JobState
    detail: Text  # e.g. a round's decision and its reason; "" without any
