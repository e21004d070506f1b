"""Column generation over fillings of knapsacks, and dives to whole ones.

A filling of a knapsack is a set of jobs on columns that fits into it. The linear program over all
fillings has the bound of the knapsacks' best job prices as its optimum (Dantzig and Wolfe, 1960),
and its solutions mix only a few fillings. So a dive, which fixes the fillings of one knapsack after
another and lets the others follow, ends near it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from tessera.formulation.base.tables import Bools, Floats, Ints, concatenate_ranges
from tessera.formulation.round.problem import Problem
from tessera.solvers.base import Budget
from tessera.solvers.exact.branching.stated import StatedKnapsacks
from tessera.solvers.exact.usage import value_unit
from tessera.solvers.kernels.knapsacks import list_fillings

FIRST_NOISE, LATER_NOISE = 60, 20
"""Random prices at which fillings are looked for before the first dive, and before each other."""
NOISE_SHARE: Final = 0.02
"""Standard deviation of a random price, as a share of what a job is typically worth."""
ROOT_ROUNDS: Final = 30
"""Rounds of column generation before anything is fixed."""
STEP_ROUNDS: Final = 1
"""The same after each step of a dive."""
MOST_OF_ROW: Final = 40
"""Fillings of a knapsack in one linear program: the best ones at the last prices."""
WHOLE: Final = 0.999
SHAKE: Final = 0.1
"""Random part of the share of a filling, in the dives after the first."""
MOST_COMBINED: Final = 800
"""Fillings of which the best combination is looked for."""
COMBINING_NODES: Final = 20


@dataclass(frozen=True, slots=True, eq=False)
class _NewFilling:
    row: int
    value: int
    columns: Ints  # int64[jobs of the filling]
    classes: Ints  # int64[jobs of the filling], rising


@dataclass(slots=True, kw_only=True, eq=False)
class _Fillings:
    """Fillings, each of one knapsack. The entries of a filling are the classes of its jobs."""

    row: Ints  # int64[fillings], the knapsack
    value: Ints  # int64[fillings], of all its columns
    entry_start: Ints  # int64[fillings + 1]
    kind: Ints  # int64[entries], class
    count: Ints  # int64[entries], jobs of the class
    columns: list[Ints]  # int64[jobs] of each, one of each of its jobs

    def add(self, new: list[_NewFilling]) -> None:
        """Add fillings."""
        entries = [np.unique(one.classes, return_counts=True) for one in new]
        ends = self.entry_start[-1] + np.cumsum([len(kinds) for kinds, _ in entries])
        self.row = np.append(self.row, [one.row for one in new])
        self.value = np.append(self.value, [one.value for one in new])
        self.entry_start = np.append(self.entry_start, ends)
        self.kind = np.concatenate([self.kind, *(kinds for kinds, _ in entries)])
        self.count = np.concatenate([self.count, *(count for _, count in entries)])
        self.columns.extend(one.columns for one in new)

    def that_fit(self, is_open: Bools, left: Ints) -> Ints:
        """Return the fillings of open rows for which enough jobs of each class are left."""
        short = np.append(0, np.cumsum(self.count > left[self.kind]))
        return np.flatnonzero(is_open[self.row] & (np.diff(short[self.entry_start]) == 0))

    def best_of_each_row(self, fillings: Ints, price: Ints, scale: int) -> Ints:
        """Return those of ``fillings`` that are worth the most at the prices of classes."""
        paid = np.append(0, np.cumsum(price[self.kind] * self.count))
        gain = self.value * scale - np.diff(paid[self.entry_start])
        order = fillings[np.lexsort((-gain[fillings], self.row[fillings]))]
        begins = np.searchsorted(self.row[order], self.row[order])
        return np.sort(order[np.arange(len(order)) - begins < MOST_OF_ROW])

    def fits(self, filling: int, left: Ints) -> bool:
        """Return whether enough jobs of each class are left for one filling."""
        own = slice(int(self.entry_start[filling]), int(self.entry_start[filling + 1]))
        return bool((self.count[own] <= left[self.kind[own]]).all())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Mixture:
    """A solution of the linear program: its fillings, their shares, and the prices of classes."""

    fillings: Ints  # int64[fillings of the program]
    share: Floats  # float64[fillings]
    price: Ints  # int64[classes], times the scale


class FillingPool:
    """The fillings that were found so far, each once.

    It is for problems whose rows all are knapsacks, and whose columns each use one.
    """

    def __init__(self, problem: Problem, stated: StatedKnapsacks) -> None:
        self._problem, self._stated = problem, stated
        sacks = stated.sacks
        self._job_of = problem.column_job
        self._class_of = np.full(len(problem.jobs), -1, dtype=np.int64)
        self._class_of[sacks.job] = sacks.owner
        self._known: set[tuple[int, int, bytes]] = set()
        none = np.zeros(0, dtype=np.int64)
        self._fillings = _Fillings(
            row=none,
            value=none,
            entry_start=np.zeros(1, np.int64),
            kind=none,
            count=none,
            columns=[],
        )
        self._unit = value_unit(problem)
        most = np.maximum.reduceat(sacks.worth, sacks.item_start[:-1])
        self._noise = NOISE_SHARE * float(np.median(most))
        self._columns = np.empty(len(sacks.column), dtype=np.int64)
        self._idle = np.full(len(problem.jobs), -1, dtype=np.int64)

    def __len__(self) -> int:
        """Return the number of fillings."""
        return len(self._known)

    def add_answer(self, choice: Ints) -> None:
        """Add the fillings of an answer, int64[jobs]."""
        columns = choice[choice >= 0]
        row_of = self._stated.columns.row_of[columns]
        rows = range(len(self._stated.sacks.capacity))
        self._add(list(rows), [columns[row_of == row] for row in rows])

    def dive(self, price: Ints, budget: Budget, turn: int) -> tuple[Ints, Ints] | None:
        """Return an answer, int64[jobs], and the prices of classes at the linear program's optimum.

        ``turn`` counts the dives. Return None if the time is over before the end.
        """
        draw = np.random.default_rng([budget.seed, turn])
        rows = np.arange(len(self._stated.sacks.capacity))
        choice, left = self._idle.copy(), self._stated.sacks.members.copy()
        for _ in range(LATER_NOISE if turn else FIRST_NOISE):
            noise = draw.normal(size=len(price)) * draw.random() * self._noise
            self._generate(np.maximum(price + noise.astype(np.int64), 0), rows, choice)
        best, root, rounds = price, price, ROOT_ROUNDS
        while len(rows):
            mixture = self._mix(rows, choice, left, best, rounds, budget)
            if mixture is None:
                return None
            if rounds == ROOT_ROUNDS:
                root = mixture.price
            best, rounds = mixture.price, STEP_ROUNDS
            share = mixture.share
            if turn:
                share = share * (1.0 + SHAKE * draw.random(len(share)))
            rows = self._fix(mixture, share, rows, choice, left)
        return choice, root

    def combine(self, budget: Budget) -> Ints | None:
        """Return the best answer that is made of fillings of the pool, or None if it is not found."""
        fillings = np.arange(len(self))
        rows = np.arange(len(self._stated.sacks.capacity))
        solved = milp(
            -self._fillings.value / self._unit,
            constraints=LinearConstraint(
                self._matrix(fillings, rows),
                ub=np.append(np.ones(len(rows)), self._stated.sacks.members),
            ),
            integrality=np.ones(len(fillings), dtype=np.int64),
            bounds=Bounds(0.0, 1.0),
            options={"node_limit": COMBINING_NODES, "time_limit": budget.time_limit_s()},
        )
        if solved.x is None or budget.expired():
            return None
        choice, left = self._idle.copy(), self._stated.sacks.members.copy()
        for filling in np.flatnonzero(solved.x > 0.5).tolist():
            if self._fillings.fits(filling, left):
                self._take(filling, choice, left)
        return choice

    def _add(self, rows: list[int], columns: list[Ints]) -> int:
        """Add fillings that are not known yet, and return their number."""
        new: list[_NewFilling] = []
        for row, own in zip(rows, columns, strict=True):
            classes = np.sort(self._class_of[self._job_of[own]])
            value = int(self._problem.value[own].sum())
            key = (row, value, classes.tobytes())
            if len(own) and key not in self._known:
                self._known.add(key)
                new.append(_NewFilling(row, value, own, classes))
        if new:
            self._fillings.add(new)
        return len(new)

    def _generate(self, price: Ints, rows: Ints, choice: Ints) -> int:
        """Add the best filling of each of ``rows`` at ``price``; return how many are new."""
        stated = self._stated
        begin = list_fillings(stated.sacks, price, rows, stated.space, choice, self._columns)
        found = np.split(self._columns[: begin[-1]].copy(), begin[1:-1])
        return self._add(rows.tolist(), found)

    def _mix(
        self, rows: Ints, choice: Ints, left: Ints, price: Ints, rounds: int, budget: Budget
    ) -> _Mixture | None:
        """Solve the linear program over the fillings of ``rows``, and generate more of them.

        ``choice`` and ``left`` are what is fixed already, and what is left of each class.
        """
        mixture = None
        for turn in range(rounds + 1):
            if budget.expired():
                return None
            mixture = self._solve(rows, left, price)
            if turn == rounds or mixture is None:
                break
            new = self._generate(mixture.price, rows, choice)
            new += self._generate((mixture.price + price) // 2, rows, choice)
            price = mixture.price
            if not new:
                break
        return mixture

    def _solve(self, rows: Ints, left: Ints, price: Ints) -> _Mixture | None:
        """Solve the linear program over the best fillings at ``price``, or return None if HiGHS fails."""
        is_open = np.zeros(len(self._stated.sacks.capacity), dtype=np.bool_)
        is_open[rows] = True
        fillings = self._fillings.best_of_each_row(
            self._fillings.that_fit(is_open, left), price, self._stated.scale
        )
        if not len(fillings):
            return _Mixture(fillings=fillings, share=np.zeros(0), price=np.zeros_like(left))
        matrix: Any = self._matrix(fillings, rows)  # scipy-stubs know no sparse ones here
        solved = linprog(
            -self._fillings.value[fillings] / self._unit,
            A_ub=matrix,
            b_ub=np.append(np.ones(len(rows)), left.astype(np.float64)),
            method="highs",
        )
        if solved.x is None:
            return None
        paid = np.maximum(-solved.ineqlin.marginals[len(rows) :], 0.0)
        price = (paid * self._unit * self._stated.scale).astype(np.int64)
        return _Mixture(fillings=fillings, share=solved.x, price=price)

    def _fix(self, mixture: _Mixture, share: Floats, rows: Ints, choice: Ints, left: Ints) -> Ints:
        """Take the filling with the largest share, and all whole ones; return the other rows."""
        fixed: set[int] = set()
        for at in np.argsort(-share, kind="stable").tolist():
            filling = int(mixture.fillings[at])
            if mixture.share[at] < WHOLE and fixed:
                break
            row = int(self._fillings.row[filling])
            if row not in fixed and self._fillings.fits(filling, left):
                self._take(filling, choice, left)
                fixed.add(row)
        if not fixed:
            return rows[:0]
        return rows[~np.isin(rows, list(fixed))]

    def _take(self, filling: int, choice: Ints, left: Ints) -> None:
        """Give the columns of a filling to jobs of their classes that are waiting."""
        problem = self._problem
        for column in self._fillings.columns[filling].tolist():
            job = int(self._job_of[column])
            place, kind = column - int(problem.job_start[job]), self._class_of[job]
            if choice[job] >= 0:
                job = int(np.flatnonzero((self._class_of == kind) & (choice < 0))[0])
            choice[job] = int(problem.job_start[job]) + place
            left[kind] -= 1

    def _matrix(self, fillings: Ints, rows: Ints) -> sparse.csr_array:
        """Return which knapsack and which classes each filling uses.

        It is float64[rows + classes, fillings].
        """
        number = np.zeros(len(self._stated.sacks.capacity), dtype=np.int64)
        number[rows] = np.arange(len(rows))
        start, every = self._fillings.entry_start, self._fillings
        size = np.diff(start)[fillings]
        entry = concatenate_ranges(start[:-1][fillings], size)
        at = np.arange(len(fillings))
        row = np.append(number[every.row[fillings]], every.kind[entry] + len(rows))
        amount = np.append(np.ones(len(fillings)), every.count[entry])
        shape = (len(rows) + len(self._stated.sacks.members), len(fillings))
        return sparse.csr_array((amount, (row, np.append(at, np.repeat(at, size)))), shape=shape)
