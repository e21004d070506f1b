"""The check that packing rows are true: that no placement of the round breaks them.

A wrong row would make a false bound. So the check shares no code with the modules that make rows,
and follows the rules of ``tessera.formulation.answer.check`` directly: every set of shares that fits on a
node, and every shape of a gang that a placement may have, are listed.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Final

import numpy as np

from tessera.formulation.answer.check import Violation
from tessera.formulation.answer.placement import Gang
from tessera.formulation.round.problem import Problem, RowKind, migration_price, placed_value
from tessera.formulation.state.snapshot import Snapshot

RULE: Final = "packing row"
UNITS: Final = 2
"""Solver integers by which a placed job may exceed the column that counts it, due to rounding."""
_SUBJECT: Final = re.compile(
    r"(.+): shares of (\d+(?:-\d+)? count \d+(?:, \d+(?:-\d+)? count \d+)*)"
)


def find_false_rows(
    snapshot: Snapshot, problem: Problem, now: Mapping[int, Gang]
) -> list[Violation]:
    """Return a violation for each packing row that a placement of the round may break.

    ``now`` are the present gangs. A row is true if no node holds more than the row allows it, and
    if each shape of each gang weighs at least what some column of its job uses that is worth as much.
    """
    rows = [r for r, row in enumerate(problem.rows) if row.kind is RowKind.PACKING]
    if not rows:
        return []
    broken, kinds = [], {kind.name: k for k, kind in enumerate(snapshot.gpu_types)}
    of_kind: defaultdict[int, list[tuple[int, tuple[int, ...]]]] = defaultdict(list)
    for row in rows:
        name = problem.rows[row].name
        stated = _SUBJECT.fullmatch(problem.rows[row].subject)
        if stated is None or stated[1] not in kinds:
            broken.append(Violation(rule=RULE, detail=f"{name} does not state its weights"))
            continue
        kind, weight = kinds[stated[1]], _weights(stated[2])
        held = sum(_most(size, weight) for size in _sizes(snapshot, kind))
        if held > problem.rows[row].capacity:
            detail = f"{name}: nodes hold {held}, but the capacity is {problem.rows[row].capacity}"
            broken.append(Violation(rule=RULE, detail=detail))
        of_kind[kind].append((row, weight))
    for kind, own in sorted(of_kind.items()):
        broken.extend(_undercounted(snapshot, problem, now, kind, own))
    return broken


def _weights(spans: str) -> tuple[int, ...]:
    """Return the weight of each share from 0 GPUs on."""
    weight: dict[int, int] = {}
    for span in spans.split(", "):
        sizes, _, amount = span.partition(" count ")
        first, _, last = sizes.partition("-")
        weight |= dict.fromkeys(range(int(first), int(last or first) + 1), int(amount))
    return tuple(weight.get(share, 0) for share in range(max(weight) + 1))


def _sizes(snapshot: Snapshot, kind: int) -> list[int]:
    nodes = snapshot.nodes
    sizes: list[int] = nodes.gpus[nodes.schedulable & (nodes.gpu_type == kind)].tolist()
    return sizes


@lru_cache(maxsize=1 << 12)
def _most(size: int, weight: tuple[int, ...], largest: int = 1 << 30) -> int:
    """Return the most that shares of at most ``largest`` GPUs on a node of ``size`` GPUs weigh."""
    return max(
        (
            weight[share] + _most(size - share, weight, share)
            for share in range(1, min(size, largest, len(weight) - 1) + 1)
        ),
        default=0,
    )


@lru_cache(maxsize=1 << 14)
def _least(gpus: int, nodes: int, sizes: frozenset[int], weight: tuple[int, ...]) -> int | None:
    """Return the least weight of the allowed shapes of a gang, or None if there is no such shape."""
    least: int | None = None
    for shape in _divisions(gpus, nodes, max(sizes)):
        times = Counter(shape)
        partial = sum(n for share, n in times.items() if share not in sizes)
        differs = gpus % nodes != 0 and max(times.values()) == nodes - 1
        if len(times) == 1 or partial <= 1 or differs:
            total = sum(weight[s] if s < len(weight) else 0 for s in shape)
            least = total if least is None else min(least, total)
    return least


def _divisions(gpus: int, nodes: int, largest: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to write ``gpus`` as a sum of ``nodes`` falling shares of at most ``largest``."""
    if nodes == 0:
        if gpus == 0:
            yield ()
        return
    for share in range(min(largest, gpus - nodes + 1), 0, -1):
        if share * nodes < gpus:
            return
        for rest in _divisions(gpus - share, nodes - 1, share):
            yield (share, *rest)


def _undercounted(
    snapshot: Snapshot,
    problem: Problem,
    now: Mapping[int, Gang],
    kind: int,
    rows: list[tuple[int, tuple[int, ...]]],
) -> Iterator[Violation]:
    """Yield a violation for each row that some shape of a gang of this type does not weigh enough for."""
    cells, cell = problem.cells, problem.cell
    sizes = _sizes(snapshot, kind)
    amounts = {row: np.zeros(len(cell), dtype=np.int64) for row, _ in rows}
    for row, amount in amounts.items():
        entries = np.flatnonzero(problem.row == row)
        amount[problem.usage_column[entries]] = problem.amount[entries]
    counted = np.flatnonzero(np.logical_or.reduce([amount > 0 for amount in amounts.values()]))
    job_of = problem.column_job
    seen: set[tuple[int, int]] = set()
    for column in counted.tolist():
        job, gpus = int(job_of[column]), int(cells.gpus[cell[column]])
        if int(cells.gpu_type[cell[column]]) != kind or (job, gpus) in seen:
            continue
        seen.add((job, gpus))
        own = [
            c
            for c in problem.columns_of(job)
            if cells.gpu_type[cell[c]] == kind and cells.gpus[cell[c]] == gpus
        ]
        nodes = now[job].nodes if job in now else 0
        for count in range(1, min(gpus, len(sizes)) + 1):
            worth = max(_worth(problem, job, c, count, nodes) for c in own)
            if worth <= 0 and not (problem.must_run[job] or problem.idle_usage_of(job)):
                continue  # it may as well wait, which uses nothing
            enough = [c for c in own if problem.value[c] + UNITS >= worth]
            for row, weight in rows:
                uses = min((int(amounts[row][c]) for c in enough), default=None)
                if uses == 0:
                    continue
                least = _least(gpus, count, frozenset(sizes), weight)
                if least is not None and (uses is None or uses > least):
                    name = problem.rows[row].name
                    detail = f"{name}: {problem.jobs[job]} on {count} nodes weighs {least} only"
                    yield Violation(rule=RULE, detail=detail)


def _worth(problem: Problem, job: int, column: int, count: int, present: int) -> float:
    """Return what a job is worth if ``column`` is placed on ``count`` nodes.

    A job that keeps its Cell on another number of nodes than ``present`` pays for the move.
    """
    if int(problem.cells.nodes[problem.cell[column]]) == count:
        return float(problem.value[column])
    worth = placed_value(problem, column, count)
    if int(problem.current[job]) == column and count != present:
        worth -= migration_price(problem, job, column, count)
    return worth
