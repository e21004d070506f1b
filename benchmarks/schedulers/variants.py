"""Simulated runs on a workload of another shape: its load, or its share of large models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal

from tessera.benchmarks.harness.options import parse_number_list
from tessera.simulator.comparison.comparisons import ByPolicy
from tessera.simulator.comparison.runs import (
    RunRequest,
    check_requests,
    run_in_scenario,
    runs_of,
)
from tessera.simulator.comparison.workload import (
    ROUND_S,
    PreparedScenario,
    WorkloadSpec,
    make_scenario,
)
from tessera.simulator.sweeps.runner import Sweep
from tessera.simulator.sweeps.tasks import Task
from tessera.simulator.traces.recipe import Recipe, apply_recipe
from tessera.simulator.traces.speeds import ClusterRoom, Speeds, requested_load

TASK: Final = "tessera.benchmarks.schedulers.variants:simulate_variant"

Axis = Literal["load", "large"]
RunsByPoint = Mapping[Axis, Mapping[float, ByPolicy]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadChanges:
    """The changes to a workload (``tessera.simulator.traces.recipe``). The defaults change nothing."""

    large_share: float | None = None
    """The share of jobs with large models, at equal GPU-hours
    (``tessera.simulator.traces.redraw``)."""
    arrival_factor: float = 1.0


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
    """Return a world of the given shape. Load and horizon are those of the shaped jobs."""
    scenario = world.scenario
    recipe = Recipe(large_share=shape.large_share, arrival_factor=shape.arrival_factor, seed=seed)
    speeds = Speeds(scenario.profiles, ClusterRoom.of(scenario.nodes))
    jobs, _ = apply_recipe(recipe, scenario.arrivals, speeds)
    scenario = replace(scenario, arrivals=jobs)
    horizon_s = ROUND_S * max(1, math.ceil(jobs[-1].arrival_s / ROUND_S))
    return replace(
        world,
        scenario=scenario,
        horizon_s=horizon_s,
        load=requested_load(jobs, speeds, scenario.gpus),
    )


def seed_run(variant: Variant, seed: int) -> Variant:
    """Return the run with the jobs of a seed."""
    work = replace(variant.asked.work, seed=seed)
    return replace(variant, asked=replace(variant.asked, work=work))


def run_points(
    base: RunRequest,
    points: Mapping[Axis, Sequence[float]],
    names: Sequence[str],
    seeds: range,
    sweep: Sweep,
) -> RunsByPoint:
    """Return the runs of each policy at each point, in the order of the seeds ``seeds``.

    Raises the errors of ``simulator.comparison.runs.check_requests`` before anything runs.
    """
    runs = {
        (axis, x, name): Variant(asked=replace(base, policy=name), shape=shape_at(axis, x))
        for axis, values in points.items()
        for x in values
        for name in names
    }
    check_requests((run.asked for run in runs.values()), len(seeds))
    tasks = {
        (*key, k): seed_run(run, k).task(f"{key[0]} {key[1]:g}, {key[2]}, seed {k}")
        for key, run in runs.items()
        for k in seeds
    }
    results = runs_of(tasks, sweep)
    return {
        axis: {
            x: {name: [results[axis, x, name, k] for k in seeds] for name in names} for x in values
        }
        for axis, values in points.items()
    }


def shape_at(axis: Axis, x: float) -> WorkloadChanges:
    """Return the shape of the workload at a point of a sweep."""
    if axis == "load":
        return WorkloadChanges(arrival_factor=x)
    return WorkloadChanges(large_share=x)


def points_of(where: str, text: str) -> tuple[float, ...]:
    """Return the points of a sweep in ascending order: shares of large models, else factors.

    Raises InvalidInput.
    """
    if where == "larges":
        return parse_number_list(where, text, lambda x: 0 <= x <= 1, "shares from 0 to 1")
    return parse_number_list(where, text, lambda x: 0 < x < math.inf, "factors above 0")
