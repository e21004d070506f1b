"""The knapsack stage: each GPU type filled exactly, jobs held together by prices.

Shadow prices alone let a type sell fractions of a gang. Where few large gangs fit on a type, that is
most of the gap. Here every job has a price instead, and each type (more generally, each row, if no
column uses two) is a knapsack that is solved exactly (Lagrangian decomposition,
Guignard and Kim, 1987). The prices of the jobs come from the shadow prices, and are improved by
subgradient steps and by column generation. Answers come from fillings of the same knapsacks, from
a core around the prices, and from knapsacks that are emptied and filled again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np

from tessera.formulation.answer.certificates import Certificate, PriceLeaf
from tessera.formulation.answer.solution import Solution
from tessera.formulation.base.tables import Ints
from tessera.formulation.round.problem import Problem
from tessera.solvers.base import Budget
from tessera.solvers.exact.answers import (
    is_answer,
    is_within,
    make_result,
    make_solution,
    objective_of,
    usable_hint,
)
from tessera.solvers.exact.branching.fillings import MOST_COMBINED, FillingPool
from tessera.solvers.exact.branching.stated import StatedKnapsacks, count_knapsacks, state_knapsacks
from tessera.solvers.exact.cpsat import WORK_PER_S, CpSat
from tessera.solvers.exact.exchange import exchange_choices
from tessera.solvers.exact.greedy import repair_choice
from tessera.solvers.exact.prices import PROVED_BY_PRICES, PricedProblem, price_at_hint
from tessera.solvers.exact.waiting_columns import with_waiting_as_columns
from tessera.solvers.kernels.knapsacks import (
    assign_by_knapsacks,
    descend_knapsacks,
    refill_knapsacks,
)

FIRST_EFFORT: Final = 300_000_000
LATER_EFFORT: Final = 150_000_000
"""Effort of the first descent, and of each later one and of the refills of a pass: about 1 ns each."""
LEAST_S: Final = 0.4
COLUMN_S: Final = 1e-6
"""Wall seconds for each column that a pass needs, beyond ``LEAST_S``."""
FIRST_STEPS: Final = 100
LATER_STEPS: Final = 60
"""Subgradient steps of the first descent, and of each later one."""
MOST_REFILLS: Final = 4_000
"""Refills of one pass."""
REFILLED: Final = 3
"""Knapsacks of a refill, at most."""
LOSSES: Final = (0.0, 1.0, 3.0)
"""What a refill may lose at first, by turns, in shares of the gap of one knapsack."""
CORE_WORK: Final = 0.3
"""Deterministic seconds of a turn of CP-SAT."""
LONG_FILLING: Final = 8
"""Jobs of a knapsack above which there are no dives: their linear programs take too long then."""
MOST_OF_KNAPSACK: Final = 20
"""Jobs of a knapsack above which shadow prices lose next to nothing, and CP-SAT gains more."""
MOST_PASSES: Final = 60
IDLE_TURNS: Final = 2
"""Turns of a move without any gain after which it is left out."""
FIRST_PASSES: Final = 3
LEAST_PROGRESS: Final = 0.1
"""Share of the gap that the first passes must close, or else the stage is of no use here."""


class KnapsackFilling:
    """A solver that treats GPU types as knapsacks. It needs the hint's shadow prices and answer.

    It is of use where each column uses one row, and few jobs fill a row, or there is one row
    (``suits``). Its work is the number of passes, which repeats the run. The bound is that of a certificate.
    """

    name = "knapsacks"

    def suits(self, problem: Problem, known: Ints | None) -> bool:
        """Return whether it gains more than CP-SAT around the answer ``known`` (int64[jobs])."""
        rows = 0 if known is None else count_knapsacks(problem)
        if known is None or not rows:
            return False
        # A single row is filled exactly, however many jobs it holds.
        return rows == 1 or int(np.count_nonzero(known >= 0)) <= MOST_OF_KNAPSACK * rows

    def least_s(self, problem: Problem) -> float:
        """Return the wall seconds without which no pass should begin."""
        return LEAST_S + COLUMN_S * len(problem.cell)

    @with_waiting_as_columns
    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        """Improve the hint's answer and bound; without them, or where it is of no use, return them."""
        known = usable_hint(problem, hint)
        priced = price_at_hint(problem, hint)
        first = priced.bound if hint is None else min(priced.bound, hint.bound)
        stated = None if known is None else state_knapsacks(problem, priced)
        choice, bound, done, proof = known, first, 0, None
        if stated is not None and known is not None:
            search = _KnapsackSearch(problem, priced, stated, known, first)
            done = self._run_passes(search, budget, self.least_s(problem))
            choice, bound = search.choice, search.bound
            proof = search.certificate if bound < first else None
        by_prices = PROVED_BY_PRICES if first == priced.bound else ""
        return make_result(
            problem,
            choice,
            bound=bound,
            solver=self.name,
            prices=priced.prices,
            seed=budget.seed,
            work=((self.name, float(done)),),
            certificate=proof,
            proved_by=self.name if proof else by_prices,
        )

    def _run_passes(self, search: _KnapsackSearch, budget: Budget, least_s: float) -> int:
        """Run passes, each of which may need ``least_s``, and return the number that were finished."""
        most, done = int(budget.work.get(self.name, MOST_PASSES)), 0
        while done < most and budget.remaining_s() > least_s and not search.ended(budget.gap):
            budget.check()
            if not search.run_pass(budget):
                break
            done += 1
        return done


class _KnapsackSearch:
    """The best answer and bound so far, and the moves that improve them by turns.

    A move that did not gain for some turns is left out until another one gains. What a move finds
    depends on the passes before it alone, so that they can be repeated. One that the clock ended
    counts for nothing.
    """

    def __init__(
        self,
        problem: Problem,
        priced: PricedProblem,
        stated: StatedKnapsacks,
        known: Ints,
        bound: float,
    ) -> None:
        self._problem, self._priced, self._stated = problem, priced, stated
        self.choice, self.bound = known.copy(), bound
        self._price, self._at = stated.price.copy(), stated.price.copy()
        self._state = np.array([1.0, 0.0])
        self._passes = self._dives = self._combined = self._cores = self._refills = 0
        self._draws = 0
        self._hopeless, self._first = False, bound - self.value
        long = np.count_nonzero(known >= 0) > LONG_FILLING * count_knapsacks(problem)
        self._pool = None if long else FillingPool(problem, stated)
        self._moves: list[Callable[[Budget], bool]] = [self._search_core, self._refill_best]
        if self._pool is not None:  # dives gain the most
            self._moves = [self._dive, self._combine] * 2 + self._moves[::-1]
        self._next, self._idle = 0, [0] * len(self._moves)

    @property
    def value(self) -> float:
        return float(objective_of(self._problem, self.choice))

    def ended(self, gap: float) -> bool:
        """Return whether the gap is met, or nothing more is to be expected."""
        met = is_within(gap, self.bound, self.value)
        return met or self._hopeless or min(self._idle) >= IDLE_TURNS

    def run_pass(self, budget: Budget) -> bool:
        """Make the next move. Return whether it was finished in time."""
        before = (self.bound, self.value)
        if self._passes == 0:
            self._descend(budget.gap, FIRST_STEPS, FIRST_EFFORT)
            self._refill_anew(budget)
        else:
            while self._idle[self._next] >= IDLE_TURNS:
                self._next = (self._next + 1) % len(self._moves)
            move, self._next = self._next, (self._next + 1) % len(self._moves)
            if not self._moves[move](budget):
                return False
            self._idle[move] += 1
            if (self.bound, self.value) != before:
                self._idle = [0] * len(self._moves)
        self._passes += 1
        if self._passes == FIRST_PASSES:
            self._hopeless = self.bound - self.value > (1.0 - LEAST_PROGRESS) * self._first
        return True

    def _descend(self, gap: float, steps: int, effort: int) -> None:
        """Lower the bound by at most ``steps`` subgradient steps."""
        stated = self._stated
        enough = int(self.value + gap * max(abs(self.value), 1.0)) * stated.scale
        best = descend_knapsacks(
            stated.sacks,
            self._price,
            self._at,
            self._state,
            stated.space,
            int(self.value) * stated.scale,
            enough,
            steps,
            effort,
        )
        self.bound = min(self.bound, float(int(best) // stated.scale))

    def _refill_anew(self, budget: Budget) -> bool:
        """Fill all knapsacks in a random order, and refill some of them."""
        stated, problem = self._stated, self._problem
        draw = np.random.default_rng([budget.seed, 1, self._refills])
        fresh = np.full(len(problem.jobs), -1, dtype=np.int64)
        order = draw.permutation(len(stated.sacks.capacity))
        assign_by_knapsacks(stated.sacks, self._price, order, stated.space, fresh)
        repaired = repair_choice(problem, fresh, self._priced.prices)
        start = self.choice if repaired is None else self._offer(repaired)
        self._refill(start, budget, LOSSES[0])
        return True

    def _refill_best(self, budget: Budget) -> bool:
        """Go on with the bound, and with refills of the best answer or, by turns, of a fresh one."""
        turn, self._refills = self._refills, self._refills + 1
        self._descend(budget.gap, LATER_STEPS, LATER_EFFORT)
        if turn % 2:
            return self._refill_anew(budget)
        self._refill(self.choice, budget, LOSSES[turn // 2 % len(LOSSES)])
        return True

    def _refill(self, choice: Ints, budget: Budget, loss: float) -> None:
        """Empty a few knapsacks of ``choice`` at a time and fill them again."""
        stated, problem, choice = self._stated, self._problem, choice.copy()
        knapsacks = len(stated.sacks.capacity)
        draw = np.random.default_rng([budget.seed, 2, self._draws])
        self._draws += 1
        refill_knapsacks(
            stated.sacks,
            self._price,
            stated.space,
            stated.columns,
            choice,
            problem.capacity - problem.used(choice),
            draw.random((MOST_REFILLS, 1 + 2 * REFILLED)),
            loss * max(self.bound - self.value, 0.0) / knapsacks,
            LATER_EFFORT,
        )
        self._offer(choice)

    def _dive(self, budget: Budget) -> bool:
        """Dive in the linear program of fillings, and refill what comes of it."""
        if self._pool is None:
            return True
        self._pool.add_answer(self.choice)
        dived = self._pool.dive(self._price, budget, self._dives)
        self._dives += 1
        if dived is None:
            return not budget.expired()
        choice, price = dived
        bound = float(self._stated.bound(price) // self._stated.scale)
        if bound < self.bound:
            self.bound, self._price, self._at = bound, price, price.copy()
        repaired = repair_choice(self._problem, choice, self._priced.prices)
        if repaired is not None:
            repaired = self._offer(repaired)
            self._pool.add_answer(repaired)
            self._refill(repaired, budget, LOSSES[0])
        return True

    def _combine(self, budget: Budget) -> bool:
        """Look for the best combination of the fillings that were found."""
        if self._pool is None or not self._combined < len(self._pool) <= MOST_COMBINED:
            return True
        self._combined = len(self._pool)
        choice = self._pool.combine(budget)
        if budget.expired():
            return False
        if choice is not None:
            self._offer(choice)
        return True

    def _search_core(self, budget: Budget) -> bool:
        """Let CP-SAT decide the columns that lose least at the shadow prices.

        By turns, they are those of the hint, and those at which the knapsacks were last filled.
        """
        if budget.remaining_s() * WORK_PER_S < CORE_WORK:
            return False
        turn, self._cores = self._cores, self._cores + 1
        stage = CpSat()
        hint = make_solution(
            self._problem,
            self.choice,
            bound=self.bound,
            solver="none",
            prices=self._stated.capacity_prices() if turn % 2 else self._priced.prices,
        )
        limited = replace(budget, workers=1, work=budget.work | {stage.name: CORE_WORK})
        solution = stage.solve(self._problem, limited, hint)
        if dict(solution.work)[stage.name] < CORE_WORK:  # the clock ended it
            return False
        if is_answer(self._problem, solution.choice):
            self._offer(solution.choice)
        return True

    def _offer(self, choice: Ints) -> Ints:
        """Return ``choice`` after exchanges, which becomes the best answer if it is better."""
        choice = exchange_choices(self._problem, self._priced, choice)
        if objective_of(self._problem, choice) > self.value and is_answer(self._problem, choice):
            self.choice = choice
        return choice

    @property
    def certificate(self) -> Certificate:
        """Return the certificate of the best bound."""
        stated = self._stated
        pairs = zip(stated.first.tolist(), self._price.tolist(), strict=True)
        return Certificate(
            bound=int(self.bound),
            denominator=stated.scale,
            root=PriceLeaf(
                prices=(),
                knapsacks=tuple(range(len(self._problem.rows))),
                job_prices=tuple((job, price) for job, price in pairs if price),
            ),
        )
