"""The best answer of a small round that really fits on its nodes, by one program over both.

It is written without any code of the solvers: columns and shapes are enumerated from the problem,
every node has a count of shares of each size, and CP-SAT does the rest.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import combinations_with_replacement, pairwise
from typing import Final

import numpy as np
from ortools.sat.python import cp_model

from tessera.formulation.round.policy import Policy
from tessera.formulation.round.problem import Problem, placed_value
from tessera.formulation.round.statement import build_problem
from tessera.formulation.state.snapshot import Snapshot

MAX_NODES: Final = 6
"""Nodes over which a gang is divided at most. Beyond that, its value is far below others'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JointOptimum:
    """The value of the best answer found, in units of the objective, and what is proven.

    ``bound`` is at least the optimum. If ``is_placed``, the answer was assigned to nodes.
    """

    value: float
    bound: float
    is_placed: bool

    @property
    def proven(self) -> bool:
        """Return whether the value is the optimum."""
        return self.is_placed and self.bound - self.value <= 1e-6 * abs(self.bound)


def divisions(gpus: int, nodes: int, size: int) -> list[tuple[int, ...]]:
    """Return the shapes of a gang on ``nodes`` equal nodes that the checker accepts."""
    shapes = []
    for shape in combinations_with_replacement(range(1, min(gpus, size) + 1), nodes):
        if sum(shape) != gpus:
            continue
        equal = len(set(shape)) == 1
        whole = sum(share != size for share in shape) <= 1
        one_differs = gpus % nodes != 0 and max(Counter(shape).values()) == nodes - 1
        if equal or whole or one_differs:
            shapes.append(shape)
    return shapes


def find_joint_optimum(snapshot: Snapshot, policy: Policy, limit_s: float) -> JointOptimum:
    """Return the optimum of a round on a fresh cluster in which all nodes have the same size."""
    problem = build_problem(snapshot, policy)
    size = int(snapshot.nodes.gpus[0])
    model = cp_model.CpModel()
    nodes = [np.flatnonzero(snapshot.nodes.gpu_type == t) for t in range(len(snapshot.gpu_types))]
    room: dict[tuple[int, int], dict[int, cp_model.IntVar]] = defaultdict(dict)
    for kind, own in enumerate(nodes):
        ranks = []
        for node in own.tolist():
            counts = [model.new_int_var(0, size // s, "") for s in range(1, size + 1)]
            model.add(sum(s * count for s, count in enumerate(counts, 1)) <= size)
            for share, count in enumerate(counts, 1):
                room[kind, share][node] = count
            ranks.append(sum(count * (size + 1) ** s for s, count in enumerate(counts)))
        for earlier, later in pairwise(ranks):
            model.add(earlier >= later)  # nodes are alike
    runs, demand = _add_gangs(model, problem, size, [len(own) for own in nodes])
    for (kind, share), parts in demand.items():
        model.add(sum(parts) <= sum(room[kind, share].values()))
    model.maximize(sum(value * variable for variable, value, _, _ in runs))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = 2
    solver.solve(model)
    chosen = [(kind, shape) for variable, _, kind, shape in runs if solver.boolean_value(variable)]
    slots = {
        key: Counter({node: solver.value(count) for node, count in own.items()})
        for key, own in room.items()
    }
    return JointOptimum(
        value=solver.objective_value / problem.scale,
        bound=solver.best_objective_bound / problem.scale,
        is_placed=_assign(sorted(chosen, key=lambda one: -len(one[1])), slots),
    )


Run = tuple[cp_model.IntVar, int, int, tuple[int, ...]]
"""A way in which a job may run: its variable, its value, its type, and its shares."""


def _add_gangs(
    model: cp_model.CpModel, problem: Problem, size: int, nodes: list[int]
) -> tuple[list[Run], dict[tuple[int, int], list[cp_model.LinearExprT]]]:
    """Add the ways in which each job may run. Return them, and the demand for each share."""
    runs: list[Run] = []
    demand: dict[tuple[int, int], list[cp_model.LinearExprT]] = defaultdict(list)
    cells = problem.cells
    for job in range(len(problem.jobs)):
        own = []
        for column in problem.columns_of(job):
            cell = int(problem.cell[column])
            gpus, kind = int(cells.gpus[cell]), int(cells.gpu_type[cell])
            for count in range(1, min(gpus, nodes[kind], MAX_NODES) + 1):
                value = int(placed_value(problem, column, count))
                if count == int(cells.nodes[cell]):
                    value = int(problem.value[column])
                for shape in divisions(gpus, count, size):
                    if value <= 0:
                        continue
                    variable = model.new_bool_var("")
                    own.append(variable)
                    runs.append((variable, value, kind, shape))
                    for share, times in Counter(shape).items():
                        demand[kind, share].append(times * variable)
        model.add_at_most_one(own)
    return runs, demand


def _assign(
    gangs: list[tuple[int, tuple[int, ...]]], slots: dict[tuple[int, int], Counter[int]]
) -> bool:
    """Return whether each share gets a slot, those of one gang on different nodes."""
    if not gangs:
        return True
    (kind, shape), *rest = gangs
    taken: list[tuple[int, int]] = []
    for share in sorted(shape, reverse=True):
        free = [n for n, left in slots[kind, share].items() if left and n not in dict(taken)]
        if not free:
            break
        node = max(free, key=lambda n: slots[kind, share][n])
        slots[kind, share][node] -= 1
        taken.append((node, share))
    return len(taken) == len(shape) and _assign(rest, slots)
