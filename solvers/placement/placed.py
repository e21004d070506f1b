"""The outcome of placement, and its construction from a board."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from tessera.formulation.placement import Placement
from tessera.formulation.solution import Solution, SolveStatus
from tessera.solvers.placement.blocks import carve
from tessera.solvers.placement.board import Board
from tessera.solvers.placement.free import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A solution with its placement, changed where its Cells found no place."""

    solution: Solution
    placement: Placement
    unplaced: dict[int, str] = field(default_factory=dict)
    """A map from a job to why its chosen Cell could not be placed.

    The job runs another Cell, or waits."""
    degraded: frozenset[int] = frozenset()
    """Jobs on a worse shape (more nodes) than their Cell's."""
    wanted: dict[int, int] = field(default_factory=dict)
    """A map from a job to the column that was chosen for it, where the solution's now differs."""


def outcome(
    board: Board, solution: Solution, wanted: dict[int, int], reasons: dict[int, str]
) -> Placed:
    """Return the outcome that ``board`` holds.

    ``wanted`` is the solver's choice. ``reasons`` gives, for each job, why that choice failed.
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
    return Placed(
        solution=solution,
        placement=board.placement(),
        unplaced={job: reasons[job] for job in sorted(denied)},
        degraded=board.degraded(),
        wanted=denied,
    )


def shortage(board: Board, column: int) -> str:
    """Return, in numbers, why the Cell of ``column`` finds no place at its own shape now."""
    kind, gpus, free = board.gpu_type[column], board.gpus[column], board.free
    name = board.snapshot.gpu_types[kind].name
    if free.total[kind] < gpus:
        return f"needs {gpus} free GPUs of type {name}; {free.total[kind]} are free"
    layout = free.layouts(kind, gpus)[0]
    beside = _short_beside_gpus(board, column, layout)
    if beside:
        return beside
    most = max(free.mask[node].bit_count() for node in free.of_type[kind])
    if layout.count == 0:
        need = f"needs {gpus} free GPUs on one {name} node; the freest has {most}"
        return need if most < gpus else f"{need}, but not in aligned blocks"
    whole = sum(
        free.mask[node].bit_count() == free.size[node] == layout.each for node in free.of_type[kind]
    )
    rest = f" and {layout.rest} GPUs on one more" if layout.rest else ""
    return (
        f"needs {layout.count} wholly free {name} nodes of {layout.each} GPUs{rest};"
        f" {whole} are wholly free"
    )


def _short_beside_gpus(board: Board, column: int, layout: Layout) -> str:
    """Return what else nodes lack that have the GPUs free; empty if there are no such nodes."""
    free, demand = board.free, board.demand(column)
    if demand is None:
        return ""
    share = demand.on_node(layout.each or layout.rest)
    short = sum(
        carve(free.mask[node], share.gpus) > 0 and not free.fits(node, share)
        for node in free.of_type[board.gpu_type[column]]
    )
    if not short:
        return ""
    return (
        f"needs {share.cpus} CPU cores and {share.host_bytes} bytes of host memory beside {share.gpus} GPUs"
        f" on a node; nodes that have the GPUs free but not these: {short}"
    )
