"""Runs in which forecasts are made at several moments, each without knowledge of what comes after it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from tessera.formulation.base.clock import SystemClock
from tessera.formulation.base.tables import Floats
from tessera.formulation.records.forecasts import EVENTS, FINISH, START, Submission
from tessera.formulation.records.spreads import Spread
from tessera.formulation.state.snapshot import Snapshot
from tessera.simulator.comparison.workload import WorkloadSpec, make_scenario
from tessera.simulator.forecasts.draws import History
from tessera.simulator.forecasts.forecast import sample_times
from tessera.simulator.forecasts.rhythm import RoundRhythm
from tessera.simulator.run import Conditions, Decider, Result, simulate
from tessera.simulator.scenario import EPOCH_S, Scenario
from tessera.simulator.sweeps.tasks import Task
from tessera.simulator.truth import perturb_estimates
from tessera.simulator.world import World
from tessera.solvers.rounds.options import RoundOptions

TASK: Final = "tessera.benchmarks.schedulers.foretold:foretell_run"
ROUND_S: Final = 300.0
"""Seconds between rounds, which take place when something has happened."""
FIRST_MOMENT: Final = 0.2
"""The share of the trace's span after which the first forecast is made, so that there is a history."""
FUTURE_SOLVER: Final = "pricing"
"""The solver of the rounds of sampled futures. That of the true rounds is the default, which takes
twice as long for about the same futures. Those of greedy's are further off.
"""
COARSENING: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class ForetoldRun:
    """A run to forecast: a workload, and how its truth differs from what rounds see.

    Rounds are those of ``scheduler``, or of the default policy if it is empty. Estimates are wrong
    by ``error`` on average, and know it. A share of ``quitters`` of the jobs ends early, after a
    uniform share of the iterations. Forecasts are made at ``moments`` equally
    spaced times, each with ``futures`` futures of ``horizon_s`` seconds.
    """

    work: WorkloadSpec
    horizon_s: float
    moments: int
    futures: int
    error: float = 0.1
    quitters: float = 0.25
    scheduler: str = ""

    def task(self, name: str) -> Task:
        """Return the run as a task of a sweep."""
        return Task(name=name, function=TASK, options=asdict(self), files=self.work.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForetoldEvent:
    """An event that was forecast ``made_s`` seconds after the world began.

    ``after_s`` is when it happened, in seconds from the forecast; inf if not before the run's end.
    """

    event: str  # of tessera.formulation.records.forecasts.EVENTS
    made_s: float
    job: str
    spread: Spread
    after_s: float


def foretell_run(work: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """Simulate the run, forecast at its moments, and return the events for ``read_events``."""
    run = ForetoldRun(work=WorkloadSpec(**work), **options)
    scenario = make_scenario(run.work).scenario
    early = _early_ends(scenario, run)
    result, seen = _simulate(scenario, run, early)
    rows: list[list[Any]] = []
    for snapshot in seen:
        sampled = sample_times(
            snapshot,
            History.of(known_submissions(result, early, snapshot.now_s), snapshot),
            Decider(RoundOptions(solver=FUTURE_SOLVER, scheduler=run.scheduler)),
            futures=run.futures,
            seed=run.work.seed,
            rhythm=RoundRhythm(
                spacing_s=ROUND_S,
                period_s=math.inf,
                horizon_s=run.horizon_s,
                coarsening=COARSENING,
                settled=True,
            ),
        )
        after = _true_times(result, snapshot)
        for event in EVENTS:
            for job in range(len(snapshot.jobs)):
                if event == START and not sampled.waits[job]:
                    continue
                spread = sampled.spread(event, job)
                made_s, after_s = snapshot.now_s - EPOCH_S, float(after[event][job])
                rows.append([event, made_s, snapshot.jobs.name[job], after_s, spread.times_s])
    return {"horizon_s": run.horizon_s, "events": rows}


def read_events(result: Mapping[str, Any]) -> list[ForetoldEvent]:
    """Return the events of a task's result, in order of their forecasts."""
    events = [
        ForetoldEvent(
            event=event,
            made_s=made_s,
            job=job,
            spread=Spread(tuple(times_s)),
            after_s=after_s,
        )
        for event, made_s, job, after_s, times_s in result["events"]
    ]
    return sorted(events, key=lambda one: one.made_s)


def _early_ends(scenario: Scenario, run: ForetoldRun) -> dict[str, float]:
    """Return the share of its iterations after which each job ends that ends early."""
    rng = np.random.default_rng([run.work.seed, 1])
    names = [one.spec.name for one in scenario.arrivals]
    shares = rng.uniform(0.01, 1.0, len(names))
    quits = rng.random(len(names)) < run.quitters
    return {names[job]: float(shares[job]) for job in np.flatnonzero(quits).tolist()}


def _simulate(
    scenario: Scenario, run: ForetoldRun, early: Mapping[str, float]
) -> tuple[Result, list[Snapshot]]:
    """Return the true run, and the snapshots after the rounds at which forecasts are made.

    The last forecast is made one horizon before the last arrival, so that arrivals go on all along.
    """
    span_s = scenario.arrivals[-1].arrival_s
    last_s = max(span_s - run.horizon_s, FIRST_MOMENT * span_s)
    due = np.linspace(FIRST_MOMENT * span_s, last_s, run.moments).tolist()
    seen: list[Snapshot] = []

    def observe(world: World) -> None:
        if due and world.now_s >= due[0] and world.store.live_jobs():
            seen.append(world.snapshot())
            while due and world.now_s >= due[0]:
                due.pop(0)

    sd = run.error * math.sqrt(math.pi / 2)
    visible = perturb_estimates(scenario.profiles, run.error, run.work.seed)
    conditions = Conditions(
        visible=[replace(record, sd=sd) for record in visible],
        ended_early=early,
        on_events=True,
        round_s=ROUND_S,
        horizon_s=span_s,
        measures=True,
    )
    decide = Decider(RoundOptions(seed=run.work.seed, scheduler=run.scheduler))
    return simulate(scenario, decide, conditions, SystemClock(), observe=observe), seen


def known_submissions(result: Result, early: Mapping[str, float], now_s: float) -> list[Submission]:
    """Return what is known of the submissions at ``now_s`` (seconds since 1970)."""
    known = []
    for one, end_s in zip(result.scenario.arrivals, result.end_s.tolist(), strict=True):
        spec = one.spec
        if EPOCH_S + one.arrival_s > now_s:
            break
        has_ended = EPOCH_S + end_s <= now_s
        known.append(
            Submission(
                submit_s=EPOCH_S + one.arrival_s,
                workload=spec.workload,
                iterations=spec.iterations,
                requested_gpus=spec.requested_gpus,
                requested_gpu_type=spec.requested_gpu_type,
                tenant=spec.tenant,
                priority=spec.priority,
                weight=spec.weight,
                guaranteed=spec.guaranteed,
                trained_share=early.get(spec.name, 1.0) if has_ended else math.nan,
            )
        )
    return known


def _true_times(result: Result, snapshot: Snapshot) -> dict[str, Floats]:
    """Return when each job of the snapshot starts next and ends, in seconds from the snapshot."""
    now_s = snapshot.now_s - EPOCH_S
    jobs = {one.spec.name: job for job, one in enumerate(result.scenario.arrivals)}
    starts: defaultdict[int, list[float]] = defaultdict(list)
    for segment in result.segments:
        if segment.start_s > now_s:
            starts[segment.job].append(segment.start_s)
    own: Sequence[int] = [jobs[name] for name in snapshot.jobs.name]
    return {
        START: np.array([min(starts[job], default=math.inf) for job in own]) - now_s,
        FINISH: result.end_s[list(own)] - now_s,
    }
