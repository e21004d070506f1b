"""A world stepped by rounds of 300 s, with optional accounting like that of Arena's artifact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tessera.benchmarks.papers.arena.oddities import ROUND_S, LaunchCost, Oddities
from tessera.benchmarks.papers.arena.pricing import sizes_inferred, slow_left_out
from tessera.benchmarks.papers.arena.scatter import scatter_starts, starts_of
from tessera.formulation.decisions import Decision, DecisionKind
from tessera.formulation.last_round import NO_SEGMENTS, ScheduleSegments
from tessera.formulation.lifecycle import JobState
from tessera.formulation.placement import Gang
from tessera.formulation.snapshot import STATE_CODE, Snapshot
from tessera.formulation.tables import Floats, Ints
from tessera.simulator.scenario import Scenario
from tessera.simulator.store.gpus import AllocationChange, InvariantBroken
from tessera.simulator.store.memory import MemoryStore
from tessera.simulator.truth import truth_of
from tessera.solvers.rounds.plan import RoundOutcome

DECIMALS = 3
_HELD, _QUEUED = STATE_CODE[JobState.HELD], STATE_CODE[JobState.QUEUED]


@dataclass(slots=True, kw_only=True)
class _RunningJob:
    """The state of a job that holds GPUs. ``debt_s`` is the remaining seconds of a long restart."""

    iter_s: float
    samples_s: float
    ready_s: float  # when training begins, if restarts are charged to jobs
    debt_s: float = 0.0
    recorded: float = 1.0  # the share of its throughput that this round's record gets


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompatResult:
    """The result of a run, with times in seconds since the trace began.

    Arrays have an entry for each job, in order of arrival, or for each round.
    """

    entered_s: Floats  # when its time begins to count, or inf if it never entered
    ended_s: Floats  # inf if it has not ended
    queued_s: Floats  # 300 s for each round in which it waited
    gains: Ints  # rounds in which it gained a GPU, its start included
    samples_s: Floats  # float64[rounds], the recorded throughput of the cluster
    decided: int  # rounds that were decided
    refused: int  # of these, those that broke a rule and were not carried out
    at_end: tuple[str, ...] = field(default=())  # states, of tessera.formulation.lifecycle

    @property
    def jct_s(self) -> Floats:
        """Return the completion times of the jobs that ended, in order of arrival."""
        done = np.isfinite(self.ended_s)
        return self.ended_s[done] - self.entered_s[done]


class ArenaWorld:
    """The cluster, its jobs and their progress, round by round."""

    def __init__(self, scenario: Scenario, launch: LaunchCost, oddities: Oddities) -> None:
        self.oddities, self.launch, self.now_s = oddities, launch, 0.0
        specs = [one.spec for one in scenario.arrivals]
        restart_s = np.array([launch.seconds(s.requested_gpus) for s in specs])
        self.store = MemoryStore(scenario, restart_s)
        self._truth = truth_of(self.store.snapshot(0.0))
        self._arrival_s = np.array([one.arrival_s for one in scenario.arrivals])
        self._batch = [s.workload.global_batch for s in specs]
        self._runs: dict[int, _RunningJob] = {}
        self._exec_s = np.zeros(len(specs))
        self._done = np.zeros(len(specs))  # iterations, where progress accrues
        self.entered_s = np.full(len(specs), np.inf)
        self.waited_s = np.zeros(len(specs))
        self.gains = np.zeros(len(specs), dtype=np.int64)

    # time passes

    def arrive(self) -> Ints:
        """Let the jobs enter whose first round this is, and return them."""
        until_s = self.now_s + (ROUND_S if self.oddities.early_arrival else 0.0)
        result = np.flatnonzero((self._arrival_s <= until_s) & np.isinf(self.entered_s))
        for job in result.tolist():
            entered_s = self.now_s if self.oddities.early_arrival else float(self._arrival_s[job])
            self.entered_s[job] = entered_s
            self.store.arrive(job, entered_s)
        return result

    def train(self) -> tuple[int, float]:
        """Let a round pass, and return the number of jobs that ended and the trained samples/s."""
        self.now_s += ROUND_S
        ended: list[tuple[float, int]] = []
        samples = 0.0
        for job, run in self._runs.items():
            share = run.recorded
            trained_s = self._trained_s(run)
            over_s = self._credit(job, run, trained_s)
            if over_s >= 0:
                trained_s -= min(over_s, trained_s)
                early_s = 0.0 if self.oddities.whole_rounds else min(over_s, ROUND_S)
                ended.append((self.now_s - early_s, job))
            samples += run.samples_s * share * trained_s / ROUND_S
        for end_s, job in sorted(ended):
            del self._runs[job]
            self.store.finish(job, end_s)
        return len(ended), samples

    def _trained_s(self, run: _RunningJob) -> float:
        """Return the seconds for which the job trained in the round that has just passed."""
        if not self.oddities.overhead_on_curve:
            return max(0.0, self.now_s - max(run.ready_s, self.now_s - ROUND_S))
        burnt_s = min(run.debt_s, ROUND_S)
        run.debt_s -= burnt_s
        run.recorded = 1.0 - burnt_s / ROUND_S
        return ROUND_S - burnt_s

    def _credit(self, job: int, run: _RunningJob, trained_s: float) -> float:
        """Credit the seconds. Return those not needed, or a negative number if the job goes on."""
        store = self.store
        iterations = float(store.jobs.iterations[job])
        self._exec_s[job] += trained_s
        if self.oddities.repriced_past:
            store.jobs.done[job] = min(self._exec_s[job] // run.iter_s, iterations)
            return float(self._exec_s[job] - iterations * run.iter_s)
        left_s = (iterations - self._done[job]) * run.iter_s
        self._done[job] += trained_s / run.iter_s
        store.jobs.done[job] = min(self._done[job], iterations)
        over_s = trained_s - left_s
        return max(0.0, over_s) if over_s >= -1e-9 * left_s and trained_s > 0 else -1.0

    def samples_s(self) -> float:
        """Return the throughput to record for the round if every job runs through it."""
        return sum(run.samples_s * run.recorded for run in self._runs.values())

    def wait(self) -> None:
        """Count the round as waiting time for jobs without GPUs."""
        waiting = [job for job in self.store.jobs.live if job not in self._runs]
        self.waited_s[waiting] += ROUND_S

    # a round

    def snapshot(self) -> Snapshot:
        """Return the snapshot for a round now. In the artifact, jobs of unknown models never run."""
        snapshot = self.store.snapshot(self.now_s)
        known = np.zeros(len(snapshot.jobs), dtype=np.bool_)
        return replace(snapshot, jobs=replace(snapshot.jobs, unestimated=known))

    def waiting(self, snapshot: Snapshot) -> Ints:
        """Return the jobs of ``snapshot`` that wait, in order of arrival."""
        return np.flatnonzero(snapshot.jobs.state == _QUEUED)

    def carry_out(
        self, decisions: Sequence[Decision], segments: ScheduleSegments = NO_SEGMENTS
    ) -> None:
        """Carry out the decisions of a round on the last snapshot."""
        held = {job: _gpus(gang) for job, gang in self.store.gpus.gangs.items()}
        for change in self.store.commit(decisions, self.now_s, segments):
            if change.kind is DecisionKind.SUSPEND:
                self._suspend(change.job)
            elif change.gang is not None:
                self._start(change, change.gang, held.get(change.job, frozenset()))

    def _suspend(self, job: int) -> None:
        del self._runs[job]
        if self.oddities.suspended_twice:
            jobs = self.store.jobs
            jobs.iterations[job] = max(1.0, jobs.iterations[job] - jobs.done[job])

    def _start(
        self, change: AllocationChange, gang: Gang, held: frozenset[tuple[int, int]]
    ) -> None:
        job, store = change.job, self.store
        rate = self._truth.iterations_per_s(
            int(store.jobs.workload[job]), store.names.cell(change.cell).on(gang.nodes)
        )
        if not rate > 0:
            raise InvariantBroken(
                f"{store.specs[job].name} was given GPUs on which it does not run"
            )
        iter_s, samples_s = 1.0 / rate, rate * self._batch[job]
        if self.oddities.rounded_rates:
            iter_s, samples_s = round(iter_s, DECIMALS), round(samples_s, DECIMALS)
        before = self._runs.get(job)
        run = _RunningJob(iter_s=iter_s, samples_s=samples_s, ready_s=self.now_s)
        gained = bool(_gpus(gang) - held)
        self.gains[job] += gained
        if gained or not self.oddities.free_release:
            self._charge(run, change.cell.gpus)
        elif before is not None:
            run.ready_s, run.debt_s, run.recorded = before.ready_s, before.debt_s, before.recorded
        self._runs[job] = run

    def _charge(self, run: _RunningJob, gpus: int) -> None:
        cost_s = self.launch.seconds(gpus)
        if not self.oddities.overhead_on_curve:
            run.ready_s = self.now_s + cost_s
        elif cost_s <= ROUND_S:
            run.recorded = 1.0 - cost_s / ROUND_S
        else:
            run.recorded, run.debt_s = 0.0, cost_s - ROUND_S

    def result(self, samples_s: list[float], decided: int, refused: int) -> CompatResult:
        """Return the result of the run."""
        return CompatResult(
            entered_s=self.entered_s,
            ended_s=self.store.jobs.ended_s,
            queued_s=self.waited_s,
            gains=self.gains,
            samples_s=np.array(samples_s),
            decided=decided,
            refused=refused,
            at_end=tuple(tuple(JobState)[code].value for code in self.store.jobs.state.tolist()),
        )


def run_artifact(
    scenario: Scenario,
    decide: Callable[[Snapshot], RoundOutcome],
    *,
    rounds: int,
    launch: LaunchCost,
    oddities: Oddities,
    progress: Callable[[int], None] = lambda _round: None,
) -> CompatResult:
    """Run ``rounds`` rounds of ``scenario``, whose arrivals are at their real times, not at rounds.

    With ``inferred_sizes`` or ``slow_is_infeasible`` switched on, its profiles are changed first.
    """
    world = ArenaWorld(price_profiles(scenario, oddities), launch, oddities)
    recorded: list[float] = []
    decided = refused = 0
    ended = 0
    for number in range(rounds):
        arrived = world.arrive()
        if world.store.jobs.live and (ended or len(arrived) or not oddities.idle_rounds):
            decided += 1
            refused += not _round(world, decide, arrived, ended)
        world.wait()
        recorded.append(world.samples_s())
        progress(number)
        if number == rounds - 1 and oddities.whole_rounds:
            break
        ended, samples_s = world.train()
        if not oddities.ending_counts_whole:
            recorded[-1] = samples_s
    return world.result(recorded, decided, refused)


def price_profiles(scenario: Scenario, oddities: Oddities) -> Scenario:
    """Return the scenario with its profiles changed by the pricing rules that are switched on."""
    profiles = list(scenario.profiles)
    if oddities.slow_is_infeasible:
        profiles = slow_left_out(profiles)
    if oddities.inferred_sizes:
        jobs = [one.spec.workload for one in scenario.arrivals]
        profiles = sizes_inferred(profiles, scenario.nodes, jobs)
    return Scenario(
        gpu_types=scenario.gpu_types,
        nodes=scenario.nodes,
        profiles=profiles,
        arrivals=scenario.arrivals,
        tenants=scenario.tenants,
    )


def _round(
    world: ArenaWorld, decide: Callable[[Snapshot], RoundOutcome], arrived: Ints, ended: int
) -> bool:
    """Decide a round and carry it out unless it violates a rule. Return whether it was valid."""
    oddities, snapshot = world.oddities, world.snapshot()
    new = set(arrived.tolist())
    waiting = [
        job for job in world.waiting(snapshot).tolist() if world.store.jobs.live[job] not in new
    ]
    hidden = set(waiting) if oddities.retries_after_ends and not ended else set[int]()
    # Leave out the jobs that pass a blocked job, and decide again until no job does.
    while True:
        outcome = decide(_without(snapshot, hidden))
        behind = _behind(snapshot, outcome, waiting) - hidden if oddities.head_of_line else set()
        if not behind:
            break
        hidden |= behind
    if outcome.violations:
        world.store.pass_round()
        return False
    placed = scatter_starts(snapshot, outcome) if oddities.scattered_starts else outcome.decisions
    world.carry_out(placed, outcome.segments_after(snapshot))
    return True


def _behind(snapshot: Snapshot, outcome: RoundOutcome, waiting: list[int]) -> set[int]:
    """Return the waiting jobs that start although one of the same type before them does not."""
    starts, kinds = starts_of(outcome.decisions), snapshot.jobs.requested_gpu_type.tolist()
    blocked: set[int] = set()
    result: set[int] = set()
    for job in waiting:
        if job not in starts:
            blocked.add(kinds[job])
        elif kinds[job] in blocked:
            result.add(job)
    return result


def _without(snapshot: Snapshot, hidden: set[int]) -> Snapshot:
    """Return the snapshot with the hidden jobs on hold, so that they exist but are not started."""
    if not hidden:
        return snapshot
    state = np.array(snapshot.jobs.state)
    state[list(hidden)] = _HELD
    return replace(snapshot, jobs=replace(snapshot.jobs, state=state))


def _gpus(gang: Gang) -> frozenset[tuple[int, int]]:
    return frozenset((node, gpu) for node, gpus in gang.members for gpu in gpus)
