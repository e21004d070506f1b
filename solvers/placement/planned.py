"""The room that placement leaves on nodes for planned starts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np

from tessera.formulation.moments import SAME_S
from tessera.formulation.problem import Problem
from tessera.formulation.rates import work_left
from tessera.formulation.snapshot import Snapshot
from tessera.solvers.placement.free import Spots

_NO_NODES: Final[frozenset[int]] = frozenset()


class SeatTable(Protocol):
    """The jobs that have GPUs while they are being placed."""

    seats: dict[int, tuple[int, Spots]]
    """Job -> its column and its GPUs."""
    present: dict[int, Spots]
    """Job -> the GPUs that it has now."""
    gpu_type: Sequence[int]
    """By column."""

    def jobs_on(self, node: int) -> set[int]:
        """Return the jobs that have GPUs of ``node``."""


class _Start(NamedTuple):
    """The share of a planned start on a node."""

    start_s: float
    end_s: float
    gpus: int
    job: int


class PlannedRoom:
    """The planned starts on each node, which jobs that last into them must leave their GPUs."""

    def __init__(self, snapshot: Snapshot, problem: Problem, by_plan: bool) -> None:
        """Index the planned starts by node.

        ``by_plan``, those that are due in this round also have room kept for them, and may take it
        whatever else is planned there.
        """
        self._snapshot, self._problem = snapshot, problem
        starts, nodes = snapshot.planned_starts, snapshot.planned_nodes
        self._starts_on: defaultdict[int, list[_Start]] = defaultdict(list)
        job, start_s, end_s = starts.job.tolist(), starts.start_s.tolist(), starts.end_s.tolist()
        self._due_gpus: dict[tuple[int, int], int] = {}
        for row, node, gpus in zip(
            nodes.start.tolist(), nodes.node.tolist(), nodes.gpus.tolist(), strict=True
        ):
            is_due = start_s[row] <= snapshot.now_s + SAME_S
            if by_plan and is_due:
                self._due_gpus[job[row], node] = gpus
            if by_plan or not is_due:
                self._starts_on[node].append(_Start(start_s[row], end_s[row], gpus, job[row]))
        self._jobs = frozenset(job)
        for node_starts in self._starts_on.values():
            node_starts.sort()
        table = snapshot.yields
        facts = (table.job, table.node, table.from_s, table.kept)
        self._yields = {
            (job, node): (from_s, part)
            for job, node, from_s, part in zip(*(f.tolist() for f in facts), strict=True)
        }
        self._size = snapshot.nodes.gpus.tolist()
        self._type = snapshot.nodes.gpu_type.tolist()
        self._work = work_left(snapshot) if len(starts) else np.zeros(0)
        self._ends_s: dict[tuple[int, int, int], float] = {}

    def __bool__(self) -> bool:
        """Return whether any start is planned."""
        return bool(self._starts_on)

    def closed(
        self,
        board: SeatTable,
        job: int,
        column: int,
        share: int,
        spread: int,
        nodes: Iterable[int] | None = None,
    ) -> frozenset[int]:
        """Return the nodes on which ``job`` would delay a planned start.

        It is given ``share`` GPUs on each of ``spread`` nodes. The result is of ``nodes``, or else of all
        nodes of the column's GPU type.
        """
        if not self._starts_on or self._must_start(job):
            return _NO_NODES
        end_s = self.end_s(job, column, spread)
        gpu_type = int(board.gpu_type[column])
        candidates = (
            self._starts_on
            if nodes is None
            else [node for node in nodes if node in self._starts_on]
        )
        return frozenset(
            node
            for node in candidates
            if self._type[node] == gpu_type and self._delays(board, node, job, end_s, share)
        )

    def _must_start(self, job: int) -> bool:
        """Return whether the job must start now for a promise that comes before planned starts."""
        waits = bool(self._problem.current[job] < 0)
        return waits and bool(self._problem.must_run[job]) and job not in self._jobs

    def lasts_beyond(self, job: int, column: int, spread: int) -> bool:
        """Return whether a start is planned between the end that the round counts on and the real one.

        A job ends later on a wider shape than its column's, and if it is moved within its column.
        """
        problem, snapshot = self._problem, self._snapshot
        moves = column == int(problem.current[job])
        wide = spread > int(problem.cells.nodes[problem.cell[column]])
        if not self._starts_on or not (moves or wide):
            return False
        starts = snapshot.planned_starts
        first_s, last_s = self.end_s(job, column, 0), self.end_s(job, column, spread)
        last_s += float(snapshot.jobs.restart_s[job]) if moves else 0.0
        is_between = (starts.start_s >= first_s - SAME_S) & (starts.start_s < last_s)
        if not len(snapshot.quotas):
            is_between &= starts.gpu_type == problem.cells.gpu_type[problem.cell[column]]
        return bool(is_between.any())

    def end_s(self, job: int, column: int, spread: int) -> float:
        """Return the time at which the job would end on ``column``, in seconds since 1970.

        It is spread over ``spread`` nodes, or has the column's own shape if that is 0.
        """
        key = (job, column, spread)
        if key not in self._ends_s:
            problem, jobs = self._problem, self._snapshot.jobs
            cell, cells = int(problem.cell[column]), problem.cells
            restart_s = 0.0 if int(problem.current[job]) == column else float(jobs.restart_s[job])
            rate = float(cells.rate[cell])
            if spread and spread != int(cells.nodes[cell]):
                rate = cells.rate_on(cell, spread) or rate
            lasts_s = float(self._work[job]) / rate
            lasts_s = min(restart_s + lasts_s, float(jobs.run_left_s[job]))
            self._ends_s[key] = self._snapshot.now_s + lasts_s
        return self._ends_s[key]

    def _delays(self, board: SeatTable, node: int, job: int, end_s: float, share: int) -> bool:
        """Return whether a share that is held until ``end_s`` leaves a start on ``node`` too little.

        A job never delays others with the GPUs that it is planned to have now.
        """
        if share <= self._due_gpus.get((job, node), 0):
            return False
        starts = [
            start
            for start in self._starts_on[node]
            if start.job != job and start.job not in board.seats
        ]
        if not starts or starts[0].start_s >= end_s - SAME_S:
            return False
        parts = [
            part
            for neighbour in board.jobs_on(node)
            if neighbour != job
            for part in self._parts(board, node, neighbour)
        ]
        for start in starts:
            if start.start_s >= end_s - SAME_S:
                return False
            total_gpus = share + sum(
                gpus for until_s, gpus in parts if until_s > start.start_s + SAME_S
            )
            total_gpus += sum(
                neighbour.gpus
                for neighbour in starts
                if neighbour.start_s <= start.start_s + SAME_S < neighbour.end_s
            )
            if total_gpus > self._size[node]:
                return True
        return False

    def _parts(self, board: SeatTable, node: int, job: int) -> Iterator[tuple[float, int]]:
        """Yield until when a seated job holds how many of its GPUs on ``node``."""
        column, spots = board.seats[job]
        gpus, end_s = dict(spots)[node].bit_count(), self.end_s(job, column, len(spots))
        stays = column == int(self._problem.current[job]) and spots == board.present.get(job)
        from_s, part = self._yields.get((job, node), (end_s, gpus)) if stays else (end_s, gpus)
        yield end_s, min(part, gpus)
        if part < gpus:
            yield from_s, gpus - part
