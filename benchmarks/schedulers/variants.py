"""Simulated runs on a workload of another shape: its load, its jobs' lengths or their models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from tessera.simulator.comparison.runs import RunRequest, check_requests, run_in_scenario
from tessera.simulator.comparison.workload import (
    ROUND_S,
    PreparedScenario,
    WorkloadSpec,
    make_scenario,
)
from tessera.simulator.sweeps.tasks import Task
from tessera.simulator.traces.recipe import Recipe, apply_recipe
from tessera.simulator.traces.speeds import ClusterRoom, Speeds, requested_load

TASK: Final = "tessera.benchmarks.schedulers.variants:simulate_variant"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadChanges:
    """The changes to a workload (``tessera.simulator.traces.recipe``). The defaults change nothing."""

    large_share: float | None = None
    """The share of jobs with large models, at equal GPU-hours
    (``tessera.simulator.traces.redraw``)."""
    arrival_factor: float = 1.0
    life_factor: float = 1.0


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
    recipe = Recipe(
        large_share=shape.large_share,
        arrival_factor=shape.arrival_factor,
        life_factor=shape.life_factor,
        seed=seed,
    )
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


def check_variants(variants: Sequence[Variant], seeds: int) -> None:
    """Refuse variants that would fail later, before anything runs.

    Raises the errors of ``simulator.comparison.runs.check_requests``.
    """
    check_requests((variant.asked for variant in variants), seeds)
