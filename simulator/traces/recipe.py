"""A sequence of steps that shape a trace, in the only order in which they make sense together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.records.clusters import TenantSpec
from tessera.simulator.traces import shaping
from tessera.simulator.traces.redraw import (
    LARGE_FROM,
    job_requests,
    redraw_models,
    with_large_share,
)
from tessera.simulator.traces.speeds import Speeds
from tessera.simulator.traces.trace import Arrival, DurationJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The changes to make to a trace.

    A step that is None or False is skipped. The functions of the steps describe them.
    """

    redraw: bool = False
    large_share: float | None = None
    large_from: float = LARGE_FROM
    busiest_hours: float | None = None
    share: float | None = None
    arrival_factor: float | None = None
    life_factor: float | None = None
    load: float | None = None
    guaranteed_share: float | None = None
    quota_gpus: int | None = None
    """The quota in GPUs. If it is None, it is all GPUs of the cluster, as in Morphling's trace MT."""
    tightness: tuple[float, float] | None = None
    deadline_factor: float | None = None
    without_deadlines: bool = False
    seed: int = 0

    @property
    def needs_speeds(self) -> bool:
        """Return whether a step needs to know how long jobs take and how many GPUs there are."""
        return self.redraw or any(
            step is not None for step in (self.large_share, self.load, self.tightness)
        )

    @property
    def is_empty(self) -> bool:
        """Return whether the recipe leaves a trace unchanged."""
        plain = Recipe(large_from=self.large_from, quota_gpus=self.quota_gpus, seed=self.seed)
        return self == plain


def apply_recipe(
    recipe: Recipe, jobs: Sequence[Arrival] | Sequence[DurationJob], speeds: Speeds | None
) -> tuple[list[Arrival], list[TenantSpec]]:
    """Return the jobs after all steps, and the tenants that they belong to.

    The steps have this order:

    1. Models are drawn.
    2. The busiest hours and a share of the jobs are taken.
    3. Large models are brought to their share.
    4. Arrivals and lives are scaled.
    5. Jobs are taken to reach the load.
    6. Tenants are drawn.
    7. Deadlines are set.

    ``speeds`` must have the cluster's capacity if ``recipe.needs_speeds``. Jobs whose models are
    redrawn need not be able to run on the cluster before. Each step has a separate seed, so that an
    additional step does not change the draws of the others.

    Raises:
        InvalidInput: a step cannot be done, or needs ``speeds``.
    """
    if recipe.needs_speeds and speeds is None:
        raise InvalidInput(
            "profiles", "give profiles and a cluster, from which the durations of jobs follow"
        )
    seeds = [int(s) for s in np.random.SeedSequence(recipe.seed).generate_state(6)]
    arrivals = _drawn(recipe, jobs, speeds, seeds[0])
    if recipe.busiest_hours is not None:
        arrivals = shaping.busiest_jobs(arrivals, recipe.busiest_hours)
    if recipe.share is not None:
        arrivals = shaping.sample_jobs(arrivals, recipe.share, seeds[1])
    if recipe.large_share is not None and speeds is not None:
        arrivals = with_large_share(
            arrivals, speeds, recipe.large_share, seeds[2], recipe.large_from
        )
    if recipe.arrival_factor is not None:
        arrivals = shaping.faster_arrivals(arrivals, recipe.arrival_factor)
    if recipe.life_factor is not None:
        arrivals = shaping.longer_lives(arrivals, recipe.life_factor)
    if recipe.load is not None and speeds is not None:
        arrivals = shaping.sampled_to_load(arrivals, speeds, gpus_of(speeds), recipe.load, seeds[3])
    arrivals, tenants = _tenants(recipe, arrivals, speeds, seeds[4])
    return _deadlines(recipe, arrivals, speeds, seeds[5]), tenants


def gpus_of(speeds: Speeds) -> int:
    """Return the number of GPUs of the cluster for which ``speeds`` was made.

    Raises:
        InvalidInput: no cluster is known, or it has no GPUs.
    """
    if speeds.room is None or not speeds.room.total_gpus:
        raise InvalidInput("nodes", "are missing; give the nodes of the cluster")
    return speeds.room.total_gpus


def _drawn(
    recipe: Recipe,
    jobs: Sequence[Arrival] | Sequence[DurationJob],
    speeds: Speeds | None,
    seed: int,
) -> list[Arrival]:
    wanted = [one for one in jobs if isinstance(one, DurationJob)]
    arrivals = [one for one in jobs if isinstance(one, Arrival)]
    if wanted and not recipe.redraw:
        raise InvalidInput("redraw", "is required, because the trace has durations but no models")
    if recipe.redraw and speeds is not None:
        requests = wanted or job_requests(arrivals, speeds.anywhere())
        arrivals = redraw_models(requests, speeds, seed, keep_requests=True)
    return arrivals


def _tenants(
    recipe: Recipe, jobs: list[Arrival], speeds: Speeds | None, seed: int
) -> tuple[list[Arrival], list[TenantSpec]]:
    if recipe.guaranteed_share is None:
        return jobs, []
    if not 0 <= recipe.guaranteed_share <= 1:
        raise InvalidInput("guaranteed", "must be a share from 0 to 1")
    quota = recipe.quota_gpus
    if quota is None:
        if speeds is None:
            raise InvalidInput("quota", "must be given if the cluster is not known")
        quota = gpus_of(speeds)
    return shaping.split_tenants(jobs, round(recipe.guaranteed_share * len(jobs)), quota, seed)


def _deadlines(
    recipe: Recipe, jobs: list[Arrival], speeds: Speeds | None, seed: int
) -> list[Arrival]:
    if recipe.without_deadlines:
        jobs = shaping.without_deadlines(jobs)
    if recipe.tightness is not None and speeds is not None:
        jobs = shaping.with_deadlines(jobs, speeds, recipe.tightness, seed)
    if recipe.deadline_factor is not None:
        jobs = shaping.looser_deadlines(jobs, recipe.deadline_factor)
    return jobs
