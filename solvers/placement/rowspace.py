"""The units of the coupling rows that a placement under construction has left."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

import numpy as np

from tessera.formulation.base.tables import Ints
from tessera.formulation.round.problem import Problem, RowKind


class RowSpace:
    """The units of each row of a problem that the jobs on a board do not use."""

    def __init__(self, problem: Problem) -> None:
        """Set up the space of rows that no job uses."""
        self._problem = problem
        self._usage: Sequence[int] = problem.usage_start.data
        self._row: Sequence[int] = problem.row.data  # these two are by entry of usage
        self._amount: Sequence[int] = problem.amount.data
        self._job_start: Sequence[int] = problem.job_start.data
        self._some_idle = len(problem.idle_row) > 0
        self._spare: list[int] = []
        self.reset(np.full(len(problem.jobs), -1, dtype=np.int64))
        self._kept_back: list[int] = [0] * len(problem.rows)
        kinds = [row.kind for row in problem.rows]
        self._changes = kinds.index(RowKind.CHANGES) if RowKind.CHANGES in kinds else -1
        self.counts_moves = self._changes >= 0
        """Whether a row limits the running jobs that change."""
        self._limited_rows = sorted({*problem.idle_row.tolist(), *({self._changes} - {-1})})

    def reset(self, choice: Ints) -> None:
        """Set the use of all rows to the use by a choice (int64[jobs]), with no job moved."""
        problem = self._problem
        self._spare = (problem.capacity - problem.used(choice)).tolist()

    def _usage_of(self, column: int) -> Iterable[tuple[int, int]]:
        """Return (row, amount) of ``column``, less the use of rows by its job's waiting."""
        uses = [
            (self._row[k], self._amount[k])
            for k in range(self._usage[column], self._usage[column + 1])
        ]
        if not self._some_idle:
            return uses
        idle = self._problem.idle_usage_of(bisect_right(self._job_start, column) - 1)
        if not idle:
            return uses
        net = dict(uses)
        for row, amount in idle.items():
            net[row] = net.get(row, 0) - amount
        return net.items()

    def take(self, column: int, moves: int) -> None:
        """Use rows for ``column``, and for ``moves`` jobs that keep their Cell on other GPUs."""
        for row, amount in self._usage_of(column):
            self._spare[row] -= amount
        if moves:
            self._spare[self._changes] -= moves

    def give(self, column: int, moves: int) -> None:
        """Return the units that ``take`` has used."""
        for row, amount in self._usage_of(column):
            self._spare[row] += amount
        if moves:
            self._spare[self._changes] += moves

    def overdraft(self) -> list[int]:
        """Return the overdraft of each row that counts waiting jobs or moves.

        The list is empty if there is no such row. A change of the board is within the limits if it
        raises none of these numbers.
        """
        return [max(0, -self._spare[row]) for row in self._limited_rows]

    def overdraws(self, column: int) -> bool:
        """Return whether ``column`` uses a row of these that is overdrawn."""
        limited_rows = set(self._limited_rows)
        return any(
            amount > 0 and row in limited_rows and self._spare[row] < 0
            for row, amount in self._usage_of(column)
        )

    def keep_back(self, columns: Iterable[int]) -> None:
        """Reserve the use of rows by these columns, which wait for a seat.

        Earlier reservations end.
        """
        self._kept_back = [0] * len(self._spare)
        for column in columns:
            for row, amount in self._usage_of(column):
                self._kept_back[row] += amount

    def affords(self, column: int) -> bool:
        """Return whether every coupling row has room for ``column``.

        A row of which the column only releases units always has room.
        """
        return all(
            self._spare[row] - self._kept_back[row] >= amount
            for row, amount in self._usage_of(column)
            if amount > 0
        )
