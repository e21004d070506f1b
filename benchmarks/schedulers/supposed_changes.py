"""Runs with a change in their middle that was foretold by a what-if, without and with the change.

What happens without and with it is simulated from the beginning. Both runs are the same until the
change. The what-if sees the snapshot at that time, with estimates that are wrong, and neither the
jobs to come nor which jobs end early.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

import numpy as np
from numpy.random import Generator

from tessera.benchmarks.schedulers.foretold import known_submissions
from tessera.formulation.clock import SystemClock
from tessera.formulation.explanations.changes import Change, ChangeKind
from tessera.formulation.lifecycle import JobState
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.records.jobs import JobSpec
from tessera.formulation.snapshot import Jobs, Nodes, Snapshot
from tessera.formulation.tables import Floats
from tessera.formulation.what_if.hypotheses import Hypothesis, append_jobs, apply_hypotheses
from tessera.simulator.comparison.workload import WorkloadSpec, make_scenario
from tessera.simulator.forecasts.draws import History
from tessera.simulator.forecasts.future import RoundRhythm
from tessera.simulator.overheads import Overheads
from tessera.simulator.run import Conditions, Decider, Result, simulate
from tessera.simulator.scenario import Scenario
from tessera.simulator.store import EPOCH_S
from tessera.simulator.sweeps.tasks import Task
from tessera.simulator.traces.trace import Arrival
from tessera.simulator.truth import perturb_estimates
from tessera.simulator.what_if.hours import HOUR_S, Side, follow_pairs, mean_waits_s, pair_figures
from tessera.simulator.what_if.rounds import unit_rates
from tessera.simulator.world import Failure, World
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import RoundOutcome

TASK: Final = "tessera.benchmarks.schedulers.supposed_changes:foretell_change"
SPACING_S: Final = 60.0
PERIOD_S: Final = 300.0
"""The least and the largest time between rounds, as of a server."""
SOLVER: Final = "pricing"
"""The solver of all rounds. The default takes twice as long for about the same rounds."""
COARSENING: Final = 0.02
SOON_S: Final = 1e-3
"""The time after the snapshot at which the change takes place in the world."""
ADDED_NODE: Final = "zz-added"
SUPPOSED: Final = "supposed"
OBJECTIVES: Final = ("throughput", "jct", "max-min")


class SupposedKind(StrEnum):
    """The kind of a change that is foretold."""

    NODES_ADDED = "nodes added"
    NODES_LOST = "nodes lost"
    JOB_ADDED = "job added"
    JOBS_REMOVED = "jobs removed"
    WEIGHT = "weight"
    OBJECTIVE = "objective"


@dataclass(frozen=True, slots=True, kw_only=True)
class SupposedRun:
    """A run with a change at a share ``moment`` of the time in which its jobs arrive.

    Estimates are wrong by ``error`` on average, and know it. A share of ``quitters`` of the jobs
    ends early. The what-if follows ``futures`` pairs of futures for ``horizon_s`` seconds.
    """

    work: WorkloadSpec
    kind: str
    moment: float
    horizon_s: float
    futures: int
    error: float = 0.1
    quitters: float = 0.25

    def task(self, name: str) -> Task:
        """Return the run as a task of a sweep."""
        return Task(name=name, function=TASK, options=asdict(self), files=self.work.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Supposed:
    """A change as the what-if states it, and as the world carries it out.

    ``decide`` is the decision maker after the change.
    """

    hypotheses: tuple[Hypothesis, ...] = ()
    added: tuple[JobSpec, ...] = ()
    options: RoundOptions
    failures: tuple[Failure, ...] = ()
    early: Mapping[str, float] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    removed: tuple[str, ...] = ()


def foretell_change(work: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """Return the changes of throughput and waiting that were foretold, and those that happened."""
    run = SupposedRun(work=WorkloadSpec(**work), **options)
    rng = np.random.default_rng([run.work.seed, 1])
    made = make_scenario(run.work).scenario
    early = _early_ends(made, run, rng)
    extra = _extra_nodes(made, run, rng)
    scenario = replace(made, nodes=[*made.nodes, *extra])
    away = tuple(Failure(node=node.name, down_s=0.0, up_s=math.inf) for node in extra)
    standing = RoundOptions(seed=run.work.seed, solver=SOLVER)
    at_s = run.moment * scenario.arrivals[-1].arrival_s
    before, seen = _simulate(scenario, run, early, Decider(standing), away, at_s)
    snapshot = _without_added(seen)
    change_s = snapshot.now_s - EPOCH_S
    supposed = _draw_change(run, scenario, snapshot, extra, standing, change_s, rng)
    after = _simulate_changed(scenario, run, early, standing, supposed, change_s)
    foretold = _foretell(run, snapshot, supposed, before, early, standing)
    unit = dict(zip(snapshot.workloads, _unit_by_workload(snapshot), strict=True))
    happened = {
        "work": (
            _work_done(before, unit, change_s, run.horizon_s),
            _work_done(after, unit, change_s, run.horizon_s),
        ),
        "wait": _true_waits_s(before, after, supposed.removed, change_s, run.horizon_s),
    }
    return {
        "kind": run.kind,
        "jobs": len(snapshot.jobs),
        **{
            f"{name}_{what}": value
            for name, found in foretold.items()
            for what, value in found.items()
        },
        **{f"{name}_true_before": pair[0] for name, pair in happened.items()},
        **{f"{name}_true": pair[1] - pair[0] for name, pair in happened.items()},
    }


def _early_ends(scenario: Scenario, run: SupposedRun, rng: Generator) -> dict[str, float]:
    names = [one.spec.name for one in scenario.arrivals]
    shares, quits = rng.uniform(0.01, 1.0, len(names)), rng.random(len(names)) < run.quitters
    return {names[job]: float(shares[job]) for job in np.flatnonzero(quits).tolist()}


def _extra_nodes(scenario: Scenario, run: SupposedRun, rng: Generator) -> list[NodeSpec]:
    """Return the nodes that are added in the middle: a quarter to a half of a type's."""
    if run.kind != SupposedKind.NODES_ADDED:
        return []
    kind = str(rng.choice(sorted({node.gpu_type for node in scenario.nodes})))
    own = [node for node in scenario.nodes if node.gpu_type == kind]
    count = max(1, round(float(rng.uniform(0.25, 0.5)) * len(own)))
    return [replace(own[0], name=f"{ADDED_NODE}-{i}") for i in range(count)]


def _simulate(
    scenario: Scenario,
    run: SupposedRun,
    early: Mapping[str, float],
    decide: Callable[[Snapshot], RoundOutcome],
    failures: tuple[Failure, ...],
    at_s: float,
) -> tuple[Result, Snapshot]:
    """Return a run until the horizon after ``at_s``, and the snapshot after the first round by then."""
    seen: list[Snapshot] = []

    def observe(world: World) -> None:
        if world.now_s >= at_s and not seen and world.store.live_jobs():
            seen.append(world.snapshot())

    sd = run.error * math.sqrt(math.pi / 2)
    visible = perturb_estimates(scenario.profiles, run.error, run.work.seed)
    conditions = Conditions(
        visible=[replace(record, sd=sd) for record in visible],
        ended_early=dict(early),
        failures=failures,
        on_events=True,
        spacing_s=SPACING_S,
        round_s=PERIOD_S,
        horizon_s=at_s + 2 * PERIOD_S + run.horizon_s,
    )
    result = simulate(scenario, decide, conditions, SystemClock(), observe=observe)
    return result, seen[0]


def _without_added(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot without the nodes that are not there yet, which are the last ones."""
    nodes = snapshot.nodes
    rows = [nodes.row(n) for n in range(len(nodes)) if not nodes.name[n].startswith(ADDED_NODE)]
    return replace(snapshot, nodes=Nodes.from_rows(rows))


def _draw_change(
    run: SupposedRun,
    scenario: Scenario,
    snapshot: Snapshot,
    extra: list[NodeSpec],
    standing: RoundOptions,
    at_s: float,
    rng: Generator,
) -> _Supposed:
    jobs, soon_s = snapshot.jobs, at_s + SOON_S
    running = np.flatnonzero(jobs.among([JobState.RUNNING])).tolist()
    match run.kind:
        case SupposedKind.NODES_ADDED:
            size = extra[0].gpus
            change = Change(
                kind=ChangeKind.ADD_GPUS,
                subject=extra[0].gpu_type,
                amount=size * len(extra),
                size=float(size),
            )
            failures = tuple(Failure(node=n.name, down_s=0.0, up_s=soon_s) for n in extra)
            return _Supposed(
                options=standing, hypotheses=(Hypothesis(change=change),), failures=failures
            )
        case SupposedKind.NODES_LOST:
            count = max(1, round(float(rng.uniform(0.1, 0.3)) * len(snapshot.nodes)))
            lost = rng.choice(len(snapshot.nodes), count, replace=False).tolist()
            names = [snapshot.nodes.name[n] for n in sorted(lost)]
            return _Supposed(
                options=standing,
                hypotheses=tuple(_of(ChangeKind.LOSE, subject=name) for name in names),
                failures=tuple(Failure(node=n, down_s=soon_s, up_s=math.inf) for n in names),
            )
        case SupposedKind.JOB_ADDED:
            like = scenario.arrivals[int(rng.integers(len(scenario.arrivals)))].spec
            return _Supposed(
                options=standing, added=(replace(like, name=SUPPOSED, weight=4.0 * like.weight),)
            )
        case SupposedKind.JOBS_REMOVED:
            count = max(1, round(float(rng.uniform(0.1, 0.3)) * len(running)))
            ended = sorted(rng.choice(running, min(count, len(running)), replace=False).tolist())
            trained = 1.0 - jobs.iterations_left / jobs.iterations
            names = [jobs.name[job] for job in ended]
            return _Supposed(
                options=standing,
                hypotheses=tuple(_of(ChangeKind.END, subject=name) for name in names),
                early={jobs.name[job]: max(float(trained[job]), 1e-9) for job in ended},
                removed=tuple(names),
            )
        case SupposedKind.WEIGHT:
            job = int(rng.integers(len(jobs)))
            weight = float(jobs.weight[job] * rng.choice([0.1, 10.0]))
            change = Change(kind=ChangeKind.WEIGHT, amount=weight)
            return _Supposed(
                options=standing,
                hypotheses=(Hypothesis(change=change, job=jobs.name[job]),),
                weights={jobs.name[job]: weight},
            )
        case _:
            objective = str(rng.choice(OBJECTIVES))
            return _Supposed(options=replace(standing, objective=objective))


def _of(kind: ChangeKind, subject: str) -> Hypothesis:
    return Hypothesis(change=Change(kind=kind, subject=subject))


def _simulate_changed(
    scenario: Scenario,
    run: SupposedRun,
    early: Mapping[str, float],
    standing: RoundOptions,
    supposed: _Supposed,
    at_s: float,
) -> Result:
    """Return the run with the change, which is the one without it until ``at_s``."""
    arrivals = [
        *scenario.arrivals,
        *(Arrival(arrival_s=at_s + SOON_S, spec=spec) for spec in supposed.added),
    ]
    changed = replace(scenario, arrivals=sorted(arrivals, key=lambda one: one.arrival_s))
    first, then = Decider(standing), Decider(supposed.options)

    def decide(snapshot: Snapshot) -> RoundOutcome:
        if snapshot.now_s <= EPOCH_S + at_s:
            return first(snapshot)
        return then(_with_weights(snapshot, supposed.weights))

    return _simulate(changed, run, {**early, **supposed.early}, decide, supposed.failures, at_s)[0]


def _with_weights(snapshot: Snapshot, weights: Mapping[str, float]) -> Snapshot:
    if not weights:
        return snapshot
    jobs = snapshot.jobs
    changed = [
        weights.get(name, weight) for name, weight in zip(jobs.name, jobs.weight, strict=True)
    ]
    return replace(snapshot, jobs=replace(jobs, weight=np.array(changed)))


def _foretell(
    run: SupposedRun,
    snapshot: Snapshot,
    supposed: _Supposed,
    before: Result,
    early: Mapping[str, float],
    standing: RoundOptions,
) -> dict[str, dict[str, float]]:
    """Return what the what-if says of work (effective GPU-hours) and of mean waiting (s)."""
    whole = append_jobs(snapshot, _rows_of(snapshot, supposed.added))
    changed, options = apply_hypotheses(whole, supposed.options, supposed.hypotheses)
    sides = (
        Side(snapshot=snapshot, decide=Decider(standing)),
        Side(snapshot=changed, decide=Decider(options)),
    )
    rhythm = RoundRhythm(
        spacing_s=SPACING_S,
        period_s=PERIOD_S,
        horizon_s=run.horizon_s,
        coarsening=COARSENING,
    )
    one, other = follow_pairs(
        sides[0],
        [sides[1]],
        History.of(known_submissions(before, early, snapshot.now_s), snapshot),
        futures=run.futures,
        seed=run.work.seed,
        rhythm=rhythm,
    )
    waits = mean_waits_s(sides, (one, other), supposed.removed)
    return {
        name: asdict(pair_figures(*pair))
        for name, pair in (("work", (one.work, other.work)), ("wait", waits))
    }


def _rows_of(snapshot: Snapshot, added: tuple[JobSpec, ...]) -> Jobs:
    """Return added jobs as a round would see them."""
    types = {kind.name: i for i, kind in enumerate(snapshot.gpu_types)}
    return Jobs.from_rows(
        [
            {
                "name": spec.name,
                "workload": snapshot.workloads.index(spec.workload),
                "iterations": float(spec.iterations),
                "iterations_left": float(spec.iterations),
                "requested_gpus": spec.requested_gpus,
                "requested_type": types.get(spec.requested_type, -1),
                "tenant": spec.tenant,
                "weight": spec.weight,
                "submit_s": snapshot.now_s,
                "queued_s": snapshot.now_s,
                "restart_s": Overheads().start_s(spec.requested_gpus, saved=True, new_cell=True),
            }
            for spec in added
        ]
    )


def _unit_by_workload(snapshot: Snapshot) -> Floats:
    """Return samples/s of one effective GPU of each workload, by the visible estimates."""
    count = len(snapshot.workloads)
    rows = [
        {
            "name": str(w),
            "workload": w,
            "iterations": 1.0,
            "iterations_left": 1.0,
            "requested_gpus": 1,
            "submit_s": 0.0,
            "queued_s": 0.0,
        }
        for w in range(count)
    ]
    return unit_rates(replace(snapshot, jobs=Jobs.from_rows(rows)))


def _overlap_s(start_s: float, end_s: float, from_s: float, to_s: float) -> float:
    return max(0.0, min(end_s, to_s) - max(start_s, from_s))


def _work_done(result: Result, unit: Mapping[Any, float], from_s: float, length_s: float) -> float:
    """Return the effective GPU-hours of work that a run did in a time window."""
    total = 0.0
    for segment in result.segments:
        trains_s = segment.end_s - segment.ready_s
        if trains_s > 0:
            spec = result.scenario.arrivals[segment.job].spec
            share = _overlap_s(segment.ready_s, segment.end_s, from_s, from_s + length_s)
            samples = segment.iterations * share / trains_s * spec.workload.global_batch
            total += samples / float(unit[spec.workload])
    return total / HOUR_S


def _true_waits_s(
    before: Result, after: Result, removed: tuple[str, ...], from_s: float, length_s: float
) -> tuple[float, float]:
    """Return the mean waiting time of the jobs of both runs in a time window, without and with."""
    return (
        _mean_wait_s(before, {*removed, SUPPOSED}, from_s, from_s + length_s),
        _mean_wait_s(after, {*removed, SUPPOSED}, from_s, from_s + length_s),
    )


def _mean_wait_s(result: Result, without: set[str], from_s: float, to_s: float) -> float:
    held_s = np.zeros(len(result.arrival_s))
    for segment in result.segments:
        held_s[segment.job] += _overlap_s(segment.start_s, segment.end_s, from_s, to_s)
    waits = [
        _overlap_s(float(arrival_s), float(end_s), from_s, to_s) - float(held)
        for one, arrival_s, end_s, held in zip(
            result.scenario.arrivals, result.arrival_s, result.end_s, held_s, strict=True
        )
        if arrival_s < to_s and end_s > from_s and one.spec.name not in without
    ]
    return float(np.mean(waits)) if waits else 0.0
