"""A portfolio from cheap to exact: greedy, shadow prices, branching, CP-SAT, and knapsacks.

The best verified answer wins.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from tessera.formulation.answer.certificates import Certificate
from tessera.formulation.answer.check import find_violations
from tessera.formulation.answer.solution import RecordedAnswer, Solution, SolveStatus
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats, Ints
from tessera.formulation.round.problem import Problem
from tessera.solvers.base import Budget, Solver, SolverFailed
from tessera.solvers.exact.answers import (
    is_answer,
    is_within,
    make_result,
    make_solution,
    objective_of,
    trivial_bound,
)
from tessera.solvers.exact.branching import Branching, KnapsackFilling
from tessera.solvers.exact.branching.solver import MAX_CP_SAT_JOBS, POLISHING_NODES, polished_gap
from tessera.solvers.exact.cpsat import POLISHING_WORK, CpSat
from tessera.solvers.exact.greedy import Greedy, find_better_choice
from tessera.solvers.exact.prices import PROVED_BY_PRICES, certificate_of_prices
from tessera.solvers.exact.pricing import Pricing
from tessera.solvers.exact.pricing.solver import usable_prices
from tessera.solvers.exact.relaxation import Relaxation
from tessera.solvers.exact.simplify import simplify
from tessera.solvers.exact.waiting_columns import with_waiting_as_columns

_LOG = logging.getLogger(__name__)

_RESERVE = {
    Pricing.name: 0.5,
    Relaxation.name: 0.5,
    CpSat.name: 0.1,
    KnapsackFilling.name: 0.1,
}
"""Share of the remaining time that a stage must leave to later stages and to verification."""
_OTHER_RESERVE: Final = 0.3
_RESERVE_OF_MANY_ROWS: Final = 0.9
"""The same for branching if there are many rows, where later stages usually prove more."""
_RESERVE_FOR_KNAPSACKS: Final = 0.85
"""The same for CP-SAT if knapsacks suit the round: they close a digit more of its gap, or two."""

MAX_PRICING_ROWS: Final = 32
"""Number of rows above which the LP is faster than cutting planes.

Cutting planes grow in number and in length with the rows."""
LARGE_PROBLEM_COLUMNS: Final = 100_000
"""With more columns than this, pricing is still faster up to twice as many rows."""
MAX_POLISHED_COLUMNS: Final = 400_000
"""Columns above which this would cost more than a tenth of a second."""


@dataclass(slots=True)
class _Best:
    """The best result of all stages so far; each of its parts is valid without the others."""

    bound: float
    choice: Ints | None = None
    objective: int = 0
    prices: Floats = field(default_factory=lambda: np.zeros(0))
    infeasible: bool = False
    proved_by: str = ""
    certificate: Certificate | None = None
    recorded: list[RecordedAnswer] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def gap_met(self, gap: float) -> bool:
        """Return whether nothing is left to gain within the gap."""
        if self.choice is None:
            return self.infeasible
        return is_within(gap, self.bound, self.objective)


class Portfolio:
    """A solver that runs stages in order until the gap is met or the time is over.

    The round is solved in its simplest numbers (``simplify``). Each stage's answer is a hint for the
    next. The first stage always runs and always terminates, so there is an answer however short the
    budget is. If the hint has shadow prices, pricing comes first (``_from_prices``). Every answer is
    checked by ``tessera.formulation.answer.check`` before it counts. An answer that breaks a rule is
    dropped with its bound, and logged.

    A little work is spent to bring the gap below 1e-6, and CP-SAT is given every round of
    up to ``MAX_CP_SAT_JOBS`` jobs that is not proven to the last unit.

    ``work`` holds the work of every stage. A stage has work 0 if it did not run or failed. If the
    wall clock cut CP-SAT short, its work is 0, too, and its answer is ``recorded``. So the run can be
    repeated bit for bit with ``Budget(remaining_s=lambda: math.inf, work=dict(solution.work),
    recorded=solution.recorded)`` and the same seed and gap, whatever the number of workers.
    """

    name = "portfolio"

    def __init__(self, stages: Sequence[Solver] | None = None) -> None:
        self._stages = tuple(stages) if stages else None

    @with_waiting_as_columns
    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        """Solve ``problem``, never worse than greedy; INFEASIBLE means that a stage proved it."""
        greedy = self._stages[0] if self._stages else Greedy()
        if hint is None and isinstance(greedy, Greedy):  # its answer to simpler numbers may be less
            first = greedy.solve(problem, budget)
            hint = first if first.has_answer else None
        simple = simplify(problem)
        recorded = simple.read_record(budget.recorded)
        budget = replace(budget, recorded=recorded)
        return simple.lift(self._solve(simple.problem, budget, simple.read_hint(hint)))

    def _solve(self, problem: Problem, budget: Budget, hint: Solution | None) -> Solution:
        stages = self._stages or stages_for(problem)
        best, work = _Best(bound=math.inf), dict.fromkeys((stage.name for stage in stages), 0.0)
        done = _from_prices(problem, stages, budget, hint, best, work)
        if best.bound == math.inf:
            best.bound = trivial_bound(problem)
        for position, stage in enumerate(stages):
            if stage.name in done or _repeat_record(problem, stage, budget, best):
                continue
            part = _part_of(problem, stage, stages, budget, best)
            if position and (part is None or budget.skips(stage.name) or budget.expired()):
                continue
            next_hint = _next_hint(problem, best, budget, work, hint)
            solution = _run(stage, problem, part or budget, next_hint, best.failures)
            if solution is None:
                continue
            work[stage.name] = dict(solution.work).get(stage.name, 0.0)
            if isinstance(stage, CpSat) and (work[stage.name] == 0 or budget.workers > 1):
                work[stage.name] = 0.0  # the record repeats it
                _record(best, stage.name, solution)
            _merge(best, problem, solution)
        return _solution(problem, best, budget, work)


def _part_of(
    problem: Problem, stage: Solver, stages: Sequence[Solver], budget: Budget, best: _Best
) -> Budget | None:
    """Return the part of the budget that a stage has, with the gap to aim at, or None for no part.

    The parts are in proportion to what the stages earn (``tessera bench stages``).
    """
    met = best.gap_met(budget.gap)
    if met and not _polishes(problem, stage, best):
        return None
    if isinstance(stage, KnapsackFilling) and not stage.suits(problem, best.choice):
        return None
    part = budget.share(1.0 - _reserve_of(problem, stage, stages, best))
    if isinstance(stage, Branching | KnapsackFilling) and part.remaining_s() < stage.least_s(
        problem
    ):
        return None
    if not met:
        return part
    if isinstance(stage, CpSat):
        return _with_limit(part, stage.name, POLISHING_WORK, 0.0)
    return _with_limit(part, stage.name, POLISHING_NODES, polished_gap(problem))


def _polishes(problem: Problem, stage: Solver, best: _Best) -> bool:
    """Return whether ``stage`` lowers a gap further that is met."""
    if best.choice is None or best.gap_met(0.0):
        return False
    if isinstance(stage, CpSat):
        return len(problem.jobs) <= MAX_CP_SAT_JOBS
    small = len(problem.cell) <= MAX_POLISHED_COLUMNS
    return isinstance(stage, Branching) and small and not best.gap_met(polished_gap(problem))


def _reserve_of(problem: Problem, stage: Solver, stages: Sequence[Solver], best: _Best) -> float:
    """Return the share of the time that is left which ``stage`` must leave to others."""
    if isinstance(stage, Branching) and len(problem.rows) > MAX_PRICING_ROWS:
        return _RESERVE_OF_MANY_ROWS
    knapsacks = [later for later in stages if isinstance(later, KnapsackFilling)]
    if isinstance(stage, CpSat) and any(k.suits(problem, best.choice) for k in knapsacks):
        return _RESERVE_FOR_KNAPSACKS
    return _RESERVE.get(stage.name, _OTHER_RESERVE)


def _with_limit(budget: Budget, stage: str, work: float, gap: float) -> Budget:
    limit = min(work, budget.work.get(stage, math.inf))
    return replace(budget, gap=min(gap, budget.gap), work=budget.work | {stage: limit})


def _record(best: _Best, stage: str, solution: Solution) -> None:
    """Record the answer of a stage that a clock ended, as changes of the best one before."""
    before = np.full_like(solution.choice, -1) if best.choice is None else best.choice
    after = solution.choice if solution.has_answer else before
    changed = np.flatnonzero(after != before)
    changes = tuple(zip(changed.tolist(), after[changed].tolist(), strict=True))
    if changes or solution.bound < best.bound:
        best.recorded.append(RecordedAnswer(stage=stage, changes=changes, bound=solution.bound))


def _repeat_record(problem: Problem, stage: Solver, budget: Budget, best: _Best) -> bool:
    """Use the recorded answer of ``stage`` instead of running it, if there is one."""
    own = [answer for answer in budget.recorded if answer.stage == stage.name]
    for answer in own:
        before = np.full(len(problem.jobs), -1) if best.choice is None else best.choice
        choice = before.copy()
        for job, column in answer.changes:
            if not 0 <= job < len(choice):
                raise InvalidInput("recorded", f"there is no job {job} in this round")
            choice[job] = column
        if not is_answer(problem, choice):
            raise InvalidInput("recorded", f"the answer of {stage.name} is not one of this round")
        if not math.isfinite(answer.bound):
            raise InvalidInput("recorded", f"the bound of {stage.name} is not a number")
        bound = max(answer.bound, float(objective_of(problem, choice)))
        solution = make_solution(
            problem, choice, bound=bound, solver=stage.name, proved_by=stage.name
        )
        best.recorded.append(answer)
        _merge(best, problem, solution)
    return bool(own)


def _from_prices(
    problem: Problem,
    stages: Sequence[Solver],
    budget: Budget,
    hint: Solution | None,
    best: _Best,
    work: dict[str, float],
) -> frozenset[str]:
    """Begin with the hint's shadow prices, if it has any; return the stages that are finished.

    Greedy, which takes most of the time of such a round, then runs only until it is proven that the
    value of its answer is lower. A hint that is greedy's own answer does not start this, since
    greedy has run.
    """
    greedy, pricing = stages[0], stages[1] if len(stages) > 1 else None
    if (
        not isinstance(greedy, Greedy)
        or not isinstance(pricing, Pricing)
        or usable_prices(problem, hint) is None
        or (hint is not None and hint.solver == greedy.name)
        or budget.skips(pricing.name)
        or budget.expired()
    ):
        return frozenset()
    part = budget.share(1.0 - _RESERVE[pricing.name])
    solution, shown = pricing.solve_and_show(problem, part, hint)
    if (
        shown is None
        or not solution.has_answer
        or not _verified(pricing.name, problem, solution, best.failures)
    ):
        return frozenset()
    work[pricing.name], work[greedy.name] = dict(solution.work)[pricing.name], 1.0
    _merge(best, problem, solution)
    better = find_better_choice(problem, solution.choice, shown, hint)
    if better is not None:
        greedy_answer = make_solution(
            problem, better, bound=best.bound, solver=greedy.name, seed=budget.seed
        )
        if _verified(greedy.name, problem, greedy_answer, best.failures):
            _merge(best, problem, greedy_answer)
    return frozenset((greedy.name, pricing.name))


def _next_hint(
    problem: Problem, best: _Best, budget: Budget, work: dict[str, float], hint: Solution | None
) -> Solution | None:
    """Return the next stage's hint: the best answer so far.

    It has the hint's shadow prices as long as there are no others.
    """
    if best.choice is None:
        return hint
    solution = _unproven(problem, best, budget, work)
    known = hint is not None and not len(best.prices)
    return replace(solution, prices=hint.prices) if hint is not None and known else solution


def stages_for(problem: Problem) -> tuple[Solver, ...]:
    """Return greedy, a stage that finds shadow prices, and those that close the gap.

    The rule depends on the problem alone. It was measured (``docs/internals/solvers.md``): shadow prices
    come from the dual, but from the LP if there are many rows.
    """
    most = MAX_PRICING_ROWS if len(problem.cell) < LARGE_PROBLEM_COLUMNS else 2 * MAX_PRICING_ROWS
    prices = Pricing() if len(problem.rows) <= most else Relaxation()
    return Greedy(), prices, Branching(), CpSat(), KnapsackFilling()


def _run(
    stage: Solver, problem: Problem, budget: Budget, hint: Solution | None, failures: list[str]
) -> Solution | None:
    """Return the stage's solution if it breaks no rule; else add why to ``failures``, and return None.

    If the stage itself made the hint, the hint is its solution, and the stage does not run again.
    """
    own = hint is not None and hint.solver == stage.name and hint.has_answer
    if hint is not None and own and not find_violations(problem, hint):
        return replace(hint, prices=np.zeros(0))  # its shadow prices are those of an earlier round
    try:
        solution = stage.solve(problem, budget, hint)
    except SolverFailed as error:
        _LOG.warning(
            "a solver failed",
            extra={"event": "solver_failed", "solver": stage.name, "error": error},
        )
        failures.append(f"{stage.name}: {error.detail}")
        return None
    if solution.has_answer and not _verified(stage.name, problem, solution, failures):
        return None
    return solution


def _verified(name: str, problem: Problem, solution: Solution, failures: list[str]) -> bool:
    """Return whether the answer breaks no rule; log the rules that it breaks, and add a failure."""
    broken = find_violations(problem, solution)
    if broken:
        _LOG.error(
            "dropped the answer of a solver",
            extra={
                "event": "answer_dropped",
                "solver": name,
                "violations": [v.detail for v in broken[:3]],
                "broken": len(broken),
            },
        )
        failures.append(f"{name}: its answer breaks {broken[0].rule}: {broken[0].detail}")
    return not broken


def _merge(best: _Best, problem: Problem, solution: Solution) -> None:
    if solution.status is SolveStatus.INFEASIBLE:
        best.infeasible = best.choice is None
        if not best.infeasible:
            best.failures.append(
                f"{solution.solver}: it called a round infeasible that has an answer"
            )
        return
    known = -math.inf if best.choice is None else best.objective
    if solution.has_answer:
        known = max(known, objective_of(problem, solution.choice))
    if solution.bound < known:
        best.failures.append(
            f"{solution.solver}: its bound {solution.bound:.0f} is below an answer of {known:.0f}"
        )
    elif solution.bound < best.bound:
        best.bound, best.proved_by = solution.bound, solution.proved_by
        best.certificate = solution.certificate or best.certificate
    if len(solution.prices):
        best.prices = solution.prices
    if solution.has_answer and (best.choice is None or solution.objective > best.objective):
        best.choice, best.objective = solution.choice, objective_of(problem, solution.choice)


def _solution(problem: Problem, best: _Best, budget: Budget, work: dict[str, float]) -> Solution:
    """Return the best result, with the exact bound of its certificate or else the word of a stage."""
    if best.certificate is None:
        # Without prices, they are 0: every job on its best column.
        prices = best.prices if len(best.prices) else np.zeros(len(problem.rows))
        best.certificate = certificate_of_prices(problem, prices)
    if best.proved_by in ("", PROVED_BY_PRICES):
        best.bound, best.proved_by = float(best.certificate.bound), PROVED_BY_PRICES
    return replace(
        _unproven(problem, best, budget, work),
        recorded=tuple(best.recorded),
        proved_by=best.proved_by,
        certificate=best.certificate,
        failures=tuple(best.failures),
    )


def _unproven(problem: Problem, best: _Best, budget: Budget, work: dict[str, float]) -> Solution:
    """Return the best answer and bound, without their proof."""
    return make_result(
        problem,
        best.choice,
        status=SolveStatus.INFEASIBLE if best.infeasible else SolveStatus.UNKNOWN,
        bound=best.bound,
        solver=Portfolio.name,
        prices=best.prices,
        seed=budget.seed,
        work=tuple(work.items()),
    )
