"""Streams of jobs on small clusters, drawn job by job, with the conditions under which they run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.random import Generator

from tessera.formulation.base.tables import Floats
from tessera.formulation.base.values import Cell, EstimateSource, GpuType, Workload
from tessera.formulation.records.clusters import NodeSpec, TenantSpec
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.records.jobs import JobSpec
from tessera.simulator.run import Conditions
from tessera.simulator.scenario import Scenario
from tessera.simulator.traces.trace import Arrival

HOUR_S: Final = 3600.0
SPACING_S: Final = 30.0
PERIOD_S: Final = 300.0
"""The least and the largest time between rounds, as a server has them."""
SPEEDS: Final[Mapping[str, float]] = {
    "a100": 1.0,
    "v100": 0.5,
    "h100": 2.0,
    "a40": 0.6,
    "a10": 0.4,
    "l20": 0.8,
    "a800": 0.9,
    "t4": 0.2,
}
"""The speed of a GPU of each type, relative to an A100."""
MEMORY_BYTES: Final = 40 * 2**30
GPU_COUNTS: Final = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
"""The GPU counts on which models run, as far as the cluster has them."""
SIZES: Final = (1, 2, 4, 8)
SIZE_SHARES: Final = (0.4, 0.25, 0.2, 0.15)
"""The GPU counts of ordinary jobs, and their shares."""
USUAL_MODEL: Final = "usual"
SPARE_TIME: Final = 5.0
"""A run may last this number of times its work on all GPUs, after its last arrival."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPool:
    """The nodes of a GPU type."""

    gpu_type: str = "a100"
    nodes: int
    node_gpus: int = 8
    labels: Mapping[str, str] = field(default_factory=dict)
    """The labels of the first half of the nodes."""

    @property
    def gpus(self) -> int:
        """Return the number of GPUs."""
        return self.nodes * self.node_gpus

    def specs(self) -> list[NodeSpec]:
        """Return the nodes."""
        return [
            NodeSpec(
                name=f"{self.gpu_type}-{i:02d}",
                gpu_type=self.gpu_type,
                gpus=self.node_gpus,
                labels=dict(self.labels) if 2 * i < self.nodes else {},
            )
            for i in range(self.nodes)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingModel:
    """A model whose rate on n GPUs is n to the ``power``, times the speed of the GPU type.

    ``favors`` are factors on the speeds of GPU types. A ``compact`` model runs on the fewest nodes
    that have its GPUs, and on no others.
    """

    name: str = USUAL_MODEL
    power: float = 0.9
    favors: Mapping[str, float] = field(default_factory=dict)
    compact: bool = False

    @property
    def workload(self) -> Workload:
        """Return the workload of its jobs."""
        return Workload(model=self.name, params="1", global_batch=256)

    def iter_time_s(self, gpu_type: str, gpus: int) -> float:
        """Return the seconds of an iteration. It is 1 s on an A100 that the model does not favor."""
        speed = SPEEDS[gpu_type] * self.favors.get(gpu_type, 1.0)
        return float(1.0 / (speed * gpus**self.power))

    def profiles(self, pools: Sequence[GpuPool]) -> list[EstimateRecord]:
        """Return the true times on the GPUs of a cluster."""
        return [
            EstimateRecord(
                workload=self.workload,
                cell=Cell(gpu_type=pool.gpu_type, gpus=gpus, pipeline_degree=1),
                iter_time_s=self.iter_time_s(pool.gpu_type, gpus),
                source=EstimateSource.MEASURED,
                complete=self.compact,
            )
            for pool in pools
            for gpus in GPU_COUNTS
            if gpus <= pool.gpus
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStream:
    """A scenario with its conditions.

    ``settings`` are options of our rounds there, e.g. ``deadlines=look-ahead``. In an ``exact``
    stream, no job lasts longer than its estimate, and no node fails. If it ``forces`` stops, promises
    other than starts may stop jobs, such as quotas and deadlines.
    """

    scenario: Scenario
    conditions: Conditions
    settings: tuple[str, ...] = ()
    exact: bool = True
    forces: bool = False

    def change_conditions(self, exact: bool = False, **changes: Any) -> JobStream:
        """Return the stream with other conditions."""
        return replace(self, exact=exact, conditions=replace(self.conditions, **changes))


class StreamDraft:
    """A stream that is drawn job by job."""

    def __init__(self, *pools: GpuPool, models: Sequence[ScalingModel] = (ScalingModel(),)) -> None:
        """Begin with a cluster and models, and without jobs. The first model is the usual one."""
        self.pools = pools
        self.models = {model.name: model for model in models}
        self._usual = models[0].name
        self._arrivals: list[Arrival] = []
        self._work_gpu_s = 0.0
        self._longest_s = 0.0

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of the cluster."""
        return sum(pool.gpus for pool in self.pools)

    def add(
        self,
        arrival_s: float,
        gpus: int,
        duration_s: float,
        *,
        model: str = "",
        role: str = "job",
        elastic: bool = False,
        tightness: float = math.inf,
        **fields: Any,
    ) -> None:
        """Add a job that lasts ``duration_s`` as requested, on the fastest type that it may use.

        ``fields`` are fields of its spec. Only an ``elastic`` job runs on other GPU counts, unless
        bounds are among them. Its deadline is ``tightness`` times its duration after its
        arrival.
        """
        shape = self.models[model or self._usual]
        requested_gpu_type = fields.get("requested_gpu_type", "")
        iter_time_s = min(
            shape.iter_time_s(pool.gpu_type, gpus)
            for pool in self.pools
            if pool.gpus >= gpus and requested_gpu_type in ("", pool.gpu_type)
        )
        bounds = {} if elastic else {"min_gpus": gpus, "max_gpus": gpus}
        spec = JobSpec(
            name=f"{role}-{len(self._arrivals):03d}",
            workload=shape.workload,
            iterations=max(1, round(duration_s / iter_time_s)),
            requested_gpus=gpus,
            deadline_s=tightness * duration_s,
            **{**bounds, **fields},
        )
        self._arrivals.append(Arrival(arrival_s, spec))
        self._work_gpu_s += gpus * duration_s
        self._longest_s = max(self._longest_s, duration_s)

    def finish(
        self,
        *,
        settings: Sequence[str] = (),
        tenants: Sequence[TenantSpec] = (),
        forces: bool = False,
    ) -> JobStream:
        """Return the stream, with exact estimates and rounds as a server has them.

        It ends at a time at which all jobs would long be over if all GPUs were in use.
        """
        arrivals = sorted(self._arrivals, key=lambda arrival: arrival.arrival_s)
        last_s = arrivals[-1].arrival_s
        lasting_s = max(self._work_gpu_s / self.gpus, self._longest_s)
        scenario = Scenario(
            gpu_types=[
                GpuType(name=name, memory_bytes=MEMORY_BYTES)
                for name in dict.fromkeys(pool.gpu_type for pool in self.pools)
            ],
            nodes=[node for pool in self.pools for node in pool.specs()],
            profiles=[
                record for model in self.models.values() for record in model.profiles(self.pools)
            ],
            arrivals=arrivals,
            tenants=tenants,
        )
        conditions = Conditions(
            on_events=True,
            spacing_s=SPACING_S,
            round_s=PERIOD_S,
            horizon_s=last_s + SPARE_TIME * lasting_s,
        )
        return JobStream(
            scenario=scenario, conditions=conditions, settings=tuple(settings), forces=forces
        )


def draw_durations_s(rng: Generator, count: int, median_s: float, sigma: float = 0.8) -> Floats:
    """Return log-normal durations of at least a minute, float64[count]."""
    durations_s: Floats = np.maximum(60.0, rng.lognormal(math.log(median_s), sigma, count))
    return durations_s


def draw_times_s(rng: Generator, gpu_s: Floats, gpus: int, load: float) -> Floats:
    """Return the arrival times of jobs that need ``gpu_s`` (float64[jobs]), ascending.

    They are uniform over the time in which the jobs are a ``load`` on ``gpus`` GPUs.
    """
    return np.sort(rng.uniform(0.0, float(gpu_s.sum()) / (gpus * load), len(gpu_s)))


def add_crowd(
    draft: StreamDraft,
    rng: Generator,
    jobs: int,
    load: float,
    *,
    sizes: Sequence[int] = SIZES,
    shares: Sequence[float] = SIZE_SHARES,
    median_s: float = 0.6 * HOUR_S,
    sigma: float = 0.8,
    **options: Any,
) -> float:
    """Add ordinary jobs at a load, and return the time of the last arrival.

    An option with a list has a value for each of ``jobs``.
    """
    gpus = rng.choice(sizes, jobs, p=shares)
    durations_s = draw_durations_s(rng, jobs, median_s, sigma)
    times_s = draw_times_s(rng, gpus * durations_s, draft.gpus, load)
    for i in range(jobs):
        own_options = {key: v[i] if isinstance(v, list) else v for key, v in options.items()}
        draft.add(float(times_s[i]), int(gpus[i]), float(durations_s[i]), **own_options)
    return float(times_s[-1])
