"""The independent checker of certificates. It proves a bound by integers alone.

It is written without the solvers' code. Arrays hold 64-bit integers where no sum can exceed them,
and Python's integers otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tessera.formulation.answer.certificates import Branch, Certificate, CertificateNode, PriceLeaf
from tessera.formulation.answer.job_classes import JobClasses, join_identical_jobs
from tessera.formulation.base.errors import InvalidCertificate
from tessera.formulation.base.tables import Bools, Ints
from tessera.formulation.round.problem import Problem

Exact: TypeAlias = NDArray[Any]
"""An array of 64-bit or of Python's integers."""

MAX_INT64: Final = 2**62
"""Limit below which sums of 64-bit integers are exact, with room for one addition."""

MAX_KNAPSACK: Final = 10_000_000
"""Most units of a row that a knapsack leaf may solve. Its table has one number for each."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Case:
    """One side of a branch, on the way from the root to a node. ``parent`` is the case above it.

    ``columns`` are positions among the classes' columns. The case is the row
    ``sign * sum x <= capacity``.
    """

    parent: _Case | None
    depth: int
    columns: Ints
    sign: int
    capacity: int


def check_certificate(problem: Problem, certificate: Certificate) -> int:
    """Return the bound that ``certificate`` proves for ``problem``, in the problem's integers.

    It is at most ``certificate.bound``.

    Raises:
        InvalidCertificate: the certificate is not one of this problem, or it proves less than it
            claims.
    """
    _require(certificate.denominator >= 1, f"its denominator is {certificate.denominator}")
    classes = join_identical_jobs(problem)
    if (classes.must_run & (np.diff(classes.start) == 0)).any():
        return int(certificate.bound)  # a job that must run never fits, so there is no answer
    scale = int(certificate.denominator)
    proven = max(
        _leaf_bound(classes, leaf, case, scale) for leaf, case in _leaves(classes, certificate.root)
    )
    floor = proven // scale
    floor -= floor % classes.value_divisor
    _require(
        floor <= certificate.bound,
        f"it proves {floor}, not the bound {certificate.bound} it claims",
    )
    return floor


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise InvalidCertificate(problem)


def _leaves(classes: JobClasses, root: CertificateNode) -> Iterator[tuple[PriceLeaf, _Case | None]]:
    """Yield each leaf with the last case on its way. A tree may be deep, so nothing recurses."""
    open_nodes: list[tuple[CertificateNode, _Case | None]] = [(root, None)]
    while open_nodes:
        node, case = open_nodes.pop()
        if isinstance(node, PriceLeaf):
            yield node, case
            continue
        columns, depth = _branch_columns(classes, node), case.depth + 1 if case else 1
        for sign, capacity, child in ((1, node.most, node.below), (-1, -node.most - 1, node.above)):
            reached = _Case(
                parent=case, depth=depth, columns=columns, sign=sign, capacity=int(capacity)
            )
            open_nodes.append((child, reached))


def _branch_columns(classes: JobClasses, branch: Branch) -> Ints:
    """Return the positions of the branch's columns among the columns of the classes' first jobs."""
    _require_rising(branch.columns, MAX_INT64, "columns of a branch")
    columns = np.array(branch.columns, np.int64)
    place = np.searchsorted(classes.column, columns)
    _require(
        np.array_equal(np.append(classes.column, -1)[place], columns),
        "a branch has a column that no first job of a class has",
    )
    return place


def _require_rising(numbers: Iterable[int], limit: int, name: str) -> None:
    before = -1
    for number in numbers:
        _require(before < number < limit, f"{name} must rise and be below {limit}, not {number}")
        before = number


def _leaf_bound(classes: JobClasses, leaf: PriceLeaf, case: _Case | None, scale: int) -> int:
    """Return ``scale`` times what ``leaf`` proves where all cases up to ``case`` hold."""
    prices = _prices(classes, leaf)
    job_prices = _job_prices(classes, leaf)
    cases = _priced_cases(leaf, case)
    dtype = _dtype(classes, prices, job_prices, cases, scale)
    margin = _margins(classes, prices, cases, scale, dtype)
    total = sum(price * classes.capacity[row] for row, price in prices.items())
    total += sum(price * case.capacity for case, price in cases)
    total += sum(price * classes.count[k] for k, price in job_prices.items())
    job_price = np.zeros(len(classes.first), dtype)
    job_price[list(job_prices)] = list(job_prices.values())
    gain = margin - np.repeat(job_price, np.diff(classes.start))
    if not leaf.knapsacks:
        return total + _best_margins(classes, gain, classes.must_run)
    return total + _knapsack_gains(classes, leaf.knapsacks, gain)


def _prices(classes: JobClasses, leaf: PriceLeaf) -> dict[int, int]:
    """Return the price of each priced row."""
    rows = len(classes.capacity)
    _require_rising((row for row, _ in leaf.prices), rows, "priced rows")
    _require_rising(leaf.knapsacks, rows, "knapsacks")
    prices = {int(row): int(price) for row, price in leaf.prices}
    _require(min(prices.values(), default=0) >= 0, "a price is negative")
    return prices


def _job_prices(classes: JobClasses, leaf: PriceLeaf) -> dict[int, int]:
    """Return the price of running a job of each class that has one, by class."""
    class_of = {job: k for k, job in enumerate(classes.first)}
    prices: dict[int, int] = {}
    for job, price in leaf.job_prices:
        _require(
            job in class_of and class_of[job] not in prices,
            f"job {job} has a price, but is not the first of its class, or has two prices",
        )
        k = class_of[job]
        _require(
            price >= 0 or bool(classes.must_run[k]),
            f"job {job} has a negative price, but may wait",
        )
        prices[k] = int(price)
    return prices


def _priced_cases(leaf: PriceLeaf, case: _Case | None) -> list[tuple[_Case, int]]:
    """Return the cases on the way to the leaf that have a price above 0, and their prices."""
    depth = case.depth if case else 0
    _require(
        len(leaf.branch_prices) == depth,
        f"a leaf below {depth} branches has {len(leaf.branch_prices)} prices of branches",
    )
    _require(min(leaf.branch_prices, default=0) >= 0, "the price of a branch is negative")
    priced = []
    while case is not None:
        price = int(leaf.branch_prices[case.depth - 1])
        if price:
            priced.append((case, price))
        case = case.parent
    return priced


def _dtype(
    classes: JobClasses,
    prices: dict[int, int],
    job_prices: dict[int, int],
    cases: list[tuple[_Case, int]],
    scale: int,
) -> type[np.generic]:
    """Return 64-bit integers if no number of a leaf can exceed them, or else Python's."""
    used = np.zeros(len(classes.capacity), np.int64)
    np.maximum.at(used, classes.row, classes.amount)
    size = scale * int(np.abs(classes.value).max(initial=0))
    size += sum(price * int(used[row]) for row, price in prices.items())
    size += sum(price for _, price in cases)
    size += max((abs(price) for price in job_prices.values()), default=0)
    return np.int64 if size * (sum(classes.count) + 1) < MAX_INT64 else np.object_


def _margins(
    classes: JobClasses,
    prices: dict[int, int],
    cases: list[tuple[_Case, int]],
    scale: int,
    dtype: type[np.generic],
) -> Exact:
    """Return ``scale`` times each column's value, less what it pays."""
    price = np.zeros(len(classes.capacity), dtype)
    price[list(prices)] = list(prices.values())
    paid = price[classes.row] * classes.amount.astype(dtype)
    margin = classes.value.astype(dtype) * scale
    some = np.diff(classes.entry_start) > 0
    if some.any():
        margin[some] -= np.add.reduceat(paid, classes.entry_start[:-1][some])
    for case, case_price in cases:
        margin[case.columns] -= case.sign * case_price
    return margin


def _best_margins(classes: JobClasses, margin: Exact, must_take: Bools) -> int:
    """Return the sum over jobs of the best margin; waiting has margin 0 unless it must take one."""
    some = np.diff(classes.start) > 0
    best = np.zeros(len(classes.first), margin.dtype)
    if some.any():
        best[some] = np.maximum.reduceat(margin, classes.start[:-1][some])
    best[~must_take] = np.maximum(best[~must_take], 0)
    return sum(count * top for count, top in zip(classes.count, best.tolist(), strict=True))


def _knapsack_gains(classes: JobClasses, knapsacks: tuple[int, ...], gain: Exact) -> int:
    """Return the most that gains can add up to in all knapsacks, and outside of them."""
    solved = np.zeros(len(classes.capacity), np.bool_)
    solved[list(knapsacks)] = True
    uses = solved[classes.row] & (classes.amount > 0)
    column = np.repeat(np.arange(len(gain)), np.diff(classes.entry_start))[uses]
    _require(len(np.unique(column)) == len(column), "a column uses two knapsacks")
    row, amount = classes.row[uses], classes.amount[uses]
    outside = gain.copy()
    outside[column] = 0
    total = _best_margins(classes, outside, np.zeros(len(classes.first), np.bool_))
    class_of = np.repeat(np.arange(len(classes.first)), np.diff(classes.start))
    for k in knapsacks:
        picked = (row == k) & (gain[column] > 0)
        columns, divisor = column[picked], max(1, classes.divisor[k])
        items: dict[int, list[tuple[int, int]]] = {}
        for c, weight, worth in zip(
            class_of[columns].tolist(),
            (amount[picked] // divisor).tolist(),
            gain[columns].tolist(),
            strict=True,
        ):
            items.setdefault(c, []).append((weight, worth))
        counted = [(classes.count[c], options) for c, options in items.items()]
        total += _solve_knapsack(counted, classes.capacity[k] // divisor, gain.dtype)
    return total


def _solve_knapsack(
    items: list[tuple[int, list[tuple[int, int]]]], capacity: int, dtype: np.dtype[Any]
) -> int:
    """Return the most that (weight, worth) of ``items`` can be worth within ``capacity``.

    An item is a count of equal jobs, each of which takes one of the options or none.
    """
    capacity = min(capacity, sum(count * max(w for w, _ in options) for count, options in items))
    _require(capacity <= MAX_KNAPSACK, f"a knapsack of {capacity} units is too large to check")
    best = np.zeros(capacity + 1, dtype)  # within each capacity
    for count, options in items:
        fitting = [(w, worth) for w, worth in options if w <= capacity]
        if not fitting:
            continue
        copies = min(count, capacity // min(w for w, _ in fitting))
        for many, choices in _bundles(copies, fitting):
            for _ in range(many):
                before = best.copy()
                for w, worth in choices:
                    np.maximum(best[w:], before[: capacity + 1 - w] + worth, out=best[w:])
                if np.array_equal(before, best):
                    break
    return int(best[-1])


def _bundles(
    copies: int, options: list[tuple[int, int]]
) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Yield (repetitions, options): with one option, 1, 2, 4, ... copies count as one choice."""
    if len(options) > 1:
        yield copies, options
        return
    ((weight, worth),) = options
    bundle = 1
    while copies > 0:
        size = min(bundle, copies)
        yield 1, [(weight * size, worth * size)]
        copies, bundle = copies - size, 2 * bundle
