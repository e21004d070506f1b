"""Runs with a change in their middle that was foretold by a what-if, without and with the change.

What happens without and with it is simulated from the beginning, in several realisations with the
same past. The what-if sees the snapshot at the time of the change, with estimates that are wrong, and
neither the jobs to come nor which jobs end early.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Final

import numpy as np
from numpy.random import Generator

from tessera.benchmarks.schedulers.foretold import known_submissions
from tessera.benchmarks.schedulers.supposed_worlds import (
    MOMENT_S,
    OVERHEADS,
    PERIOD_S,
    SOON_S,
    SPACING_S,
    SUPPOSED,
    Chance,
    Happened,
    Supposed,
    SupposedWorlds,
    draw_chance,
    draw_ends,
)
from tessera.formulation.answer.explanations.changes import Change, ChangeKind
from tessera.formulation.answer.hypotheses import Hypothesis, append_jobs, apply_hypotheses
from tessera.formulation.base.tables import Floats
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.records.forecasts import Submission
from tessera.formulation.records.jobs import JobSpec
from tessera.formulation.state.snapshot import Jobs, Nodes, Snapshot
from tessera.simulator.comparison.workload import WorkloadSpec, make_scenario
from tessera.simulator.forecasts.draws import Draw, History
from tessera.simulator.forecasts.rhythm import RoundRhythm
from tessera.simulator.hazards import Failure
from tessera.simulator.run import Decider
from tessera.simulator.scenario import EPOCH_S, Scenario
from tessera.simulator.sweeps.tasks import Task
from tessera.simulator.what_if.hours import Side, compare_sides, follow_pairs
from tessera.simulator.what_if.rounds import unit_rates
from tessera.solvers.rounds.options import RoundOptions

TASK: Final = "tessera.benchmarks.schedulers.supposed_changes:foretell_change"
SOLVER: Final = "pricing"
"""The solver of all rounds. The default takes twice as long for about the same rounds."""
COARSENING: Final = 0.02
ADDED_NODE: Final = "zz-added"
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
    ends early. The what-if follows ``futures`` pairs of futures for ``horizon_s`` seconds. What happens
    is simulated in ``realisations`` worlds, of which the first one is the workload's own. If the
    future is ``known``, the what-if follows exactly those realisations, with true times.
    """

    work: WorkloadSpec
    kind: str
    moment: float
    horizon_s: float
    futures: int
    realisations: int
    known: bool = False
    error: float = 0.1
    quitters: float = 0.25

    def task(self, name: str) -> Task:
        """Return the run as a task of a sweep."""
        return Task(name=name, function=TASK, options=asdict(self), files=self.work.files)


def foretell_change(work: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """Return what was foretold of each measure, and what happened in each realisation."""
    run = SupposedRun(work=WorkloadSpec(**work), **options)
    rng = np.random.default_rng([run.work.seed, 1])
    made = make_scenario(run.work).scenario
    early = draw_ends([one.spec.name for one in made.arrivals], run.quitters, rng)
    extra = _extra_nodes(made, run, rng)
    scenario = replace(made, nodes=[*made.nodes, *extra])
    standing = RoundOptions(seed=run.work.seed, solver=SOLVER)
    worlds = SupposedWorlds(
        scenario=scenario,
        standing=standing,
        error=run.error,
        at_s=run.moment * scenario.arrivals[-1].arrival_s,
        horizon_s=run.horizon_s,
        away=tuple(Failure(node=node.name, down_s=0.0, up_s=math.inf) for node in extra),
    )
    own = Chance(arrivals=scenario.arrivals, early=early)
    before, seen = worlds.begin(own)
    snapshot = _without_added(seen)
    change_s = snapshot.now_s - EPOCH_S
    supposed = _draw_change(run, scenario, snapshot, extra, standing, change_s, rng)
    history = known_submissions(before, early, snapshot.now_s)
    happened = Happened(
        truth=worlds.truth,
        workloads=worlds.workloads,
        unit=dict(zip(snapshot.workloads, _unit_by_workload(snapshot).tolist(), strict=True)),
        from_s=change_s,
        length_s=run.horizon_s,
        without=frozenset({*supposed.removed, SUPPOSED}),
    )
    chances = [
        own,
        *(
            draw_chance(
                own, snapshot, run.quitters, np.random.default_rng([run.work.seed, 3, which])
            )
            for which in range(1, run.realisations)
        ),
    ]
    return {
        "kind": run.kind,
        "jobs": len(snapshot.jobs),
        "foretold": _foretell(
            run,
            snapshot,
            supposed,
            history,
            standing,
            known=[_known_draw(worlds, chance, snapshot, supposed) for chance in chances]
            if run.known
            else [],
        ),
        "happened": [
            happened.compare(worlds.follow(chance), worlds.follow(chance, supposed))
            for chance in chances
        ],
    }


def _extra_nodes(scenario: Scenario, run: SupposedRun, rng: Generator) -> list[NodeSpec]:
    """Return the nodes that are added in the middle: a quarter to a half of a type's."""
    if run.kind != SupposedKind.NODES_ADDED:
        return []
    kind = str(rng.choice(sorted({node.gpu_type for node in scenario.nodes})))
    own = [node for node in scenario.nodes if node.gpu_type == kind]
    count = max(1, round(float(rng.uniform(0.25, 0.5)) * len(own)))
    return [replace(own[0], name=f"{ADDED_NODE}-{i}") for i in range(count)]


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
) -> Supposed:
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
            return Supposed(
                options=standing, hypotheses=(Hypothesis(change=change),), failures=failures
            )
        case SupposedKind.NODES_LOST:
            count = max(1, round(float(rng.uniform(0.1, 0.3)) * len(snapshot.nodes)))
            lost = rng.choice(len(snapshot.nodes), count, replace=False).tolist()
            names = [snapshot.nodes.name[n] for n in sorted(lost)]
            return Supposed(
                options=standing,
                hypotheses=tuple(_of(ChangeKind.LOSE, subject=name) for name in names),
                failures=tuple(Failure(node=n, down_s=soon_s, up_s=math.inf) for n in names),
            )
        case SupposedKind.JOB_ADDED:
            like = scenario.arrivals[int(rng.integers(len(scenario.arrivals)))].spec
            return Supposed(
                options=standing, added=(replace(like, name=SUPPOSED, weight=4.0 * like.weight),)
            )
        case SupposedKind.JOBS_REMOVED:
            trains = jobs.since_s + jobs.restart_s <= snapshot.now_s
            among = [job for job in running if trains[job]] or running
            count = max(1, round(float(rng.uniform(0.1, 0.3)) * len(running)))
            ended = sorted(rng.choice(among, min(count, len(among)), replace=False).tolist())
            # A job of the world ends after whole iterations: here, after the one at hand.
            share = 1.0 - (jobs.iterations_left - 1.0) / jobs.iterations
            names = [jobs.name[job] for job in ended]
            return Supposed(
                options=standing,
                hypotheses=tuple(_of(ChangeKind.END, subject=name) for name in names),
                early={jobs.name[job]: min(1.0, float(share[job])) for job in ended},
                removed=tuple(names),
            )
        case SupposedKind.WEIGHT:
            job = int(rng.integers(len(jobs)))
            weight = float(jobs.weight[job] * rng.choice([0.1, 10.0]))
            change = Change(kind=ChangeKind.WEIGHT, amount=weight)
            return Supposed(
                options=standing,
                hypotheses=(Hypothesis(change=change, job=jobs.name[job]),),
                weights={jobs.name[job]: weight},
            )
        case _:
            objective = str(rng.choice(OBJECTIVES))
            return Supposed(options=replace(standing, objective=objective))


def _of(kind: ChangeKind, subject: str) -> Hypothesis:
    return Hypothesis(change=Change(kind=kind, subject=subject))


def _foretell(
    run: SupposedRun,
    snapshot: Snapshot,
    supposed: Supposed,
    history: list[Submission],
    standing: RoundOptions,
    known: list[Draw],
) -> dict[str, dict[str, float]]:
    """Return what the what-if says of each measure: soon, and over the next hours.

    If draws are ``known``, futures have these.
    """
    whole = append_jobs(snapshot, _rows_of(snapshot, supposed.added))
    changed, options = apply_hypotheses(whole, supposed.options, supposed.hypotheses)
    sides = (
        Side(snapshot=snapshot, decide=Decider(standing), settled=True),
        Side(snapshot=changed, decide=Decider(options)),
    )
    one, other = follow_pairs(
        sides[0],
        [sides[1]],
        History.of(history, snapshot),
        futures=len(known) or run.futures,
        seed=run.work.seed,
        draw=known.__getitem__ if known else None,
        rhythm=RoundRhythm(
            spacing_s=SPACING_S,
            period_s=PERIOD_S,
            horizon_s=run.horizon_s,
            coarsening=COARSENING,
        ),
    )
    figures = compare_sides(sides, (one, other), supposed.removed)
    return {
        measure: asdict(figures[name])
        for measure, name in (
            ("throughput", "soon_throughput"),
            ("waiting", "soon_waiting"),
            ("work", "work"),
            ("wait", "mean_wait_s"),
        )
    }


def _known_draw(
    worlds: SupposedWorlds, chance: Chance, snapshot: Snapshot, supposed: Supposed
) -> Draw:
    """Return the facts of a realisation, which no what-if knows."""
    now_s = snapshot.now_s - EPOCH_S
    to_come = [one for one in chance.arrivals if one.arrival_s > now_s + MOMENT_S]
    names = [*snapshot.jobs.name, *(one.name for one in supposed.added)]
    names += [one.spec.name for one in to_come]
    submit_s = EPOCH_S + np.array([one.arrival_s for one in to_come])
    arrivals = _rows_of(snapshot, tuple(one.spec for one in to_come))
    return Draw(
        iter_time_s=worlds.true_times_s(snapshot),
        share=np.array([chance.early.get(name, 1.0) for name in names]),
        arrivals=replace(arrivals, submit_s=submit_s, queued_s=submit_s),
    )


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
                "requested_gpu_type": types.get(spec.requested_gpu_type, -1),
                "tenant": spec.tenant,
                "weight": spec.weight,
                "submit_s": snapshot.now_s,
                "queued_s": snapshot.now_s,
                "restart_s": OVERHEADS.start_s(spec.requested_gpus, saved=True, new_cell=True),
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
