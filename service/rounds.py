"""One round as a pure function: from a snapshot to decisions, with no database, network or clock.

The service, what-if calls, benchmarks and ``tessera replay`` all call ``plan_round``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from formulation.admission import Admission
from formulation.check import Violation, held_twice, placement_violations, score, violations
from formulation.decisions import Decision, decide
from formulation.errors import InvalidInput
from formulation.explain import explain
from formulation.goals import GoalResult
from formulation.policy import Policy
from formulation.problem import Problem
from formulation.snapshot import Snapshot
from formulation.solution import Solution, SolveStatus
from formulation.statement import Statement, state
from formulation.tables import Ints
from solvers.answers import objective_of
from solvers.base import Budget, Solver
from solvers.goals import solve_goals, surrogate
from solvers.greedy import Greedy
from solvers.lookahead import ADMISSION, admit
from solvers.placement import Placed, defragment, place
from solvers.policies.base import Known, Scheduler, narrowed, not_chosen
from solvers.waiting import SpelledOut


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOptions(Policy):
    """What a caller may ask of a round, and how it is to be solved; recorded with it."""

    solver: str = "portfolio"
    gap: float = 1e-4
    seed: int = 0
    solve_limit_s: float = math.inf
    scheduler: str = ""
    """A published policy (``solvers.policies``) decides, e.g. ``fcfs``; empty: Tessera's own statement."""
    work: tuple[tuple[str, float], ...] = ()
    """Solver -> deterministic work at which to stop; empty: only time and gap stop it."""

    def __post_init__(self) -> None:
        """Refuse values that have no meaning."""
        Policy.__post_init__(self)
        if not 0 < self.gap < 1:
            raise InvalidInput("gap", "must lie between 0 and 1")
        if not self.solve_limit_s > 0:
            raise InvalidInput("solve_limit", "must be a positive duration")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a round came to. With ``violations`` it must not be committed."""

    problem: Problem
    solution: Solution
    goals: tuple[GoalResult, ...]
    placed: Placed
    decisions: tuple[Decision, ...]
    violations: tuple[Violation, ...]
    greedy_objective: int  # 0 where a published policy decided
    placed_score: float  # in units of the last goal
    given_up: frozenset[int]  # jobs whose promise could not be kept
    admission: Admission | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answered:
    """A round's answer, placed but not checked. ``broken`` is what was wrong with it before."""

    statement: Statement
    solution: Solution
    goals: tuple[GoalResult, ...]
    placed: Placed
    given_up: frozenset[int] = frozenset()
    greedy_objective: int = 0
    admission: Admission | None = None
    broken: tuple[Violation, ...] = ()


def _no_mark(_phase: str) -> None:
    return None


def plan_round(
    snapshot: Snapshot,
    policy: Policy,
    solver: Solver,
    budget: Budget,
    mark: Callable[[str], None] = _no_mark,
    scheduler: Scheduler | None = None,
) -> Outcome:
    """Decide a round: state it, solve it, place it, check it, explain it.

    With a ``scheduler`` that decides, and ``solver`` is not asked: the objective measures what it chose.

    ``mark`` is called with the name of each phase as it ends (build, greedy, solve, place, check).
    Only the solver is bound by the budget's time: placement's effort is bounded by itself, so that a
    round that is decided again with the recorded work is placed as it was.
    The answer is never worth less than greedy's on the same problem, by the objective as stated and,
    where both had to bend to the blocks that are free, by what was placed.
    """
    if scheduler is not None:
        answered = _scheduled(snapshot, policy, scheduler, budget, mark)
    else:
        answered = _solved(snapshot, policy, solver, budget, mark)
    mark("place")
    return _checked(snapshot, answered, mark)


def _solved(
    snapshot: Snapshot, policy: Policy, solver: Solver, budget: Budget, mark: Callable[[str], None]
) -> _Answered:
    """Return the solver's answer to the round's statement, placed."""
    looks_ahead = policy.deadline_mode == "look-ahead"
    admission = admit(snapshot, policy, budget) if looks_ahead else None
    statement = state(snapshot, policy, admission)
    mark("build")
    statement, given_up, greedy = _keep_promises(snapshot, policy, admission, statement, budget)
    mark("greedy")
    solved = solve_goals(statement, solver, budget, greedy)
    mark("solve")
    stated = surrogate(statement)
    placed = _place(
        snapshot, stated, policy, (solved.on(stated), greedy), budget,
        lambda choice: solved.standing(statement, choice),
    )  # fmt: skip
    problem = statement.problem
    choice = placed.solution.choice
    objective = objective_of(problem, choice)
    solution = replace(
        solved.solution, choice=choice, objective=objective, status=placed.solution.status,
        bound=max(solved.solution.bound, objective),
        work=(*solved.solution.work, *(((ADMISSION, admission.work),) if admission else ())),
    )  # fmt: skip
    problem, given_up = _release_unplaced(problem, solution, given_up | statement.lapsed)
    if admission is not None:  # a new promise that finds no blocks now has not been made
        admission = admission.without(_new_among(snapshot, given_up))
    return _Answered(
        statement=replace(statement, problem=problem), solution=solution, goals=solved.results,
        placed=placed, given_up=given_up, admission=admission,
        greedy_objective=objective_of(statement.problem, greedy.choice),
    )  # fmt: skip


def _new_among(snapshot: Snapshot, jobs: frozenset[int]) -> frozenset[int]:
    return frozenset(job for job in jobs if not snapshot.jobs.admitted[job])


def _scheduled(
    snapshot: Snapshot, policy: Policy, scheduler: Scheduler, budget: Budget,
    mark: Callable[[str], None],
) -> _Answered:  # fmt: skip
    """Return what a published policy chooses, placed on the GPU types and counts that it chose.

    Its bound is the trivial one, since nothing was proven.
    """
    statement = state(snapshot, policy, published=True)
    mark("build")
    decided = scheduler.decide(snapshot, policy, statement.problem, budget.seed)
    measured = solve_goals(statement, Known(decided.solution), budget, decided.solution)
    mark("solve")
    absent = {**statement.absent, **not_chosen(statement.problem, decided)}
    broken = violations(statement.problem, decided.solution)
    problem, solution = narrowed(statement.problem, measured.solution)
    placed = place(snapshot, problem, solution, deadline_expired=budget.cancelled)
    placed = _defragmented(snapshot, problem, policy, placed, budget)
    solution = replace(placed.solution, bound=max(solution.bound, placed.solution.objective))
    return _Answered(
        statement=replace(
            statement, problem=problem, absent=absent, opportunistic=decided.opportunistic
        ),
        solution=solution, goals=measured.results, placed=placed, broken=tuple(broken),
    )  # fmt: skip


def _checked(snapshot: Snapshot, answered: _Answered, mark: Callable[[str], None]) -> Outcome:
    """Return the outcome: checked, explained and, where no rule is broken, decided job by job."""
    statement, solution, placed = answered.statement, answered.solution, answered.placed
    problem, given_up = statement.problem, answered.given_up
    broken = [
        *answered.broken,
        *held_twice(snapshot),
        *violations(problem, solution),
        *placement_violations(snapshot, problem, solution, placed.placement),
    ]
    reasons = explain(snapshot, problem, solution, placed.unplaced, given_up, statement.absent)
    decisions = (
        decide(snapshot, statement, solution, placed.placement, reasons, answered.admission)
        if not broken
        else []
    )
    mark("check")
    return Outcome(
        problem=problem, solution=solution, goals=answered.goals, placed=placed,
        decisions=tuple(decisions), violations=tuple(broken),
        greedy_objective=answered.greedy_objective,
        placed_score=score(problem, solution, placed.placement), given_up=given_up,
        admission=answered.admission,
    )  # fmt: skip


def _place(
    snapshot: Snapshot, problem: Problem, policy: Policy,
    answers: tuple[Solution, Solution], budget: Budget,
    standing: Callable[[Ints], tuple[float, ...]],
) -> Placed:  # fmt: skip
    """Return the first answer placed, or the second (greedy's) where that is worth more once placed.

    With several goals ``standing`` compares choices by them; the score decides between equals.
    """

    def worth(placed: Placed) -> tuple[float, ...]:
        mine = score(problem, placed.solution, placed.placement)
        return *standing(placed.solution.choice), mine

    solution, greedy = answers
    placed = place(snapshot, problem, solution, deadline_expired=budget.cancelled)
    *stands, mine = worth(placed)
    if (*stands, mine * problem.scale) < (*standing(greedy.choice), greedy.objective):
        other = place(snapshot, problem, greedy, deadline_expired=budget.cancelled)
        placed = max((placed, other), key=worth)  # on equal scores the solver's
    return _defragmented(snapshot, problem, policy, placed, budget)


def _defragmented(
    snapshot: Snapshot, problem: Problem, policy: Policy, placed: Placed, budget: Budget
) -> Placed:
    """Return ``placed`` with fragmentation mended, in the rounds that look for it."""
    every = policy.defragment_every_rounds
    if every and snapshot.round_number % every == 0:
        placed = defragment(snapshot, problem, placed, deadline_expired=budget.cancelled)
    return placed


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


def _keep_promises(
    snapshot: Snapshot, policy: Policy, admission: Admission | None, statement: Statement,
    budget: Budget,
) -> tuple[Statement, frozenset[int], Solution]:  # fmt: skip
    """Return the statement with the promises that can be kept, those given up, and greedy's answer.

    Where the jobs that must run no longer fit together (nodes were lost), the promises kept are those
    of greatest total weight that greedy finds; the round is stated anew without the others.
    """
    solver, problem = SpelledOut(Greedy()), surrogate(statement)
    greedy = solver.solve(problem, budget, _witness(statement, problem))
    if greedy.has_answer:
        return statement, frozenset(), greedy
    heaviest = problem.weight.max(initial=1.0)
    worth = np.rint(problem.weight / heaviest * 1e6).astype(np.int64) + 1
    columns = problem.column_job
    promises = replace(
        problem,
        value=np.where(problem.must_run[columns], worth[columns], 0),
        must_run=np.zeros_like(problem.must_run),
    )
    kept = solver.solve(promises, budget)
    must_run = problem.must_run & (kept.choice >= 0)
    given_up = frozenset(np.flatnonzero(problem.must_run & ~must_run).tolist())
    statement = state(snapshot, policy, admission, waived=given_up)
    relaxed = surrogate(statement)
    hint = _witness(statement, relaxed)
    if hint is None:
        others = kept.choice if len(problem.idle_row) else -1  # waiting may use what is short
        choice = _carried(problem, relaxed, np.where(must_run, kept.choice, others))
        hint = replace(kept, choice=choice, objective=objective_of(relaxed, choice), bound=math.inf)
    return statement, given_up, solver.solve(relaxed, budget, hint)


def _witness(statement: Statement, problem: Problem) -> Solution | None:
    """Return the answer that the rules packed for the jobs that must run, if they had to."""
    if statement.witness is None:
        return None
    return Solution(
        status=SolveStatus.FEASIBLE, choice=statement.witness, solver="packing", bound=math.inf,
        objective=objective_of(problem, statement.witness),
    )  # fmt: skip


def _carried(before: Problem, after: Problem, choice: Ints) -> Ints:
    """Return ``choice`` in the columns of ``after``, which states the same Cells; -1 where it has none."""
    found = np.full(len(choice), -1, dtype=np.int64)
    for job in np.flatnonzero(choice >= 0).tolist():
        columns = after.columns_of(job)
        same = np.flatnonzero(after.cell[columns.start : columns.stop] == before.cell[choice[job]])
        if len(same):
            found[job] = columns.start + int(same[0])
    return found
