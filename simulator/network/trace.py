"""The run of a trace of jobs on a network.

Each job is placed once. The network is planned again at each start and end, and contention slows
jobs down.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from tessera.formulation.errors import InvalidInput
from tessera.formulation.network.contention import Contention, demand_of, join_parts
from tessera.formulation.network.plan import NetworkPlan
from tessera.formulation.network.traffic import Traffic
from tessera.formulation.placement import Gang
from tessera.formulation.tables import Bools, Floats
from tessera.simulator.network.planning import PlanCounter
from tessera.simulator.network.rates import GroupRates

ENDED_TOLERANCE = 1e-9
"""The share of its iterations that a job may have left when it ends. Such a rest is due to rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceJob:
    """A job of a trace. It holds its GPUs from its start to its end."""

    name: str
    arrival_s: float
    gpus: int
    iterations: float
    traffic: Traffic

    def __post_init__(self) -> None:
        """Refuse values that have no meaning."""
        if not (
            0 <= self.arrival_s < math.inf and 0 < self.iterations < math.inf and self.gpus > 0
        ):
            raise InvalidInput(
                self.name, "must arrive at 0 or later, with more than 0 iterations and GPUs"
            )


class GpuAllocator(Protocol):
    """An allocator that records which job holds which GPUs."""

    def allocate(self, job: str, gpus: int) -> Gang | None:
        """Allocate GPUs to the job. If it does not fit now, return None and change nothing."""

    def release(self, job: str) -> None:
        """Release the job's GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The cluster of a trace, with its allocator and its network planner.

    ``met`` returns one job's part of the network's contention. The links are the same for all jobs.
    ``clock`` is read before and after planning, and influences no decision. Jobs are tried in order
    of arrival. A job that fits may overtake one that does not, unless ``in_turn`` is set.

    ``changed`` is called before each plan. It returns, by name, the parts of running jobs that
    differ from before (jobs that share GPUs slow each other down).

    ``comparisons`` has other planners by name. Their plans are evaluated on the jobs that run at each
    time, and never carried out. Two separate runs would also differ by chance, because a job that
    ends a little earlier changes which jobs share links.
    """

    gpus: int
    places: GpuAllocator
    met: Callable[[TraceJob, Gang], Contention]
    plan: Callable[[Contention], NetworkPlan]
    clock: Callable[[], float]
    in_turn: bool = False
    changed: Callable[[], Mapping[str, Contention]] | None = None
    comparisons: Mapping[str, Callable[[Contention], NetworkPlan]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceResult:
    """The outcome of a trace.

    Arrays are by job in the given order. Sums are over time until ``ended_s``. A job is contended if
    it shares a link with another, even if they cannot fill it.
    """

    start_s: Floats  # (J,) inf: the job has never started
    end_s: Floats  # (J,) inf: the job has not ended
    alone_s: Floats  # (J,) time from start to end if it were alone; nan: it never started
    jct_s: Floats  # (J,) from arrival to end; inf: it has not ended
    ever_contended: Bools  # (J,)
    ended_s: float
    flop: float  # work done: U_T (Crux, eq. 1)
    comparison_flop: dict[
        str, float
    ]  # work that the running jobs would have done under these plans
    held_gpu_s: float
    computing_gpu_s: float  # the part of ``held_gpu_s`` in which GPUs computed
    contended_gpu_s: float
    contended_job_s: float
    link_use: Floats  # (links,) mean share of each link's bandwidth that was used
    plans: int
    plan_s: float  # seconds spent on planning, all plans together
    slowest_plan_s: float
    groups_played: int

    @property
    def computing_of_held(self) -> float:
        """Return the share of the held GPU time in which GPUs computed."""
        return self.computing_gpu_s / self.held_gpu_s if self.held_gpu_s else 0.0


def run_trace(
    jobs: Sequence[TraceJob],
    cluster: Cluster,
    rates: GroupRates | None = None,
    horizon_s: float = math.inf,
) -> TraceResult:
    """Run the jobs until all are over, nothing can start any more, or the horizon is reached.

    Between starts and ends, every job advances at its long-run rate under the current network plan.
    Transients of a few iterations are ignored.
    """
    if twice := [n for n, times in Counter(job.name for job in jobs).items() if times > 1]:
        raise InvalidInput("jobs", f"must have unique names; {twice[0]} occurs twice")
    if not horizon_s > 0:
        raise InvalidInput("horizon_s", "must be above 0")
    trace = _TraceRun(jobs, cluster, GroupRates() if rates is None else rates)
    trace.go(horizon_s)
    return trace.result()


@dataclass(slots=True)
class _Sums:
    flop: float = 0.0
    held_gpu_s: float = 0.0
    computing_gpu_s: float = 0.0
    contended_gpu_s: float = 0.0
    contended_job_s: float = 0.0
    comparison_flop: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


@dataclass(slots=True, kw_only=True, eq=False)
class _RunningJobs:
    """The jobs that run, as arrays by their position in ``jobs``, at their current rates."""

    jobs: list[int] = field(default_factory=list)
    parts: list[Contention] = field(default_factory=list)
    left: Floats = field(default_factory=lambda: np.zeros(0))
    rate: Floats = field(default_factory=lambda: np.zeros(0))
    contended: Bools = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    link_rate: Floats | None = None  # share of each link that is used
    comparison: dict[str, float] = field(default_factory=dict)  # flop/s


class _TraceRun:
    def __init__(self, jobs: Sequence[TraceJob], cluster: Cluster, rates: GroupRates) -> None:
        self.jobs, self.cluster, self.rates = jobs, cluster, rates
        self.comparison_rates = {name: GroupRates(rates.window) for name in cluster.comparisons}
        count = len(jobs)
        self.gpus = np.array([job.gpus for job in jobs], dtype=np.int64)
        self.compute_s = np.array([job.traffic.compute_s for job in jobs])
        self.flop = np.array([job.traffic.work_flop for job in jobs])
        self.iterations = np.array([job.iterations for job in jobs])
        self.arrival_s = np.array([job.arrival_s for job in jobs])
        self.start_s, self.end_s = np.full(count, np.inf), np.full(count, np.inf)
        self.alone_s, self.ever = np.full(count, np.nan), np.zeros(count, dtype=np.bool_)
        self.now_s, self.sums, self.plans = 0.0, _Sums(), PlanCounter()
        self.link_s: Floats | None = None  # seconds at full bandwidth
        self.run, self.waiting = _RunningJobs(), list[int]()
        self.free = cluster.gpus

    def go(self, horizon_s: float) -> None:
        """Let time pass until the trace is over."""
        order = np.argsort(self.arrival_s, kind="stable").tolist()
        coming = 0
        while True:
            arrival_s = self.arrival_s[order[coming]] if coming < len(order) else math.inf
            next_s = min(arrival_s, self._next_end_s(), horizon_s)
            if not math.isfinite(next_s):
                return
            self._pass_until(max(next_s, self.now_s))
            if self.now_s >= horizon_s:
                return
            changed = self._end()
            while coming < len(order) and self.arrival_s[order[coming]] <= self.now_s:
                self.waiting.append(order[coming])
                coming += 1
            if self._start() or changed:
                self._plan()

    def _next_end_s(self) -> float:
        run = self.run
        with np.errstate(divide="ignore"):
            return self.now_s + float((run.left / run.rate).min(initial=math.inf))

    def _pass_until(self, to_s: float) -> None:
        run, s, jobs, for_s = self.run, self.sums, self.run.jobs, to_s - self.now_s
        gpus, done = self.gpus[jobs], run.rate * for_s
        run.left = run.left - done
        s.flop += float(self.flop[jobs] @ done)
        s.held_gpu_s += float(gpus.sum()) * for_s
        s.computing_gpu_s += float((gpus * self.compute_s[jobs]) @ done)
        s.contended_gpu_s += float(gpus[run.contended].sum()) * for_s
        s.contended_job_s += float(run.contended.sum()) * for_s
        for name, flop_per_s in run.comparison.items():
            s.comparison_flop[name] += flop_per_s * for_s
        if run.link_rate is not None:
            if self.link_s is None:
                self.link_s = np.zeros_like(run.link_rate)
            self.link_s += run.link_rate * for_s
        self.now_s = to_s

    def _end(self) -> bool:
        run = self.run
        over = run.left <= ENDED_TOLERANCE * self.iterations[run.jobs]
        for at in np.flatnonzero(over).tolist():
            job = run.jobs[at]
            self.end_s[job] = self.now_s
            self.free += self.jobs[job].gpus
            self.cluster.places.release(self.jobs[job].name)
        stay = np.flatnonzero(~over).tolist()
        run.jobs, run.parts = [run.jobs[i] for i in stay], [run.parts[i] for i in stay]
        run.left = run.left[stay]
        return bool(over.any())

    def _start(self) -> bool:
        """Start the waiting jobs that fit, in order, and return whether any job has started."""
        started, full = set[int](), set[int]()
        for job in self.waiting:
            trace_job = self.jobs[job]
            gang = None
            if trace_job.gpus <= self.free and trace_job.gpus not in full:
                gang = self.cluster.places.allocate(trace_job.name, trace_job.gpus)
            if gang is None:
                full.add(trace_job.gpus)
                if self.cluster.in_turn:
                    break
                continue
            started.add(job)
            self.free -= trace_job.gpus
            self.start_s[job] = self.now_s
            self.run.jobs.append(job)
            self.run.parts.append(self.cluster.met(trace_job, gang))
            self.run.left = np.append(self.run.left, trace_job.iterations)
        self.waiting = [job for job in self.waiting if job not in started]
        return bool(started)

    def _plan(self) -> None:
        """Plan the network for the running jobs, and find their rates."""
        run, cluster = self.run, self.cluster
        if not run.jobs:
            self.run = _RunningJobs()
            return
        if cluster.changed is not None:
            now = cluster.changed()
            names = [self.jobs[job].name for job in run.jobs]
            run.parts = [now.get(n, part) for n, part in zip(names, run.parts, strict=True)]
        contention = join_parts(run.parts)
        plan = self.plans.timed(cluster.plan, contention, cluster.clock)
        demand = demand_of(contention, plan.chosen)
        run.rate = self.rates(contention.jobs, demand, plan.level, plan.offset_s)
        run.contended = demand.contended()
        used = demand.busy_s * run.rate[demand.job]
        run.link_rate = np.zeros(demand.links)
        np.add.at(run.link_rate, demand.link, used)
        self.ever[run.jobs] |= run.contended
        new = np.isnan(self.alone_s[run.jobs])
        started = np.array(run.jobs)[new]
        self.alone_s[started] = demand.alone_s[new] * self.iterations[started]
        run.comparison = {
            name: self._would_do(plan(contention), contention, self.comparison_rates[name])
            for name, plan in cluster.comparisons.items()
        }

    def _would_do(self, plan: NetworkPlan, contention: Contention, rates: GroupRates) -> float:
        """Return the flop/s that the jobs would do under the plan."""
        demand = demand_of(contention, plan.chosen)
        rate = rates(contention.jobs, demand, plan.level, plan.offset_s)
        return float(contention.work_flop @ rate)

    def result(self) -> TraceResult:
        s = self.sums
        links_s = np.zeros(0) if self.link_s is None else self.link_s
        return TraceResult(
            start_s=self.start_s,
            end_s=self.end_s,
            alone_s=self.alone_s,
            jct_s=self.end_s - self.arrival_s,
            ever_contended=self.ever,
            ended_s=self.now_s,
            flop=s.flop,
            comparison_flop=dict(s.comparison_flop),
            held_gpu_s=s.held_gpu_s,
            computing_gpu_s=s.computing_gpu_s,
            contended_gpu_s=s.contended_gpu_s,
            contended_job_s=s.contended_job_s,
            link_use=links_s / max(self.now_s, 1e-300),
            plans=self.plans.plans,
            plan_s=self.plans.plan_s,
            slowest_plan_s=self.plans.slowest_plan_s,
            groups_played=self.rates.played,
        )
