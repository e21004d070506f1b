"""Columns and packings of nodes in one integer program, so that what is chosen surely fits.

Nodes of one size on which nothing runs are filled by patterns, and it is counted how many have each
pattern. Nodes with running jobs are modelled one by one: a job stays where it is, or its GPUs are
free for others, and it pays for a move. CP-SAT solves the program over the columns that can be part of
a better answer at the prices.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from ortools.sat.python import cp_model

from tessera.formulation.answer.placement import Gang
from tessera.formulation.answer.solution import SolveStatus
from tessera.formulation.base.tables import Floats, Ints
from tessera.formulation.round.packing.shapes import ShapeClasses
from tessera.formulation.round.packing.shares import shares_of
from tessera.formulation.round.problem import Problem, RowKind, migration_price, placed_value
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.base import Budget
from tessera.solvers.exact.cpsat.solver import STATUS, solve_while_wanted, solver_of
from tessera.solvers.exact.prices import price_problem
from tessera.solvers.packing.separate import MAX_LISTED_WAYS, patterns_of

MAX_CORE_COLUMNS: Final = 4000
"""Columns of the largest program. If more could matter, those that lose most are left out."""
MAX_RUNNING_NODES: Final = 128
"""Nodes with running jobs that are modelled one by one; with more, there is no program."""
WORK: Final = 1.0
"""Deterministic seconds of a program."""
NAME: Final = "joint packing"
"""Name under which the work is recorded."""

Shares = tuple[tuple[int, int], ...]
"""The nodes of a gang and the number of its GPUs on each, by rising node."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Joint:
    """A choice (int64[jobs]), and the shares of the jobs that get other GPUs.

    ``work`` is the limit that the search ran under; it is 0 if a clock cut it short, and then there
    is no choice.
    """

    work: float
    choice: Ints | None = None
    shares: dict[int, Shares] = field(default_factory=dict)


def solve_joint(
    snapshot: Snapshot,
    problem: Problem,
    classes: ShapeClasses,
    now: Mapping[int, Gang],
    prices: Floats,
    least: float,
    budget: Budget,
) -> Joint:
    """Return the best choice found that fits on the nodes of the types of ``classes``.

    ``now`` are the present gangs, ``prices`` the shadow prices, float64[rows], and ``least`` the
    value of a known placed answer. Avoided nodes, CPU cores and host memory are not modelled, and
    blocks are not: placement decides whether the shares can be had.
    """
    limit = budget.work.get(NAME, WORK)
    if limit <= 0 or budget.expired():
        return Joint(work=0.0)
    core = _core(problem, prices, least)
    model = _Model(snapshot, problem, classes, now, core, least)
    if model.too_large:
        return Joint(work=limit)
    solver = solver_of(budget)
    solver.parameters.max_deterministic_time = limit
    solver.parameters.relative_gap_limit = budget.gap / 10
    status = STATUS.get(solve_while_wanted(solver, model.model, budget))
    proven = status in (SolveStatus.OPTIMAL, SolveStatus.INFEASIBLE)
    if not proven and solver.response_proto.deterministic_time < limit:
        return Joint(work=0.0)  # the clock ended it, so it cannot be repeated
    if status not in (SolveStatus.OPTIMAL, SolveStatus.FEASIBLE):
        return Joint(work=limit)
    choice, shares = model.read(solver)
    return Joint(work=limit, choice=choice, shares=shares)


def _core(problem: Problem, prices: Floats, least: float) -> Ints:
    """Return the columns that an answer of more than ``least`` may have, rising."""
    priced = price_problem(problem, prices)
    job = problem.column_job
    loss = priced.best[job] - priced.margin
    room = priced.total + priced.slack - least
    core = np.flatnonzero(loss <= room)
    if len(core) > MAX_CORE_COLUMNS:
        core = np.sort(core[np.argsort(loss[core], kind="stable")[:MAX_CORE_COLUMNS]])
    return core


class _Model:
    """The program: variables of columns, of moves, of ways to divide gangs, and of patterns."""

    def __init__(
        self,
        snapshot: Snapshot,
        problem: Problem,
        classes: ShapeClasses,
        now: Mapping[int, Gang],
        core: Ints,
        least: float,
    ) -> None:
        self._snapshot, self._problem, self._classes, self._now = snapshot, problem, classes, now
        self.model = cp_model.CpModel()
        self._runs: dict[int, cp_model.IntVar] = {}  # column -> it is chosen, on new GPUs
        self._stays: dict[int, cp_model.IntVar] = {}  # job -> it stays on its column and its GPUs
        self._gain: list[tuple[cp_model.IntVar, int]] = []
        self._supply: defaultdict[tuple[int, int], list[tuple[cp_model.IntVar, int]]] = defaultdict(
            list
        )
        self._ways: dict[tuple[int, int, int], dict[tuple[int, ...], cp_model.IntVar]] = {}
        self._filled: dict[tuple[int, int], dict[tuple[int, ...], cp_model.IntVar]] = {}
        self._mixed: dict[int, dict[int, cp_model.IntVar]] = {}
        self._fresh: dict[tuple[int, int], list[int]] = {}
        self._add_columns(core)
        self._busy = self._running_nodes()
        self.too_large = len(self._busy) > MAX_RUNNING_NODES
        if not self.too_large:
            self._add_rows(core)
            self._add_nodes()
            self._add_demand()
            total = sum(value * variable for variable, value in self._gain)
            self.model.add(total >= math.floor(least) + 1)
            self.model.maximize(total)

    def _add_columns(self, core: Ints) -> None:
        problem = self._problem
        by_job: defaultdict[int, list[cp_model.IntVar]] = defaultdict(list)
        for column in core.tolist():
            job = int(np.searchsorted(problem.job_start, column, side="right")) - 1
            value, kind = int(problem.value[column]), self._kind(column)
            stays = int(problem.current[job]) == column and job in self._now
            if stays:
                worth = self._worth_in_place(job, column)
                self._stays[job] = self._chosen(f"stay {job}", by_job[job], worth)
                value -= math.ceil(migration_price(problem, job, column))
            if not stays or (kind in self._classes.sizes and problem.movable[job]):
                self._runs[column] = self._chosen(f"run {column}", by_job[job], value)
        for job in np.flatnonzero(problem.must_run).tolist():
            by_job.setdefault(job, [])
        for job, own in by_job.items():
            if problem.must_run[job]:
                self.model.add_exactly_one(own)
            elif len(own) > 1:
                self.model.add_at_most_one(own)
        self._of_job = by_job

    def _chosen(self, name: str, own: list[cp_model.IntVar], value: int) -> cp_model.IntVar:
        variable = self.model.new_bool_var(name)
        own.append(variable)
        self._gain.append((variable, value))
        return variable

    def _worth_in_place(self, job: int, column: int) -> int:
        nodes = self._now[job].nodes
        if nodes == int(self._problem.cells.nodes[self._problem.cell[column]]):
            return int(self._problem.value[column])
        return math.floor(placed_value(self._problem, column, nodes))

    def _kind(self, column: int) -> int:
        return int(self._problem.cells.gpu_type[self._problem.cell[column]])

    def _running_nodes(self) -> dict[int, list[tuple[cp_model.IntVar, int]]]:
        """Return the nodes of the packed types on which jobs may stay: (it stays, its GPUs)."""
        busy: defaultdict[int, list[tuple[cp_model.IntVar, int]]] = defaultdict(list)
        for job, stays in self._stays.items():
            if self._kind(int(self._problem.current[job])) in self._classes.sizes:
                for node, gpus in self._now[job].members:
                    busy[node].append((stays, len(gpus)))
        return busy

    def _add_rows(self, core: Ints) -> None:
        """Add the coupling rows. Columns that are not in the program are not chosen."""
        problem = self._problem
        terms: defaultdict[int, list[cp_model.LinearExpr | int]] = defaultdict(list)
        job_of = problem.column_job
        for column in core.tolist():
            job = int(job_of[column])
            own = [self._runs[column]] if column in self._runs else []
            if int(problem.current[job]) == column and job in self._stays:
                own.append(self._stays[job])
            for row, amount in problem.usage_of(column).items():
                terms[row] += [amount * variable for variable in own]
        for job in np.unique(problem.idle_job).tolist():
            for row, amount in problem.idle_usage_of(job).items():
                terms[row].append(amount * (1 - sum(self._of_job.get(job, []))))
        for row, kind in enumerate(r.kind for r in problem.rows):
            if kind is RowKind.CHANGES:
                terms[row] += [
                    self._runs[int(problem.current[job])]
                    for job in self._stays
                    if int(problem.current[job]) in self._runs
                ]
        for row, parts in terms.items():
            self.model.add(sum(parts) <= problem.rows[row].capacity)

    def _add_nodes(self) -> None:
        """Add what fresh nodes, by their size, and nodes with running jobs can hold."""
        nodes = self._snapshot.nodes
        for node in np.flatnonzero(nodes.schedulable).tolist():
            kind, size = int(nodes.gpu_type[node]), int(nodes.gpus[node])
            if kind not in self._classes.sizes:
                continue
            if node not in self._busy:
                self._fresh.setdefault((kind, size), []).append(node)
                continue
            own = {
                share: self.model.new_int_var(0, size // share, f"node {node} share {share}")
                for share in range(1, size + 1)
            }
            taken = sum(gpus * stays for stays, gpus in self._busy[node])
            self.model.add(sum(s * count for s, count in own.items()) + taken <= size)
            self._mixed[node] = own
            for share, count in own.items():
                self._supply[kind, share].append((count, 1))
        for (kind, size), fresh in self._fresh.items():
            filled = {
                pattern: self.model.new_int_var(0, len(fresh), f"{kind} {pattern}")
                for pattern in patterns_of(size)
            }
            self.model.add(sum(filled.values()) <= len(fresh))
            self._filled[kind, size] = filled
            for pattern, count in filled.items():
                for share, times in enumerate(pattern):
                    if times:
                        self._supply[kind, share].append((count, times))

    def _add_demand(self) -> None:
        """Add the ways in which chosen gangs are divided, and that nodes hold all shares."""
        cells, cell = self._problem.cells, self._problem.cell
        chosen: defaultdict[tuple[int, int, int], list[cp_model.IntVar]] = defaultdict(list)
        for column, runs in self._runs.items():
            kind = self._kind(column)
            if kind in self._classes.sizes:
                row = int(cell[column])
                chosen[kind, int(cells.gpus[row]), int(cells.nodes[row])].append(runs)
        demand: defaultdict[tuple[int, int], list[cp_model.LinearExpr]] = defaultdict(list)
        for key, jobs in chosen.items():
            kind, gpus, nodes = key
            ways = shares_of(gpus, nodes, self._classes.sizes[kind])[:MAX_LISTED_WAYS]
            own = {way: self.model.new_int_var(0, len(jobs), f"{key} as {way}") for way in ways}
            self._ways[key] = own
            self.model.add(sum(own.values()) == sum(jobs))
            for way, count in own.items():
                for share in set(way):
                    demand[kind, share].append(way.count(share) * count)
        for slot, parts in demand.items():
            supply = sum(times * count for count, times in self._supply[slot])
            self.model.add(sum(parts) <= supply)

    def read(self, solver: cp_model.CpSolver) -> tuple[Ints, dict[int, Shares]]:
        """Return the choice, and the shares of the jobs that get other GPUs, as far as they fit."""
        choice = np.full(len(self._problem.jobs), -1, dtype=np.int64)
        job_of = self._problem.column_job
        for job, stays in self._stays.items():
            if solver.boolean_value(stays):
                choice[job] = self._problem.current[job]
        gangs: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
        cells, cell = self._problem.cells, self._problem.cell
        for column, runs in self._runs.items():
            if solver.boolean_value(runs):
                choice[job_of[column]] = column
                row = int(cell[column])
                gangs[self._kind(column), int(cells.gpus[row]), int(cells.nodes[row])].append(
                    int(job_of[column])
                )
        slots = self._slots(solver)
        wanted: list[tuple[int, tuple[int, ...], int]] = []
        for key, own in self._ways.items():
            jobs = gangs[key]
            for way, count in own.items():
                for _ in range(solver.value(count)):
                    wanted.append((key[0], way, jobs.pop(0)))
        # Gangs on most nodes come first, since each of their shares needs another node.
        wanted.sort(key=lambda one: (-len(one[1]), -sum(one[1]), one[2]))
        shares: dict[int, Shares] = {}
        for kind, way, job in wanted:
            taken = slots.take(kind, way)
            if taken is not None:
                shares[job] = taken
        return choice, shares

    def _slots(self, solver: cp_model.CpSolver) -> _Slots:
        nodes = self._snapshot.nodes
        slots = _Slots(nodes.gpus.tolist())
        for node, own in self._mixed.items():
            for share, count in own.items():
                slots.add(int(nodes.gpu_type[node]), share, node, solver.value(count))
        for (kind, size), filled in self._filled.items():
            # Whole nodes are next to one another, since their order is that of the racks.
            left = sorted(self._fresh[kind, size], key=lambda node: (nodes.rack[node], node))
            for pattern, count in sorted(
                filled.items(), reverse=True, key=lambda one: one[0][::-1]
            ):
                for _ in range(solver.value(count)):
                    node = left.pop(0)
                    for share, times in enumerate(pattern):
                        slots.add(kind, share, node, times)
        return slots


class _Slots:
    """Room for shares: type and share -> node -> how many. ``size`` has the GPUs of each node."""

    def __init__(self, size: list[int]) -> None:
        self._size = size
        self._room: defaultdict[tuple[int, int], dict[int, int]] = defaultdict(dict)

    def add(self, kind: int, share: int, node: int, times: int) -> None:
        """Add room for ``times`` shares."""
        if times and share:
            self._room[kind, share][node] = times

    def take(self, kind: int, way: tuple[int, ...]) -> Shares | None:
        """Take room for a gang with one share on each of several nodes, or None if it does not suffice."""
        taken: dict[int, int] = {}
        for share in way:
            room = self._room[kind, share]
            free = [node for node in room if node not in taken]
            if not free:
                for node, gpus in taken.items():
                    self.add(kind, gpus, node, 1 + self._room[kind, gpus].get(node, 0))
                return None
            node = max(free, key=lambda n: (self._size[n] == share, room[n], -n))
            taken[node] = share
            room[node] -= 1
            if not room[node]:
                del room[node]
        return tuple(sorted(taken.items()))
