"""The room that placement leaves on nodes for planned starts."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Final, NamedTuple, Protocol

import numpy as np

from tessera.formulation.base.moments import SAME_S
from tessera.formulation.round.problem import Problem
from tessera.formulation.round.rates import work_left
from tessera.formulation.state.snapshot import Snapshot
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


class _Profile(NamedTuple):
    """The times of planned starts on a node, and the most GPUs that are used at any of them so far."""

    starts_s: list[float]
    max_gpus: list[int]


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
        self._nodes_of: defaultdict[int, set[int]] = defaultdict(set)
        for row, node, gpus in zip(
            nodes.start.tolist(), nodes.node.tolist(), nodes.gpus.tolist(), strict=True
        ):
            self._nodes_of[job[row]].add(node)
            is_due = start_s[row] <= snapshot.now_s + SAME_S
            if by_plan and is_due:
                self._due_gpus[job[row], node] = gpus
            if by_plan or not is_due:
                self._starts_on[node].append(_Start(start_s[row], end_s[row], gpus, job[row]))
        self._jobs = frozenset(job)
        for node_starts in self._starts_on.values():
            node_starts.sort()
        table = snapshot.expected_releases
        facts = (table.job, table.node, table.from_s, table.kept)
        self._yields = {
            (job, node): (from_s, part)
            for job, node, from_s, part in zip(*(f.tolist() for f in facts), strict=True)
        }
        self._size = snapshot.nodes.gpus.tolist()
        gpu_type = snapshot.nodes.gpu_type.tolist()
        self._nodes_by_type: defaultdict[int, set[int]] = defaultdict(set)
        for node in self._starts_on:
            self._nodes_by_type[gpu_type[node]].add(node)
        self._profiles: dict[int, _Profile] = {}
        """By node, as long as nobody gets or leaves GPUs there."""
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
        candidates = self._nodes_by_type[int(board.gpu_type[column])]
        if nodes is not None:
            candidates = candidates.intersection(nodes)
        return frozenset(
            node for node in candidates if self._delays(board, node, job, end_s, share)
        )

    def forget(self, job: int, spots: Spots) -> None:
        """Note that ``job`` gets or leaves these GPUs, and with them its planned start."""
        if self._profiles:
            for node in self._nodes_of.get(job, ()):
                self._profiles.pop(node, None)
            for node, _ in spots:
                self._profiles.pop(node, None)

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
        if job in board.seats or node in self._nodes_of.get(job, ()):
            profile = self._find_profile(board, node, job)
        else:
            if node not in self._profiles:
                self._profiles[node] = self._find_profile(board, node)
            profile = self._profiles[node]
        count = bisect_left(profile.starts_s, end_s - SAME_S)
        return count > 0 and share + profile.max_gpus[count - 1] > self._size[node]

    def _find_profile(self, board: SeatTable, node: int, job: int = -1) -> _Profile:
        """Return what others than ``job`` use on a node when starts are planned there."""
        starts = [
            start
            for start in self._starts_on[node]
            if start.job != job and start.job not in board.seats
        ]
        parts = [
            part
            for neighbour in (board.jobs_on(node) if starts else ())
            if neighbour != job
            for part in self._parts(board, node, neighbour)
        ]
        gpus = [
            sum(gpus for until_s, gpus in parts if until_s > start.start_s + SAME_S)
            + sum(
                neighbour.gpus
                for neighbour in starts
                if neighbour.start_s <= start.start_s + SAME_S < neighbour.end_s
            )
            for start in starts
        ]
        return _Profile([start.start_s for start in starts], list(accumulate(gpus, max)))

    def _parts(self, board: SeatTable, node: int, job: int) -> Iterator[tuple[float, int]]:
        """Yield until when a seated job holds how many of its GPUs on ``node``."""
        column, spots = board.seats[job]
        gpus, end_s = dict(spots)[node].bit_count(), self.end_s(job, column, len(spots))
        stays = column == int(self._problem.current[job]) and spots == board.present.get(job)
        from_s, part = self._yields.get((job, node), (end_s, gpus)) if stays else (end_s, gpus)
        yield end_s, min(part, gpus)
        if part < gpus:
            yield from_s, gpus - part
