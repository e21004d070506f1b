"""An assignment of columns that grows job by job, as a proof that marked jobs can run together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from tessera.formulation.base.tables import Floats, Ints
from tessera.formulation.round.draft import Draft
from tessera.formulation.round.problem import RowKind
from tessera.formulation.round.promises.launched import is_launched

NO_COLUMN_GPUS: Final = np.iinfo(np.int64).max
"""GPUs that a job needs of a type on which it has no column."""

Release = tuple[int, int]
"""A pair of a job and the column that it takes instead. The column is -1 if the job waits."""


class Packing:
    """The column of each seated job, and the free capacity of every row.

    Launched jobs that must run are seated first. They get their smallest columns if running jobs
    may change freely, and else keep theirs. ``sound`` says whether they fit together. If they do
    not, nothing may be promised to any other job.

    The other launched jobs are seated if there is room. They yield to jobs with a lower queue
    number in ``queue`` (float64[jobs]). All jobs that ``take`` accepts can therefore run together.
    All rows are counted, but blocks of GPUs on nodes are not.
    """

    def __init__(self, draft: Draft, queue: Floats) -> None:
        self.draft = draft
        self._types = len(draft.snapshot.gpu_types)
        self._capacity = draft.snapshot.schedulable_gpus()
        self.column = np.full(len(draft.current), -1, dtype=np.int64)
        self.free: list[int] = [*self._capacity.tolist(), *(use.row.capacity for use in draft.rows)]
        self._queue: list[float] = queue.tolist()
        self._idle: dict[int, dict[int, int]] = {}
        self._kind: list[int] = draft.gpu_type.tolist()  # this and the next are by column
        self._gpus: list[int] = draft.gpus.tolist()
        self._first: list[int] = draft.job_start.tolist()
        self._capped = any(use.row.kind is RowKind.CHANGES for use in draft.rows)
        self._index_rows()
        self.need = self._smallest()
        self._yields: list[dict[float, int]] = [{} for _ in range(self._types)]
        self._soft: set[int] = set()
        self._launched = [0] * self._types  # GPUs of launched jobs when the packing began
        for r, row in enumerate(draft.rows):
            self.free[self._types + r] -= int(row.idle_amount.sum())
        self.sound = self._seat_launched() and min(self.free, default=0) >= 0

    def _index_rows(self) -> None:
        types, rows = self._types, self.draft.rows
        column = np.concatenate([np.zeros(0, np.int64), *(r.column for r in rows)])
        order = np.argsort(column, kind="stable")
        index = [np.full(len(r.column), types + k, np.int64) for k, r in enumerate(rows)]
        self._row: list[int] = np.concatenate([np.zeros(0, np.int64), *index])[order].tolist()
        amount = np.concatenate([np.zeros(0, np.int64), *(r.amount for r in rows)])[order]
        self._amount: list[int] = amount.tolist()
        bounds = np.searchsorted(column[order], np.arange(len(self.draft.cell) + 1))
        self._start: list[int] = bounds.tolist()
        for k, r in enumerate(rows):
            for job, amount in zip(r.idle_job.tolist(), r.idle_amount.tolist(), strict=True):
                self._idle.setdefault(job, {})[types + k] = amount

    def _smallest(self) -> Ints:
        """Return the fewest GPUs that each job needs of each type, int64[jobs, types]."""
        need = np.full((len(self.column), self._types), NO_COLUMN_GPUS)
        np.minimum.at(need, (self.draft.job, self.draft.gpu_type), self.draft.gpus)
        return need

    def _seat_launched(self) -> bool:
        """Seat jobs that must run, then other launched jobs. Return whether the former all fit."""
        draft, current = self.draft, self.draft.current
        must = np.flatnonzero(draft.must_run)
        witness = draft.witness if draft.witness is not None else np.full(len(current), -1)
        # Running jobs are seated before waiting ones, and large jobs before small ones.
        for job in must[
            np.lexsort((-self.need[must].min(axis=1, initial=NO_COLUMN_GPUS), current[must] < 0))
        ].tolist():
            stays, column = int(current[job]), int(witness[job])
            if column < 0 or not self.fits(job, column):
                column = self._shrunk(job) if stays >= 0 else self.smallest_fit(job)
            if column < 0 or not (self.fits(job, column) or stays == column):
                return False
            self.seat(job, column)
        # Other launched jobs are seated by queue, and may yield later.
        soft = np.flatnonzero(is_launched(draft.snapshot) & ~draft.must_run & (current >= 0))
        for job in soft[np.lexsort((soft, np.array(self._queue)[soft]))].tolist():
            column = self._shrunk(job)
            if self.fits(job, column):
                self.seat(job, column)
                self._soft.add(job)
                yields = self._yields[self._kind[column]]
                queue = self._queue[job]
                yields[queue] = yields.get(queue, 0) + self._gpus[column]
        for column in self.column[(self.column >= 0) & (current >= 0)].tolist():
            self._launched[self._kind[column]] += self._gpus[column]
        return True

    def _shrunk(self, job: int) -> int:
        """Return the smallest fitting column of a running job on its type.

        If changes are capped, it is the current column.
        """
        stays = int(self.draft.current[job])
        if self._capped:
            return stays
        for column in self._by_size(job):
            if self._kind[column] == self._kind[stays] and self.fits(job, column):
                return column
        return stays

    def _by_size(self, job: int) -> list[int]:
        """Return the columns of ``job`` by rising need: first by type, then by size.

        The type with the smallest need relative to its capacity is first. Columns of one type are
        adjacent, by rising GPUs (``Cells``).
        """
        share = [
            need / max(1, gpus)
            for need, gpus in zip(self.need[job].tolist(), self._capacity.tolist(), strict=True)
        ]
        columns = range(self._first[job], self._first[job + 1])
        return sorted(columns, key=lambda column: share[self._kind[column]])

    def use(self, job: int, column: int) -> dict[int, int]:
        """Return row -> the use of ``column`` beyond what ``job`` uses by waiting."""
        span = slice(self._start[column], self._start[column + 1])
        uses = dict(zip(self._row[span], self._amount[span], strict=True))
        uses[self._kind[column]] = self._gpus[column]
        for row, amount in self._idle.get(job, {}).items():
            uses[row] = uses.get(row, 0) - amount
        return uses

    def fits(self, job: int, column: int) -> bool:
        """Return whether ``job``, which has no seat, may take ``column`` next to seated jobs."""
        return all(a <= 0 or a <= self.free[row] for row, a in self.use(job, column).items())

    def seat(self, job: int, column: int) -> None:
        """Give ``job`` the column. A column of -1 takes the job's column away."""
        for sign, c in ((1, int(self.column[job])), (-1, column)):
            if c >= 0:
                for row, amount in self.use(job, c).items():
                    self.free[row] += sign * amount
        self.column[job] = column

    def smallest_fit(self, job: int) -> int:
        """Return the smallest column of ``job`` that fits, or -1 if none does."""
        return next((c for c in self._by_size(job) if self.fits(job, c)), -1)

    def take(self, job: int) -> bool:
        """Seat the waiting ``job`` on its smallest possible column. Return whether there is one.

        Launched jobs with a higher queue number that need not run may lose their seat to it.
        """
        self.draft.check()
        queue = self._queue[job]
        if not any(
            need <= self.free[t] + self._releasable(t, queue)
            for t, need in enumerate(self.need[job].tolist())
        ):
            return False
        columns = self._by_size(job)
        for column in columns:
            if self.fits(job, column):
                self.seat(job, column)
                return True
        return any(
            self._make_room(job, column, queue)
            for column in columns
            if self._releasable(self._kind[column], queue) and self._lacks_gpus(job, column)
        )

    def _lacks_gpus(self, job: int, column: int) -> bool:
        return all(
            amount <= max(0, self.free[row])
            for row, amount in self.use(job, column).items()
            if row >= self._types
        )

    def _releasable(self, kind: int, queue: float) -> int:
        """Return the most GPUs of a type that other jobs can give to a job of this queue."""
        if self._capped:
            return self._launched[kind]
        return sum(gpus for theirs, gpus in self._yields[kind].items() if theirs > queue)

    def _make_room(self, job: int, column: int, queue: float) -> bool:
        """Seat ``job`` on ``column`` once others have given it GPUs, or change nothing and fail.

        Return whether it was seated.
        """
        before: list[Release] = []
        for other, instead in self._releases(self._kind[column], queue):
            self.draft.check()
            before.append((other, int(self.column[other])))
            self.seat(other, instead)
            # Another row is exceeded, e.g. the cap on changes.
            if min(self.free[self._types :], default=0) < 0:
                break
            if self.fits(job, column):
                self.seat(job, column)
                for gone, was in before:
                    self._forget(gone, was)
                return True
        # There was not enough room: undo the releases.
        for other, was in reversed(before):
            self.seat(other, was)
        return False

    def _forget(self, job: int, was: int) -> None:
        """Update the GPUs that a job can still give, after it yielded from its seat on ``was``."""
        if job in self._soft:
            self._yields[self._kind[was]][self._queue[job]] -= self._gpus[was]
            if self.column[job] < 0:
                self._soft.discard(job)
            else:
                now = int(self.column[job])
                self._yields[self._kind[now]][self._queue[job]] += self._gpus[now]

    def _releases(self, kind: int, queue: float) -> Iterator[Release]:
        """Yield the releases that give GPUs of a type, from the lowest queue, then the latest start.

        If changes are capped, the jobs that give most come first, and jobs may also be shrunk.
        """
        releases: list[tuple[float, float, int, int]] = []
        for job in sorted(self._soft):
            column = int(self.column[job])
            if self._kind[column] == kind and self._queue[job] > queue:
                first = -self._gpus[column] if self._capped else -self._queue[job]
                releases.append((first, -float(self.draft.snapshot.jobs.since_s[job]), job, -1))
        if self._capped:
            yielding = {job for *_, job, _ in releases}
            for job in np.flatnonzero(
                (self.column >= 0) & (self.column == self.draft.current)
            ).tolist():
                column = int(self.column[job])
                if self._kind[column] == kind and job not in yielding:
                    small = self._smallest_of_type(job, kind)
                    if self._gpus[small] < self._gpus[column]:
                        releases.append((self._gpus[small] - self._gpus[column], 0.0, job, small))
        for *_, job, instead in sorted(releases):
            yield job, instead

    def _smallest_of_type(self, job: int, kind: int) -> int:
        return next(c for c in self._by_size(job) if self._kind[c] == kind)

    def restore(self) -> None:
        """Put running jobs back on their current columns if these still fit."""
        moved = (self.column >= 0) & (self.draft.current >= 0) & (self.column != self.draft.current)
        for job in np.flatnonzero(moved).tolist():
            small = int(self.column[job])
            self.seat(job, -1)
            current = int(self.draft.current[job])
            self.seat(job, current if self.fits(job, current) else small)
        for yields in self._yields:
            yields.clear()
        for job in self._soft:
            column, queue = int(self.column[job]), self._queue[job]
            yields = self._yields[self._kind[column]]
            yields[queue] = yields.get(queue, 0) + self._gpus[column]
