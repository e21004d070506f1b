"""The shapes on which each column may be placed, as far as packing rows must count them.

A row is true for placed answers if each of them is counted at no more than its shares weigh. A gang
may be placed on more or fewer nodes than its column has, and is then valued by ``placed_value``. So
each such shape is counted by a column of the same job, type and GPU count that is worth at least as
much: the widest one, since shares on more nodes weigh less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from tessera.formulation.base.tables import Floats, Ints, begins_group
from tessera.formulation.round.packing.shares import MAX_NODE_GPUS, Sizes
from tessera.formulation.round.problem import Problem, migration_price
from tessera.formulation.state.cells import Cells
from tessera.formulation.state.snapshot import Snapshot

ANY_SHAPE: Final = -1
"""Number of nodes that stands for all shapes that are not listed. Such a shape weighs nothing."""
MAX_LISTED_GPUS: Final = 32
"""GPUs of the largest gang of which all shapes are listed."""
LISTED_NODES: Final = 4
"""Numbers of nodes that are listed for larger gangs, from the fewest on."""
ROUNDING: Final = 2.0
"""Solver integers by which a column may be worth less than a placement that it counts.

Values and restart costs are rounded, so a column and the same shape valued by its rate differ by as
much as that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeClass:
    """Columns that packing rows count alike: their type, their GPUs, and the nodes they stand for."""

    gpu_type: int
    gpus: int
    nodes: tuple[int, ...]  # rising; with ANY_SHAPE, the column weighs nothing


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShapeClasses:
    """The class of each column, int64[columns]; it is -1 for types without packing rows."""

    classes: tuple[ShapeClass, ...]
    of_column: Ints
    sizes: dict[int, Sizes]  # of the types with packing rows
    count: dict[int, dict[int, int]]  # type -> node size -> number of schedulable nodes


def node_counts(snapshot: Snapshot, gpu_type: int) -> dict[int, int]:
    """Return the number of schedulable nodes of a type by their GPUs."""
    own = snapshot.nodes.schedulable & (snapshot.nodes.gpu_type == gpu_type)
    sizes, counts = np.unique(snapshot.nodes.gpus[own], return_counts=True)
    return dict(zip(sizes.tolist(), counts.tolist(), strict=True))


def packable_types(snapshot: Snapshot) -> frozenset[int]:
    """Return the types whose nodes are small enough for packing rows."""
    size = snapshot.node_size()
    return frozenset(np.flatnonzero((size > 0) & (size <= MAX_NODE_GPUS)).tolist())


def classify_shapes(
    snapshot: Snapshot, problem: Problem, types: frozenset[int], present: dict[int, int]
) -> ShapeClasses:
    """Return the classes of all columns of ``types``, each of which must be packable.

    ``present`` maps each job that has GPUs to the number of nodes that it is on.
    """
    counts = {kind: node_counts(snapshot, kind) for kind in sorted(types)}
    names: dict[ShapeClass, int] = {}
    of_column = np.full(len(problem.cell), -1, dtype=np.int64)
    for group in _groups(problem, types):
        cell = problem.cell[group.columns[0]]
        kind, gpus = int(problem.cells.gpu_type[cell[0]]), int(problem.cells.gpus[cell[0]])
        most = min(gpus, sum(counts[kind].values()))
        nodes = _listed(problem, cell, gpus, most)
        stands = _absorbers(problem, group, nodes, present)
        for pattern in stands if len(stands) == 1 else np.unique(stands, axis=0):
            same = (stands == pattern).all(axis=1)
            for place in range(group.columns.shape[1]):
                own = tuple(
                    n for n, who in zip(nodes, pattern.tolist(), strict=True) if who == place
                )
                unlisted = any(n + 1 not in nodes and n < most for n in own)
                if unlisted or (pattern == _NO_COLUMN).any():
                    own = (ANY_SHAPE, *own)
                own = own or (int(problem.cells.nodes[cell[place]]),)
                made = ShapeClass(gpu_type=kind, gpus=gpus, nodes=own)
                number = names.setdefault(made, len(names))
                of_column[group.columns[same, place]] = number
    return ShapeClasses(
        classes=tuple(names),
        of_column=of_column,
        sizes={kind: tuple(sorted(count)) for kind, count in counts.items()},
        count=counts,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Group:
    """Columns of jobs that have the same Cells of one type and GPU count.

    ``columns`` is int64[jobs, Cells]. ``jobs`` is int64[jobs].
    """

    jobs: Ints
    columns: Ints


def _groups(problem: Problem, types: frozenset[int]) -> list[_Group]:
    """Return the columns of ``types`` by job, type and GPU count; jobs with equal Cells together."""
    cells, cell, job = problem.cells, problem.cell, problem.column_job
    concerned = np.flatnonzero(np.isin(cells.gpu_type[cell], list(types)))
    if not len(concerned):
        return []
    own = cell[concerned]
    first = np.flatnonzero(begins_group(job[concerned], cells.gpu_type[own], cells.gpus[own]))
    last = np.append(first[1:], len(concerned))
    by_cells: dict[tuple[int, ...], list[int]] = {}
    listed = own.tolist()
    for start, end in zip(first.tolist(), last.tolist(), strict=True):
        by_cells.setdefault(tuple(listed[start:end]), []).append(start)
    groups = []
    for rows, starts in by_cells.items():
        columns = concerned[np.array(starts)[:, None] + np.arange(len(rows))]
        groups.append(_Group(jobs=job[columns[:, 0]], columns=columns))
    return groups


def _listed(problem: Problem, cell: Ints, gpus: int, most: int) -> list[int]:
    """Return the numbers of nodes that are listed for a gang, rising.

    Between these, and beyond the last, rates only fall.
    """
    if gpus <= MAX_LISTED_GPUS:
        return list(range(1, most + 1))
    nodes = problem.cells.nodes
    fewest = int(nodes[cell].min())
    known = {int(nodes[row]) for row in problem.cells.rows_like(int(cell[0]))}
    close = set(range(fewest, fewest + LISTED_NODES))
    return sorted(n for n in known | close if n <= most)


def _absorbers(problem: Problem, group: _Group, nodes: list[int], present: dict[int, int]) -> Ints:
    """Return which of a job's columns stands for each number of nodes, int64[jobs, nodes].

    It is ``_NO_COLUMN`` if no column is worth as much as the gang placed there, and ``_WAITING`` if
    waiting is, which uses nothing.
    """
    own = problem.cells.nodes[problem.cell[group.columns[0]]]
    worth = problem.value[group.columns].astype(np.float64)
    placed = _placed_values(problem, group, worth, nodes, present)
    count = np.array(nodes)
    # Of the columns on no more nodes, the widest comes first; of the others, the narrowest.
    narrow = own[:, None] <= count
    preference = np.where(narrow, own[:, None] + _WIDEST, _WIDEST - own[:, None])
    enough = worth[:, :, None] + ROUNDING >= placed[:, None, :]
    preferred = np.where(enough, preference, 0)
    stands: Ints = np.where(preferred.any(axis=1), preferred.argmax(axis=1), _NO_COLUMN)
    may_wait = ~problem.must_run & (np.diff(problem.idle_start) == 0)
    stands[(placed <= 0) & may_wait[group.jobs][:, None]] = _WAITING
    return stands


_WIDEST: Final = 1 << 32
"""A number of nodes above that of any shape."""
_NO_COLUMN: Final = -1
_WAITING: Final = -2


def _placed_values(
    problem: Problem, group: _Group, worth: Floats, nodes: list[int], present: dict[int, int]
) -> Floats:
    """Return the most that each job is worth if it is placed on these nodes, float64[jobs, nodes].

    ``worth`` is that of its columns, float64[jobs, Cells]. A job that keeps its Cell pays for a
    move, except on the nodes that it has.
    """
    cell = problem.cell[group.columns[0]]
    share = np.array(_rate_shares(problem.cells, cell.tolist(), nodes))
    placed = np.where(worth > 0, worth, 0.0)[:, :, None] * share
    best = np.maximum(worth.max(axis=1), 0.0)  # the most that a faster shape counts
    placed = np.minimum(placed, best[:, None, None])
    placed += np.where(worth > 0, 0.0, worth)[:, :, None]  # a cost does not shrink with the rate
    stays = problem.current[group.jobs][:, None] == group.columns
    for k, place in zip(*np.nonzero(stays), strict=True):
        job, column = int(group.jobs[k]), int(group.columns[k, place])
        for at, n in enumerate(nodes):
            if n not in (present.get(job), int(problem.cells.nodes[cell[place]])):
                placed[k, place, at] -= migration_price(problem, job, column, n)
    most: Floats = placed.max(axis=1)
    return most


def _rate_shares(cells: Cells, rows: list[int], nodes: list[int]) -> list[list[float]]:
    """Return the rate at which each row is placed on these nodes, as a share of its own rate."""
    fastest: dict[int, float] = {}
    for row in cells.rows_like(rows[0]):  # by falling rate
        fastest.setdefault(int(cells.nodes[row]), float(cells.rate[row]))
    shares = []
    for row in rows:
        own, rate = int(cells.nodes[row]), float(cells.rate[row])
        shares.append(
            [
                1.0 if n == own else fastest.get(n, inferred) / rate
                for n, inferred in zip(nodes, cells.rates_on(row, nodes), strict=True)
            ]
        )
    return shares
