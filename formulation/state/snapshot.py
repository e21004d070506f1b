"""The data of a round, read in one transaction: cluster, jobs, estimates, allocations, clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.resources import (
    GIVEN_PREFIX,
    HOST_NAMES,
    NOT_STATED,
    Capacity,
    amounts_of,
    name_amounts,
)
from tessera.formulation.base.tables import Bools, CellTable, Floats, Ints, ShapeTable, Table, usual
from tessera.formulation.base.values import (
    NO_CELL,
    PROFILING,
    Cell,
    CellKey,
    GpuType,
    Hold,
    Workload,
)
from tessera.formulation.job.dependencies import CONDITIONS
from tessera.formulation.job.lifecycle import SCHEDULABLE, JobState
from tessera.formulation.state.decayed_use import HOST_CODES, NO_DECAYED_USE, DecayedUse
from tessera.formulation.state.host_tables import CapacityTable, GivenTable, NeedsTable
from tessera.formulation.state.last_round import (
    NO_EXPECTED_RELEASES,
    NO_PLANNED_NODES,
    NO_PLANNED_STARTS,
    NO_PRICES,
    NO_SEGMENTS,
    ExpectedReleases,
    PlannedNodes,
    PlannedStarts,
    Prices,
    ScheduleSegments,
)
from tessera.formulation.state.network_facts import (
    NO_NETWORK_PLAN,
    NO_TRAFFIC,
    NO_TRAFFIC_MEASUREMENTS,
    StandingNetworkPlan,
    TrafficMeasurements,
    Traffics,
)
from tessera.formulation.state.permissions import (
    NO_ALLOWED_GPU_TYPES,
    NO_AVOIDED_NODES,
    NO_SELECTORS,
    NO_UNMATCHED_NODES,
    AllowedGpuTypes,
    AvoidedNodes,
    Selectors,
    UnmatchedNodes,
)
from tessera.formulation.state.plan_tables import (
    NO_PLAN_KINDS,
    NO_REFUSED_PLANS,
    NO_RUNTIMES,
    PlanKinds,
    RefusedPlans,
    Runtimes,
)
from tessera.formulation.state.reserved import (
    NO_ENTITLEMENTS,
    NO_EXCLUDED_JOBS,
    NO_RESERVATIONS,
    NO_RESERVED_NODES,
    Entitlements,
    ExcludedJobs,
    Reservations,
    ReservedNodes,
)
from tessera.formulation.state.tenants import NO_QUOTAS, NO_TENANTS, Quotas, Tenants
from tessera.formulation.state.topologies.described import DescribedTopology

STATES: tuple[JobState, ...] = tuple(JobState)
"""State of each code in ``Jobs.state``."""

STATE_CODE: dict[JobState, int] = {state: code for code, state in enumerate(STATES)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Nodes(CapacityTable):
    """The cluster's nodes. A node holds GPUs of one type."""

    INDEX: ClassVar[str] = "nodes"
    name: tuple[str, ...]
    gpu_type: Ints  # index into Snapshot.gpu_types
    gpus: Ints
    rack: tuple[str, ...]
    schedulable: Bools  # False if the node is draining, or was silent for longer than its lease
    version: Ints

    def capacity(self, node: int) -> Capacity:
        """Return the capacity of ``node``."""
        host = (int(has[node]) for has in amounts_of(self))
        stated = name_amounts(None if amount == NOT_STATED else amount for amount in host)
        return Capacity(gpus=int(self.gpus[node]), **stated)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Estimates(NeedsTable, ShapeTable):
    """Predicted or measured iteration times, sorted by ``ORDER``. All shapes of a Cell need the same."""

    INDEX: ClassVar[str] = "estimates"
    workload: Ints  # index into Snapshot.workloads
    gpu_type: Ints
    gpus: Ints
    nodes: Ints  # nodes that the GPUs are spread over; with gpus, the shape
    pipeline_degree: Ints  # BEST_FOUND if it was not recorded
    plan: Ints  # index into Snapshot.plans
    iter_time_s: Floats  # inf if the shape was tried and does not run
    source: Ints  # Source
    sd: Floats = usual(np.nan)
    """Standard deviation of the logarithm of ``iter_time_s``. It is NaN if it is not known."""
    complete: Bools = usual(False)
    """Whether the estimate's profile has all shapes on which the workload runs on the GPU type."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Jobs(GivenTable, CellTable):
    """The jobs that have not ended, in order of submission.

    A column that is not given has the values of a waiting job that was submitted with defaults.
    """

    INDEX: ClassVar[str] = "jobs"
    CELL: ClassVar[tuple[str, ...]] = (
        "current_type",
        "current_gpus",
        "current_degree",
        "current_plan",
    )
    name: tuple[str, ...]
    version: Ints = usual(1)
    state: Ints = usual(STATE_CODE[JobState.QUEUED])  # index into STATES
    workload: Ints
    iterations: Floats  # of the whole job
    iterations_left: Floats
    requested_gpus: Ints
    requested_gpu_type: Ints = usual(-1)  # index into Snapshot.gpu_types; -1 for any type
    pinned_gpu_type: Bools = usual(
        False
    )  # if true, the requested type is required, not only preferred
    tenant: tuple[str, ...] = usual("")
    priority: Ints = usual(1)  # 1 is served first
    weight: Floats = usual(1.0)
    guaranteed: Bools = usual(False)
    pinned: Bools = usual(False)  # if true, defragmentation never moves the job
    deadline_s: Floats = usual(np.inf)  # seconds since 1970; inf if there is no deadline
    admitted: Bools = usual(False)  # a round has promised that the deadline will be met
    opportunistic: Bools = usual(False)
    """Whether the job was started past a blocked one. It gives way once the blocked job fits."""
    submit_s: Floats  # seconds since 1970
    queued_s: Floats  # when it last began to wait: its submission, or the loss of its GPUs
    since_s: Floats = usual(0.0)  # start of its allocation, seconds since 1970; 0 if it has none
    progress_s: Floats = usual(0.0)
    """When its gang last reported the progress of ``iterations_left``, in seconds since 1970. 0 if
    that is its present progress."""
    service_gpu_s: Floats = usual(0.0)  # GPU-seconds that it has held until now
    restart_s: Floats = usual(60.0)  # duration of a start, move, resize or replan
    unsaved_since_s: Floats = usual(0.0)
    """Time since which its training is in no checkpoint that a restart would find, in seconds since
    1970. 0 for a job that writes a checkpoint when it is stopped, or of which that is not known."""
    generation: Ints = usual(0)  # of the latest allocation; 0 if there was none yet
    # The Cell that an ACTIVE job runs on. It is NO_CELL without one.
    current_type: Ints = usual(-1)  # -1 without a Cell
    current_gpus: Ints = usual(0)
    current_degree: Ints = usual(0)
    current_plan: Ints = usual(0)  # index into Snapshot.plans
    min_gpus: Ints = usual(0)
    """Smallest GPU count of the job's columns. 0 means that there is no bound."""
    max_gpus: Ints = usual(0)
    """Largest GPU count of the job's columns. 0 means that there is no bound."""
    plan: Ints = usual(-1)
    """Execution plan that the job's user states, an index into Snapshot.plans. -1 without one."""
    plan_first: Bools = usual(False)
    """Whether only the job's first start must use the stated plan."""
    submitted_plan: Ints = usual(-1)
    """Execution plan that the job was submitted with, an index into Snapshot.plans. It binds nothing.
    -1 if it is not recorded."""
    requested_cpus: Ints = usual(0)  # cores in all; 0 if they are not stated
    required_selector: Ints = usual(-1)
    """Selector that its nodes must match, an index into Snapshot.selectors. -1 without one."""
    preferred_selector: Ints = usual(-1)
    """Selector whose nodes it prefers, an index into Snapshot.selectors. -1 without one."""
    run_left_s: Floats = usual(np.inf)
    """Seconds for which it may still hold GPUs, after which it fails. inf without such a limit."""
    runtime: Ints = usual(-1)
    """Runtime of the job and its techniques, an index into Snapshot.runtimes. -1 if it runs any plan."""
    failures: Ints = usual(0)  # consecutive failures
    retry_s: Floats = usual(0.0)
    """Time before which the job is not tried again, in seconds since 1970. 0 means immediately."""
    unmet: Ints = usual(0)
    """Dependencies of the job that are not met yet. It may not run until this is 0."""
    array: Ints = usual(-1)
    """Array of the job, if its members share a limit: a number that all of them have. -1 if not."""
    array_limit: Ints = usual(0)
    """Largest number of the array's members that may run at the same time. 0 without a limit."""
    unestimated: Bools = usual(False)
    """Whether the job's workload has no estimates, and none can be derived. If the job states a GPU
    type, it runs on its request at an unknown rate (``formulation.answer.unknown_rates``)."""
    preemptible: Bools = usual(False)  # if true, a round may suspend or shrink the job at any time
    start_by_s: Floats = usual(np.inf)
    """Time by which a round has promised that the waiting job starts, in seconds since 1970. inf if
    none has."""
    assumed_efficiency: Floats = usual(np.nan)
    """Share of linear speed-up at which a round assumes a job of unknown rate to run. It is NaN for
    all other jobs, and in all stored snapshots."""

    def among(self, states: Iterable[JobState]) -> Bools:
        """Return whether each job is in one of ``states``, bool[jobs]."""
        wanted = np.zeros(len(STATES), dtype=np.bool_)
        wanted[[STATE_CODE[state] for state in states]] = True
        is_among: Bools = wanted[self.state]
        return is_among

    def may_run(self) -> Bools:
        """Return whether a round may give each job GPUs, by its state and dependencies, bool[jobs]."""
        may_run: Bools = self.among(SCHEDULABLE) & (self.unmet == 0)
        return may_run


WITHOUT_CELL: Final[dict[str, int]] = {
    **dict(zip(Jobs.CELL, NO_CELL, strict=True)),
    **{GIVEN_PREFIX + name: NOT_STATED for name in HOST_NAMES},
}
"""The columns of ``Jobs`` on its Cell, and on what it was given with it, of a job without one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Allocations(Table):
    """One row for each pair of a GPU and a job that holds or awaits it."""

    INDEX: ClassVar[str] = "allocations"
    job: Ints  # index into Snapshot.jobs; -1 for a job that has ended or is not in the snapshot
    node: Ints  # index into Snapshot.nodes
    gpu: Ints  # index of the GPU on its node
    hold: Ints  # Hold
    generation: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dependencies(Table):
    """The dependencies on single jobs that are not met yet. Those on arrays are only counted."""

    INDEX: ClassVar[str] = "dependencies"
    job: Ints  # index into Snapshot.jobs, the one that waits
    on: Ints  # index into Snapshot.jobs, the one that must end
    condition: Ints  # index into CONDITIONS


NO_DEPENDENCIES: Final = Dependencies.from_rows([])


_AMOUNTS: Final = (
    ("nodes", "gpus", 0, True),
    *(("nodes", name, NOT_STATED, True) for name in HOST_NAMES),
    ("estimates", "gpus", 1, True),
    ("estimates", "nodes", 1, True),
    ("estimates", "iter_time_s", 0, False),
    *(("estimates", name, 0, True) for name in HOST_NAMES),
    ("jobs", "iterations", 0, True),
    ("jobs", "iterations_left", 0, True),
    ("jobs", "requested_gpus", 1, True),
    ("jobs", "requested_cpus", 0, True),
    *(("jobs", GIVEN_PREFIX + name, NOT_STATED, True) for name in HOST_NAMES),
    ("jobs", "min_gpus", 0, True),
    ("jobs", "max_gpus", 0, True),
    ("jobs", "weight", 0, True),
    ("jobs", "restart_s", 0, True),
    ("jobs", "progress_s", 0, True),
    ("jobs", "service_gpu_s", 0, True),
    ("jobs", "unsaved_since_s", 0, True),
    ("jobs", "failures", 0, True),
    ("jobs", "unmet", 0, True),
    ("jobs", "array", -1, True),
    ("jobs", "array_limit", 0, True),
    ("jobs", "retry_s", 0, True),
    ("jobs", "run_left_s", 0, False),
    ("tenants", "weight", 0, True),
    ("tenants", "borrow_gpus", -1, True),
    ("quotas", "gpus", 0, True),
    ("schedule_segments", "gpus", 1, True),
    ("planned_starts", "gpus", 1, True),
    ("planned_nodes", "gpus", 1, True),
    ("prices", "price", 0, True),
    ("traffic_measurements", "period_s", 0, True),
    ("traffic_measurements", "sent_bytes", 0, True),
    ("reservations", "gpus", 0, True),
    ("decayed_use", "amount", 0, True),
)
"""The columns of numbers that have a least value: table, column, that value, and whether inf is refused."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """The data of a round. Immutable; ``codec.digest`` names its content."""

    cluster: str
    epoch: int
    round_number: int  # of the round being decided, from 1
    now_s: float  # the database's clock, seconds since 1970
    gpu_types: tuple[GpuType, ...]
    nodes: Nodes
    workloads: tuple[Workload, ...]
    plans: tuple[str, ...]  # ids of execution plans; "" is the best that the Cell's author found
    estimates: Estimates
    jobs: Jobs
    allocations: Allocations
    tenants: Tenants = NO_TENANTS
    quotas: Quotas = NO_QUOTAS
    avoided_nodes: AvoidedNodes = NO_AVOIDED_NODES
    schedule_segments: ScheduleSegments = NO_SEGMENTS
    planned_starts: PlannedStarts = NO_PLANNED_STARTS
    planned_nodes: PlannedNodes = NO_PLANNED_NODES
    expected_releases: ExpectedReleases = NO_EXPECTED_RELEASES
    """What planned starts count on. A round fills it, and it is empty in stored snapshots."""
    prices: Prices = NO_PRICES
    topology: DescribedTopology | None = None
    """The cluster's network. If it is None, the network is not described."""
    traffic: Traffics = NO_TRAFFIC
    network_plan: StandingNetworkPlan = NO_NETWORK_PLAN
    traffic_measurements: TrafficMeasurements = NO_TRAFFIC_MEASUREMENTS
    runtimes: Runtimes = NO_RUNTIMES
    refused_plans: RefusedPlans = NO_REFUSED_PLANS
    plan_kinds: PlanKinds = NO_PLAN_KINDS
    dependencies: Dependencies = NO_DEPENDENCIES
    allowed_gpu_types: AllowedGpuTypes = NO_ALLOWED_GPU_TYPES
    selectors: Selectors = NO_SELECTORS
    unmatched_nodes: UnmatchedNodes = NO_UNMATCHED_NODES
    reservations: Reservations = NO_RESERVATIONS
    reserved_nodes: ReservedNodes = NO_RESERVED_NODES
    """The nodes that reservations name. A round adds those that it chooses (``with_reservations``)."""
    entitlements: Entitlements = NO_ENTITLEMENTS
    excluded_jobs: ExcludedJobs = NO_EXCLUDED_JOBS
    """The jobs that reservations keep out. A round fills it, and it is empty in stored snapshots."""
    decayed_use: DecayedUse = NO_DECAYED_USE
    """What tenants used until now. It is empty if nobody asked for it."""
    use_half_life_s: float = 0.0
    """The half-life by which ``uses`` decays, or 0 if nobody asked for it."""
    clock_factor: float = 1.0
    """Seconds of training that the cluster's agents replay in a second. 1 if jobs really train."""

    def __post_init__(self) -> None:
        """Check that every index is in range and every number is meaningful."""
        if not 0 < self.clock_factor < np.inf:
            raise InvalidInput("clock_factor", "must be above 0 and finite")
        if not 0 <= self.use_half_life_s < np.inf:
            raise InvalidInput("use_half_life_s", "must be 0 or a positive number of seconds")
        self._require_indices()
        self._require_amounts()
        if self.jobs.unestimated.any() and "" not in self.plans:
            raise InvalidInput("plans", 'must have "", by which jobs without an estimate run')
        if (self.estimates.sd < 0).any() or np.isinf(self.estimates.sd).any():
            raise InvalidInput("estimates.sd", "must be numbers of at least 0, or NaN if not known")

    def _require_indices(self) -> None:
        """Refuse an index that is out of range."""
        types, works = len(self.gpu_types), len(self.workloads)
        for table, column, low, high in (
            ("nodes", "gpu_type", 0, types),
            ("estimates", "gpu_type", 0, types),
            ("estimates", "workload", 0, works),
            ("estimates", "plan", 0, len(self.plans)),
            ("jobs", "workload", 0, works),
            ("jobs", "state", 0, len(STATES)),
            ("jobs", "requested_gpu_type", -1, types),
            ("jobs", "current_type", -1, types),
            ("jobs", "current_plan", 0, max(1, len(self.plans))),
            ("jobs", "plan", -1, len(self.plans)),
            ("jobs", "submitted_plan", -1, len(self.plans)),
            ("plan_kinds", "plan", 0, len(self.plans)),
            ("jobs", "runtime", -1, len(self.runtimes)),
            ("refused_plans", "runtime", 0, len(self.runtimes)),
            ("refused_plans", "plan", 0, len(self.plans)),
            ("allocations", "job", -1, len(self.jobs)),
            ("allocations", "node", 0, len(self.nodes)),
            ("tenants", "parent", -1, len(self.tenants)),
            ("quotas", "tenant", 0, len(self.tenants)),
            ("quotas", "gpu_type", -1, types),
            ("avoided_nodes", "job", 0, len(self.jobs)),
            ("avoided_nodes", "node", 0, len(self.nodes)),
            ("dependencies", "job", 0, len(self.jobs)),
            ("dependencies", "on", 0, len(self.jobs)),
            ("dependencies", "condition", 0, len(CONDITIONS)),
            ("allowed_gpu_types", "job", 0, len(self.jobs)),
            ("allowed_gpu_types", "gpu_type", 0, types),
            ("jobs", "required_selector", -1, len(self.selectors)),
            ("jobs", "preferred_selector", -1, len(self.selectors)),
            ("unmatched_nodes", "selector", 0, len(self.selectors)),
            ("unmatched_nodes", "node", 0, len(self.nodes)),
            ("schedule_segments", "job", 0, len(self.jobs)),
            ("schedule_segments", "gpu_type", 0, types),
            ("schedule_segments", "plan", 0, max(1, len(self.plans))),
            ("planned_starts", "job", 0, len(self.jobs)),
            ("planned_starts", "gpu_type", 0, types),
            ("planned_starts", "plan", 0, max(1, len(self.plans))),
            ("planned_nodes", "start", 0, len(self.planned_starts)),
            ("planned_nodes", "node", 0, len(self.nodes)),
            ("traffic", "workload", 0, works),
            ("traffic", "gpu_type", 0, types),
            ("traffic", "plan", 0, len(self.plans)),
            ("network_plan", "job", -1, len(self.jobs)),
            ("traffic_measurements", "job", 0, len(self.jobs)),
            ("traffic_measurements", "node", 0, len(self.nodes)),
            ("reservations", "gpu_type", -1, types),
            ("reserved_nodes", "reservation", 0, len(self.reservations)),
            ("reserved_nodes", "node", 0, len(self.nodes)),
            ("entitlements", "reservation", 0, len(self.reservations)),
            ("entitlements", "job", 0, len(self.jobs)),
            ("decayed_use", "resource", min(HOST_CODES), types),
            ("excluded_jobs", "reservation", 0, len(self.reservations)),
            ("excluded_jobs", "job", 0, len(self.jobs)),
        ):
            values = getattr(getattr(self, table), column)
            if len(values) and not (values.min() >= low and values.max() < high):
                raise InvalidInput(f"{table}.{column}", f"must lie in [{low}, {high})")

    def _require_amounts(self) -> None:
        """Refuse a number that is too small, infinite or NaN."""
        for table, column, least, is_finite in _AMOUNTS:
            values = getattr(getattr(self, table), column)
            if not len(values):
                continue
            if not values.min() >= least or (is_finite and values.max() == np.inf):  # and NaN
                raise InvalidInput(f"{table}.{column}", f"must be numbers of at least {least}")

    def cell(self, key: CellKey) -> Cell:
        """Return the Cell of ``key``, with names."""
        return key.named(self.gpu_types, self.plans)

    def key(self, cell: Cell) -> CellKey:
        """Return a Cell as indices. The snapshot must have its type and execution plan."""
        return CellKey(
            gpu_type=[kind.name for kind in self.gpu_types].index(cell.gpu_type),
            gpus=cell.gpus,
            pipeline_degree=cell.pipeline_degree,
            plan=self.plans.index(cell.plan),
        )

    def kinds_of_plans(self) -> Ints:
        """Return the kind of each execution plan as a number, int64[plans].

        Plans of one kind differ in nothing but their data-parallel degree.
        """
        kinds = np.arange(len(self.plans), dtype=np.int64)
        first: dict[str, int] = {}
        for plan, kind in zip(self.plan_kinds.plan.tolist(), self.plan_kinds.kind, strict=True):
            kinds[plan] = first.setdefault(kind, plan)
        return kinds

    def schedulable_gpus(self) -> Ints:
        """Return the number of GPUs in schedulable nodes, int64[types]."""
        ok = self.nodes.schedulable
        return np.bincount(
            self.nodes.gpu_type[ok], weights=self.nodes.gpus[ok], minlength=len(self.gpu_types)
        ).astype(np.int64)

    def node_size(self) -> Ints:
        """Return the largest schedulable node of each type, int64[types]; 0 without such a node."""
        size = np.zeros(len(self.gpu_types), dtype=np.int64)
        ok = self.nodes.schedulable
        np.maximum.at(size, self.nodes.gpu_type[ok], self.nodes.gpus[ok])
        return size

    def type_choices(self) -> tuple[Ints, Bools]:
        """Return the sets of GPU types that jobs may run on (``AllowedGpuTypes.choices``)."""
        return self.allowed_gpu_types.choices(len(self.jobs), len(self.gpu_types))

    def matching_nodes(self) -> Bools:
        """Return the nodes that match each selector, bool[selectors, nodes]."""
        return self.unmatched_nodes.matches(len(self.selectors), len(self.nodes))

    @property
    def global_batch(self) -> Ints:
        """Return the samples of one iteration of each job, int64[jobs]."""
        batch = np.array([w.global_batch for w in self.workloads], dtype=np.int64)
        return batch[self.jobs.workload] if len(batch) else np.zeros(0, np.int64)

    def profiling(self) -> Bools:
        """Return whether each job is a profiling task, bool[jobs]."""
        tasks = np.array([w.model == PROFILING for w in self.workloads], dtype=np.bool_)
        return tasks[self.jobs.workload] if tasks.any() else np.zeros(len(self.jobs), np.bool_)

    def nodes_owned(self) -> Ints:
        """Return the number of nodes on which each job owns GPUs, held or reserved, int64[jobs]."""
        a, count = self.allocations, max(1, len(self.nodes))
        own = (a.hold != Hold.RELEASING) & (a.job >= 0)
        pair = np.unique(a.job[own] * count + a.node[own])
        return np.bincount(pair // count, minlength=len(self.jobs)).astype(np.int64)

    def disturbed(self) -> Bools:
        """Return whether each job owns a GPU of an unschedulable node, bool[jobs].

        A job owns the GPUs that it holds or has reserved.
        """
        out = np.zeros(len(self.jobs), dtype=np.bool_)
        a = self.allocations
        own = (a.hold != Hold.RELEASING) & (a.job >= 0)
        out[a.job[own & ~self.nodes.schedulable[a.node]]] = True
        return out
