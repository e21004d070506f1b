"""Families of rounds that are hard to solve or to prove, by name and seed.

``draw_family`` draws a round. Families about jobs on GPUs are snapshots (``snapshots``, ``arena``),
and the others are problems (``knapsacks``, ``resources``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from tessera.benchmarks.rounds.families import arena, knapsacks, resources, snapshots
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.round.problem import Problem
from tessera.formulation.state.snapshot import Snapshot

MAX_CPU_S: Final = 5.0
"""CPU seconds that solving a round of a family should take at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFamily:
    """A family of rounds.

    ``draw`` takes the generator and numbers of jobs, GPUs and types. The number of GPUs is 0 if it
    is the family's own. ``aim`` is the gap that our solver should reach in ``cpu_s`` CPU seconds.
    ``is_alone`` says that the number of types cannot be chosen.
    """

    draw: Callable[[np.random.Generator, int, int, int], Snapshot | Problem]
    jobs: int
    types: int
    aim: float = 1e-4
    cpu_s: float = MAX_CPU_S
    is_alone: bool = False


NAMED_FAMILIES: Final[Mapping[str, RoundFamily]] = {
    "identical": RoundFamily(draw=snapshots.draw_identical, jobs=4_096, types=4),
    "subset-sum": RoundFamily(draw=knapsacks.draw_subset_sum, jobs=20, types=1),
    "inverse": RoundFamily(draw=knapsacks.draw_inverse, jobs=100, types=1),
    "odd-counts": RoundFamily(draw=snapshots.draw_odd_counts, jobs=1_000, types=4),
    "small-values": RoundFamily(draw=knapsacks.draw_small_values, jobs=10_000, types=10),
    "nested-quotas": RoundFamily(draw=resources.draw_nested_quotas, jobs=2_048, types=4),
    "three-resources": RoundFamily(
        draw=resources.draw_three_resources, jobs=2_048, types=4, aim=3e-4
    ),
    "forty-types": RoundFamily(draw=snapshots.draw_many_types, jobs=2_048, types=40, aim=2e-3),
    "few-large": RoundFamily(draw=snapshots.draw_few_large, jobs=300, types=40, aim=2e-3),
    "mmkp": RoundFamily(draw=knapsacks.draw_mmkp, jobs=100, types=10, aim=2e-3),
    "arena": RoundFamily(
        draw=arena.draw_profiled, jobs=4_096, types=4, aim=0.0, cpu_s=1.0, is_alone=True
    ),
}
"""The families that set their own types and GPUs unless they are given."""


def draw_family(
    name: str, *, jobs: int = 0, gpus: int = 0, types: int = 0, seed: int = 0
) -> Snapshot | Problem:
    """Return a round of the family ``name``; a number that is 0 is the family's own.

    Raises:
        InvalidInput: there is no such family, or a number has no meaning for it.
        MissingData: the family needs data that this machine does not have.
    """
    if name not in NAMED_FAMILIES:
        raise InvalidInput("family", f"must be one of {', '.join(NAMED_FAMILIES)}")
    family = NAMED_FAMILIES[name]
    if jobs < 0 or gpus < 0 or types < 0:
        raise InvalidInput(
            "jobs", "must be at least 0, like GPUs and types; 0 for the family's own"
        )
    if family.is_alone and types not in (0, family.types):
        raise InvalidInput("types", f"of the family {name} are {family.types}; leave them out")
    types = types or family.types
    if 0 < gpus < types:
        raise InvalidInput("gpus", f"must be at least one of each of the {types} types")
    rng = np.random.default_rng([seed, *name.encode()])
    return family.draw(rng, jobs or family.jobs, gpus, types)
