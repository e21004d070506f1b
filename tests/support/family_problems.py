"""Small rounds of the named families, with marks that these do not have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from tessera.benchmarks.rounds.families import knapsacks, resources, snapshots
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.problem import Problem
from tessera.formulation.round.statement import build_problem
from tessera.formulation.state.snapshot import Snapshot

Draw = Callable[[np.random.Generator, int, int, int], Snapshot | Problem]

MARKED_SHARE: Final = 0.3
"""The share of the rounds in which some jobs run already or must run."""
MARKED_JOBS_SHARE: Final = 0.15
OBJECTIVE: Final = "throughput"

SMALL_FAMILIES: Final[Mapping[str, tuple[Draw, tuple[int, int], tuple[int, int], int]]] = {
    "identical classes": (snapshots.draw_identical, (1, 60), (1, 3), 1),
    "subset sums": (knapsacks.draw_subset_sum, (1, 6), (1, 2), 0),
    "inverse": (knapsacks.draw_inverse, (1, 10), (1, 2), 0),
    "odd counts": (snapshots.draw_odd_counts, (1, 12), (1, 3), 60_000),
    "small values": (knapsacks.draw_small_values, (1, 60), (1, 3), 1),
    "nested quotas": (resources.draw_nested_quotas, (1, 24), (1, 3), 1),
    "three resources": (resources.draw_three_resources, (1, 16), (1, 3), 2),
    "many types": (snapshots.draw_many_types, (1, 16), (20, 40), 0),
    "few large": (snapshots.draw_few_large, (4, 16), (2, 8), 0),
    "mmkp": (knapsacks.draw_mmkp, (2, 8), (2, 10), 0),
}
"""Kind -> the function that draws it, its numbers of jobs and of types (both ends are included), and
the GPUs for each job. With 0 for each job, the family sets its GPUs."""


def draw_small_family(rng: np.random.Generator, kind: str) -> Problem:
    """Draw a small round of the kind, one of ``SMALL_FAMILIES``, and mark some of its jobs."""
    draw, jobs_between, types_between, gpus_a_job = SMALL_FAMILIES[kind]
    jobs = int(rng.integers(jobs_between[0], jobs_between[1] + 1))
    types = int(rng.integers(types_between[0], types_between[1] + 1))
    drawn = draw(rng, jobs, max(types, gpus_a_job * jobs) if gpus_a_job else 0, types)
    problem = (
        drawn if isinstance(drawn, Problem) else build_problem(drawn, Policy(objective=OBJECTIVE))
    )
    return _marked(rng, problem) if rng.random() < MARKED_SHARE else problem


def _marked(rng: np.random.Generator, problem: Problem) -> Problem:
    """Return the problem in which some jobs must run, and some run now."""
    count = np.diff(problem.job_start)
    own = problem.job_start[:-1] + rng.integers(0, np.maximum(count, 1))
    runs = (rng.random(len(count)) < MARKED_JOBS_SHARE) & (count > 0)
    must = rng.random(len(count)) < MARKED_JOBS_SHARE
    return replace(
        problem, must_run=problem.must_run | must, current=np.where(runs, own, problem.current)
    )
