"""One round as a pure function: from a snapshot to decisions, with no database, network or clock.

The service, what-if calls, benchmarks and ``tessera replay`` all call ``plan_round``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from formulation.check import Violation, held_twice, placement_violations, score, violations
from formulation.decisions import Decision, decide
from formulation.errors import InvalidInput
from formulation.explain import explain
from formulation.policy import Policy
from formulation.problem import Problem
from formulation.snapshot import Snapshot
from formulation.solution import Solution
from formulation.throughput import build_problem
from solvers.answers import objective_of
from solvers.base import Budget, Solver
from solvers.greedy import Greedy
from solvers.placement import Placed, defragment, place


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOptions:
    """What a caller may ask of a round; recorded with it."""

    objective: str = "throughput"
    raw_throughput: bool = False
    solver: str = "portfolio"
    gap: float = 1e-4
    seed: int = 0
    solve_limit_s: float = math.inf
    restart_horizon_s: float = 3600.0
    defragment_every_rounds: int = 12
    work: tuple[tuple[str, float], ...] = ()
    """Solver -> deterministic work at which to stop; empty: only time and gap stop it."""

    def policy(self) -> Policy:
        """Return the policy that these options ask for."""
        if self.objective != "throughput":
            raise InvalidInput("options.objective", f"{self.objective!r}: know only 'throughput'")
        return Policy(
            objective="throughput",
            raw_throughput=self.raw_throughput,
            restart_horizon_s=self.restart_horizon_s,
            defragment_every_rounds=self.defragment_every_rounds,
        )

    def __post_init__(self) -> None:
        """Refuse values that have no meaning."""
        if not 0 < self.gap < 1:
            raise InvalidInput("options.gap", "must lie between 0 and 1")
        if not self.solve_limit_s > 0:
            raise InvalidInput("options.solve_limit", "must be a positive duration")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a round came to. With ``violations`` it must not be committed."""

    problem: Problem
    solution: Solution
    placed: Placed
    decisions: tuple[Decision, ...]
    violations: tuple[Violation, ...]
    greedy_objective: int
    placed_score: float  # in units of the objective
    given_up: frozenset[int]  # jobs whose promise could not be kept


def _no_mark(_phase: str) -> None:
    return None


def plan_round(
    snapshot: Snapshot,
    policy: Policy,
    solver: Solver,
    budget: Budget,
    mark: Callable[[str], None] = _no_mark,
) -> Outcome:
    """Decide a round: state it, solve it, place it, check it, explain it.

    ``mark`` is called with the name of each phase as it ends (build, greedy, solve, place, check).
    Only the solver is bound by the budget's time: placement's effort is bounded by itself, so that a
    round that is decided again with the recorded work is placed as it was.
    The answer is never worth less than greedy's on the same problem, by the objective as stated and,
    where both had to bend to the blocks that are free, by what was placed.
    """
    problem = build_problem(snapshot, policy)
    mark("build")
    problem, given_up, greedy = _keep_promises(problem, budget)
    mark("greedy")
    solution = _solve(problem, solver, budget, greedy)
    mark("solve")
    placed = place(snapshot, problem, solution, deadline_expired=budget.cancelled)
    if score(problem, placed.solution, placed.placement) * problem.scale < greedy.objective:
        other = place(snapshot, problem, greedy, deadline_expired=budget.cancelled)
        placed = max(
            (placed, other), key=lambda p: score(problem, p.solution, p.placement)
        )  # on equal scores the solver's
    every = policy.defragment_every_rounds
    if every and snapshot.round_number % every == 0:
        placed = defragment(snapshot, problem, placed, deadline_expired=budget.cancelled)
    solution = replace(
        placed.solution,
        prices=solution.prices,
        bound=max(solution.bound, placed.solution.objective),
    )
    problem, given_up = _release_unplaced(problem, solution, given_up)
    mark("place")
    broken = [
        *held_twice(snapshot),
        *violations(problem, solution),
        *placement_violations(snapshot, problem, solution, placed.placement),
    ]
    reasons = explain(snapshot, problem, solution, placed.unplaced, given_up)
    decisions = decide(snapshot, problem, solution, placed.placement, reasons) if not broken else []
    mark("check")
    return Outcome(
        problem=problem, solution=solution, placed=placed, decisions=tuple(decisions),
        violations=tuple(broken), greedy_objective=greedy.objective,
        placed_score=score(problem, solution, placed.placement), given_up=given_up,
    )  # fmt: skip


def _solve(problem: Problem, solver: Solver, budget: Budget, greedy: Solution) -> Solution:
    """Return the solver's answer, or greedy's where that is better or the only verified one."""
    if solver.name == greedy.solver:
        return greedy
    found = solver.solve(problem, budget, greedy)
    if found.has_answer and not violations(problem, found):
        if found.objective >= greedy.objective:
            return found
        return replace(greedy, bound=found.bound, prices=found.prices, work=found.work)
    if not found.has_answer and greedy.objective <= found.bound <= greedy.bound:
        return replace(greedy, bound=found.bound, prices=found.prices, work=found.work)
    return greedy


def _release_unplaced(
    problem: Problem, solution: Solution, given_up: frozenset[int]
) -> tuple[Problem, frozenset[int]]:
    """Give up the promises that found no blocks although placement displaced all that it may."""
    lost = problem.must_run & (solution.choice < 0)
    if not lost.any():
        return problem, given_up
    return replace(problem, must_run=problem.must_run & ~lost), given_up | set(
        np.flatnonzero(lost).tolist()
    )


def _keep_promises(problem: Problem, budget: Budget) -> tuple[Problem, frozenset[int], Solution]:
    """Return the problem with the promises that can be kept, those given up, and greedy's answer.

    Where the jobs that must run no longer fit together (nodes were lost), the promises kept are those
    of greatest total weight that greedy finds; the rest become best effort for this round.
    """
    greedy = Greedy().solve(problem, budget)
    if greedy.has_answer:
        return problem, frozenset(), greedy
    heaviest = problem.weight.max(initial=1.0)
    worth = np.rint(problem.weight / heaviest * 1e6).astype(np.int64) + 1
    columns = problem.column_job
    promises = replace(
        problem,
        value=np.where(problem.must_run[columns], worth[columns], 0),
        must_run=np.zeros_like(problem.must_run),
    )
    kept = Greedy().solve(promises, budget)
    must_run = problem.must_run & (kept.choice >= 0)
    relaxed = replace(problem, must_run=must_run)
    choice = np.where(must_run, kept.choice, -1)
    hint = replace(kept, choice=choice, objective=objective_of(problem, choice), bound=math.inf)
    given_up = frozenset(np.flatnonzero(problem.must_run & ~must_run).tolist())
    return relaxed, given_up, Greedy().solve(relaxed, budget, hint)
