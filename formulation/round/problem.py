"""The statement of a round as arrays. It knows no solver, no database and no clock.

Equations (1) to (4) of ``docs/mathematics.md``:

    maximize    sum over columns c of value[c] * x[c]                                    (1)
    subject to  sum over columns c of job j of x[c] <= 1,  = 1 where j must run          (2)
                sum over columns c of usage[r, c] * x[c]
                    + sum over waiting jobs j of idle[r, j] <= capacity[r]               (3)
                x[c] in {0, 1}                                                           (4)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Self

import numpy as np

from tessera.formulation.base.errors import InvalidInput, ProblemTooLarge
from tessera.formulation.base.tables import Bools, Floats, Ints, concatenate_ranges, freeze_array
from tessera.formulation.state.cells import Cells

VALUE_SCALE: Final = 1_000_000
"""Solver integers in one effective GPU. Rounding is then below a thousandth of any gap."""

MAX_TOTAL: Final = 2**53
"""Limit of every objective and row. Integers below it are exact in float64, far inside int64."""

MAX_TOTAL_VALUE: Final = MAX_TOTAL / 8
"""Limit of the sum of all jobs' values."""

ENTRIES_AT_A_TIME: Final = 1 << 20
"""Number of entries of the usage matrix that are converted together."""

_FINITE: Final = 1e280
"""Limit of a value whose sum over all jobs is still finite."""


class RowKind(StrEnum):
    """The quantity that a coupling row limits."""

    GPUS = "gpus"  # of a GPU type
    CPUS = "cpus"  # cores of the nodes of a GPU type
    HOST_MEMORY = "host memory"  # MiB of the nodes of a GPU type
    SELECTED = "selected"  # GPUs of the nodes of a GPU type that a selector matches
    QUOTA = "quota"  # GPUs that count against the quota of a tenant's guaranteed jobs
    HELD = "held"  # GPUs that a tenant may hold: its quota and what it may borrow
    KEPT = "kept for"  # GPUs that others may hold if a tenant's quota is not lent
    RESERVED = "reserved"  # GPUs of a type that planned starts leave to other jobs
    WINDOW = "window"  # GPUs of a type that a reservation leaves to other jobs
    CHANGES = "changes"  # running jobs that change; placement's moves count too
    PACKING = "packing"  # what the nodes of a GPU type can hold of shares, by weight
    GOAL = "goal"  # what an earlier goal leaves to later ones


TENANT_ROWS: Final = (RowKind.QUOTA, RowKind.HELD, RowKind.KEPT)
"""The kinds of rows that are for a tenant. Their subject is ``TENANT`` or ``TENANT/TYPE``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CouplingRow:
    """A coupling row: a resource that columns use.

    ``subject`` is the GPU type, tenant, job or goal that the row is for. It is empty if the kind is
    enough.
    """

    kind: RowKind
    subject: str = ""
    capacity: int

    @property
    def name(self) -> str:
        """Return the row's name as in shadow prices and reasons, e.g. ``gpus/a100``."""
        return f"{self.kind}/{self.subject}" if self.subject else str(self.kind)

    @property
    def tenant(self) -> str:
        """Return the tenant that the row is for, or "" if it is for none."""
        return self.subject.partition("/")[0] if self.kind in TENANT_ROWS else ""

    @classmethod
    def from_name(cls, name: str, capacity: int) -> Self:
        """Return the row of that name. Raises ValueError if its first part is not a kind of row."""
        kind, _, subject = name.partition("/")
        return cls(kind=RowKind(kind), subject=subject, capacity=capacity)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """The statement of a round. All arrays are read-only.

    Columns are grouped by job: those of job j are ``job_start[j] : job_start[j + 1]``. Usage is
    stored as compressed rows by column: column c uses ``amount[k]`` of row ``row[k]`` for k in
    ``usage_start[c] : usage_start[c + 1]``.

    A row that counts waiting jobs is used by jobs that wait. This use is stored as compressed rows
    by job: ``idle_amount[k]`` of row ``idle_row[k]`` for k in ``idle_start[j] : idle_start[j +
    1]``. Only jobs with columns have any.
    """

    jobs: tuple[str, ...]
    job_start: Ints  # int64[jobs + 1]
    cells: Cells
    plans: tuple[str, ...]  # names of the execution plans that `cells.plan` points to
    cell: Ints  # int64[columns], index into cells
    value: Ints  # int64[columns], in solver integers, restart cost already subtracted
    restart_price: Ints  # int64[columns], the restart cost that was subtracted
    scale: float  # solver integers in one unit of the objective
    unit: str  # of the objective, e.g. "effective GPUs" or "samples/s"
    rows: tuple[CouplingRow, ...]
    usage_start: Ints  # int64[columns + 1]
    row: Ints  # int64[nonzeros]
    amount: Ints  # int64[nonzeros]
    idle_start: Ints  # int64[jobs + 1]
    idle_row: Ints  # int64[idle nonzeros]
    idle_amount: Ints  # int64[idle nonzeros]
    must_run: Bools  # bool[jobs]
    least_rate: Floats  # float64[jobs], samples/s below which it must not be placed; 0 for any
    movable: Bools  # bool[jobs]; if false, the job keeps its GPUs while it keeps its Cell
    current: Ints  # int64[jobs], the column that runs now; -1 if it has none
    restart_share: Floats  # float64[jobs], share of a column's gross value that a restart costs
    weight: Floats  # float64[jobs]; weight of its promise if not all promises can be kept

    def __post_init__(self) -> None:
        """Freeze the arrays, check their shapes, and check that no sum can overflow."""
        for name, dtype in (
            ("job_start", np.int64),
            ("cell", np.int64),
            ("value", np.int64),
            ("restart_price", np.int64),
            ("usage_start", np.int64),
            ("row", np.int64),
            ("amount", np.int64),
            ("idle_start", np.int64),
            ("idle_row", np.int64),
            ("idle_amount", np.int64),
            ("must_run", np.bool_),
            ("current", np.int64),
            ("least_rate", np.float64),
            ("movable", np.bool_),
            ("restart_share", np.float64),
            ("weight", np.float64),
        ):
            object.__setattr__(self, name, freeze_array(getattr(self, name), dtype))
        jobs, columns = len(self.jobs), len(self.cell)
        for name, length in (
            ("job_start", jobs + 1),
            ("must_run", jobs),
            ("current", jobs),
            ("weight", jobs),
            ("restart_share", jobs),
            ("least_rate", jobs),
            ("movable", jobs),
            ("idle_start", jobs + 1),
            ("value", columns),
            ("restart_price", columns),
            ("usage_start", columns + 1),
        ):
            if len(getattr(self, name)) != length:
                raise InvalidInput(name, f"has {len(getattr(self, name))} entries, not {length}")
        for name, total in (
            ("job_start", columns),
            ("usage_start", len(self.row)),
            ("idle_start", len(self.idle_row)),
        ):
            starts = getattr(self, name)
            if starts[0] != 0 or starts[-1] != total or (starts[1:] < starts[:-1]).any():
                raise InvalidInput(name, f"must rise from 0 to {total}")
        for name, index in (("amount", self.row), ("idle_amount", self.idle_row)):
            if len(getattr(self, name)) != len(index):
                raise InvalidInput(
                    name, f"has {len(getattr(self, name))} entries, not {len(index)}"
                )
            if len(index) and not (index.min() >= 0 and index.max() < len(self.rows)):
                raise InvalidInput("row", f"must lie in [0, {len(self.rows)})")
            if np.any(getattr(self, name) < 0):
                raise InvalidInput(name, "amounts must not be negative")
        if any(r.capacity < 0 for r in self.rows):
            raise InvalidInput("rows", "capacities must not be negative")
        idles = len(self.idle_row) and np.diff(self.idle_start) > 0
        if np.any(idles & (self.job_start[1:] == self.job_start[:-1])):
            raise InvalidInput("idle_start", "a job without columns cannot use anything by waiting")
        if columns and not (self.cell.min() >= 0 and self.cell.max() < len(self.cells)):
            raise InvalidInput("cell", f"must lie in [0, {len(self.cells)})")
        if not _rise_within(self.usage_start, self.row):
            raise InvalidInput("row", "the rows that a column uses must rise, each named once")
        if not _rise_within(self.idle_start, self.idle_row):
            raise InvalidInput("idle_row", "the rows that a job uses must rise, each named once")
        own = (self.current >= self.job_start[:-1]) & (self.current < self.job_start[1:])
        if not (own | (self.current < 0)).all():
            raise InvalidInput("current", "must be a column of its own job, or -1")
        self._check_sums()

    def _check_sums(self) -> None:
        most = reduce_by_job(np.maximum, self.value, self.job_start)
        least = reduce_by_job(np.minimum, self.value, self.job_start)
        if np.maximum(most, -least).sum() >= MAX_TOTAL:
            raise ProblemTooLarge(
                "value", f"the objective may exceed 2^53; lower scale {self.scale}"
            )
        use = _row_totals(self.row, self.amount, len(self.rows) + 1)
        use += _row_totals(self.idle_row, self.idle_amount, len(use))
        largest = max([use.max(), *(r.capacity for r in self.rows)])
        if largest >= MAX_TOTAL:
            raise ProblemTooLarge("amount", "a row's total may exceed 2^53; use larger units")

    @property
    def column_job(self) -> Ints:
        """Return the job of each column, int64[columns]."""
        return np.repeat(np.arange(len(self.jobs), dtype=np.int64), np.diff(self.job_start))

    @property
    def capacity(self) -> Ints:
        """Return the capacity of each row, int64[rows]."""
        return np.array([r.capacity for r in self.rows], dtype=np.int64)

    @property
    def usage_column(self) -> Ints:
        """Return the column of each nonzero of the usage matrix, int64[nonzeros]."""
        return np.repeat(np.arange(len(self.cell), dtype=np.int64), np.diff(self.usage_start))

    @property
    def idle_job(self) -> Ints:
        """Return the job of each idle nonzero, int64[idle nonzeros]."""
        return np.repeat(np.arange(len(self.jobs), dtype=np.int64), np.diff(self.idle_start))

    def cost(self, prices: Floats) -> Floats:
        """Return each column's cost of usage at ``prices`` (float64[rows]), float64[columns]."""
        return np.bincount(
            self.usage_column, weights=prices[self.row] * self.amount, minlength=len(self.cell)
        ).astype(np.float64)

    def columns_of(self, job: int) -> range:
        """Return the columns of ``job``."""
        return range(int(self.job_start[job]), int(self.job_start[job + 1]))

    def usage_of(self, column: int) -> dict[int, int]:
        """Return the usage of ``column``, row -> amount."""
        span = slice(int(self.usage_start[column]), int(self.usage_start[column + 1]))
        return dict(zip(self.row[span].tolist(), self.amount[span].tolist(), strict=True))

    def idle_usage_of(self, job: int) -> dict[int, int]:
        """Return what ``job`` uses by waiting, row -> amount."""
        span = slice(int(self.idle_start[job]), int(self.idle_start[job + 1]))
        return dict(zip(self.idle_row[span].tolist(), self.idle_amount[span].tolist(), strict=True))

    def used(self, choice: Ints) -> Ints:
        """Return the use of each row by ``choice`` (int64[jobs], column or -1), int64[rows]."""
        column = choice[choice >= 0]
        first = self.usage_start[column]
        picked = concatenate_ranges(first, self.usage_start[column + 1] - first)
        waits = (choice < 0)[self.idle_job] if len(self.idle_row) else np.zeros(0, np.bool_)
        row = np.append(self.row[picked], self.idle_row[waits])
        amount = np.append(self.amount[picked], self.idle_amount[waits])
        return np.bincount(row, weights=amount, minlength=len(self.rows)).astype(np.int64)


def _row_totals(row: Ints, amount: Ints, rows: int) -> Floats:
    """Return the total amount of each row, float64[rows], a part of the entries at a time.

    Converting tens of millions of amounts at once would take as much memory as they do.
    """
    totals = np.zeros(rows)
    for begin in range(0, len(row), ENTRIES_AT_A_TIME):
        part = slice(begin, begin + ENTRIES_AT_A_TIME)
        totals += np.bincount(row[part], weights=amount[part], minlength=rows)
    return totals


def _rise_within(start: Ints, values: Ints) -> bool:
    """Return whether ``values`` rise within each span of ``start``."""
    if (start[1:] - start[:-1]).max(initial=0) <= 1:
        return True
    begins = np.zeros(len(values) + 1, dtype=np.bool_)
    begins[start] = True
    return bool(begins[1:-1][values[1:] <= values[:-1]].all())


def restrict_problem(
    problem: Problem,
    jobs: Ints,
    columns: Ints,
    *,
    capacity: Ints | None = None,
    must_run: Bools | None = None,
) -> Problem:
    """Return the problem with ``jobs`` and ``columns`` only, both rising indices into the whole.

    ``capacity`` (int64[rows]) and ``must_run`` (bool[jobs of the whole]) replace the problem's own.
    A job that is left without columns can only wait, so it must not be one that must run.
    """
    names, must = problem.jobs, problem.must_run if must_run is None else must_run
    count = np.bincount(problem.column_job[columns], minlength=len(names))[jobs]
    uses, idles = np.diff(problem.usage_start)[columns], np.diff(problem.idle_start)[jobs]
    entries = concatenate_ranges(problem.usage_start[columns], uses)
    idle = concatenate_ranges(problem.idle_start[jobs], idles)
    current = problem.current[jobs]
    # A job stays if its current column is among ``columns``.
    place = np.searchsorted(columns, current)
    stays = (current >= 0) & (place < len(columns))
    stays[stays] = columns[place[stays]] == current[stays]
    rows = problem.rows
    if capacity is not None:
        rows = tuple(replace(r, capacity=c) for r, c in zip(rows, capacity.tolist(), strict=True))
    return replace(
        problem,
        jobs=names if len(jobs) == len(names) else tuple(names[j] for j in jobs.tolist()),
        job_start=np.append(0, np.cumsum(count)),
        cell=problem.cell[columns],
        value=problem.value[columns],
        restart_price=problem.restart_price[columns],
        rows=rows,
        usage_start=np.append(0, np.cumsum(uses)),
        row=problem.row[entries],
        amount=problem.amount[entries],
        idle_start=np.append(0, np.cumsum(idles)),
        idle_row=problem.idle_row[idle],
        idle_amount=problem.idle_amount[idle],
        must_run=must[jobs],
        least_rate=problem.least_rate[jobs],
        movable=problem.movable[jobs],
        current=np.where(stays, place, -1),
        restart_share=problem.restart_share[jobs],
        weight=problem.weight[jobs],
    )


def reduce_by_job(op: np.ufunc, values: Floats | Ints, job_start: Ints) -> Floats:
    """Reduce a per-column array by job. Jobs without columns give 0."""
    out = np.zeros(len(job_start) - 1)
    some = np.flatnonzero(np.diff(job_start) > 0)
    if len(some):
        out[some] = op.reduceat(values, job_start[:-1][some])
    return out


def bound_values(
    gross: Floats, price: Floats, scale: float, job_start: Ints
) -> tuple[Floats, Floats]:
    """Return values of columns and their restart costs, bounded so that all fit in integers.

    One job of an absurd value must not make every round of its cluster fail, nor round the values
    of others away. If the greatest values together exceed ``MAX_TOTAL_VALUE``, those above a common limit
    count as that limit. All others stay unchanged. ``job_start`` has shape (jobs + 1,).
    """
    gross, price = _clip_to_finite(gross), _clip_to_finite(price)
    size = np.abs(gross)
    size += np.abs(price)
    greatest = np.sort(reduce_by_job(np.maximum, size, job_start)) * scale
    if greatest.sum() <= MAX_TOTAL_VALUE:
        return gross, price
    # Find the limit at which the capped values sum to MAX_TOTAL_VALUE, from the smallest job upwards.
    below = np.append(0.0, np.cumsum(greatest)[:-1])
    limits = (MAX_TOTAL_VALUE - below) / (len(greatest) - np.arange(len(greatest)))
    limit = limits[np.argmax(limits < greatest)] / scale
    factor = limit / np.maximum(size, limit)
    return gross * factor, price * factor


def _clip_to_finite(values: Floats) -> Floats:
    """Return ``values`` within the limit of finite sums. A NaN stays."""
    most, least = values.max(initial=0.0), values.min(initial=0.0)
    is_finite = least >= -_FINITE and most <= _FINITE  # false with a NaN
    return values if is_finite else np.clip(values, -_FINITE, _FINITE)


def scale_values(values: Floats, scale: float) -> Ints:
    """Return ``values * scale`` rounded to integers. Only this function turns values into integers.

    Raises:
        ProblemTooLarge: a value is not finite, or too large once scaled.
    """
    product = values * scale
    most, least = product.max(initial=0.0), product.min(initial=0.0)
    if not (most < MAX_TOTAL and least > -MAX_TOTAL):  # the maximum of numbers with a NaN is NaN
        raise ProblemTooLarge("value", "a value is not finite or exceeds 2^53 once scaled")
    return np.rint(product, out=product).astype(np.int64)


def placed_value(problem: Problem, column: int, nodes: int) -> float:
    """Return the value of ``column`` spread over ``nodes`` nodes, in the problem's units.

    A positive value shrinks with the rate. A cost (a value below 0) does not. A faster shape counts
    no more than the best column of the same job, type and GPU count, so that columns bound it.
    """
    value = float(problem.value[column])
    if value <= 0:
        return value
    cell = int(problem.cell[column])
    share = problem.cells.placed_rate(cell, nodes) / float(problem.cells.rate[cell])
    return min(share * value, _best_alike(problem, column)) if share > 1 else share * value


def _best_alike(problem: Problem, column: int) -> float:
    """Return the greatest value of a column of the same job, type and GPU count."""
    job = int(np.searchsorted(problem.job_start, column, side="right")) - 1
    own_columns = np.arange(problem.job_start[job], problem.job_start[job + 1])
    cells, cell = problem.cells, problem.cell
    alike = (cells.gpu_type[cell[own_columns]] == cells.gpu_type[cell[column]]) & (
        cells.gpus[cell[own_columns]] == cells.gpus[cell[column]]
    )
    return float(problem.value[own_columns[alike]].max())


def migration_price(problem: Problem, job: int, column: int, nodes: int = 0) -> float:
    """Return the restart cost of moving ``job`` within ``column``, in the problem's units.

    If it is moved to ``nodes`` nodes, on which it is faster, the cost is a share of the value there.
    It is then the same as for a start on that shape.
    """
    gross = abs(float(problem.value[column] + problem.restart_price[column]))
    if nodes and problem.value[column] > 0:
        gross *= max(1.0, placed_value(problem, column, nodes) / float(problem.value[column]))
    return gross * float(problem.restart_share[job])
