"""The worlds in which a supposed change really happens, or does not, and what happens in them.

The past of these worlds is the same: the rounds until the change are decided once and repeated. What
comes after it is one of several realisations. In each, others of the same jobs come next, and other
jobs end early. What a job's iterations take in truth stays the same, for the past depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import numpy as np
from numpy.random import Generator

from tessera.formulation.answer.hypotheses import Hypothesis
from tessera.formulation.base.clock import SystemClock
from tessera.formulation.base.tables import Floats
from tessera.formulation.base.values import Workload
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.records.jobs import JobSpec
from tessera.formulation.state.snapshot import Snapshot
from tessera.simulator.hazards import Failure
from tessera.simulator.log import Segment
from tessera.simulator.overheads import Overheads
from tessera.simulator.run import Conditions, Decider, Result, simulate
from tessera.simulator.scenario import EPOCH_S, Scenario
from tessera.simulator.traces.trace import Arrival
from tessera.simulator.truth import Truth, perturb_estimates
from tessera.simulator.what_if.hours import HOUR_S
from tessera.simulator.world import World
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import RoundOutcome

SPACING_S: Final = 60.0
PERIOD_S: Final = 300.0
"""The least and the largest time between rounds, as of a server."""
SOON_S: Final = 1e-3
"""The time after the snapshot at which the change takes place in the world."""
OVERHEADS: Final = Overheads(save_s=0.0, load_s=78.0, search_s={1: 0.0})
"""The cost of starts: Morphling's 78 s for each. A snapshot has only one number for it, so that futures
are biased where first starts cost less than others."""
MOMENT_S: Final = 1e-6
"""The time within which times of the world and of its snapshots are the same: times of snapshots are
rounded, since they are seconds since 1970."""
SUPPOSED: Final = "supposed"
"""The name of a job that the change adds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Supposed:
    """A change as the what-if states it, and as the world carries it out.

    ``options`` are those of rounds after the change. ``early`` and ``weights`` are by job.
    """

    options: RoundOptions
    hypotheses: tuple[Hypothesis, ...] = ()
    added: tuple[JobSpec, ...] = ()
    failures: tuple[Failure, ...] = ()
    early: Mapping[str, float] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    removed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chance:
    """The draws of a realisation: jobs with their times, and the shares at which jobs end early."""

    arrivals: Sequence[Arrival]
    early: Mapping[str, float]


def draw_ends(names: Sequence[str], quitters: float, rng: Generator) -> dict[str, float]:
    """Return the share of its iterations after which each job ends that ends early.

    It is uniform, and a share of ``quitters`` of the jobs ends early.
    """
    shares, quits = rng.uniform(0.01, 1.0, len(names)), rng.random(len(names)) < quitters
    return {names[job]: float(shares[job]) for job in np.flatnonzero(quits).tolist()}


def draw_chance(known: Chance, snapshot: Snapshot, quitters: float, rng: Generator) -> Chance:
    """Return another realisation of what comes after ``snapshot``, with the same past.

    The jobs to come begin at another place of their sequence, and its end is followed by its
    beginning. Their gaps go with them, so that bursts stay bursts. Early ends are drawn again, and
    lie at least an iteration after what a job has trained.
    """
    now_s = snapshot.now_s - EPOCH_S
    past = [one for one in known.arrivals if one.arrival_s <= now_s + MOMENT_S]
    hidden = known.arrivals[len(past) :]
    order = np.roll(np.arange(len(hidden)), int(rng.integers(max(1, len(hidden)))))
    gaps = np.diff([now_s, *(one.arrival_s for one in hidden)])[order]
    moved = [
        Arrival(arrival_s=now_s + after_s, spec=hidden[job].spec)
        for job, after_s in zip(order.tolist(), np.cumsum(gaps).tolist(), strict=True)
    ]
    jobs = snapshot.jobs
    least = 1.0 - (jobs.iterations_left - 1.0) / jobs.iterations
    least_share = dict(zip(jobs.name, least.tolist(), strict=True))
    ended = {one.spec.name for one in past} - set(jobs.name)
    early = {name: share for name, share in known.early.items() if name in ended}
    undrawn = [*jobs.name, *(one.spec.name for one in moved)]
    while undrawn:
        drawn = draw_ends(undrawn, quitters, rng)
        for name in undrawn:
            early.pop(name, None)
        early |= drawn
        undrawn = [name for name, share in drawn.items() if share <= least_share.get(name, 0.0)]
    return Chance(arrivals=[*past, *moved], early=early)


@dataclass(kw_only=True, eq=False)
class SupposedWorlds:
    """The worlds of a scenario without and with a change after ``at_s`` seconds.

    Rounds see times that are wrong by ``error`` on average, and know it, until they are measured.
    Worlds end ``horizon_s`` seconds and two periods after ``at_s``. ``away`` are nodes that only the
    change may bring.
    """

    scenario: Scenario
    standing: RoundOptions
    error: float
    at_s: float
    horizon_s: float
    away: tuple[Failure, ...] = ()
    truth: Truth = field(init=False)
    workloads: Sequence[Workload] = field(init=False)
    _now_s: float = field(init=False)
    _past: list[RoundOutcome] = field(init=False)

    def begin(self, chance: Chance) -> tuple[Result, Snapshot]:
        """Return the world without a change, and its snapshot after the first round at ``at_s``."""
        seen: list[Snapshot] = []
        decided: list[tuple[float, RoundOutcome]] = []
        decide_now = Decider(self.standing)

        def decide(snapshot: Snapshot) -> RoundOutcome:
            outcome = decide_now(snapshot)
            decided.append((snapshot.now_s, outcome))
            return outcome

        def observe(world: World) -> None:
            if world.now_s >= self.at_s and not seen and world.store.live_jobs():
                seen.append(world.snapshot())
                self.truth, self.workloads = world.truth, world.store.names.workloads

        result = self._simulate(chance, decide, self.away, observe)
        self._now_s = seen[0].now_s
        self._past = [outcome for at_s, outcome in decided if at_s <= self._now_s]
        return result, seen[0]

    def follow(self, chance: Chance, change: Supposed | None = None) -> Result:
        """Return the world after the same past, without or with a change."""
        past = iter(self._past)
        decide_now = Decider(self.standing if change is None else change.options)

        def decide(snapshot: Snapshot) -> RoundOutcome:
            if snapshot.now_s <= self._now_s:
                return next(past)
            weights = {} if change is None else change.weights
            return decide_now(_with_weights(snapshot, weights))

        if change is None:
            return self._simulate(chance, decide, self.away)
        soon_s = self._now_s - EPOCH_S + SOON_S
        added = [Arrival(arrival_s=soon_s, spec=spec) for spec in change.added]
        changed = Chance(
            arrivals=sorted([*chance.arrivals, *added], key=lambda one: one.arrival_s),
            early={**chance.early, **change.early},
        )
        return self._simulate(changed, decide, change.failures)

    def true_times_s(self, snapshot: Snapshot) -> Floats:
        """Return the true times of the estimates of a snapshot, float64[estimates]."""
        e, keys = snapshot.estimates, snapshot.estimates.keys()
        shapes = zip(e.workload.tolist(), map(snapshot.cell, keys), e.nodes.tolist(), strict=True)
        rate = [self.truth.iterations_per_s(work, cell.on(nodes)) for work, cell, nodes in shapes]
        with np.errstate(divide="ignore"):
            return 1.0 / np.array(rate)

    @cached_property
    def _visible(self) -> list[EstimateRecord]:
        sd = self.error * math.sqrt(math.pi / 2)
        visible = perturb_estimates(self.scenario.profiles, self.error, self.standing.seed)
        return [replace(record, sd=sd) for record in visible]

    def _simulate(
        self,
        chance: Chance,
        decide: Callable[[Snapshot], RoundOutcome],
        failures: tuple[Failure, ...],
        observe: Callable[[World], None] = lambda _world: None,
    ) -> Result:
        conditions = Conditions(
            overheads=OVERHEADS,
            visible=self._visible,
            ended_early=dict(chance.early),
            failures=failures,
            on_events=True,
            spacing_s=SPACING_S,
            round_s=PERIOD_S,
            horizon_s=self.at_s + 2 * PERIOD_S + self.horizon_s,
            measures=True,
        )
        scenario = replace(self.scenario, arrivals=list(chance.arrivals))
        return simulate(scenario, decide, conditions, SystemClock(), observe=observe)


def _with_weights(snapshot: Snapshot, weights: Mapping[str, float]) -> Snapshot:
    if not weights:
        return snapshot
    jobs = snapshot.jobs
    changed = [
        weights.get(name, weight) for name, weight in zip(jobs.name, jobs.weight, strict=True)
    ]
    return replace(snapshot, jobs=replace(jobs, weight=np.array(changed)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """The measures of worlds from ``from_s`` on, in seconds since the world began.

    ``unit`` has the samples/s of one effective GPU of each workload. Sums over time end ``length_s``
    seconds later. Jobs ``without`` are left out of waiting.
    """

    truth: Truth
    workloads: Sequence[Workload]
    unit: Mapping[Workload, float]
    from_s: float
    length_s: float
    without: frozenset[str]

    def compare(self, before: Result, after: Result) -> dict[str, tuple[float, float]]:
        """Return the measures without and with the change."""
        later_s = (
            row.at_s for row in after.rounds if row.decided and row.at_s > self.from_s + SOON_S
        )
        round_s = next(later_s, self.from_s)
        return {
            "throughput": (self._throughput(before, round_s), self._throughput(after, round_s)),
            "waiting": (self._waiting(before, round_s), self._waiting(after, round_s)),
            "work": (self._work(before), self._work(after)),
            "wait": (self._mean_wait_s(before), self._mean_wait_s(after)),
        }

    def _throughput(self, result: Result, at_s: float) -> float:
        """Return the effective GPUs of all running jobs, once they train."""
        total = 0.0
        for segment in _held(result, at_s):
            work = result.scenario.arrivals[segment.job].spec.workload
            index = self.workloads.index(work)
            pace = self.truth.iterations_per_s(index, segment.cell.on(len(segment.members)))
            total += pace * work.global_batch / self.unit[work]
        return total

    def _waiting(self, result: Result, at_s: float) -> float:
        """Return the number of jobs that are there and hold no GPUs."""
        there = sum(
            arrival_s <= at_s < end_s and one.spec.name not in self.without
            for one, arrival_s, end_s in _jobs(result)
        )
        held = {result.scenario.arrivals[segment.job].spec.name for segment in _held(result, at_s)}
        return float(there - len(held - self.without))

    def _work(self, result: Result) -> float:
        """Return the effective GPU-hours of work."""
        total = 0.0
        for segment in result.segments:
            trains_s = segment.end_s - segment.ready_s
            if trains_s > 0:
                work = result.scenario.arrivals[segment.job].spec.workload
                share = self._overlap_s(segment.ready_s, segment.end_s) / trains_s
                total += segment.iterations * share * work.global_batch / self.unit[work]
        return total / HOUR_S

    def _mean_wait_s(self, result: Result) -> float:
        """Return the mean time for which jobs wait."""
        held_s = np.zeros(len(result.arrival_s))
        for segment in result.segments:
            held_s[segment.job] += self._overlap_s(segment.start_s, segment.end_s)
        to_s = self.from_s + self.length_s
        waits = [
            self._overlap_s(arrival_s, end_s) - held
            for (one, arrival_s, end_s), held in zip(_jobs(result), held_s.tolist(), strict=True)
            if arrival_s < to_s and end_s > self.from_s and one.spec.name not in self.without
        ]
        return float(np.mean(waits)) if waits else 0.0

    def _overlap_s(self, start_s: float, end_s: float) -> float:
        return max(0.0, min(end_s, self.from_s + self.length_s) - max(start_s, self.from_s))


def _held(result: Result, at_s: float) -> list[Segment]:
    return [one for one in result.segments if one.start_s <= at_s < one.end_s]


def _jobs(result: Result) -> list[tuple[Arrival, float, float]]:
    """Return each job with its arrival and its end, in seconds since the world began."""
    times = zip(result.arrival_s.tolist(), result.end_s.tolist(), strict=True)
    return [
        (one, arrival_s, end_s)
        for one, (arrival_s, end_s) in zip(result.scenario.arrivals, times, strict=True)
    ]
