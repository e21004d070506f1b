"""The compiled branch and bound over the counts of a joined problem, by a dual simplex method.

Every column has a count between two limits, and so has waiting. So any basis becomes dual feasible
if each nonbasic count is put on the right limit, and the search may go on at any node from the basis
of any other. Only the limits differ. The dual value falls with every pivot, and it is a bound
wherever the method stops.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.solvers.kernels.jit import compile_lazily

OPEN, LEAF, INNER = 0, 1, 2
"""The states of a node: not looked at yet, bounded well enough, divided."""
SOLVED, CUT, EMPTY, STUCK = 0, 1, 2, 3
"""The ends of the simplex method: optimal, below the cutoff, no answer, no progress."""
NODES, CURRENT, PIVOTS, SINCE, FOUND, RETURNS = 0, 1, 2, 3, 4, 5
"""Places of ``SearchState.counts``: nodes made, the node to look at (-1: the best open one), pivots
in all, pivots since the tableau was built, whether a better answer was found, and
how often the search has returned to the newest node instead of the best one."""
KNOWN, BOUND = 0, 1
"""Places of ``SearchState.values``: the value of the best answer, and what is proven."""

EPSILON = 1e-9
"""Smaller numbers of the scaled tableau count as 0."""
INTEGRAL = 1e-6
"""A count this close to an integer is one."""
REBUILD_PIVOTS = 400
"""Pivots after which the tableau is built again, because rounding adds up."""
LEAST_SHARE = 0.02
"""Weight of a fractional count for a branch, in addition to its shares of the rows: the decisions on
large gangs come first."""
MOST_RETURNS = 20
"""Ends of dives after which the search returns to its newest node, before it goes to the best one.

Near the end of a dive, answers differ little and cost a few pivots each."""
MOST_DEPTH = 400
"""Branches above a node, at most."""
MOST_PIVOTS = 4_000
"""Pivots at one node."""


class JoinedProgram(NamedTuple):
    """A joined problem. Columns are sorted by class; ``unit`` is 1 over the largest |value|."""

    class_start: Ints  # int64[classes + 1]
    owner: Ints  # int64[columns], the class
    members: Ints  # int64[classes], the number of jobs of each
    must: Bools  # bool[classes]
    value: Ints  # int64[columns]
    usage: Ints  # int64[rows, columns]
    capacity: Ints  # int64[rows]
    size: Floats  # float64[rows], the largest amount, at least 1
    unit: float


class Tableau(NamedTuple):
    """The simplex tableau. Variables: columns, what rows have left, then the waiting jobs of classes."""

    body: Floats  # float64[rows + classes, variables]
    level: Floats  # float64[rows + classes], of the basic variables
    basis: Ints  # int64[rows + classes]
    place: Ints  # int64[variables], the row of a basic variable, else -1
    rest: Floats  # float64[variables], the level of a nonbasic variable
    low: Floats  # float64[variables]
    high: Floats
    gain: Floats  # float64[variables], the reduced cost


class SearchTree(NamedTuple):
    """The nodes. Node k is the case ``above`` or below of a branch of its parent."""

    parent: Ints  # int64[nodes]
    column: Ints  # int64[nodes], on which the parent was divided
    most: Ints  # int64[nodes]
    above: Bools  # bool[nodes]
    state: Ints  # int64[nodes]
    bound: Floats  # float64[nodes]
    prices: Floats  # float64[nodes, rows]


class SearchState(NamedTuple):
    """The memory of a search between calls: ``best`` is int64[columns], counts of the best answer."""

    counts: Ints
    values: Floats
    best: Ints


@compile_lazily
def search_tree(
    program: JoinedProgram,
    tableau: Tableau,
    tree: SearchTree,
    state: SearchState,
    allowed: float,
    nodes: int,
) -> bool:
    """Look at up to ``nodes`` nodes, the most promising first. Return whether the search is over.

    It is over when no answer can be more than ``allowed`` above the best one, or when ``tree`` is
    full. ``state`` is brought up to date.
    """
    counts, values = state.counts, state.values
    if counts[NODES] == 0:
        counts[NODES], counts[CURRENT] = 1, 0
        tree.parent[0], tree.state[0], tree.bound[0] = -1, OPEN, np.inf
        tree.prices[0] = 0.0
        _build(program, tableau)
    for _ in range(nodes):
        node = counts[CURRENT]
        if node < 0 and counts[RETURNS] < MOST_RETURNS:
            counts[RETURNS] += 1
            node = _newest(tree, counts[NODES], values[KNOWN] + allowed + 1.0)
        if node < 0:
            counts[RETURNS] = 0
            node = _most_promising(tree, counts[NODES])
        cutoff = values[KNOWN] + allowed + 1.0
        if node < 0 or tree.bound[node] < cutoff:
            if counts[CURRENT] < 0:
                break
            counts[CURRENT] = -1
            continue
        if counts[NODES] + 2 > tree.parent.size:
            break
        if counts[SINCE] > REBUILD_PIVOTS:
            _rebuild(program, tableau)
            counts[SINCE] = 0
        if _limit(program, tableau, tree, node) >= MOST_DEPTH:
            tree.state[node], counts[CURRENT] = LEAF, -1
            continue
        counts[CURRENT] = _look_at(program, tableau, tree, state, node, allowed)
    values[BOUND] = values[KNOWN]
    over = True
    for node in range(counts[NODES]):
        if tree.state[node] != INNER:
            values[BOUND] = max(values[BOUND], np.floor(tree.bound[node]))
            if tree.state[node] == OPEN and tree.bound[node] >= values[KNOWN] + allowed + 1.0:
                over = False
    return over or counts[NODES] + 2 > tree.parent.size


@compile_lazily
def _newest(tree: SearchTree, nodes: int, cutoff: float) -> int:
    """Return the open node that was made last among those that are not cut off, or -1."""
    for node in range(nodes - 1, -1, -1):
        if tree.state[node] == OPEN and tree.bound[node] >= cutoff:
            return node
    return -1


@compile_lazily
def _rounding(value: float) -> float:
    """Return more than the rounding of a bound of this size."""
    return 1e-7 + 1e-12 * abs(value) if value > -np.inf else 0.0


@compile_lazily
def _most_promising(tree: SearchTree, nodes: int) -> int:
    best = -1
    for node in range(nodes):
        if tree.state[node] == OPEN and (best < 0 or tree.bound[node] > tree.bound[best]):
            best = node
    return best


@compile_lazily
def _look_at(
    program: JoinedProgram,
    tableau: Tableau,
    tree: SearchTree,
    state: SearchState,
    node: int,
    allowed: float,
) -> int:
    """Bound ``node``, and divide it if need be. Return the node to look at next, or -1."""
    counts, values = state.counts, state.values
    cutoff = values[KNOWN] + allowed + 1.0
    cutoff = (cutoff - _rounding(cutoff)) * program.unit
    end, pivots, row, left, last = _descend(program, tableau, cutoff)
    counts[PIVOTS] += pivots
    counts[SINCE] += pivots
    rows = program.capacity.size
    if end == STUCK:
        tree.state[node] = LEAF  # it keeps the bound and the prices of its parent
        return -1
    bound = _dual_value(program, tableau) / program.unit
    bound += _rounding(bound)
    if end == EMPTY:
        _price_out(program, tableau, tree, node, row, left, last)
    elif bound < tree.bound[node] or node == 0:
        for r in range(rows):
            gain = tableau.gain[program.value.size + r]
            tree.prices[node, r] = max(0.0, -gain) / program.unit / program.size[r]
        tree.bound[node] = min(bound, tree.bound[node])
    if end != SOLVED:
        tree.state[node] = LEAF
        return -1
    column = _round(program, tableau, state)
    if column < 0 or tree.bound[node] < values[KNOWN] + allowed + 1.0:
        tree.state[node] = LEAF
        return -1
    level = _level(tableau, column)
    most = int(np.floor(level))
    tree.state[node] = INNER
    first = counts[NODES]
    counts[NODES] += 2
    for k in range(2):
        child = first + k
        tree.parent[child], tree.column[child], tree.most[child] = node, column, most
        tree.above[child], tree.state[child] = k == 1, OPEN
        tree.bound[child] = tree.bound[node]
        tree.prices[child] = tree.prices[node]
    return int(first + (1 if level - most > 0.4 else 0))


@compile_lazily
def _price_out(
    program: JoinedProgram,
    tableau: Tableau,
    tree: SearchTree,
    node: int,
    row: int,
    left: float,
    last: float,
) -> None:
    """Set prices of ``node``, which has no answer, at which its bound is below that of any answer.

    Along a ray of the dual, the bound falls by ``left`` a step from step ``last`` on.
    """
    sign = 1.0 if tableau.level[row] > tableau.high[tableau.basis[row]] else -1.0
    lowest = -1.0
    for k in range(program.members.size):
        largest = 0.0
        for c in range(program.class_start[k], program.class_start[k + 1]):
            largest = max(largest, abs(float(program.value[c])))
        lowest -= largest * program.members[k] * program.unit
    step = last + (max(0.0, _dual_value(program, tableau) - lowest) + 1.0) / left
    for r in range(program.capacity.size):
        slack = program.value.size + r
        price = -(tableau.gain[slack] + step * sign * tableau.body[row, slack])
        tree.prices[node, r] = max(0.0, price) / program.unit / program.size[r]
    tree.bound[node] = -np.inf


@compile_lazily
def _build(program: JoinedProgram, tableau: Tableau) -> None:
    """Fill the tableau of the root: rows keep what they have left, and classes take their dearest."""
    columns, rows, classes = program.value.size, program.capacity.size, program.members.size
    tableau.low[:] = 0.0
    for c in range(columns):
        k = program.owner[c]
        tableau.high[c] = float(program.members[k])
    for r in range(rows):
        tableau.high[columns + r] = program.capacity[r] / program.size[r]
    for k in range(classes):
        tableau.high[columns + rows + k] = 0.0 if program.must[k] else float(program.members[k])
    _reset(program, tableau)
    tableau.rest[:] = 0.0
    for i in range(rows + classes):
        tableau.basis[i] = columns + i
    for k in range(classes):
        best = columns + rows + k
        gain = -np.inf if program.must[k] else 0.0
        for c in range(program.class_start[k], program.class_start[k + 1]):
            if tableau.gain[c] > gain:
                best, gain = c, tableau.gain[c]
        if best < columns:
            tableau.basis[rows + k] = best
            _pivot(tableau, rows + k, best)
    _settle(program, tableau)


@compile_lazily
def _reset(program: JoinedProgram, tableau: Tableau) -> None:
    """Write the constraints and the values into the tableau, as if all that is left were basic."""
    columns, rows, classes = program.value.size, program.capacity.size, program.members.size
    tableau.body[:] = 0.0
    tableau.gain[:] = 0.0
    for c in range(columns):
        for r in range(rows):
            tableau.body[r, c] = program.usage[r, c] / program.size[r]
        tableau.body[rows + program.owner[c], c] = 1.0
        tableau.gain[c] = program.value[c] * program.unit
    for i in range(rows + classes):
        tableau.body[i, columns + i] = 1.0


@compile_lazily
def _rebuild(program: JoinedProgram, tableau: Tableau) -> None:
    """Compute the tableau of the present basis again from the constraints."""
    columns, size = program.value.size, tableau.basis.size
    wanted = tableau.basis.copy()
    _reset(program, tableau)
    taken = np.zeros(size, np.bool_)
    for variable in wanted:
        if variable >= columns:
            taken[variable - columns] = True
            tableau.basis[variable - columns] = variable
    for variable in wanted:
        if variable < columns:
            best = -1
            for i in range(size):
                if not taken[i] and (
                    best < 0 or abs(tableau.body[i, variable]) > abs(tableau.body[best, variable])
                ):
                    best = i
            taken[best] = True
            tableau.basis[best] = variable
            _pivot(tableau, best, variable)
    _settle(program, tableau)


@compile_lazily
def _settle(program: JoinedProgram, tableau: Tableau) -> None:
    """Compute places, and the levels of the basic variables."""
    tableau.place[:] = -1
    for i in range(tableau.basis.size):
        tableau.place[tableau.basis[i]] = i
    columns, rows = program.value.size, program.capacity.size
    for j in range(tableau.place.size):
        if tableau.place[j] < 0:
            tableau.rest[j] = _better_limit(tableau, j)
    # The columns of what is left are the inverse of the basis.
    for i in range(tableau.basis.size):
        level = 0.0
        for r in range(rows):
            level += tableau.body[i, columns + r] * (program.capacity[r] / program.size[r])
        for k in range(program.members.size):
            level += tableau.body[i, columns + rows + k] * program.members[k]
        tableau.level[i] = level
    for j in range(tableau.place.size):
        if tableau.place[j] < 0 and tableau.rest[j] != 0.0:
            for i in range(tableau.basis.size):
                tableau.level[i] -= tableau.body[i, j] * tableau.rest[j]


@compile_lazily
def _better_limit(tableau: Tableau, variable: int) -> float:
    """Return the limit at which a nonbasic variable is dual feasible."""
    if tableau.gain[variable] > EPSILON:
        return float(tableau.high[variable])
    if tableau.gain[variable] < -EPSILON:
        return float(tableau.low[variable])
    rest = tableau.rest[variable]
    return float(min(max(rest, tableau.low[variable]), tableau.high[variable]))


@compile_lazily
def _limit(program: JoinedProgram, tableau: Tableau, tree: SearchTree, node: int) -> int:
    """Set the limits that hold at ``node``, and put the nonbasic variables on them. Return its depth."""
    columns, depth = program.value.size, 0
    tableau.low[:columns] = 0.0
    for c in range(columns):
        tableau.high[c] = float(program.members[program.owner[c]])
    while tree.parent[node] >= 0:
        column = tree.column[node]
        if tree.above[node]:
            tableau.low[column] = max(tableau.low[column], float(tree.most[node] + 1))
        else:
            tableau.high[column] = min(tableau.high[column], float(tree.most[node]))
        node = tree.parent[node]
        depth += 1
    for j in range(tableau.place.size):
        if tableau.place[j] < 0:
            _shift(tableau, j, _better_limit(tableau, j))
    return depth


@compile_lazily
def _shift(tableau: Tableau, variable: int, to: float) -> None:
    """Move a nonbasic variable to another level."""
    by = to - tableau.rest[variable]
    if by != 0.0:
        for i in range(tableau.level.size):
            tableau.level[i] -= tableau.body[i, variable] * by
        tableau.rest[variable] = to


@compile_lazily
def _pivot(tableau: Tableau, row: int, variable: int) -> None:
    """Eliminate ``variable`` from all rows but ``row``, and from the gains."""
    body = tableau.body
    line = body[row]
    line /= line[variable]
    line[variable] = 1.0
    for i in range(body.shape[0]):
        factor = body[i, variable]
        if i != row and abs(factor) > 1e-13:
            for j in range(body.shape[1]):
                body[i, j] -= factor * line[j]
            body[i, variable] = 0.0
    factor = tableau.gain[variable]
    if factor != 0.0:
        for j in range(body.shape[1]):
            tableau.gain[j] -= factor * line[j]
        tableau.gain[variable] = 0.0


@compile_lazily
def _dual_value(program: JoinedProgram, tableau: Tableau) -> float:
    """Return the value of the dual, in scaled units, from the gains alone."""
    columns, rows = program.value.size, program.capacity.size
    total = 0.0
    for r in range(rows):
        total -= tableau.gain[columns + r] * program.capacity[r] / program.size[r]
    for k in range(program.members.size):
        total -= tableau.gain[columns + rows + k] * program.members[k]
    for j in range(tableau.gain.size):
        gain = tableau.gain[j]
        total += gain * (tableau.high[j] if gain > 0.0 else tableau.low[j])
    return total


@compile_lazily
def _descend(
    program: JoinedProgram, tableau: Tableau, cutoff: float
) -> tuple[int, int, int, float, float]:
    """Take dual simplex steps. Return how it ended and the pivots.

    If there is no answer, also return the row that shows it, by how much the row stays beyond its
    limit whatever the others do, and the step from which on the dual falls at that rate.
    """
    candidates = np.empty(tableau.gain.size, np.int64)
    ratio = np.empty(tableau.gain.size)
    for pivots in range(MOST_PIVOTS):
        row = _worst_row(tableau)
        if row < 0:
            return SOLVED, pivots, -1, 0.0, 0.0
        if _dual_value(program, tableau) <= cutoff:
            return CUT, pivots, row, 0.0, 0.0
        variable = tableau.basis[row]
        above = tableau.level[row] > tableau.high[variable]
        limit = tableau.high[variable] if above else tableau.low[variable]
        left = abs(tableau.level[row] - limit)
        found = _find_candidates(tableau, row, above, candidates, ratio)
        # Pass those that may go to their other limit while the bound still falls.
        order, at = np.argsort(ratio[:found]), 0
        while at < found:
            j = candidates[order[at]]
            reach = abs(tableau.body[row, j]) * (tableau.high[j] - tableau.low[j])
            if left <= reach + EPSILON:
                break
            left -= reach
            at += 1
        if at == found:
            last = ratio[order[found - 1]] if found else 0.0
            return (EMPTY if left > 1e-7 else STUCK), pivots, row, left, last
        entering = candidates[order[at]]
        # Of almost equal ratios, take a larger pivot.
        tie = at + 1
        while tie < found and ratio[order[tie]] <= ratio[order[at]] + 1e-12:
            j = candidates[order[tie]]
            if abs(tableau.body[row, j]) > 4.0 * abs(tableau.body[row, entering]):
                entering = j
            tie += 1
        if abs(tableau.body[row, entering]) < 1e-7:
            return STUCK, pivots, row, 0.0, 0.0
        for k in range(at):
            j = candidates[order[k]]
            high = tableau.rest[j] < tableau.high[j] - EPSILON
            _shift(tableau, j, tableau.high[j] if high else tableau.low[j])
        by = (tableau.level[row] - limit) / tableau.body[row, entering]
        for i in range(tableau.level.size):
            tableau.level[i] -= tableau.body[i, entering] * by
        tableau.level[row] = tableau.rest[entering] + by
        tableau.rest[variable] = limit
        tableau.basis[row], tableau.place[entering], tableau.place[variable] = entering, row, -1
        _pivot(tableau, row, entering)
    return STUCK, MOST_PIVOTS, -1, 0.0, 0.0


@compile_lazily
def _worst_row(tableau: Tableau) -> int:
    """Return the row whose basic variable is furthest beyond a limit, or -1."""
    row, worst = -1, 1e-7
    for i in range(tableau.level.size):
        variable, level = tableau.basis[i], tableau.level[i]
        over = max(level - tableau.high[variable], tableau.low[variable] - level)
        if over > worst:
            row, worst = i, over
    return row


@compile_lazily
def _find_candidates(
    tableau: Tableau, row: int, above: bool, candidates: Ints, ratio: Floats
) -> int:
    """List the nonbasic variables that can bring the basic one of ``row`` back to its limit."""
    sign, found = 1.0 if above else -1.0, 0
    for j in range(tableau.gain.size):
        if tableau.place[j] < 0 and tableau.high[j] - tableau.low[j] > EPSILON:
            slope = sign * tableau.body[row, j]
            at_high = tableau.rest[j] >= tableau.high[j] - EPSILON
            if (slope > EPSILON and not at_high) or (slope < -EPSILON and at_high):
                candidates[found] = j
                ratio[found] = abs(tableau.gain[j]) / abs(slope)
                found += 1
    return found


@compile_lazily
def _level(tableau: Tableau, variable: int) -> float:
    place = tableau.place[variable]
    return float(tableau.level[place] if place >= 0 else tableau.rest[variable])


@compile_lazily
def _round(program: JoinedProgram, tableau: Tableau, state: SearchState) -> int:
    """Round the fractional counts down, fill what is left, and keep the answer if it is the best.

    Return the column on which to divide, or -1 if all counts are whole.
    """
    columns, rows = program.value.size, program.capacity.size
    number = np.zeros(columns, np.int64)
    free, waiting = program.capacity.copy(), program.members.copy()
    branch, most = -1, 0.0
    for c in range(columns):
        level = _level(tableau, c)
        number[c] = int(np.floor(level + INTEGRAL))
        waiting[program.owner[c]] -= number[c]
        share = 0.0
        for r in range(rows):
            free[r] -= program.usage[r, c] * number[c]
            if program.capacity[r] > 0:
                share += program.usage[r, c] / program.capacity[r]
        part = level - np.floor(level)
        if INTEGRAL < part < 1.0 - INTEGRAL:
            part = min(part, 1.0 - part) * (LEAST_SHARE + share)
            if part > most:
                branch, most = c, part
    for r in range(rows):
        if free[r] < 0:
            return branch
    order = np.argsort(-tableau.gain[:columns])
    for musts in (True, False):
        for c in order:
            k = program.owner[c]
            if waiting[k] > 0 and program.must[k] == musts and (musts or program.value[c] > 0):
                fit = waiting[k]
                for r in range(rows):
                    if program.usage[r, c] > 0:
                        fit = min(fit, free[r] // program.usage[r, c])
                _take(program, number, free, c, fit)
                waiting[k] -= fit
    for k in range(program.members.size):
        if waiting[k] < 0 or (program.must[k] and waiting[k] > 0):
            return branch
    _improve(program, number, free)
    total = 0.0
    for c in range(columns):
        total += float(program.value[c]) * number[c]
    if total > state.values[KNOWN]:
        state.values[KNOWN] = total
        state.best[:] = number
        state.counts[FOUND] = 1
    return branch


@compile_lazily
def _take(program: JoinedProgram, number: Ints, free: Ints, column: int, jobs: int) -> None:
    number[column] += jobs
    for r in range(free.size):
        free[r] -= program.usage[r, column] * jobs


@compile_lazily
def _improve(program: JoinedProgram, number: Ints, free: Ints) -> None:
    """Move jobs to dearer columns of their class where there is room."""
    for c in range(number.size):
        k = program.owner[c]
        while number[c] > 0:
            best = -1
            for other in range(program.class_start[k], program.class_start[k + 1]):
                fits = program.value[other] > program.value[c]
                for r in range(free.size):
                    more = program.usage[r, other] - program.usage[r, c]
                    fits = fits and more <= free[r]
                if fits and (best < 0 or program.value[other] > program.value[best]):
                    best = other
            if best < 0:
                break
            _take(program, number, free, c, -1)
            _take(program, number, free, best, 1)
