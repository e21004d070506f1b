"""One future of a snapshot: rounds, arrivals and ends, until the jobs of the snapshot are over.

A future works on the tables of a live snapshot, so that everything that binds a round binds it, too.
The decisions are those of the same code as in the service. ``simulator.world`` is the full world of a
scenario, with failures, a log and checks. A future has none of these, and runs many times.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tessera.formulation.answer.decisions import CHANGES_GPUS, Decision, DecisionKind
from tessera.formulation.answer.placement import current_gangs
from tessera.formulation.base.moments import SAME_S
from tessera.formulation.base.resources import GIVEN_PREFIX, HOST_NAMES, NO_NEEDS, NOT_STATED
from tessera.formulation.base.tables import Bools, Floats, Ints, array_columns
from tessera.formulation.base.values import BEST_FOUND, CellKey, Hold
from tessera.formulation.job.dependencies import CONDITIONS, Condition
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.state.cells import build_cells
from tessera.formulation.state.decayed_use import Stint, UseMeter
from tessera.formulation.state.given_demand import demands_of_cells
from tessera.formulation.state.last_round import (
    NO_SEGMENTS,
    PlannedNodes,
    PlannedStarts,
    Prices,
    ScheduleSegments,
    StartPlan,
    keep_starts,
)
from tessera.formulation.state.snapshot import (
    NO_DEPENDENCIES,
    STATE_CODE,
    WITHOUT_CELL,
    Allocations,
    Jobs,
    Snapshot,
)
from tessera.simulator.forecasts.draws import Draw
from tessera.simulator.forecasts.rhythm import RoundRhythm
from tessera.simulator.measured_times import MEASURED_ITERATIONS, with_measured_time
from tessera.simulator.renumbering import renumber_jobs
from tessera.solvers.rounds.due import due_s, next_segment_s, next_start_s
from tessera.solvers.rounds.plan import RoundOutcome

MOMENT_S: Final = 1e-6
"""The time within which two events are the same moment."""

ARRIVAL, RETRY = -1, -2
"""Stamps of events that are no end: the job arrives, or it may be tried again after a failure."""

_AFTER: Final = {
    JobState.STARTING: JobState.RUNNING,
    JobState.STOPPING: JobState.QUEUED,
    JobState.HOLDING: JobState.HELD,
    JobState.CANCELLING: JobState.CANCELLED,
    JobState.FAILING: JobState.FAILED,
}
"""The states that states in between lead to. Futures take that step at their beginning."""

_QUEUED, _RUNNING = STATE_CODE[JobState.QUEUED], STATE_CODE[JobState.RUNNING]
_OVER: Final = [STATE_CODE[s] for s in JobState if s in (JobState.CANCELLED, JobState.FAILED)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FutureTimes:
    """The times and the work of a future.

    ``start_s`` and ``finish_s`` are float64[jobs of the snapshot], in seconds since 1970.
    ``start_s`` is the first start after the snapshot. Both are inf for what did not happen before
    the future's horizon. The others are float64[jobs, then arrivals], from the snapshot to the
    future's end: the seconds for which each job waited, and the iterations that it trained. Of an
    arrival that the future did not reach, ``waited_s`` is NaN. ``finished`` counts the jobs that
    ended, arrivals included. ``soon_waits`` (bool) and ``soon_speed`` are of the same jobs, one
    spacing of rounds after the snapshot, when an event at the snapshot has been answered: whether a
    job waits, and the iterations/s at which it trains or will train on its GPUs.
    """

    start_s: Floats
    finish_s: Floats
    waited_s: Floats
    trained: Floats
    finished: int
    soon_waits: Bools
    soon_speed: Floats


def follow_future(
    snapshot: Snapshot,
    draw: Draw,
    decide: Callable[[Snapshot], RoundOutcome],
    rhythm: RoundRhythm,
    wanted: Callable[[], bool] = lambda: True,
) -> FutureTimes:
    """Return when the jobs of ``snapshot`` start and finish in one future.

    ``wanted`` is asked before each round. When it says no, the future ends as at its horizon.
    """
    future = _Future(snapshot, draw)
    times, until_s = rhythm.times(), snapshot.now_s + rhythm.horizon_s
    soon_s = snapshot.now_s + rhythm.spacing_s
    times.begin(future.now_s)
    if rhythm.settled:
        times.need(_next_promise_s(snapshot))
        times.expect(_next_start_s(snapshot))
    else:
        times.ask(future.now_s)
    while (rhythm.to_horizon or future.tracks()) and future.now_s < until_s and wanted():
        if times.due_s() <= future.now_s + MOMENT_S:
            times.begin(future.now_s)
            apart_s = rhythm.coarsening * (future.now_s - snapshot.now_s)
            times.spacing_s = max(rhythm.spacing_s, apart_s)
            times.need(future.decide_round(decide, rhythm))
            times.expect(future.next_start_s)
        if future.now_s >= soon_s - MOMENT_S:
            future.look()
            soon_s = math.inf
        event_s = future.next_event_s()
        next_s = min(times.due_s(event_s), until_s, soon_s)
        if math.isinf(next_s):
            break
        if future.advance(next_s):
            times.ask(event_s)
    return future.times()


class _Future:
    """The state of a future, as arrays by job: those of the snapshot, then the arrivals."""

    def __init__(self, snapshot: Snapshot, draw: Draw) -> None:
        self.base, self.now_s = snapshot, snapshot.now_s
        self._tracked = len(snapshot.jobs)
        self._set_up_jobs(snapshot.jobs.followed_by(draw.arrivals), draw)
        self._set_up_gpus()
        self._seen = snapshot.estimates
        truth = replace(snapshot, estimates=replace(self._seen, iter_time_s=draw.iter_time_s))
        self._cells = build_cells(truth)
        keys = zip(self._cells.workload.tolist(), self._cells.keys(), strict=True)
        self._row = {key: row for row, key in enumerate(keys)}
        self._batch = [w.global_batch for w in snapshot.workloads]
        self._demands = demands_of_cells(snapshot.estimates)
        self._meter: UseMeter | None = None
        if snapshot.use_half_life_s > 0:
            self._meter = UseMeter(snapshot.use_half_life_s, snapshot.decayed_use, snapshot.now_s)
        self._segments, self._prices, self._rounds = snapshot.schedule_segments, snapshot.prices, 0
        self.next_start_s = math.inf  # when the last round has planned the next start
        self._starts = snapshot.planned_starts, snapshot.planned_nodes
        self.start_s = np.full(self._tracked, np.inf)
        self.finish_s = np.full(self._tracked, np.inf)
        self._resume()
        self.look()  # for a future that ends before it is looked at again

    def _set_up_jobs(self, jobs: Jobs, draw: Draw) -> None:
        self._names, self._tenants = np.array(jobs.name), np.array(jobs.tenant)
        self._column = {name: np.array(getattr(jobs, name)) for name in array_columns(Jobs)}
        column, count = self._column, len(jobs)
        column["progress_s"] = np.zeros(count)  # a future knows the progress of each moment
        state = column["state"]
        for before, after in _AFTER.items():
            state[state == STATE_CODE[before]] = STATE_CODE[after]
        arrival_s = np.where(np.arange(count) < self._tracked, -np.inf, column["submit_s"])
        self._live = np.isneginf(arrival_s) & ~np.isin(state, _OVER)
        # The iterations until a job really ends, a whole number. It is shown as many as its user states.
        total, left = column["iterations"], column["iterations_left"]
        done = total - left
        self._left = np.maximum(np.maximum(np.rint(draw.share * total), 1.0) - done, 0.0)
        self._stated_left = np.array(left)
        self._left_at_first, self._finished = np.array(self._left), 0
        self._waited_s = np.zeros(count)
        self._speed, self._ready_s = np.zeros(count), np.full(count, np.inf)
        self._measured_s, self._nodes = np.full(count, np.inf), np.zeros(count, dtype=np.int64)
        self._trained_at_s = np.full(count, self.now_s)
        self._stamp = np.zeros(count, dtype=np.int64)
        self._events: list[tuple[float, int, int]] = []  # (time, job, stamp)
        for job in range(self._tracked, count):
            self._events.append((float(arrival_s[job]), job, ARRIVAL))
        for job in np.flatnonzero(self._live & (column["retry_s"] > self.now_s)).tolist():
            self._events.append((float(column["retry_s"][job]), job, RETRY))
        heapq.heapify(self._events)

    def _set_up_gpus(self) -> None:
        nodes = self.base.nodes
        self._first_gpu = np.append(0, np.cumsum(nodes.gpus))
        self._node_of = np.repeat(np.arange(len(nodes)), nodes.gpus)
        self._owner = np.full(int(self._first_gpu[-1]), -1, dtype=np.int64)
        self._gpus: dict[int, Ints] = {}

    def _resume(self) -> None:
        """Let the jobs that own GPUs go on."""
        a, column = self.base.allocations, self._column
        lost = set(np.unique(a.job[~self.base.nodes.schedulable[a.node] & (a.job >= 0)]).tolist())
        for job, gang in current_gangs(self.base).items():
            ended = not self._live[job] or column["state"][job] != _RUNNING
            if ended or job in lost:
                self._set_waiting(job)
                continue
            where = [int(self._first_gpu[n]) + gpu for n, gpus in gang.members for gpu in gpus]
            self._gpus[job] = np.array(where, dtype=np.int64)
            self._owner[self._gpus[job]] = job
            started_s = float(column["since_s"][job]) + float(column["restart_s"][job])
            self._train(job, gang.nodes, started_s)
        running = (column["state"] == _RUNNING) & self._live
        for job in np.flatnonzero(running).tolist():
            if job not in self._gpus:
                self._set_waiting(job)

    def _set_waiting(self, job: int) -> None:
        column = self._column
        for name, value in WITHOUT_CELL.items():
            column[name][job] = value
        column["since_s"][job] = 0.0
        if column["state"][job] == _RUNNING:
            column["state"][job], column["queued_s"][job] = _QUEUED, self.now_s

    # time

    def tracks(self) -> bool:
        """Return whether a job of the snapshot is left that may start or finish.

        Those that wait for others do not count: while they wait, another one is left.
        """
        state, unmet = self._column["state"][: self._tracked], self._column["unmet"]
        idle = (state == STATE_CODE[JobState.HELD]) | (unmet[: self._tracked] > 0)
        return bool((self._live[: self._tracked] & ~idle).any())

    def look(self) -> None:
        """Note which jobs wait now, and at which speed the others train."""
        self._soon = self._waits(), np.array(self._speed)

    def _waits(self) -> Bools:
        queued: Bools = self._column["state"] == _QUEUED
        return self._live & queued

    def times(self) -> FutureTimes:
        """Return the times of jobs, and what they have done until now."""
        for job in list(self._gpus):
            self._settle(job)
        waited_s, waits = np.array(self._waited_s), self._waits()
        waited_s[waits] += self.now_s - np.maximum(self._column["queued_s"][waits], self.base.now_s)
        to_come = np.arange(len(waits)) >= self._tracked
        to_come &= self._column["submit_s"] > self.now_s
        waited_s[to_come] = np.nan
        return FutureTimes(
            start_s=self.start_s,
            finish_s=self.finish_s,
            waited_s=waited_s,
            trained=self._left_at_first - self._left,
            finished=self._finished,
            soon_waits=self._soon[0],
            soon_speed=self._soon[1],
        )

    def next_event_s(self) -> float:
        """Return the time of the next event, or inf without one."""
        while self._events and self._events[0][2] >= 0:
            _, job, stamp = self._events[0]
            if self._stamp[job] == stamp:
                break
            heapq.heappop(self._events)
        return self._events[0][0] if self._events else math.inf

    def advance(self, to_s: float) -> bool:
        """Let time pass until ``to_s``; return whether something happened that rounds see."""
        happened = False
        while self.next_event_s() <= to_s + MOMENT_S:
            self.now_s, job, stamp = heapq.heappop(self._events)
            happened = True
            if stamp == ARRIVAL:
                self._live[job] = True
            elif stamp >= 0:
                self._end(job)
        self.now_s = to_s
        return happened

    def _end(self, job: int) -> None:
        self._release(job)
        self._live[job] = False
        self._finished += 1
        if job < self._tracked:
            self.finish_s[job] = self.now_s
            self._free_dependents(job)

    def _free_dependents(self, job: int) -> None:
        """Note that a job has succeeded, so that those which waited for that only may start."""
        d = self.base.dependencies
        met = (d.on == job) & (d.condition != CONDITIONS.index(Condition.FAILED))
        for waits in d.job[met].tolist():
            self._column["unmet"][waits] -= 1
            self._column["queued_s"][waits] = self.now_s

    def _settle(self, job: int) -> None:
        """Count what the job has trained until now."""
        since_s = max(float(self._trained_at_s[job]), float(self._ready_s[job]))
        trained = self._speed[job] * max(0.0, self.now_s - since_s)
        self._left[job] -= trained
        self._stated_left[job] -= trained
        self._trained_at_s[job] = self.now_s

    def _measure(self, job: int) -> None:
        """Let rounds see the time of the Cell on which a job has trained for long enough."""
        self._measured_s[job] = np.inf
        self._seen = with_measured_time(
            self._seen,
            self._workload(job),
            self._cell(job),
            int(self._nodes[job]),
            1.0 / float(self._speed[job]),
        )

    def _release(self, job: int) -> None:
        if self._measured_s[job] <= self.now_s:
            self._measure(job)
        self._settle(job)
        if self._meter is not None:
            self._meter.add(self._stint(job), self.now_s)
        self._column["service_gpu_s"][job] += self._held_s(job) * len(self._gpus[job])
        self._column["run_left_s"][job] -= self._held_s(job)
        self._owner[self._gpus.pop(job)] = -1
        self._speed[job], self._ready_s[job], self._measured_s[job] = 0.0, math.inf, math.inf
        self._stamp[job] += 1
        self._set_waiting(job)

    def _stint(self, job: int) -> Stint:
        """Return what the job has held since the snapshot, which has what it held before."""
        cell, column = self._cell(job), self._column
        needs = tuple(int(column[GIVEN_PREFIX + name][job]) for name in HOST_NAMES)
        if NOT_STATED in needs:
            needs = self._demands.get((self._workload(job), cell), NO_NEEDS)
        return Stint(
            tenant=str(self._tenants[job]),
            gpu_type=cell.gpu_type,
            gpus=len(self._gpus[job]),
            needs=needs,
            began_s=self.now_s - self._held_s(job),
        )

    def _workload(self, job: int) -> int:
        return int(self._column["workload"][job])

    def _cell(self, job: int) -> CellKey:
        return CellKey._make(int(self._column[name][job]) for name in Jobs.CELL)

    def _held_s(self, job: int) -> float:
        """Return the seconds since the snapshot for which the job has held its GPUs."""
        return self.now_s - max(float(self._column["since_s"][job]), self.base.now_s)

    def _train(self, job: int, nodes: int, ready_s: float) -> None:
        self._speed[job] = self._iterations_per_s(job, nodes)
        self._ready_s[job], self._trained_at_s[job] = ready_s, self.now_s
        self._stamp[job] += 1
        # It ends when it is trained, or at the latest when it has run for its longest run time.
        end_s = self.now_s + float(self._column["run_left_s"][job])
        if self._speed[job] > 0:
            self._nodes[job] = nodes
            self._measured_s[job] = ready_s + MEASURED_ITERATIONS / self._speed[job]
            begins_s = max(self.now_s, ready_s)
            end_s = min(end_s, begins_s + float(self._left[job] / self._speed[job]))
        if end_s < math.inf:
            heapq.heappush(self._events, (end_s, job, int(self._stamp[job])))

    def _iterations_per_s(self, job: int, nodes: int) -> float:
        """Return the true speed of a job, or 0 if its Cell is not known to run."""
        work, cell = self._workload(job), self._cell(job)
        row = self._row.get((work, cell))
        if row is None and cell.pipeline_degree == BEST_FOUND:
            alike = [
                r
                for (w, c), r in self._row.items()
                if (w, c.gpu_type, c.gpus) == (work, cell.gpu_type, cell.gpus)
            ]
            row = max(alike, key=lambda r: float(self._cells.rate[r]), default=None)
        return 0.0 if row is None else self._cells.rate_on(row, nodes) / self._batch[work]

    # rounds

    def decide_round(
        self, decide: Callable[[Snapshot], RoundOutcome], rhythm: RoundRhythm
    ) -> float:
        """Decide a round and carry it out; return when promises or reservations need the next one."""
        shown = np.flatnonzero(self._live)
        if not len(shown):
            return math.inf
        snapshot = self._snapshot(shown)
        outcome = decide(snapshot)
        self._rounds += 1
        if outcome.violations:
            return math.inf
        self._plan_starts(outcome.plan, shown)
        self._carry_out(outcome.decisions, shown)
        segments = outcome.segments_after(snapshot)
        self._segments = _renumber(segments, shown) if len(segments) else NO_SEGMENTS
        self._prices = Prices.after_round(outcome.prices)
        self.next_start_s = next_start_s(snapshot, outcome)
        return min(
            due_s(snapshot, outcome, rhythm.period_s),
            next_segment_s(snapshot, outcome),
            snapshot.reservations.next_change_s(self.now_s),
        )

    def _snapshot(self, shown: Ints) -> Snapshot:
        """Return what a round sees now of the jobs ``shown``, which are live."""
        for job in np.flatnonzero(self._measured_s <= self.now_s).tolist():
            self._measure(job)
        local = np.full(len(self._live), -1, dtype=np.int64)
        local[shown] = np.arange(len(shown))
        starts, nodes = self._waiting_starts(local)
        return replace(
            self.base,
            epoch=self.base.epoch + self._rounds,
            round_number=self.base.round_number + self._rounds,
            now_s=self.now_s,
            estimates=self._seen,
            jobs=self._jobs(shown),
            allocations=self._allocations(local),
            avoided_nodes=renumber_jobs(self.base.avoided_nodes, local),
            dependencies=NO_DEPENDENCIES,  # rounds only need their number
            allowed_gpu_types=renumber_jobs(self.base.allowed_gpu_types, local),
            entitlements=renumber_jobs(self.base.entitlements, local),
            schedule_segments=renumber_jobs(self._segments, local),
            planned_starts=replace(starts, job=local[starts.job]),
            planned_nodes=nodes,
            prices=self._prices,
            decayed_use=self.base.decayed_use
            if self._meter is None
            else self._meter.read(self.now_s, map(self._stint, self._gpus)),
        )

    def _jobs(self, shown: Ints) -> Jobs:
        rows = {name: column[shown] for name, column in self._column.items()}
        since_s = np.maximum(self._trained_at_s[shown], self._ready_s[shown])
        trained = self._speed[shown] * np.maximum(0.0, self.now_s - since_s)
        rows["iterations_left"] = np.maximum(self._stated_left[shown] - trained, 0.0)
        held_s = np.where(
            rows["since_s"] > 0, self.now_s - np.maximum(rows["since_s"], self.base.now_s), 0.0
        )
        rows["service_gpu_s"] = rows["service_gpu_s"] + held_s * rows["current_gpus"]
        rows["run_left_s"] = np.maximum(rows["run_left_s"] - held_s, 0.0)
        return Jobs(name=tuple(self._names[shown]), tenant=tuple(self._tenants[shown]), **rows)

    def _allocations(self, local: Ints) -> Allocations:
        held = np.flatnonzero(self._owner >= 0)
        job, node = self._owner[held], self._node_of[held]
        return Allocations(
            job=local[job],
            node=node,
            gpu=held - self._first_gpu[node],
            hold=np.full(len(held), int(Hold.HELD), dtype=np.int64),
            generation=self._column["generation"][job],
        )

    def _plan_starts(self, plan: StartPlan | None, jobs: Ints) -> None:
        """Keep what a round has planned and promised for the jobs that wait, if it says anything."""
        if plan is not None:
            self._starts = replace(plan.starts, job=jobs[plan.starts.job]), plan.nodes
            self._column["start_by_s"][jobs] = plan.start_by_s

    def _waiting_starts(self, local: Ints) -> tuple[PlannedStarts, PlannedNodes]:
        """Return the planned starts of shown jobs that wait, and their nodes. Others are forgotten."""
        starts, nodes = self._starts
        waits = self._column["state"][starts.job] == _QUEUED
        self._starts = keep_starts(starts, nodes, waits & (local[starts.job] >= 0))
        return self._starts

    def _carry_out(self, decisions: Sequence[Decision], shown: Ints) -> None:
        column = self._column
        for decision in decisions:  # release all GPUs before any are taken
            job = int(shown[decision.job])
            column["admitted"][job] = decision.admitted
            column["opportunistic"][job] = decision.opportunistic and decision.gang is not None
            stays = decision.kind in (DecisionKind.KEEP, DecisionKind.WAIT)
            if not stays and job in self._gpus:
                self._release(job)
            if decision.kind is DecisionKind.REJECT:
                self._count_wait(job)
                self._live[job] = False
        for decision in decisions:
            if decision.kind in CHANGES_GPUS and decision.gang is not None:
                self._start(int(shown[decision.job]), decision)

    def _count_wait(self, job: int) -> None:
        """Count the time for which the job has waited, if it waits."""
        if self._column["state"][job] == _QUEUED:
            since_s = max(float(self._column["queued_s"][job]), self.base.now_s)
            self._waited_s[job] += self.now_s - since_s

    def _start(self, job: int, decision: Decision) -> None:
        column, gang = self._column, decision.gang
        assert gang is not None  # noqa: S101 - the caller has checked it
        where = [int(self._first_gpu[n]) + gpu for n, gpus in gang.members for gpu in gpus]
        self._gpus[job] = np.array(where, dtype=np.int64)
        self._owner[self._gpus[job]] = job
        self._count_wait(job)
        # What it needs is what its Cell's estimates state, which never change here.
        given = WITHOUT_CELL | dict(zip(Jobs.CELL, decision.cell, strict=True))
        for name, value in given.items():
            column[name][job] = value
        if column["unsaved_since_s"][job] > 0:  # it writes no checkpoint when it is stopped
            column["unsaved_since_s"][job] = self.now_s
        column["state"][job], column["since_s"][job] = _RUNNING, self.now_s
        column["start_by_s"][job] = math.inf
        column["generation"][job] += 1
        column["version"][job] += 1
        if job < self._tracked:
            self.start_s[job] = min(self.start_s[job], self.now_s)
        self._train(job, gang.nodes, self.now_s + float(column["restart_s"][job]))


def _next_promise_s(snapshot: Snapshot) -> float:
    """Return when the round that left a snapshot needs the next one, as far as the snapshot says it."""
    next_s = _next_after(snapshot.schedule_segments.start_s, snapshot.now_s)
    return min(next_s, snapshot.reservations.next_change_s(snapshot.now_s))


def _next_start_s(snapshot: Snapshot) -> float:
    """Return the next time for which the round that left a snapshot has planned a start, or inf."""
    return _next_after(snapshot.planned_starts.start_s, snapshot.now_s)


def _next_after(times_s: Floats, now_s: float) -> float:
    """Return the first of the times (float64[any]) after ``now_s``, or inf."""
    return float(times_s[times_s > now_s + SAME_S].min(initial=math.inf))


def _renumber(segments: ScheduleSegments, shown: Ints) -> ScheduleSegments:
    """Return the segments with the future's own indices of jobs."""
    return replace(segments, job=shown[segments.job])
