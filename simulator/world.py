"""A simulated cluster, in which events happen in order of time and jobs train at their speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np

from tessera.formulation.answer.decisions import Decision
from tessera.formulation.answer.placement import Gang
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.values import CellKey
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.state.last_round import NO_SEGMENTS, ScheduleSegments, StartPlan
from tessera.formulation.state.snapshot import Snapshot
from tessera.simulator.events import EventQueue
from tessera.simulator.hazards import Failure, Straggler
from tessera.simulator.ledger import Ledger
from tessera.simulator.log import Segment
from tessera.simulator.measured_times import MEASURED_ITERATIONS
from tessera.simulator.overheads import Overheads
from tessera.simulator.profiling import ProfilingTasks, shown_estimates, true_estimates
from tessera.simulator.progress import Progress, RunningJob
from tessera.simulator.scenario import Scenario
from tessera.simulator.store.gpus import AllocationChange
from tessera.simulator.store.memory import MemoryStore
from tessera.simulator.traces.trace import Arrival
from tessera.simulator.truth import truth_of

MOMENT_S: Final = 1e-6
"""A job that would end within this time after a round counts as having ended before it. Such a
difference is due to rounding."""

Slowdowns: TypeAlias = Callable[[Mapping[int, AllocationChange]], Mapping[int, float]]
"""A function that returns, by job, the factor (at least 1) by which iterations take longer because
jobs share links of the network. Its argument has the running jobs, each with the change that
started it. A job that is left out is not slowed."""


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
        measures: bool = False,
    ) -> None:
        """Set up the world at time 0, with its arrivals, failures and stragglers as events.

        If models are profiled (``Overheads.profile_s``), rounds see estimates of a model on a GPU
        type only once its profiling task there has ended.

        ``visible`` are the estimates that rounds see. If it is None, rounds see the true ones.
        ``slowdowns`` is called whenever the running jobs or their GPUs have changed. If it is None,
        no job is slowed by others. ``ended_early`` and ``measures`` are described at
        ``Conditions``.
        """
        self.scenario, self.overheads, self.now_s = scenario, overheads, 0.0
        self._set_up_store(scenario.profiles if visible is None else visible)
        self.segments: list[Segment] = []
        self.task_segments: list[Segment] = []  # their jobs are indices into ``tasks``
        self.events_handled = 0
        specs = self.store.specs
        self._measures = measures
        self._work = self.store.jobs.iterations * [
            ended_early.get(spec.name, 1.0) for spec in specs
        ]
        self._work = np.maximum(1.0, np.rint(self._work))  # iterations after which each job ends
        self.first_start_s = np.full(len(specs), np.inf)
        self.restarts = np.zeros(len(specs), dtype=np.int64)  # starts after the first, and changes
        self._runs: dict[int, RunningJob] = {}
        self._pace = Progress(len(specs))
        self._last_cell: dict[int, CellKey] = {}
        self._saved = np.zeros(len(specs), dtype=np.bool_)
        self._ledger = Ledger(self.store)
        self._away = np.zeros(len(self.store.node_names), dtype=np.int64)
        self._slow: dict[int, list[float]] = {}
        self._slowdowns, self._met = slowdowns, dict[int, float]()
        self._others_run = False  # since the last call of ``slowdowns``
        self._events, self._stamps = EventQueue(), count()
        self._to_come = len(scenario.arrivals)
        self._created_s: dict[int, float] = {}  # of profiling tasks, in order of creation
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
        # Events within rounding of ``to_s`` happen now, so that a round at a planned start sees them.
        while self._events and self._events.next_s() <= to_s + MOMENT_S:
            self._pass_time(max(self.now_s, min(self._events.next_s(), to_s)))
            happen = self._events.pop()
            happen()
            self._meet()
        self._pass_time(to_s)
        # So do ends of jobs, whose events may be later by more.
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
        return self._events.next_s()

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
        self._ledger.pass_time(to_s - self.now_s)
        self.now_s = to_s

    def _plan_arrivals(self) -> None:
        for job, one in enumerate(self.scenario.arrivals):
            self._events.add(one.arrival_s, partial(self._arrive, job))

    def _plan_nodes(self, failures: Sequence[Failure], stragglers: Sequence[Straggler]) -> None:
        index = {name: i for i, name in enumerate(self.store.node_names)}
        names = [f.node for f in failures] + [s.node for s in stragglers]
        if unknown := sorted(set(names) - set(index)):
            raise InvalidInput("node", f"the cluster has no node named {', '.join(unknown[:5])}")
        for f in failures:
            node = index[f.node]
            self._events.add(f.down_s, partial(self._node_down, node))
            self._events.add(f.up_s, partial(self._node_up, node))
        for s in stragglers:
            node = index[s.node]
            self._events.add(s.start_s, partial(self._slow_down, node, s.factor))
            self._events.add(s.end_s, partial(self._speed_up, node, s.factor))

    # the two sides of a round

    def snapshot(self) -> Snapshot:
        """Return the snapshot that a round sees now."""
        return self.store.snapshot(self.now_s)

    def carry_out(
        self,
        decisions: Sequence[Decision],
        schedule_segments: ScheduleSegments = NO_SEGMENTS,
        prices: Mapping[str, float] = MappingProxyType({}),
        plan: StartPlan | None = None,
    ) -> list[AllocationChange]:
        """Carry out a round's decisions on the last snapshot, and return the changes they made."""
        changes = self.store.commit(decisions, self.now_s, schedule_segments, prices, plan)
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
        ready_s = self.now_s + self._start_cost_s(job, cell)
        if np.isfinite(self.first_start_s[job]):
            self.restarts[job] += 1
        self.first_start_s[job] = min(self.first_start_s[job], self.now_s)
        run = RunningJob(
            change=change,
            cell=self.store.names.cell(cell),
            gang=gang,
            start_s=self.now_s,
            ready_s=ready_s,
            stamp=next(self._stamps),
            at_s=[ready_s],
            done=[float(self.store.jobs.done[job])],
        )
        self._runs[job], self._others_run = run, True
        self._events.add(
            self.now_s + self.store.jobs.run_left_s(job),
            partial(self._time_out, job, int(self.store.jobs.generation[job])),
        )
        self._set_speed(job, run)

    def _start_cost_s(self, job: int, cell: CellKey) -> float:
        """Return the seconds that a start of a job on a Cell takes."""
        if self.store.is_task(job):  # it has no checkpoint, and no plan to search
            return self.overheads.load_s
        is_new = self._last_cell.get(job) != cell
        return self.overheads.start_s(cell.gpus, saved=bool(self._saved[job]), new_cell=is_new)

    def _set_speed(self, job: int, run: RunningJob) -> None:
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
            self._events.add(run.at_s[-1] + left / run.speed, partial(self._finish, job, run.stamp))
            if self._measures or self.store.is_unestimated(job):
                warm_s = run.at_s[-1] + MEASURED_ITERATIONS / run.speed
                self._events.add(warm_s, partial(self._measure, job, run.stamp))
        else:
            self._events.add(run.ready_s, partial(self._crash, job, run.stamp))
        self._pace.take(job, run)

    def _run(self, job: int, stamp: int) -> RunningJob | None:
        """Return the run of an event's stamp, or None if it has changed since the event was added."""
        run = self._runs.get(job)
        return run if run is not None and run.stamp == stamp else None

    def _finish(self, job: int, stamp: int) -> None:
        if self._run(job, stamp) is None:
            return
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
        """Let rounds see the iteration time of a job. It is an event if its rate was unknown."""
        run = self._run(job, stamp)
        if run is None:
            return
        if self.store.is_unestimated(job):
            self.events_handled += 1
        self.store.measure(job, 1.0 / run.speed)

    def _crash(self, job: int, stamp: int) -> None:
        """Queue the job again, because its Cell does not run in truth, and let rounds see that."""
        if self._run(job, stamp) is None:
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

    def _runs_on(self, node: int) -> list[tuple[int, RunningJob]]:
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

    def _respeed(self, runs: Sequence[tuple[int, RunningJob]]) -> None:
        for job, run in runs:
            done = run.done_at(self.now_s)
            if self.now_s > run.start_s:
                self._write(job, run, "speed", done)
            at_s = max(self.now_s, run.ready_s)
            if at_s > run.at_s[-1]:
                run.at_s.append(at_s)
                run.done.append(done)
            run.start_s, run.stamp = self.now_s, next(self._stamps)
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
        if self.now_s >= run.ready_s:
            self._last_cell[job] = run.change.cell
            self._saved[job] = why != "failure" and left > run.done[0]

    def _write(
        self, job: int, run: RunningJob, why: str, done: float | None = None, lost: float = 0.0
    ) -> None:
        reached = run.done_at(self.now_s) if done is None else done
        trained = reached - run.done_at(run.start_s)
        self._ledger.log(job, trained - lost)
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

    def check(self) -> None:
        """Raise InvariantBroken unless GPUs, GPU-seconds and work add up."""
        self._ledger.check(self._runs, self._pace, self.now_s)
