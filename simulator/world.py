"""A simulated cluster, in which events happen in order of time and jobs train at their speed."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np

from tessera.formulation.decisions import Decision
from tessera.formulation.errors import InvalidInput
from tessera.formulation.placement import Gang
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.snapshot import NO_LEGS, Legs, Snapshot
from tessera.formulation.tables import Bools, Floats, Ints
from tessera.formulation.values import Cell, CellKey
from tessera.simulator.log import Segment
from tessera.simulator.overheads import Overheads
from tessera.simulator.profiling import ProfilingTasks, shown_estimates, true_estimates
from tessera.simulator.scenario import Scenario
from tessera.simulator.store.gpus import AllocationChange, InvariantBroken
from tessera.simulator.store.memory import MemoryStore
from tessera.simulator.traces.trace import Arrival
from tessera.simulator.truth import truth_of

TOLERANCE = 1e-6
"""The relative tolerance for sums of work and of GPU-seconds that are added up in two orders."""

MOMENT_S = 1e-6
"""A job that would end within this time after a round counts as having ended before it. Such a
difference is due to rounding."""


Slowdowns: TypeAlias = Callable[[Mapping[int, AllocationChange]], Mapping[int, float]]
"""A function that returns, by job, the factor (at least 1) by which iterations take longer because
jobs share links of the network. Its argument has the running jobs, each with the change that
started it. A job that is left out is not slowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A node that is away from ``down_s`` until ``up_s``.

    If ``up_s`` is inf, the node never comes back.
    """

    node: str
    down_s: float
    up_s: float

    def __post_init__(self) -> None:
        """Refuse times that are out of order."""
        if not 0 <= self.down_s < self.up_s:
            raise InvalidInput(
                "failures", f"{self.node}: down_s must be at least 0, and up_s later"
            )


MEASURED_ITERATIONS: Final = 7
"""Iterations after which the rate of a job is known, if it was unknown. The service ignores a run's
first two reports, and takes the median of five.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A node on which iterations take ``factor`` times as long from ``start_s`` until ``end_s``.

    If several overlap on a node, the slowest counts. The slowest node of a gang slows the whole
    gang.
    """

    node: str
    start_s: float
    end_s: float
    factor: float

    def __post_init__(self) -> None:
        """Refuse times that are out of order, and factors that speed up."""
        if not 0 <= self.start_s < self.end_s:
            raise InvalidInput(
                "stragglers", f"{self.node}: start_s must be at least 0, and end_s later"
            )
        if not 1 <= self.factor < np.inf:
            raise InvalidInput(
                "stragglers", f"{self.node}: the factor must be at least 1 and finite"
            )


@dataclass(slots=True, kw_only=True)
class _RunningJob:
    """A job that holds GPUs. Its progress is linear between the breakpoints (``at_s``, ``done``).

    ``owed`` determines the work that the start must do before ``ready_s``. It is a pair: whether a
    checkpoint was written for the job, and the Cell on which it ran last. If the start is cut short,
    the next start owes the same work.
    """

    change: AllocationChange
    cell: Cell  # the Cell of the change, by names
    gang: Gang
    owed: tuple[bool, CellKey | None]
    start_s: float  # the start of the segment that is not yet logged
    ready_s: float
    stamp: int
    speed: float = 0.0  # iterations/s, including the slowdown
    slowdown: float = 1.0
    network: float = 1.0  # the network's part of the slowdown
    at_s: list[float] = field(default_factory=list)
    done: list[float] = field(default_factory=list)

    def done_at(self, now_s: float) -> float:
        """Return the iterations trained by ``now_s``. Before the start there is no progress."""
        if len(self.at_s) == 1:  # the usual case, needed for every job in every round
            return self.done[0] + self.speed * max(0.0, now_s - self.at_s[0])
        i = max(0, bisect_right(self.at_s, now_s) - 1)
        speed = self.speed
        if i + 1 < len(self.at_s):
            speed = (self.done[i + 1] - self.done[i]) / (self.at_s[i + 1] - self.at_s[i])
        return self.done[i] + speed * max(0.0, now_s - self.at_s[i])


class _Progress:
    """The progress of running jobs after their last breakpoint, as arrays by job."""

    def __init__(self, jobs: int) -> None:
        self.at_s, self.done = np.zeros(jobs), np.zeros(jobs)  # of the last breakpoint
        self.speed = np.zeros(jobs)
        self.ready_s = np.zeros(jobs)
        self.began = np.zeros(jobs)  # iterations trained before the segment that is not yet logged
        self.gpus = np.zeros(jobs, dtype=np.int64)

    def take(self, job: int, run: _RunningJob) -> None:
        """Record the run's last breakpoint, speed, start and GPUs."""
        self.at_s[job], self.done[job], self.speed[job] = run.at_s[-1], run.done[-1], run.speed
        self.ready_s[job], self.began[job] = run.ready_s, run.done_at(run.start_s)
        self.gpus[job] = run.cell.gpus

    def done_at(self, jobs: Ints, now_s: float) -> Floats:
        """Return the iterations trained by ``now_s`` of running jobs, float64[jobs].

        Before its last breakpoint a job makes no progress.
        """
        return self.done[jobs] + self.speed[jobs] * np.maximum(0.0, now_s - self.at_s[jobs])


class World:
    """The clock, the jobs' progress and the cluster's nodes.

    ``advance`` lets time pass. ``snapshot`` and ``carry_out`` are the input and the outcome of a
    round. Events are handled in order of time, then in the order in which they were scheduled. A
    round takes place after all events of its time.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        overheads: Overheads,
        visible: Sequence[EstimateRecord] | None = None,
        failures: Sequence[Failure] = (),
        stragglers: Sequence[Straggler] = (),
        slowdowns: Slowdowns | None = None,
        ended_early: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Set up the world at time 0, with its arrivals, failures and stragglers as events.

        If models are profiled (``Overheads.profile_s``), rounds see estimates of a model on a GPU
        type only once its profiling task there has ended.

        ``visible`` are the estimates that rounds see. If it is None, rounds see the true ones.
        ``slowdowns`` is called whenever the running jobs or their GPUs have changed. If it is None,
        no job is slowed by others. ``ended_early`` is described at ``Conditions``.
        """
        self.scenario, self.overheads, self.now_s = scenario, overheads, 0.0
        self._set_up_store(scenario.profiles if visible is None else visible)
        self.segments: list[Segment] = []
        self.task_segments: list[Segment] = []  # their jobs are indices into ``tasks``
        self.events_handled = 0
        specs = self.store.specs
        self._work = self.store.jobs.iterations * [
            ended_early.get(spec.name, 1.0) for spec in specs
        ]
        self._work = np.maximum(1.0, np.rint(self._work))  # iterations after which each job ends
        self.first_start_s = np.full(len(specs), np.inf)
        self.restarts = np.zeros(len(specs), dtype=np.int64)  # starts after the first, and changes
        self._runs: dict[int, _RunningJob] = {}
        self._pace = _Progress(len(specs))
        self._last_cell: dict[int, CellKey] = {}
        self._saved = np.zeros(len(specs), dtype=np.bool_)
        self._logged = np.zeros(len(specs))  # iterations by segments, less those that were lost
        self._held_gpu_s = 0.0
        self._away = np.zeros(len(self.store.node_names), dtype=np.int64)
        self._slow: dict[int, list[float]] = {}
        self._slowdowns, self._met = slowdowns, dict[int, float]()
        self._others_run = False  # since the last call of ``slowdowns``
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._to_come = len(scenario.arrivals)
        self._created_s: dict[int, float] = {}  # of profiling tasks, in order of creation
        self._seen_waiting = self._waiting()
        self._plan_arrivals()
        self._plan_nodes(failures, stragglers)

    def _set_up_store(self, shown: Sequence[EstimateRecord]) -> None:
        """Set up the profiling tasks, the truth and the store. Rounds see the estimates ``shown``."""
        scenario, overheads = self.scenario, self.overheads
        restart_s = np.array(
            [
                overheads.start_s(one.spec.requested_gpus, saved=True, new_cell=True)
                for one in scenario.arrivals
            ]
        )
        estimated = {e.workload for e in shown}
        workloads = [one.spec.workload for one in scenario.arrivals if overheads.profiles]
        self._profiling = ProfilingTasks(
            scenario.gpu_types, scenario.nodes, (w for w in workloads if w in estimated)
        )
        tasks, types = self._profiling.specs, scenario.gpu_types
        true = [*scenario.profiles, *true_estimates(types, overheads.profile_s)]
        truth = MemoryStore(scenario, restart_s, true, tasks=tasks)
        self.truth = truth_of(truth.snapshot(0.0))  # same indices
        told = [*shown, *shown_estimates(types)]
        self.store = MemoryStore(scenario, restart_s, told, tasks=tasks)
        if overheads.profiles:
            self.store.estimates.hide()

    # the clock

    def advance(self, to_s: float) -> int:
        """Let time pass until ``to_s``, and return how many events changed a round's snapshot."""
        before = self.events_handled
        while self._events and self._events[0][0] <= to_s:
            at_s, _, happen = heapq.heappop(self._events)
            self._pass_time(at_s)
            happen()
            self._meet()
        self._pass_time(to_s)
        # Jobs that would end within rounding of ``to_s`` end now, so that the round does not see
        # them.
        jobs = np.array(list(self._runs), dtype=np.int64)
        done, left = self._pace.done_at(jobs, to_s), self._pace.speed[jobs] * MOMENT_S
        self.store.jobs.done[jobs] = done
        ends = (to_s > self._pace.ready_s[jobs]) & (self._work[jobs] - done <= left)
        for job in jobs[ends].tolist():
            self._finish(job, self._runs[job].stamp)
        self._meet()
        return self.events_handled - before

    def next_event_s(self) -> float:
        """Return the time of the next event, or inf without one."""
        return self._events[0][0] if self._events else np.inf

    def over(self) -> bool:
        """Return whether every job has arrived and ended. Profiling tasks may be left."""
        return self.store.live_jobs() == 0 and self._to_come == 0

    def jobs_over(self) -> int:
        """Return how many jobs have ended."""
        return self.store.users_jobs - self.store.live_jobs() - self._to_come

    def jobs_running(self) -> int:
        """Return how many jobs hold GPUs, without profiling tasks."""
        return sum(not self.store.is_task(job) for job in self._runs)

    def tasks(self) -> list[Arrival]:
        """Return the profiling tasks that were created, in order."""
        return [Arrival(at_s, self.store.specs[job]) for job, at_s in self._created_s.items()]

    def quiet(self) -> bool:
        """Return whether no job is running and no event is pending."""
        return not self._runs and not self._events

    def _pass_time(self, to_s: float) -> None:
        held = int((self.store.gpus.owner >= 0).sum())
        self._held_gpu_s += held * (to_s - self.now_s)
        self.now_s = to_s

    def _at(self, at_s: float, happen: Callable[[], None]) -> None:
        if np.isfinite(at_s):  # an infinite time never comes
            heapq.heappush(self._events, (at_s, next(self._order), happen))

    def _plan_arrivals(self) -> None:
        for job, one in enumerate(self.scenario.arrivals):
            self._at(one.arrival_s, partial(self._arrive, job))

    def _plan_nodes(self, failures: Sequence[Failure], stragglers: Sequence[Straggler]) -> None:
        index = {name: i for i, name in enumerate(self.store.node_names)}
        names = [f.node for f in failures] + [s.node for s in stragglers]
        if unknown := sorted(set(names) - set(index)):
            raise InvalidInput("node", f"the cluster has no node named {', '.join(unknown[:5])}")
        for f in failures:
            node = index[f.node]
            self._at(f.down_s, partial(self._node_down, node))
            self._at(f.up_s, partial(self._node_up, node))
        for s in stragglers:
            node = index[s.node]
            self._at(s.start_s, partial(self._slow_down, node, s.factor))
            self._at(s.end_s, partial(self._speed_up, node, s.factor))

    # the two sides of a round

    def snapshot(self) -> Snapshot:
        """Return the snapshot that a round sees now."""
        return self.store.snapshot(self.now_s)

    def carry_out(
        self,
        decisions: Sequence[Decision],
        legs: Legs = NO_LEGS,
        prices: Mapping[str, float] = MappingProxyType({}),
    ) -> list[AllocationChange]:
        """Carry out a round's decisions on the last snapshot, and return the changes they made."""
        changes = self.store.commit(decisions, self.now_s, legs, prices)
        for change in changes:
            if change.job in self._runs:
                self._stop(change.job, change.kind.value)
            if change.gang is not None:
                self._start(change, change.gang)
        self._meet()
        return changes

    def close(self) -> None:
        """End the log by writing the segments of the jobs that still run, up to now."""
        for job in list(self._runs):
            self._write(job, self._runs.pop(job), "horizon")

    # events

    def _arrive(self, job: int) -> None:
        self.events_handled += 1
        self._to_come -= 1
        self.store.arrive(job, self.now_s)
        for task in self._profiling.ask(self.store.specs[job].workload):
            created = self.store.users_jobs + task
            self._created_s[created] = self.now_s
            self.store.arrive(created, self.now_s)

    def _start(self, change: AllocationChange, gang: Gang) -> None:
        job, cell = change.job, change.cell
        saved, last = bool(self._saved[job]), self._last_cell.get(job)
        cost_s = self.overheads.start_s(cell.gpus, saved=saved, new_cell=last != cell)
        if self.store.is_task(job):  # it has no checkpoint, and no plan to search
            cost_s = self.overheads.load_s
        if np.isfinite(self.first_start_s[job]):
            self.restarts[job] += 1
        self.first_start_s[job] = min(self.first_start_s[job], self.now_s)
        self._last_cell[job] = cell
        run = _RunningJob(
            change=change,
            cell=self.store.names.cell(cell),
            gang=gang,
            owed=(saved, last),
            start_s=self.now_s,
            ready_s=self.now_s + cost_s,
            stamp=next(self._order),
            at_s=[self.now_s + cost_s],
            done=[float(self.store.jobs.done[job])],
        )
        self._runs[job], self._others_run = run, True
        self._at(
            self.now_s + self.store.jobs.run_left_s(job),
            partial(self._time_out, job, int(self.store.jobs.generation[job])),
        )
        self._set_speed(job, run)

    def _set_speed(self, job: int, run: _RunningJob) -> None:
        """Let the job train at the speed that its nodes allow, and schedule its end or crash."""
        run.network = self._met.get(job, 1.0)
        run.slowdown = run.network * max(
            (max(self._slow[n]) for n, _ in run.gang.members if self._slow.get(n)), default=1.0
        )
        run.speed = (
            self.truth.iterations_per_s(
                int(self.store.jobs.workload[job]), run.cell.on(run.gang.nodes)
            )
            / run.slowdown
        )
        if run.speed > 0:
            left = float(self._work[job]) - run.done[-1]
            self._at(run.at_s[-1] + left / run.speed, partial(self._finish, job, run.stamp))
            if self.store.is_unestimated(job):
                warm_s = run.at_s[-1] + MEASURED_ITERATIONS / run.speed
                self._at(warm_s, partial(self._measure, job, run.stamp))
        else:
            self._at(run.ready_s, partial(self._crash, job, run.stamp))
        self._pace.take(job, run)

    def _finish(self, job: int, stamp: int) -> None:
        run = self._runs.get(job)
        if run is None or run.stamp != stamp:
            return  # the run has changed since the event was scheduled
        self.events_handled += 1
        self._stop(job, "finish", done=float(self._work[job]))
        self.store.finish(job, self.now_s)
        if self.store.is_task(job):
            subject = self._profiling.subject(job - self.store.users_jobs)
            self.store.estimates.show(subject.covers)

    def _time_out(self, job: int, generation: int) -> None:
        """End a job that has held GPUs for its longest run time."""
        if job not in self._runs or self.store.jobs.generation[job] != generation:
            return  # the run of which the event is the end is over
        self.events_handled += 1
        self._stop(job, "timed out")
        self.store.time_out(job, self.now_s)

    def _measure(self, job: int, stamp: int) -> None:
        """Let rounds see the iteration time of a job whose rate was unknown."""
        run = self._runs.get(job)
        if run is None or run.stamp != stamp:
            return
        self.events_handled += 1
        self.store.measure(job, 1.0 / run.speed)

    def _crash(self, job: int, stamp: int) -> None:
        """Queue the job again, because its Cell does not run in truth, and let rounds see that."""
        run = self._runs.get(job)
        if run is None or run.stamp != stamp:
            return
        self.events_handled += 1
        self._stop(job, "crash")
        self.store.measure(job, np.inf)
        self.store.lose(job, self.now_s)

    def _node_down(self, node: int) -> None:
        self.events_handled += 1
        self._away[node] += 1
        self.store.set_schedulable(node, False)
        every_s = self.overheads.checkpoint_every_s
        for job, run in self._runs_on(node):
            if self.store.is_task(job):  # its records are safe
                self._stop(job, "failure")
                self.store.lose(job, self.now_s)
                continue
            # Progress returns to the last checkpoint of this run.
            trained_s = max(0.0, self.now_s - run.ready_s)
            written = np.floor(trained_s / every_s) * every_s if np.isfinite(every_s) else 0.0
            kept = run.done_at(run.ready_s + float(written))
            self._stop(job, "failure", kept=kept)
            self.store.lose(job, self.now_s)

    def _runs_on(self, node: int) -> list[tuple[int, _RunningJob]]:
        """Return the jobs that hold GPUs of ``node``, with their runs."""
        return [
            (job, run)
            for job, run in self._runs.items()
            if any(n == node for n, _ in run.gang.members)
        ]

    def _node_up(self, node: int) -> None:
        self.events_handled += 1
        self._away[node] -= 1
        self.store.set_schedulable(node, bool(self._away[node] == 0))

    def _slow_down(self, node: int, factor: float) -> None:
        self._slow.setdefault(node, []).append(factor)
        self._respeed(self._runs_on(node))

    def _speed_up(self, node: int, factor: float) -> None:
        self._slow[node].remove(factor)
        self._respeed(self._runs_on(node))

    def _meet(self) -> None:
        """Update the network slowdowns of running jobs, if the set of runs has changed."""
        if self._slowdowns is None or not self._others_run:
            return
        self._others_run, before = False, self._met
        jobs = {job: run for job, run in self._runs.items() if not self.store.is_task(job)}
        factors = self._slowdowns({job: run.change for job, run in jobs.items()})
        if wrong := [job for job, factor in factors.items() if not 1 <= factor < np.inf]:
            raise InvalidInput(
                "slowdowns", f"the factor of job {wrong[0]} must be at least 1 and finite"
            )
        self._met = {job: factors.get(job, 1.0) for job in self._runs}
        self._respeed(
            [
                (job, run)
                for job, run in self._runs.items()
                if self._met[job] != before.get(job, 1.0)
            ]
        )

    def _respeed(self, runs: Sequence[tuple[int, _RunningJob]]) -> None:
        for job, run in runs:
            done = run.done_at(self.now_s)
            if self.now_s > run.start_s:
                self._write(job, run, "speed", done)
            at_s = max(self.now_s, run.ready_s)
            if at_s > run.at_s[-1]:
                run.at_s.append(at_s)
                run.done.append(done)
            run.start_s, run.stamp = self.now_s, next(self._order)
            self._set_speed(job, run)

    def _stop(
        self, job: int, why: str, *, done: float | None = None, kept: float | None = None
    ) -> None:
        """End the job's run.

        ``kept`` is the progress that is left after a failure.
        """
        run, self._others_run = self._runs.pop(job), True
        self._met.pop(job, None)
        reached = run.done_at(self.now_s) if done is None else done
        left = reached if kept is None else kept
        self._write(job, run, why, reached, lost=reached - left)
        self.store.jobs.done[job] = left
        # A start that was cut short has paid nothing, so that the next one owes the same.
        if self.now_s < run.ready_s:
            self._saved[job], last = run.owed
            if last is None:
                del self._last_cell[job]
            else:
                self._last_cell[job] = last
        else:
            self._saved[job] = why != "failure" and left > run.done[0]

    def _write(
        self, job: int, run: _RunningJob, why: str, done: float | None = None, lost: float = 0.0
    ) -> None:
        reached = run.done_at(self.now_s) if done is None else done
        trained = reached - run.done_at(run.start_s)
        self._logged[job] += trained - lost
        is_task = self.store.is_task(job)
        (self.task_segments if is_task else self.segments).append(
            Segment(
                job=list(self._created_s).index(job) if is_task else job,
                start_s=run.start_s,
                ready_s=max(run.ready_s, run.start_s),
                end_s=self.now_s,
                cell=run.cell,
                members=run.gang.members,
                slowdown=run.slowdown,
                network=run.network,
                iterations=trained,
                lost=lost,
                ended_by=why,
            )
        )

    # invariants

    def check(self) -> None:
        """Raise InvariantBroken unless GPUs, GPU-seconds and work add up."""
        store, runs = self.store, self._runs
        if set(store.gpus.gangs) != set(runs):
            raise InvariantBroken("a job holds GPUs but does not run, or runs without GPUs")
        held = np.bincount(store.gpus.owner[store.gpus.owner >= 0], minlength=len(store.specs))
        if not np.array_equal(held, store.jobs.current_gpus):
            raise InvariantBroken(
                "a job counts a GPU that it does not hold, or holds one uncounted"
            )
        jobs = np.array(list(runs), dtype=np.int64)
        held_s = self.now_s - store.jobs.began_s[jobs]
        served = float(store.jobs.service_gpu_s.sum() + (self._pace.gpus[jobs] * held_s).sum())
        if abs(served - self._held_gpu_s) > TOLERANCE * (1.0 + self._held_gpu_s):
            raise InvariantBroken(
                f"jobs were served {served} GPU-seconds, but {self._held_gpu_s} were held"
            )
        logged = np.array(self._logged)
        logged[jobs] += self._pace.done_at(jobs, self.now_s) - self._pace.began[jobs]
        wrong = np.abs(logged - store.jobs.done) > TOLERANCE * (1.0 + store.jobs.iterations)
        if wrong.any():
            name = store.specs[int(np.flatnonzero(wrong)[0])].name
            raise InvariantBroken(f"the progress of {name} differs from the sum of its log")
        self._check_waiting()

    def _check_waiting(self) -> None:
        """Raise InvariantBroken if a job made progress while it held no GPUs."""
        then, done, generation = self._seen_waiting
        still = self._waits()[then] & (self.store.jobs.generation[then] == generation)
        if (self.store.jobs.done[then] != done)[still].any():
            raise InvariantBroken("a job made progress while it held no GPUs")
        self._seen_waiting = self._waiting()

    def _waiting(self) -> tuple[Ints, Floats, Ints]:
        waits, live = self._waits(), np.array(self.store.jobs.live, dtype=np.int64)
        jobs = live[waits[live]]
        return (
            jobs,
            np.array(self.store.jobs.done[jobs]),
            np.array(self.store.jobs.generation[jobs]),
        )

    def _waits(self) -> Bools:
        """Return which jobs hold no GPUs, bool[jobs]."""
        waits = np.ones(len(self.store.specs), dtype=np.bool_)
        waits[list(self._runs)] = False
        return waits
