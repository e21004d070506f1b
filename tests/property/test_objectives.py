"""Laws of every objective: small rounds against an oracle of the equations, larger ones by two solvers."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.benchmarks.rounds.small_rounds import draw_snapshot
from tessera.formulation.answer.check import find_violations
from tessera.formulation.answer.solution import Solution
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.statement import Statement, state_round
from tessera.solvers.base import Budget
from tessera.solvers.exact.greedy import Greedy
from tessera.solvers.goals import SolvedGoals, build_surrogate, solve_goals
from tessera.solvers.registry import DEFAULT, make_solver
from tests.support.laws import examples
from tests.support.oracles.objective_values import Choice, Oracle, OracleGoal, OracleOption

THROUGHPUT: Final = OracleGoal(terms=(("throughput", 1.0),))
OBJECTIVES: Final[dict[str, tuple[OracleGoal, ...]]] = {
    "throughput": (THROUGHPUT,),
    "deadline": (THROUGHPUT,),
    "jct": (OracleGoal(terms=(("jct", 1.0),)),),
    "balanced": (OracleGoal(terms=(("balanced", 1.0),)),),
    "balanced:0.25": (OracleGoal(terms=(("balanced:0.25", 1.0),)),),
    "cost": (OracleGoal(terms=(("running", 1.0),)), OracleGoal(terms=(("cost", 1.0),))),
    "finish-time-fairness": (OracleGoal(levels="finish-time-fairness"), THROUGHPUT),
    "max-min": (OracleGoal(levels="max-min"), THROUGHPUT),
    "makespan": (OracleGoal(levels="makespan"), THROUGHPUT),
    "0.7*throughput + 0.3*jct": (OracleGoal(terms=(("throughput", 0.7), ("jct", 0.3))),),
    "throughput within 5% then jct": (
        OracleGoal(terms=(("throughput", 1.0),), tolerance=0.05),
        OracleGoal(terms=(("jct", 1.0),)),
    ),
}
"""The objectives as written, and the goals that the oracle derives from them."""

ROUNDING_TOLERANCE: Final = 1e-4
"""The tolerance for sums of a dozen values, which solvers see in millionths, and for what such a
difference may decide."""
AGREEMENT_TOLERANCE: Final = 1e-4
"""The relative difference of a goal that two solvers may have on the same round."""
OPINIONS: Final = ("cp-sat", "cvxpy")
"""The solvers that are compared on larger rounds."""


@pytest.mark.parametrize("objective", OBJECTIVES)
@examples(50)
@given(
    seed=st.integers(0, 2**32),
    jobs=st.sampled_from((6, 12)),
    solver=st.sampled_from((DEFAULT, "cp-sat")),
)
def test_answers_are_as_good_as_the_best_of_all_by_the_equations(
    objective: str, seed: int, jobs: int, solver: str
) -> None:
    """Every assignment of 6 jobs to 5 Cells is tried. A dynamic program judges rounds of 12 jobs."""
    snapshot = draw_snapshot(np.random.default_rng(seed), jobs)
    policy = _policy_of(objective, jobs)
    statement = state_round(snapshot, policy)

    solution = _solve(statement, solver, gap=0.0).solution

    assert find_violations(statement.problem, solution) == []
    assert solution.has_answer
    oracle = Oracle(snapshot, policy, OBJECTIVES[objective])
    chosen = [_option(statement, oracle, j, c) for j, c in enumerate(solution.choice.tolist())]
    assert oracle.fits(chosen)
    best = oracle.best_by_enumeration if jobs == 6 else oracle.best_by_dynamic_program
    lenient = strict = best(-ROUNDING_TOLERANCE)
    if any(goal.tolerance for goal in oracle.goals):
        strict = best(ROUNDING_TOLERANCE)
    assert _reaches(oracle, chosen, strict, lenient)


@pytest.mark.parametrize("objective", OBJECTIVES)
@examples(5)
@given(seed=st.integers(0, 2**32))
def test_two_solvers_agree_on_each_goal_of_larger_rounds(objective: str, seed: int) -> None:
    snapshot = draw_snapshot(np.random.default_rng(seed), jobs=60, gpus=60)
    statement = state_round(snapshot, _policy_of(objective, jobs=60))
    solutions = []
    for solver in OPINIONS:
        solution = _solve(statement, solver, gap=AGREEMENT_TOLERANCE / 10).solution
        assert find_violations(statement.problem, solution) == []
        assert solution.has_answer
        solutions.append(solution)

    for goal in statement.goals:
        one, other = (_measured(statement, goal, solution) for solution in solutions)
        # Later goals may take from a goal up to its tolerance.
        near = AGREEMENT_TOLERANCE + goal.tolerance
        assert np.allclose(one, other, rtol=near, atol=near * 1e-6)


def _policy_of(name: str, jobs: int) -> Policy:
    """Return the policy of an objective. The levels of small rounds are settled to the last job."""
    depth = jobs if jobs <= 12 else Policy().fairness_levels
    return Policy(
        objective=name,
        fairness_levels=depth,
        deadlines="myopic" if name == "deadline" else "",
        keep_requests=False,
        promise_starts=False,
        change_spacing=0.0,
    )


def _solve(statement: Statement, name: str, gap: float) -> SolvedGoals:
    budget = Budget(remaining_s=lambda: math.inf, gap=gap)
    greedy = Greedy().solve(build_surrogate(statement), budget)
    return solve_goals(statement, make_solver(name), budget, greedy)


def _option(statement: Statement, oracle: Oracle, job: int, column: int) -> OracleOption | None:
    """Return the oracle's option for a column of the problem."""
    if column < 0:
        return None
    cells, cell = statement.problem.cells, int(statement.problem.cell[column])
    key = cells.key_at(cell)[:3]
    result = [o for o in oracle.options[job] if o and (o.gpu_type, o.gpus, o.degree) == key]
    # not one of the job's options: it does not fit
    return result[0] if result else OracleOption(*key, 0.0, False)


def _reaches(
    oracle: Oracle,
    choice: Choice,
    strict: list[tuple[float, ...]],
    lenient: list[tuple[float, ...]],
) -> bool:
    """Return whether every goal reaches its optimum, within ``ROUNDING_TOLERANCE``."""
    mine = oracle.worth(choice)
    for goal, got, low, high in zip(oracle.goals, mine, strict, lenient, strict=True):
        if goal.levels:
            if not np.allclose(got, high, rtol=1e-9, atol=0):
                return False
        elif goal.tolerance:
            if got[0] < high[0] * (1 - goal.tolerance) - ROUNDING_TOLERANCE:
                return False
        elif not low[0] - ROUNDING_TOLERANCE <= got[0] <= high[0] + ROUNDING_TOLERANCE:
            return False
    return True


def _measured(statement: Statement, goal: Any, solution: Solution) -> np.ndarray:
    choice, start = solution.choice, statement.problem.job_start
    runs = choice >= 0
    if hasattr(goal, "level"):
        level = np.where(runs, goal.level[choice], goal.waiting)[np.diff(start) > 0]
        return np.asarray(np.sort(level)[::-1][: goal.depth])
    return np.array([goal.value[choice[runs]].sum() / goal.scale])
