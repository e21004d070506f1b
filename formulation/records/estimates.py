"""Estimates of Cells, the data they are computed from, and requests for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.resources import (
    UNSTATED_HOST,
    Capacity,
    HostCapacity,
    HostNeeds,
    amounts_of,
    name_amounts,
)
from tessera.formulation.base.values import (
    ESTIMATE_SOURCES,
    Cell,
    EstimateSource,
    GpuType,
    Workload,
)
from tessera.formulation.job.execution_plan import ExecutionPlan, check_fits
from tessera.formulation.job.launch import TuningSpace
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.job.techniques import PlanLimits
from tessera.formulation.state.traffic import CellTraffic

BEST_PLAN_NOTE: Final = "by the best plan known"
"""The provenance of users' estimates that got their execution plan from the service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateRecord(HostNeeds):
    """An estimate as stored, with what a job on the Cell needs in all.

    If ``iter_time_s`` is inf, the Cell was tried and does not run.
    """

    workload: Workload
    cell: Cell  # with its nodes; 0 in a request means the fewest that the cluster allows
    iter_time_s: float
    source: EstimateSource
    provenance: str = ""
    sd: float | None = None  # of the logarithm of iter_time_s; None if it is not known
    complete: bool = False  # its profile has all shapes on which the workload runs on the GPU type
    traffic: CellTraffic | None = None  # of its execution plan; None if it is not known
    plan: ExecutionPlan | None = None
    """The execution plan that ``cell`` names by its digest. It is None if only the name is known, or
    if the Cell's author does not say what the best plan is."""
    plan_kind: str = ""
    """The name of the plan without its data-parallel degree. "" if that is the plan's own name."""

    def __post_init__(self) -> None:
        """Check that the source is one of estimates, and that the plan is the Cell's."""
        if self.source not in ESTIMATE_SOURCES:
            raise InvalidInput(
                "source",
                "must not be REPLAYED: a replayed time is the estimate that the runtime was given; leave"
                " the Cell out, or state the source of that estimate",
            )
        plan, cell = self.plan, self.cell
        if plan is None:
            return
        check_fits(plan, "execution_plan", self.workload, cell.gpus)
        if (cell.plan, cell.pipeline_degree) != (plan.digest, plan.pipeline_degree):
            raise InvalidInput(
                "cell",
                f"has the plan {cell.plan!r} and pipeline degree {cell.pipeline_degree}, but its execution"
                f" plan is {plan.digest} of degree {plan.pipeline_degree}; make them equal",
            )

    def with_plan(self, plan: ExecutionPlan) -> EstimateRecord:
        """Return the estimate of the same Cell under ``plan``."""
        cell = replace(self.cell, plan=plan.digest, pipeline_degree=plan.pipeline_degree)
        return replace(self, cell=cell, plan=plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningRecord:
    """The execution plans that jobs of a runtime may try where they would run by ``plan``.

    ``space_plans`` is the number of all plans of the space that fit into memory, and ``whole_plans``
    that of the full space. ``plans`` may be fewer, the best by their estimates.
    """

    workload: Workload
    gpu_type: str
    plan: ExecutionPlan
    runtime: str
    space: TuningSpace
    plans: tuple[ExecutionPlan, ...]  # the best estimate first
    space_plans: int
    whole_plans: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A user's own model, so that its Cells can be estimated, with its training settings."""

    model: str  # as in workloads
    params: str
    architecture: str  # as the user wrote it; read by ``tessera.estimator.architectures.files``
    sequence: int = 0  # overrides the architecture's if it is not 0
    dtype: str = ""  # f32, bf16 or f16; overrides the architecture's if it is not ""
    flash: bool = False  # attention does not keep its scores
    micro_batches: int = 16
    state_bytes: float = 16.0  # of a parameter with its gradient and optimizer states
    checkpointing: bool = False
    zero: int = 0  # stage of ZeRO
    step: str = ""  # JAX step that profiling measures, module:function; "" if the model has none
    step_arguments: tuple[str, ...] = ()  # of its function, "key=value"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRow:
    """A kind of layer of a workload, as a profiling task measured it on a device of a GPU type."""

    workload: Workload
    gpu_type: str
    task: str  # the profiling task that measured
    source: str  # the step that was measured, with its arguments
    kind: str
    layers: int  # number of the model's layers of this kind
    samples: float
    tp: int
    dtype: str
    forward_s: float
    backward_s: float
    method: str
    repeats: int
    device_s: float  # device time that the measurement took
    device: str
    versions: tuple[tuple[str, str], ...]  # by name
    date: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileGap:
    """The sizes of a workload that a profiling task left out on a GPU type, and the reason."""

    workload: Workload
    gpu_type: str
    task: str
    source: str  # the step that the task measured, with its arguments
    left_out: tuple[tuple[float, int], ...]  # samples and tensor degree
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRates:
    """The speed of a node's host under ZeRO-Offload, as measured on the node.

    If a bandwidth is None, ``copy_gap`` says why it was not measured. ``updates`` are pairs of CPU
    cores and the bytes of optimizer states that these read and write in a second, with rising
    numbers of cores. If it is empty, ``update_gap`` says why.
    """

    to_device_bytes_per_s: float | None = None  # from pinned memory to one GPU, which copies alone
    to_host_bytes_per_s: float | None = None  # the same in the other direction
    copy_gap: str = ""
    updates: tuple[tuple[int, float], ...] = ()
    update_gap: str = ""
    method: str = ""  # the libraries that copied and updated, with their versions
    device: str = ""  # name of the GPU, or of the CPU if there is none
    date: str = ""

    def __post_init__(self) -> None:
        """Check that each part was either measured or has a reason.

        Raises:
            InvalidInput: names the field.
        """
        copied = (self.to_device_bytes_per_s, self.to_host_bytes_per_s)
        self._check_part("copy_gap", copied, all(copied))
        self._check_part("update_gap", [rate for _, rate in self.updates], bool(self.updates))
        cores = [count for count, _ in self.updates]
        if any(count < 1 for count in cores) or cores != sorted(set(cores)):
            raise InvalidInput("updates", f"must have rising numbers of cores from 1, not {cores}")

    def _check_part(self, gap: str, rates: Sequence[float | None], measured: bool) -> None:
        if measured == bool(getattr(self, gap)):
            raise InvalidInput(gap, "must say why the rate is absent, and only if it is absent")
        for rate in rates:
            if rate is not None and not (math.isfinite(rate) and rate > 0):
                raise InvalidInput(gap.replace("gap", "rate"), f"must be above 0 B/s, not {rate}")

    @property
    def copied_bytes_per_s(self) -> float | None:
        """Return the bandwidth of the slower direction, or None if it was not measured."""
        both = (self.to_device_bytes_per_s, self.to_host_bytes_per_s)
        known = [rate for rate in both if rate is not None]
        return min(known, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostProfile:
    """The rates of a host that a profiling task measured on a node of a GPU type."""

    gpu_type: str
    task: str
    rates: HostRates


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilingJob:
    """A profiling task in its present state. ``service_gpu_s`` is the GPU-seconds it has used."""

    name: str
    gpu_type: str
    state: JobState
    last_error: str
    service_gpu_s: float
    age_s: float = 0.0  # since it was submitted
    started_ago_s: float | None = None  # since it first ran; None if it never did
    task: str = ""  # what it measures, as JSON; "" if that is not known
    is_orphan: bool = False  # the job that it measures for has ended; never so for profiling tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementRecord:
    """A Cell that ran, with the median of the times that its job's leader reported once warm."""

    workload: Workload
    cell: Cell  # with the nodes that it ran on
    iter_time_s: float
    plan: ExecutionPlan | None = None  # that the Cell names; None if it was not recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterGpuType:
    """A GPU type of a cluster, with its nodes there."""

    gpu_type: GpuType
    node_gpus: int  # of the largest node; 0 if the cluster has none
    gpus: int  # of all nodes, including drained ones
    node_host: HostCapacity = UNSTATED_HOST  # the most that a node states of each resource

    @property
    def node_capacity(self) -> Capacity | None:
        """Return what a node has, or None if no node states anything but its GPUs."""
        if self.node_host.limits_nothing:
            return None
        return Capacity(gpus=self.node_gpus, **name_amounts(amounts_of(self.node_host)))

    @property
    def nodes(self) -> int:
        """Return the number of nodes, or fewer if they have different numbers of GPUs."""
        return -(-self.gpus // self.node_gpus) if self.node_gpus else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UnestimatedWorkload:
    """A workload of live jobs that has no estimates from users, so the service derives them."""

    workload: Workload
    requests: tuple[int, ...]  # GPU counts that its jobs request, rising
    counts: tuple[int, ...]  # GPU counts of its analytic estimates and of its jobs' bounds, rising
    derived_from: str  # digest of the inputs of its estimates; "" if there are no estimates
    profile: bool = False  # one of its jobs requests profiling
    asking_job: str = ""  # the first live job that requests profiling; "" if no job does
    plans: tuple[ExecutionPlan, ...] = ()  # that its jobs state or were submitted with, by digest
    plans_only: bool = False  # users gave its other estimates, so only stated plans are estimated
    has_reason: bool = False  # it is stored why it has no estimates
    limits: tuple[PlanLimits, ...] = ()
    """Distinct limits of those of its jobs whose plans rounds choose. Jobs without limits are left
    out."""
    is_open: bool = True
    """Whether the best of all plans is wanted: not all of those jobs name techniques."""
    without_plan: tuple[Cell, ...] = ()
    """Cells of users that have a time but no execution plan."""
    exhausted: tuple[Cell, ...] = ()
    """Cells on shapes whose execution plans ran out of memory here, so that others are searched."""
    tunings: tuple[tuple[str, TuningSpace], ...] = ()
    """The runtimes of those of its jobs that tune at launch, each with the space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimationInputs:
    """All inputs of a cluster's estimates."""

    kinds: tuple[ClusterGpuType, ...]
    models: tuple[ModelSpec, ...]  # by (model, params)
    measurements: tuple[MeasurementRecord, ...]  # the latest, oldest first
    wanted: tuple[UnestimatedWorkload, ...]  # in order of submission
    profiles: tuple[ProfileRow, ...] = ()  # of models with live jobs, oldest first
    profiling: tuple[ProfilingJob, ...] = ()  # all tasks, in order of submission
    gaps: tuple[ProfileGap, ...] = ()  # what these left out, of models with live jobs, oldest first
    hosts: tuple[HostProfile, ...] = ()  # the latest of each GPU type
    runs: tuple[ProfilingJob, ...] = ()  # of jobs' programs that measure plans, by submission


@dataclass(frozen=True, slots=True, kw_only=True)
class CellFilter:
    """The Cells to delete: those that match every field that is given."""

    workload: Workload | None = None  # None for all workloads
    gpu_type: str = ""  # "" for all types
    gpus: int = 0  # 0 for any number of GPUs
