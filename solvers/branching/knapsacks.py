"""The knapsack stage: each GPU type filled exactly, jobs held together by prices.

Shadow prices alone let a type sell fractions of a gang. Where few large gangs fit on a type, that is
most of the gap. Here every job has a price instead, and each type (more generally, each of some rows
of which no column uses two) is a knapsack that is solved exactly (Lagrangian decomposition,
Guignard and Kim, 1987). The prices of the jobs come from the shadow prices, and are improved by
subgradient steps. Answers come from the same knapsacks, filled one after another; a few of them are
emptied and filled again as long as that gains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from tessera.formulation.certificates import Certificate, PriceLeaf
from tessera.formulation.problem import Problem, reduce_by_job
from tessera.formulation.solution import Solution
from tessera.formulation.tables import Bools, Ints
from tessera.solvers.answers import is_answer, is_within, make_result, objective_of, usable_hint
from tessera.solvers.base import Budget
from tessera.solvers.branching.joining import find_classes
from tessera.solvers.exchange import exchange_choices
from tessera.solvers.greedy import repair_choice
from tessera.solvers.kernels.knapsacks import (
    Knapsacks,
    SackColumns,
    assign_by_knapsacks,
    descend_knapsacks,
    refill_knapsacks,
)
from tessera.solvers.prices import (
    PROVED_BY_PRICES,
    PricedProblem,
    leaf_prices,
    price_at_hint,
    price_scale,
    whole_prices,
)
from tessera.solvers.waiting_columns import with_waiting_as_columns

MOST_STEP_LOADS: Final = 400_000_000
"""Columns times loads of one evaluation: about 0.4 s."""
MOST_SHARED_LOADS: Final = 40_000_000
"""The same if jobs have columns in several knapsacks, so that their prices must be found."""
LOADS_A_PASS: Final = 100_000_000
"""Columns times loads of a pass's steps: some 0.2 s."""
LEAST_S: Final = 0.4
LOAD_S: Final = 1e-8
"""Wall seconds for each load: an evaluation takes a tenth, a pass several evaluations."""
FIRST_STEPS: Final = 300
LATER_STEPS: Final = 60
"""Subgradient steps of the first pass, and of each later one, if they are not too long."""
MOST_REFILLS: Final = 4_000
"""Steps of one pass."""
REFILLED: Final = 3
"""Knapsacks of a step, at most."""
SKIPPED_FACTOR: Final = 40
"""About how many times as many loads a step would have if it looked at every waiting job."""
MOST_PASSES: Final = 40
IDLE_PASSES: Final = 6
"""Passes without any gain after which the stage ends."""
FIRST_PASSES: Final = 2
LEAST_PROGRESS: Final = 0.1
"""Share of the gap that the first passes must close, or else the stage is of no use here."""
_LARGEST: Final = 2.0**60


class KnapsackFilling:
    """A solver that treats GPU types as knapsacks. It needs the hint's shadow prices and answer.

    Its work is the number of passes, which repeats the run. The bound is that of a certificate.
    """

    name = "knapsacks"

    def least_s(self, problem: Problem) -> float:
        """Return the wall seconds without which it should not begin. A pass may need more."""
        return LEAST_S

    @with_waiting_as_columns
    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        """Improve the hint's answer and bound; without them, or where it is of no use, return them."""
        known = usable_hint(problem, hint)
        priced = price_at_hint(problem, hint)
        first = priced.bound if hint is None else min(priced.bound, hint.bound)
        stated = None if known is None else state_knapsacks(problem, priced)
        choice, bound, done, proof = known, first, 0, None
        if stated is not None and known is not None:
            filling = _Filling(problem, priced, stated, known, first)
            done = self._run_passes(filling, budget, LEAST_S + LOAD_S * stated.loads)
            choice, bound = filling.choice, filling.bound
            proof = filling.certificate if bound < first else None
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

    def _run_passes(self, filling: _Filling, budget: Budget, least_s: float) -> int:
        """Run passes, each of which may need ``least_s``, and return their number."""
        most, done = int(budget.work.get(self.name, MOST_PASSES)), 0
        while done < most and budget.remaining_s() > least_s and not filling.ended(budget.gap):
            budget.check()
            filling.run_pass(budget.gap, np.random.default_rng([budget.seed, done]))
            done += 1
        return done


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StatedKnapsacks:
    """The knapsacks of a problem, and arrays to solve them.

    ``price`` is int64[classes], the jobs' first prices times ``scale``. ``loads`` is the size of one
    evaluation.
    """

    rows: Bools  # bool[rows], which are knapsacks
    prices: Ints  # int64[rows], of the other rows, times the scale
    scale: int
    first: Ints  # int64[classes], the first job of each class
    price: Ints
    sacks: Knapsacks
    columns: SackColumns
    table: np.ndarray
    loads: int


class _Filling:
    """The best answer and bound so far."""

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
        self._passes = self._idle = 0
        self._hopeless, self._first = False, bound - self.value

    @property
    def value(self) -> float:
        return float(objective_of(self._problem, self.choice))

    def ended(self, gap: float) -> bool:
        """Return whether the gap is met, or nothing more is to be expected."""
        met = is_within(gap, self.bound, self.value)
        return met or self._hopeless or self._idle >= IDLE_PASSES

    def run_pass(self, gap: float, draw: np.random.Generator) -> None:
        """Lower the bound, fill all knapsacks again, and refill some of those of the best answer."""
        before = (self.bound, self.value)
        stated, loads = self._stated, max(self._stated.loads, 1)
        most, times = (LATER_STEPS, 1) if self._passes else (FIRST_STEPS, 4)
        steps = min(most, times * LOADS_A_PASS // loads + 1)
        enough = int(self.value + gap * max(abs(self.value), 1.0)) * stated.scale
        best = descend_knapsacks(
            stated.sacks,
            self._price,
            self._at,
            self._state,
            stated.table,
            int(self.value) * stated.scale,
            enough,
            steps,
        )
        self.bound = min(self.bound, float(int(best) // stated.scale))
        fresh = self._fill_anew(draw)
        if fresh is not None and self._passes % 2 == 0:
            self._refill(fresh, draw)
        else:
            self._refill(self.choice, draw)
        self._passes += 1
        if self._passes == FIRST_PASSES:
            self._hopeless = self.bound - self.value > (1.0 - LEAST_PROGRESS) * self._first
        self._idle = 0 if (self.bound, self.value) != before or self._passes < 2 else self._idle + 1

    def _fill_anew(self, draw: np.random.Generator) -> Ints | None:
        """Return an answer from all knapsacks in a random order, int64[jobs], or None."""
        stated, problem = self._stated, self._problem
        fresh = np.full(len(problem.jobs), -1, dtype=np.int64)
        order = draw.permutation(len(stated.sacks.capacity))
        assign_by_knapsacks(stated.sacks, self._price, order, stated.table, fresh)
        repaired = repair_choice(problem, fresh, self._priced.prices)
        if repaired is None:
            return None
        better = exchange_choices(problem, self._priced, repaired)
        self._offer(better)
        return better

    def _refill(self, choice: Ints, draw: np.random.Generator) -> None:
        """Empty a few knapsacks of ``choice`` at a time and fill them again."""
        stated, problem, choice = self._stated, self._problem, choice.copy()
        of_step = REFILLED * stated.loads // (SKIPPED_FACTOR * max(len(stated.sacks.capacity), 1))
        steps = int(min(MOST_REFILLS, 1 + LOADS_A_PASS // max(of_step, 1)))
        refill_knapsacks(
            stated.sacks,
            self._price,
            stated.table,
            stated.columns,
            choice,
            problem.capacity - problem.used(choice),
            draw.random((steps, 1 + 2 * REFILLED)),
        )
        self._offer(exchange_choices(problem, self._priced, choice))

    def _offer(self, choice: Ints) -> None:
        if objective_of(self._problem, choice) > self.value and is_answer(self._problem, choice):
            self.choice = choice

    @property
    def certificate(self) -> Certificate:
        """Return the certificate of the best bound."""
        stated = self._stated
        pairs = zip(stated.first.tolist(), self._price.tolist(), strict=True)
        return Certificate(
            bound=int(self.bound),
            denominator=stated.scale,
            root=PriceLeaf(
                prices=leaf_prices(stated.prices.tolist()),
                knapsacks=tuple(np.flatnonzero(stated.rows).tolist()),
                job_prices=tuple((job, price) for job, price in pairs if price),
            ),
        )


def state_knapsacks(problem: Problem, priced: PricedProblem) -> StatedKnapsacks | None:
    """Return the knapsacks of ``problem``, or None without any, or if they are too large."""
    scale = price_scale(problem)
    rows = _separate_rows(problem)
    uses = np.bincount(problem.row, minlength=len(problem.rows))
    loads = int((uses * problem.capacity)[rows].sum())
    prices = np.where(rows, 0.0, whole_prices(problem, priced.prices, scale))
    largest = float(np.abs(priced.best).sum()) * scale + float(prices @ problem.capacity)
    if not rows.any() or loads > MOST_STEP_LOADS or not largest < _LARGEST:
        return None
    first, label = find_classes(problem, np.ones(len(problem.jobs), dtype=np.bool_))
    whole = prices.astype(np.int64)
    sacks, row_of = _knapsacks(problem, rows, whole, scale, first, label)
    if loads > MOST_SHARED_LOADS and not sacks.alone.all():
        return None  # many evaluations would be needed
    price = np.where(sacks.alone, 0.0, np.ceil(priced.best[first] * scale))
    groups = int(np.diff(sacks.group_start[:-1]).max(initial=1))
    return StatedKnapsacks(
        rows=rows,
        prices=whole,
        scale=scale,
        first=first,
        price=price.astype(np.int64),
        sacks=sacks,
        columns=SackColumns(
            value=problem.value,
            usage_start=problem.usage_start,
            row=problem.row,
            amount=problem.amount,
            must_run=problem.must_run,
            row_of=row_of,
        ),
        table=np.empty((groups, int(sacks.capacity.max()) + 1), dtype=np.int32),
        loads=loads,
    )


def _separate_rows(problem: Problem) -> Bools:
    """Return rows of which no column uses two, bool[rows]: those with the most columns first."""
    used = problem.amount > 0  # an amount of 0 does not put a column into a knapsack
    row, column = problem.row[used], problem.usage_column[used]
    uses = np.bincount(row, minlength=len(problem.rows))
    taken = np.zeros(len(problem.cell), dtype=np.bool_)
    rows = np.zeros(len(problem.rows), dtype=np.bool_)
    order = np.argsort(row, kind="stable")
    bounds = np.searchsorted(row[order], np.arange(len(problem.rows) + 1))
    for r in np.argsort(-uses, kind="stable").tolist():
        own = column[order[bounds[r] : bounds[r + 1]]]
        if len(own) and not taken[own].any():
            rows[r] = True
            taken[own] = True
    return rows


def _knapsacks(
    problem: Problem, rows: Bools, prices: Ints, scale: int, first: Ints, label: Ints
) -> tuple[Knapsacks, Ints]:
    """Return the knapsacks of ``rows``, and the knapsack of each column, int64[columns]."""
    chosen, number = np.flatnonzero(rows), np.cumsum(rows) - 1
    separate = rows[problem.row] & (problem.amount > 0)
    where = np.full(len(problem.cell), len(chosen), dtype=np.int64)
    weight, cost = np.zeros((2, len(problem.cell)), dtype=np.int64)
    where[problem.usage_column[separate]] = number[problem.row[separate]]
    weight[problem.usage_column[separate]] = problem.amount[separate]
    np.add.at(cost, problem.usage_column, prices[problem.row] * problem.amount)
    low, high = (
        reduce_by_job(by, where.astype(np.float64), problem.job_start)[first]
        for by in (np.minimum, np.maximum)
    )
    order = np.lexsort((problem.column_job, where))
    job, row = problem.column_job[order], where[order]
    begins = np.flatnonzero((np.diff(job, prepend=-1) != 0) | (np.diff(row, prepend=-1) != 0))
    sacks = Knapsacks(
        group_start=np.searchsorted(row[begins], np.arange(len(chosen) + 2)),
        item_start=np.append(begins, len(order)),
        owner=label[job[begins]],
        job=job[begins],
        column=order,
        weight=weight[order],
        worth=(problem.value * scale - cost)[order],
        capacity=problem.capacity[chosen],
        members=np.bincount(label, minlength=len(first)),
        must=problem.must_run[first],
        alone=(low == high) & ~problem.must_run[first],
        sold=int((prices * problem.capacity).sum()),
    )
    return sacks, where
