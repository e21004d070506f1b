"""Simulated runs with one change: the workload's shape or jobs' options."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import numpy as np

from tessera.formulation.errors import InvalidInput
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.records.jobs import JobSpec
from tessera.formulation.tables import Ints
from tessera.simulator.clusters import NODES_PER_RACK
from tessera.simulator.comparison.runs import RunRequest, check_requests, run_in_scenario
from tessera.simulator.comparison.workload import (
    ROUND_S,
    PreparedScenario,
    WorkloadSpec,
    make_scenario,
)
from tessera.simulator.scenario import Scenario
from tessera.simulator.sweeps.tasks import Task
from tessera.simulator.traces.recipe import Recipe, apply_recipe
from tessera.simulator.traces.screening import screen_jobs
from tessera.simulator.traces.speeds import ClusterRoom, Speeds, requested_load
from tessera.simulator.traces.trace import Arrival

TASK: Final = "tessera.benchmarks.schedulers.variants:simulate_variant"
TYPE_SALT, QUEUE_SALT = 1, 2
"""Salts that are added to the seed, so that draws of different things are independent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadChanges:
    """The changes to a workload, made in the order of the fields. The defaults change nothing."""

    gpu_types: int = 0
    """The number of GPU types, with as many GPUs in all (``on_fewer_types``); 0 keeps them."""
    large_share: float | None = None
    """The share of jobs with large models, at equal GPU-hours
    (``tessera.simulator.traces.redraw``)."""
    arrival_factor: float = 1.0
    life_factor: float = 1.0
    queues: int = 1
    """The number of priority queues over which jobs are drawn uniformly."""
    pinned: bool = False
    """Whether every job runs only on the GPU type that it requests."""
    at_requested: bool = False
    """Whether every job runs only on its requested number of GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A run on a workload of another shape."""

    asked: RunRequest
    shape: WorkloadChanges = field(default_factory=WorkloadChanges)

    def task(self, name: str) -> Task:
        """Return the run as a task of a sweep."""
        return Task(
            name=name, function=TASK, options=asdict(self), files=self.asked.task(name).files
        )


def simulate_variant(asked: dict[str, Any], shape: dict[str, Any]) -> dict[str, Any]:
    """Run a variant to the end of all jobs, and return the data that ``FinishedRun`` reads."""
    work = WorkloadSpec(**asked["work"])
    return run_variant(
        Variant(asked=RunRequest(**{**asked, "work": work}), shape=WorkloadChanges(**shape))
    )


def run_variant(variant: Variant) -> dict[str, Any]:
    """Run a variant to the end of all jobs, and return the data that ``FinishedRun`` reads."""
    world = shape_world(make_scenario(variant.asked.work), variant.shape, variant.asked.work.seed)
    return run_in_scenario(world, variant.asked)


def shape_world(world: PreparedScenario, shape: WorkloadChanges, seed: int) -> PreparedScenario:
    """Return a world of the given shape. Load and horizon are those of the shaped jobs.

    Raises:
        InvalidInput: the shape makes no sense for this workload.
    """
    scenario = world.scenario
    if shape.gpu_types:
        scenario = on_fewer_types(scenario, shape.gpu_types, seed)
    recipe = Recipe(
        large_share=shape.large_share,
        arrival_factor=shape.arrival_factor,
        life_factor=shape.life_factor,
        seed=seed,
    )
    speeds = Speeds(scenario.profiles, ClusterRoom.of(scenario.nodes))
    jobs, _ = apply_recipe(recipe, scenario.arrivals, speeds)
    jobs = queue_jobs(jobs, shape.queues, seed)
    if shape.pinned:
        jobs = [a._replace(spec=replace(a.spec, pinned_type=True)) for a in jobs]
    if shape.at_requested:
        jobs = [a._replace(spec=_at_requested(a.spec)) for a in jobs]
    scenario = replace(scenario, arrivals=jobs)
    horizon_s = ROUND_S * max(1, math.ceil(jobs[-1].arrival_s / ROUND_S))
    left = len(world.scenario.arrivals) - len(jobs)
    return replace(
        world,
        scenario=scenario,
        horizon_s=horizon_s,
        dropped=world.dropped + left,
        load=requested_load(jobs, speeds, scenario.gpus),
    )


def _at_requested(spec: JobSpec) -> JobSpec:
    return replace(spec, min_gpus=spec.requested_gpus, max_gpus=spec.requested_gpus)


def queue_jobs(jobs: Sequence[Arrival], queues: int, seed: int) -> list[Arrival]:
    """Return the jobs, each in one of ``queues`` queues, drawn uniformly.

    With one queue, all are in the first.

    A job that is in an early queue of few is also in an early queue of many.
    """
    if queues < 1:
        raise InvalidInput("queues", "must be 1 or more")
    drawn = queue_of(len(jobs), queues, seed).tolist()
    return [a._replace(spec=replace(a.spec, queue=q)) for a, q in zip(jobs, drawn, strict=True)]


def queue_of(jobs: int, queues: int, seed: int) -> Ints:
    """Return the queue of each job, int64[jobs], counted from 1. Queue 1 is the first to launch."""
    drawn = np.random.default_rng((seed, QUEUE_SALT)).random(jobs)
    return 1 + np.floor(drawn * queues).astype(np.int64)


def on_fewer_types(scenario: Scenario, count: int, seed: int) -> Scenario:
    """Return the scenario on ``count`` GPU types, with as many GPUs in all as nodes allow.

    GPU types are ordered by how many jobs they run as requested (the most first, then by name).
    Jobs that the first type cannot run at their GPU count are left out for every ``count``, so that
    all counts have the same jobs. A job whose type is not there asks for one that runs it at its
    GPU count, drawn uniformly. It lasts as long as before, so that its GPU-hours stay the same.

    Raises:
        InvalidInput: there are fewer types.
    """
    order, speeds = (
        types_by_use(scenario),
        Speeds(scenario.profiles, ClusterRoom.of(scenario.nodes)),
    )
    if not 1 <= count <= len(order):
        raise InvalidInput("gpu_types", f"must be between 1 and {len(order)}, the number of types")
    kept = order[:count]
    drawn = np.random.default_rng((seed, TYPE_SALT)).random(len(scenario.arrivals)).tolist()
    jobs = []
    for one, at in zip(scenario.arrivals, drawn, strict=True):
        spec = one.spec
        running = [t for t in kept if (t, spec.requested_gpus) in speeds.cells(spec.workload)]
        if (order[0], spec.requested_gpus) in speeds.cells(spec.workload):
            there = spec.requested_type in (*kept, "")
            chosen = spec if there else _on(spec, running[int(at * len(running))], speeds)
            jobs.append(one._replace(spec=chosen))
    nodes = _nodes_of(scenario.nodes, kept)
    profiles = [e for e in scenario.profiles if e.cell.gpu_type in kept]
    fit = screen_jobs(jobs, profiles, scenario.gpu_types, nodes, "drop").arrivals
    if not fit:
        raise InvalidInput("gpu_types", f"leaves no job that runs on {order[0]}")
    types = [kind for kind in scenario.gpu_types if kind.name in kept]
    return replace(scenario, gpu_types=types, nodes=nodes, profiles=profiles, arrivals=fit)


def types_by_use(scenario: Scenario) -> list[str]:
    """Return the GPU types by how many jobs run on them at their requested GPU count."""
    speeds = Speeds(scenario.profiles, ClusterRoom.of(scenario.nodes))
    runs = Counter(
        kind
        for one in scenario.arrivals
        for kind, gpus in speeds.cells(one.spec.workload)
        if gpus == one.spec.requested_gpus
    )
    return sorted({node.gpu_type for node in scenario.nodes}, key=lambda t: (-runs[t], t))


def _on(spec: JobSpec, gpu_type: str, speeds: Speeds) -> JobSpec:
    """Return the job on another GPU type, with the number of iterations that last as long there."""
    cells = speeds.cells(spec.workload)
    before_s, after_s = speeds.iter_time_s(spec), cells[gpu_type, spec.requested_gpus]
    iterations = max(1, round(spec.iterations * before_s / after_s))
    return replace(spec, requested_type=gpu_type, iterations=iterations)


def _nodes_of(nodes: Iterable[NodeSpec], kept: Sequence[str]) -> list[NodeSpec]:
    """Return nodes of the types ``kept`` with about as many GPUs, in the same proportions."""
    every = list(nodes)
    of_type = {kind: [node for node in every if node.gpu_type == kind] for kind in kept}
    total = sum(node.gpus for node in every)
    growth = total / sum(node.gpus for some in of_type.values() for node in some)
    return [
        replace(
            some[i % len(some)],
            name=f"{kind}-{i:03d}",
            rack=f"{kind}-rack-{i // NODES_PER_RACK:02d}",
        )
        for kind, some in of_type.items()
        for i in range(round(growth * len(some)))
    ]


def seed_run(variant: Variant, seed: int) -> Variant:
    """Return the run with the jobs, and the errors of estimates, of a seed."""
    work = replace(variant.asked.work, seed=seed)
    return replace(variant, asked=replace(variant.asked, work=work, error_seed=seed))


def check_variants(variants: Sequence[Variant], seeds: int) -> None:
    """Refuse variants that would fail later, before anything runs.

    Raises the errors of ``simulator.comparison.runs.check_requests``.
    """
    check_requests((variant.asked for variant in variants), seeds)
