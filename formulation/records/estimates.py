"""Estimates of Cells, what they are computed from, and what of them is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.formulation.lifecycle import JobState
from tessera.formulation.network.traffic import CellTraffic
from tessera.formulation.values import Cell, GpuType, Source, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateRecord:
    """An estimate as stored. ``iter_time_s`` inf: tried, does not run."""

    workload: Workload
    cell: Cell  # on nodes; on 0 on the way in: the fewest that the cluster's nodes allow
    iter_time_s: float
    source: Source
    provenance: str = ""
    sd: float | None = None  # of the logarithm of iter_time_s; None: not known
    traffic: CellTraffic | None = None  # of its plan; None: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model of a user's own, so that its Cells can be estimated, and how it is trained."""

    model: str  # as workloads name it
    params: str
    architecture: str  # as its user wrote it; read by ``tessera.estimator.architectures.files``
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
    cell: Cell  # on the nodes that it ran on
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
class CellFilter:
    """The Cells to delete: those that match everything that is given."""

    workload: Workload | None = None  # None: of all workloads
    gpu_type: str = ""  # "": on all types
    gpus: int = 0  # 0: with any number of GPUs
