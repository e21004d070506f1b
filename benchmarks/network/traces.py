"""A trace on one network under one mechanism and one job scheduler, as a task of a sweep."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final
from zlib import crc32

import numpy as np

from tessera.benchmarks.network.fabrics import FABRICS
from tessera.benchmarks.network.sharing import MuriPlaces
from tessera.benchmarks.network.workload import (
    DAY_S,
    PEAK_FLOP_PER_S,
    TraceWorkload,
    jobs_of,
    trace_statistics,
)
from tessera.formulation.errors import InvalidInput
from tessera.formulation.network.contention import Contention
from tessera.formulation.network.flows import NetworkJob, build_contention
from tessera.formulation.network.plan import NetworkPlan
from tessera.formulation.network.traffic import Traffic
from tessera.formulation.placement import Gang
from tessera.formulation.tables import Floats
from tessera.formulation.topologies.routes import Routes
from tessera.formulation.topologies.shapes import A100_HOST
from tessera.formulation.topologies.topology import NO_HOST, Topology
from tessera.simulator.network.rates import GroupRates, RateWindow
from tessera.simulator.network.trace import Cluster, TraceJob, TraceResult, run_trace
from tessera.simulator.sweeps.tasks import Task
from tessera.solvers.network.jobs.hived import HiveD
from tessera.solvers.network.jobs.placers import Occupancy, Placer, RandomSpread, first_fit
from tessera.solvers.network.mechanisms import make_mechanism

SCHEDULERS: Final = ("first-fit", "random", "hived", "muri")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTrace:
    """A simulated run: a workload on a network under a mechanism and a job scheduler.

    Further mechanisms may be judged on the same jobs at the same times. For each of ``noises``, the
    mechanism itself is judged in that way with mismeasured traffic. The traffic of
    each job is then off by a factor that stays the same for the job's whole life. The noise is the
    standard deviation of that factor's logarithm. ``speed`` is the speed of links between switches,
    as a share of the speeds of ``fabrics``. ``background`` is the share of links beyond hosts that
    storage takes. Planners know it. ``window`` is the length of the simulations from which rates
    are taken, in iterations of the longest of the contending jobs.
    """

    fabric: str
    mechanism: str
    scheduler: str = "first-fit"
    levels: int = 8
    speed: float = 1.0
    beside: tuple[str, ...] = ()  # the mechanisms that are judged on the same jobs
    noises: tuple[float, ...] = ()
    background: float = 0.0
    window: float = 20.0
    workload: TraceWorkload = field(default_factory=TraceWorkload)

    @property
    def name(self) -> str:
        """Return the name of the run within a sweep."""
        return f"{self.fabric}, {self.scheduler}, {self.mechanism}"

    def task(self) -> Task:
        """Return the run as a task of a sweep."""
        return Task(
            name=self.name,
            function="tessera.benchmarks.network.traces:play_trace",
            options=asdict(self),
        )


def play_trace(*, workload: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """Run the trace of ``SimulatedTrace``'s options to the end of its days and return its summary."""
    asked = SimulatedTrace(**options, workload=TraceWorkload(**workload))
    jobs = jobs_of(asked.workload)
    result, owner = simulate_trace(asked, jobs)
    return summarize_run(asked.workload, jobs, result, owner)


def simulate_trace(
    asked: SimulatedTrace, jobs: Sequence[TraceJob]
) -> tuple[TraceResult, Mapping[str, str]]:
    """Run jobs over the days of the workload.

    Return the result, and for jobs that shared GPUs the first job of their group.
    """
    w = asked.workload
    topology = FABRICS[asked.fabric](-(-w.gpus // A100_HOST.gpus), asked.speed)
    network = ContentionNetwork(topology, asked.background)
    book = Occupancy(topology, _placer(asked.scheduler, topology, w.seed))
    traffic = {job.name: job.traffic for job in jobs}
    muri = None
    if asked.scheduler == "muri":
        muri = MuriPlaces(book, lambda name, gang: network.part(name, traffic[name], gang))

    def planner(name: str, noise: float = 0.0) -> Callable[[Contention], NetworkPlan]:
        plan = make_mechanism(name).plan
        return lambda seen: plan(
            mismeasure_times(seen, noise, w.seed), levels=asked.levels, seed=w.seed
        )

    comparisons = {name: planner(name) for name in asked.beside}
    comparisons |= {noise_name(noise): planner(asked.mechanism, noise) for noise in asked.noises}
    cluster = Cluster(
        gpus=w.gpus if muri is None else 2 * w.gpus,
        places=book if muri is None else muri,
        met=lambda job, gang: network.part(job.name, job.traffic, gang),
        plan=planner(asked.mechanism),
        clock=time.perf_counter,
        changed=None if muri is None else muri.changed,
        comparisons=comparisons,
    )
    rates = GroupRates(RateWindow(iterations=asked.window))
    result = run_trace(jobs, cluster, rates, horizon_s=w.days * DAY_S)
    return result, {} if muri is None else muri.owner


def noise_name(noise: float) -> str:
    """Return the name of the comparison with plans on mismeasured traffic."""
    return f"noise {noise:g}"


def _placer(scheduler: str, topology: Topology, seed: int) -> Placer:
    match scheduler:
        case "first-fit" | "muri":
            return first_fit
        case "random":
            return RandomSpread(seed)
        case "hived":
            return HiveD(topology)
    raise InvalidInput("scheduler", f"unknown {scheduler!r}; choose one of {', '.join(SCHEDULERS)}")


class ContentionNetwork:
    """A topology on which the contention of single jobs is made."""

    def __init__(self, topology: Topology, background: float = 0.0) -> None:
        v, e = topology.vertices, topology.links
        outside = (v.host[e.source] == NO_HOST) | (v.host[e.target] == NO_HOST)
        self._topology, self._routes = topology, Routes(topology)
        self._background: Floats = np.where(outside, background, 0.0)

    def part(self, name: str, traffic: Traffic, gang: Gang) -> Contention:
        """Return the job's own contention, on the bandwidth that storage leaves."""
        hosts = self._topology.hosts
        placed = NetworkJob(
            name=name, gang=tuple((hosts[h], at) for h, at in gang.members), traffic=traffic
        )
        result, _ = build_contention(self._topology, [placed], routes=self._routes)
        return result.with_background(self._background) if self._background.any() else result


def mismeasure_times(c: Contention, noise: float, seed: int) -> Contention:
    """Return the contention with the traffic of each job off by a constant factor of mean 1."""
    if noise == 0:
        return c
    factor = np.array([_factor(name, noise, seed) for name in c.jobs])
    return replace(
        c,
        fixed_bytes=c.fixed_bytes * np.repeat(factor, np.diff(c.fixed_start)),
        bundle_bytes=c.bundle_bytes * factor[c.bundle_job],
    )


def _factor(name: str, noise: float, seed: int) -> float:
    rng = np.random.default_rng([crc32(name.encode()), seed])
    return float(rng.lognormal(-(noise**2) / 2, noise))


def summarize_run(
    w: TraceWorkload, jobs: Sequence[TraceJob], result: TraceResult, owner: Mapping[str, str]
) -> dict[str, Any]:
    """Return the summary of a run for JSON. ``jct_s`` has None for jobs that have not ended."""
    total_gpu_s = w.gpus * result.ended_s
    held_gpu_s = held_once(jobs, result, owner)
    peak = result.flop / PEAK_FLOP_PER_S
    ended = np.isfinite(result.end_s)
    ran_s = result.end_s[ended] - result.start_s[ended]
    slowdown = ran_s / result.alone_s[ended]
    used = result.link_use[result.link_use > 0]
    return {
        "flop": result.flop,
        "beside_flop": result.comparison_flop,
        "of_all": peak / total_gpu_s,
        "of_held": peak / held_gpu_s,
        "computing_of_all": result.computing_gpu_s / total_gpu_s,
        "computing_of_held": result.computing_gpu_s / held_gpu_s,
        "held_share": held_gpu_s / total_gpu_s,
        "ended": int(ended.sum()),
        "slowdown": float(slowdown.mean()) if len(slowdown) else 1.0,
        "worst_slowdown": float(slowdown.max(initial=1.0)),
        "link_use": float(used.mean()) if len(used) else 0.0,
        "busiest_link_use": float(used.max(initial=0.0)),
        "shared": sum(job != first for job, first in owner.items()),
        "plans": result.plans,
        "plan_s": result.plan_s,
        "slowest_plan_s": result.slowest_plan_s,
        "statistics": trace_statistics(jobs, result),
        "jct_s": [jct if np.isfinite(jct) else None for jct in result.jct_s.tolist()],
    }


def held_once(jobs: Sequence[TraceJob], result: TraceResult, owner: Mapping[str, str]) -> float:
    """Return the GPU seconds that were held, where GPUs that two jobs share count once.

    The jobs of a group follow each other on the same GPUs without a gap. The group therefore held
    its GPUs from its first start to its last end.
    """
    begin: dict[str, float] = {}
    last: dict[str, float] = {}
    total = 0.0
    for at, job in enumerate(jobs):
        if np.isfinite(result.start_s[at]):
            first = owner.get(job.name, job.name)
            begin[first] = min(begin.get(first, np.inf), float(result.start_s[at]))
            last[first] = max(last.get(first, 0.0), min(float(result.end_s[at]), result.ended_s))
    for job in jobs:
        if job.name in begin:
            total += job.gpus * (last[job.name] - begin[job.name])
    return total
