"""The compiled, exact bounds of a search tree's leaves, and the prices that prove them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.solvers.kernels.branching import JoinedProgram, SearchTree
from tessera.solvers.kernels.jit import compile_lazily

FAR = 1 << 56
"""An integer beyond every margin."""


class ProblemColumns(NamedTuple):
    """The whole problem around a search. ``owner`` is -1 for jobs that the search did not join."""

    job_start: Ints
    value: Ints
    usage_start: Ints
    row: Ints
    amount: Ints
    capacity: Ints  # int64[rows]
    owner: Ints  # int64[jobs], the class of the search
    settled: Ints  # int64[jobs], the column of a job that is settled; -1: it waits
    runs: Bools  # bool[jobs], whether the search let it run in any case, although it may wait
    outside: Bools  # bool[columns], whether the search left it out, although it fits


@compile_lazily
def bound_leaves(
    program: JoinedProgram,
    tree: SearchTree,
    leaves: Ints,
    prices: Ints,
    scale: int,
    problem: ProblemColumns,
    dropped: Bools,
    idle: Bools,
    bound: Ints,
    drop_price: Ints,
    idle_price: Ints,
    path_prices: Ints,
) -> None:
    """Bound each of ``leaves`` exactly, with integer prices over ``scale``.

    What the search left out of the whole problem must not become better at these prices.
    ``dropped`` (bool[columns]) marks columns that do, and ``idle`` (bool[jobs]) marks jobs that
    would wait. ``drop_price`` and ``idle_price`` (int64[leaves]) are what keeps them away.
    ``path_prices`` is int64[leaves, depth], the price of each branch from the leaf upwards.
    ``bound`` is int64[leaves], over ``scale``.
    """
    columns, rows, classes = program.value.size, program.capacity.size, program.members.size
    jobs = problem.job_start.size - 1
    low, high = np.empty(columns, np.int64), np.empty(columns, np.int64)
    margin, edge = np.empty(columns, np.int64), np.empty(classes, np.int64)
    # A price moves by a share of its unit. From which share on could each job choose differently?
    first = prices[0].astype(np.float64)
    unit = first + first.mean() + 1.0
    share, used = np.empty(jobs), np.zeros(rows, np.int64)
    worth = _settle_shares(problem, prices[0], unit, scale, share, used)
    order = np.argsort(share)
    for at in range(leaves.size):
        price = prices[at]
        _counts_at(program, tree, leaves[at], low, high)
        total = worth
        for c in range(columns):
            margin[c] = program.value[c] * scale
            for r in range(rows):
                margin[c] -= price[r] * program.usage[r, c]
        for k in range(classes):
            total += _fill_class(program, k, low, high, margin, edge)
        moved = 0.0
        for r in range(rows):
            total += price[r] * (problem.capacity[r] - used[r])
            moved = max(moved, abs(float(price[r]) - first[r]) / unit[r])
        drop_price[at], idle_price[at] = 0, 0
        for job in order:
            if share[job] > moved:
                break
            drop, wait = _mark_better(problem, job, price, scale, edge, dropped, idle)
            drop_price[at] = max(drop_price[at], drop)
            idle_price[at] = max(idle_price[at], wait)
        bound[at] = total
        _price_path(program, tree, leaves[at], low, high, margin, edge, path_prices[at])


@compile_lazily
def _mark_better(
    problem: ProblemColumns,
    job: int,
    price: Ints,
    scale: int,
    edge: Ints,
    dropped: Bools,
    idle: Bools,
) -> tuple[int, int]:
    """Mark what is better for ``job`` than what the search left it, and return by how much at most.

    The first number is of columns, and the second of waiting.
    """
    k, settled = problem.owner[job], problem.settled[job]
    drop, wait, least = 0, 0, edge[k] if k >= 0 else 0
    if k < 0 and settled >= 0:
        least = _margin_of(problem, settled, price, scale)
    if problem.runs[job] and least < 0:
        idle[job] = True
        wait = -least
    for c in range(problem.job_start[job], problem.job_start[job + 1]):
        if problem.outside[c]:
            over = _margin_of(problem, c, price, scale) - least
            if over > 0:
                dropped[c] = True
                drop = max(drop, over)
    return drop, wait


@compile_lazily
def _settle_shares(
    problem: ProblemColumns, price: Ints, unit: Floats, scale: int, share: Floats, used: Ints
) -> int:
    """Return the value of all settled columns times ``scale``; ``used`` becomes their use of rows.

    ``share`` (float64[jobs]) becomes the share of ``unit`` by which all prices may move without a
    change of a settled job's best choice. It is -1 for jobs that the search joined.
    """
    total = 0
    for job in range(share.size):
        share[job] = -1.0
        if problem.owner[job] >= 0:
            continue
        settled, best, own = problem.settled[job], 0, 0.0
        if settled >= 0:
            best = _margin_of(problem, settled, price, scale)
            total += problem.value[settled] * scale
            for e in range(problem.usage_start[settled], problem.usage_start[settled + 1]):
                used[problem.row[e]] += problem.amount[e]
                own += unit[problem.row[e]] * problem.amount[e]
        share[job] = np.inf
        if problem.runs[job]:
            share[job] = (best - 1.0) / (own + 1.0)
        for c in range(problem.job_start[job], problem.job_start[job + 1]):
            if problem.outside[c]:
                uses = own
                for e in range(problem.usage_start[c], problem.usage_start[c + 1]):
                    uses += unit[problem.row[e]] * problem.amount[e]
                clear = float(best - _margin_of(problem, c, price, scale))
                share[job] = min(share[job], (clear - 1.0) / (uses + 1.0))
    return int(total)


@compile_lazily
def _margin_of(problem: ProblemColumns, column: int, price: Ints, scale: int) -> int:
    margin = problem.value[column] * scale
    for k in range(problem.usage_start[column], problem.usage_start[column + 1]):
        margin -= price[problem.row[k]] * problem.amount[k]
    return int(margin)


@compile_lazily
def _counts_at(program: JoinedProgram, tree: SearchTree, node: int, low: Ints, high: Ints) -> None:
    """Fill the limits of each column's count at ``node``."""
    for c in range(low.size):
        low[c], high[c] = 0, program.members[program.owner[c]]
    while tree.parent[node] >= 0:
        c = tree.column[node]
        if tree.above[node]:
            low[c] = max(low[c], tree.most[node] + 1)
        else:
            high[c] = min(high[c], tree.most[node])
        node = tree.parent[node]


@compile_lazily
def _fill_class(
    program: JoinedProgram, k: int, low: Ints, high: Ints, margin: Ints, edge: Ints
) -> int:
    """Return the most that the jobs of a class can be worth within the limits of their counts.

    ``edge[k]`` becomes the best margin of which there could be more.
    """
    first, last = program.class_start[k], program.class_start[k + 1]
    total, left, free = 0, program.members[k], True
    edge[k] = -FAR if program.must[k] else 0
    for c in range(first, last):
        total += margin[c] * low[c]
        left -= low[c]
        free = free and low[c] == 0 and high[c] == program.members[k]
        edge[k] = max(edge[k], margin[c])
    if free:
        return int(edge[k] * left)
    edge[k] = 0
    if left < 0:  # no answer has so many: any price is right that is high enough
        edge[k] = FAR
        return -FAR
    if program.must[k]:
        edge[k] = -FAR
    order = first + np.argsort(-margin[first:last])
    for c in order:
        if margin[c] <= edge[k]:
            break
        if high[c] - low[c] > left:
            edge[k] = margin[c]
            break
        total += margin[c] * (high[c] - low[c])
        left -= high[c] - low[c]
    if edge[k] == -FAR:
        if left > 0:
            return -FAR
        edge[k] = FAR
        for c in range(first, last):
            if high[c] > 0:
                edge[k] = min(edge[k], margin[c])
    return int(total + edge[k] * left)


@compile_lazily
def _price_path(
    program: JoinedProgram,
    tree: SearchTree,
    node: int,
    low: Ints,
    high: Ints,
    margin: Ints,
    edge: Ints,
    path: Ints,
) -> None:
    """Fill the price of each branch above ``node``: of equal ones, the nearest counts."""
    at = 0
    done = np.zeros((2, low.size), np.bool_)
    while tree.parent[node] >= 0:
        c, above = tree.column[node], tree.above[node]
        path[at] = 0
        binding = low[c] == tree.most[node] + 1 if above else high[c] == tree.most[node]
        if binding and not done[1 if above else 0, c]:
            done[1 if above else 0, c] = True
            gain = margin[c] - edge[program.owner[c]]
            path[at] = max(0, -gain if above else gain)
        node = tree.parent[node]
        at += 1
