"""The work of the branching stage: it repeats a run, and 0 says that the stage did not run."""

from __future__ import annotations

import math

import numpy as np

from tessera.solvers.answers import make_solution, trivial_bound
from tessera.solvers.base import Budget
from tessera.solvers.branching import Branching
from tests.support.problems import a_problem


def test_a_stage_that_needs_exchanges_only_has_work_that_repeats_it() -> None:
    problem = a_problem([[(5, {0: 3})], [(9, {0: 3})]], capacity=[6])
    hint = make_solution(problem, np.array([0, -1]), bound=trivial_bound(problem), solver="greedy")
    free = Budget(remaining_s=lambda: math.inf)

    first = Branching().solve(problem, free, hint)

    assert first.objective == 14 > hint.objective
    assert dict(first.work) == {"branching": 1.0}
    again = Branching().solve(
        problem, Budget(remaining_s=lambda: math.inf, work=dict(first.work)), hint
    )
    assert again.choice.tolist() == first.choice.tolist()
