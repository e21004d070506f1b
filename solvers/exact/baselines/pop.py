"""POP: random parts of the jobs, each with an equal part of every capacity, solved separately.

D. Narayanan et al., "Solving Large-Scale Granular Resource Allocation Problems Efficiently with
POP" (SOSP'21), section 3.
"""

from __future__ import annotations

import numpy as np

from tessera.formulation.answer.solution import Solution, SolveStatus
from tessera.formulation.base.tables import Ints, concatenate_ranges
from tessera.formulation.round.problem import Problem, restrict_problem
from tessera.solvers.base import Budget, Solver
from tessera.solvers.exact.answers import (
    find_unrunnable,
    make_solution,
    trivial_bound,
    without_answer,
)
from tessera.solvers.exact.baselines.highs import Highs
from tessera.solvers.exact.waiting_columns import with_waiting_as_columns


class Pop:
    """A solver that splits the jobs at random into ``parts``, and every capacity evenly.

    The answers of the parts are joined. Each part is solved by ``inner`` (HiGHS's branch and bound
    unless another is given) in an even share of the remaining time, one after the other. POP would
    run them in parallel, so it would be up to n times faster on n cores. Nothing is proven of the
    whole, so the bound is the trivial one. The paper has no promises: if a part's must-run jobs do
    not fit, the whole has no answer.
    """

    def __init__(self, parts: int = 8, inner: Solver | None = None) -> None:
        self.name = f"pop-{parts}"
        self._parts, self._inner = parts, inner or Highs()

    @with_waiting_as_columns
    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        """Solve ``problem``; the hint is not used, on purpose."""
        del hint
        work = ((self.name, 1.0),)
        if len(find_unrunnable(problem)):
            return without_answer(
                problem, SolveStatus.INFEASIBLE, solver=self.name, seed=budget.seed, work=work
            )
        order = np.random.default_rng(budget.seed).permutation(len(problem.jobs))
        groups = [np.sort(group) for group in np.array_split(order, self._parts)]
        choice = np.full(len(problem.jobs), -1, dtype=np.int64)
        for number, jobs in enumerate(groups):
            solution = self._part(problem, jobs, number, budget)
            if not solution.has_answer and problem.must_run[jobs].any():
                return without_answer(
                    problem, SolveStatus.UNKNOWN, solver=self.name, seed=budget.seed, work=work
                )
            choice[jobs] = _lifted(problem, jobs, solution.choice)
        return make_solution(
            problem,
            choice,
            bound=trivial_bound(problem),
            solver=self.name,
            seed=budget.seed,
            work=work,
        )

    def _part(self, problem: Problem, jobs: Ints, number: int, budget: Budget) -> Solution:
        share = budget.share(1.0 / (self._parts - number))
        part = part_of(problem, jobs, _even(problem.capacity, self._parts, number))
        return self._inner.solve(part, share)


def _even(capacity: Ints, parts: int, number: int) -> Ints:
    """Return the share of part ``number`` in each capacity; remainders go to the parts in turn."""
    turn = (number - np.arange(len(capacity))) % parts
    return np.asarray(capacity // parts + (turn < capacity % parts))


def part_of(problem: Problem, jobs: Ints, capacity: Ints) -> Problem:
    """Return the problem of only ``jobs`` (rising), with ``capacity`` (int64[rows])."""
    columns = concatenate_ranges(problem.job_start[jobs], np.diff(problem.job_start)[jobs])
    return restrict_problem(problem, jobs, columns, capacity=capacity)


def _lifted(problem: Problem, jobs: Ints, choice: Ints) -> Ints:
    """Return the choice of a part's jobs in the columns of the whole problem."""
    start = np.append(0, np.cumsum(np.diff(problem.job_start)[jobs]))
    return np.where(choice >= 0, choice - start[:-1] + problem.job_start[jobs], -1)
