"""The outcome of placement, and its construction from a board."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from tessera.formulation.answer.placement import Placement
from tessera.formulation.answer.solution import Solution, SolveStatus
from tessera.formulation.base.resources import HOST_RESOURCES, amounts_of
from tessera.formulation.base.texts import Name, Text, join
from tessera.solvers.placement.blocks import carve_share
from tessera.solvers.placement.board import Board
from tessera.solvers.placement.free import Layout
from tessera.solvers.placement.search import SeatChange


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementResult:
    """A solution with its placement, changed where its Cells found no place."""

    solution: Solution
    placement: Placement
    unplaced: dict[int, Text] = field(default_factory=dict)
    """A map from a job to the reason why its chosen Cell could not be placed.

    The job runs another Cell, or waits."""
    degraded: frozenset[int] = frozenset()
    """Jobs on a worse shape (more nodes) than their Cell's."""
    wanted: dict[int, int] = field(default_factory=dict)
    """A map from a job to the column that was chosen for it, where the solution's now differs."""


def make_result(
    board: Board, solution: Solution, wanted: dict[int, int], reasons: dict[int, Text]
) -> PlacementResult:
    """Return the outcome that ``board`` holds.

    ``wanted`` is the solver's choice. ``reasons`` gives, for each job, the reason why it failed.
    """
    choice = board.choice()
    objective = int(board.problem.value[choice[choice >= 0]].sum())
    status = solution.status
    if status is SolveStatus.OPTIMAL and objective != solution.objective:
        status = SolveStatus.FEASIBLE
    if not np.array_equal(choice, solution.choice):
        solution = replace(solution, choice=choice, objective=objective, status=status)
    has = choice.tolist()
    denied = {job: column for job, column in wanted.items() if has[job] != column}
    return PlacementResult(
        solution=solution,
        placement=board.placement(),
        unplaced={job: reasons[job] for job in sorted(denied)},
        degraded=board.degraded(),
        wanted=denied,
    )


def explain_change(
    board: Board, change: SeatChange, job: int, wanted: dict[int, int], reasons: dict[int, Text]
) -> None:
    """Add to ``reasons`` why other jobs lose the columns ``wanted`` for them to ``job``."""
    name = Name(board.problem.jobs[job], board.snapshot.jobs.tenant[job])
    needs = "must run, needs" if board.must_run[job] else "is worth more, needs"
    for other, seat in change.seats.items():
        if seat is not None and seat[0] != wanted[other]:
            reasons.setdefault(other, join("", (name, f", which {needs} its GPUs")))


def describe_shortage(board: Board, column: int) -> str:
    """Return, in numbers, the reason why the Cell of ``column`` finds no place at its own shape now."""
    kind, gpus, free = board.gpu_type[column], board.gpus[column], board.free
    name, nodes = board.snapshot.gpu_types[kind].name, _nodes_for(board, column)
    if free.total[kind] < gpus:
        return f"the job needs {gpus} x {name}, but only {free.total[kind]} are free"
    left = sum(free.mask[node].bit_count() for node in nodes)
    if left < gpus:
        return f"the job needs {gpus} x {name} on nodes that it may run on, but only {left} are free there"
    layout = free.layouts(kind, gpus, board.nodes[column])[0]
    shortage_of_rest = _shortage_of_rest(board, column, layout)
    if shortage_of_rest:
        return shortage_of_rest
    most = max(free.mask[node].bit_count() for node in nodes)
    if layout.count == 0:
        need = f"the job needs {gpus} free GPUs on one {name} node"
        if most < gpus:
            return f"{need}, but the freest node has {most}"
        return f"{need}, and the freest node has {most}, but not in aligned blocks"
    if not layout.whole:
        there = sum(carve_share(free.mask[node], layout.each) > 0 for node in nodes)
        rest = f" and {layout.rest} GPUs on one more" if layout.rest else ""
        return (
            f"the job needs {layout.each} free GPUs on each of {layout.count} {name} nodes{rest}, but"
            f" {there} have them"
        )
    whole = sum(free.mask[node].bit_count() == free.size[node] == layout.each for node in nodes)
    rest = f" and {layout.rest} GPUs on one more" if layout.rest else ""
    return (
        f"the job needs {layout.count} wholly free {name} nodes of {layout.each} GPUs{rest},"
        f" but {whole} are wholly free"
    )


def _nodes_for(board: Board, column: int) -> list[int]:
    """Return the schedulable nodes of the column's type that its job may run on with it."""
    avoided = board.avoided(board.job_of(column), column)
    return [node for node in board.free.of_type[board.gpu_type[column]] if node not in avoided]


def _shortage_of_rest(board: Board, column: int, layout: Layout) -> str:
    """Return the other resources that nodes with enough free GPUs lack, or "" if they lack none."""
    free, demand = board.free, board.demand(column)
    if demand is None:
        return ""
    share = demand.on_node(layout.each or layout.rest)
    short = sum(
        carve_share(free.mask[node], share.gpus) > 0 and not free.fits(node, share)
        for node in _nodes_for(board, column)
    )
    if not short:
        return ""
    needs = " and ".join(
        f"{amount} {resource.noun}"
        for resource, amount in zip(HOST_RESOURCES, amounts_of(share), strict=True)
    )
    return (
        f"the job needs {needs} in addition to {share.gpus} GPUs on a node; nodes that have the GPUs"
        f" free but lack the rest: {short}"
    )
