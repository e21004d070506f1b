"""If the ascent of prices stops early, its result is still a valid bound."""

from __future__ import annotations

import math

import pytest

from tessera.formulation.tables import Floats
from tessera.solvers.base import Budget
from tessera.solvers.greedy import Greedy
from tessera.solvers.pricing import dual
from tests.support.builders import a_random_problem


def test_an_unsolvable_model_ends_the_ascent_with_a_valid_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem, forever = a_random_problem(3, jobs=20), Budget(remaining_s=lambda: math.inf)
    whole = dual.descend(problem, forever, None, most=400, tolerance=1e-6)
    step, taken = dual._Descent._step, []

    def fails_at_the_third(descent: dual._Descent) -> tuple[Floats, float, bool] | None:
        taken.append(descent)
        return step(descent) if len(taken) < 3 else None

    monkeypatch.setattr(dual._Descent, "_step", fails_at_the_third)
    cut = dual.descend(problem, forever, None, most=400, tolerance=1e-6)
    assert cut.passes == 3 < whole.passes
    assert cut.total >= whole.total >= Greedy().solve(problem, forever).objective
