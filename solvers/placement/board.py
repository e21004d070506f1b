"""The board: the column and GPUs of each job, their value, and the ways to change them."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from tessera.formulation.answer.placement import Gang, Placement, current_gangs
from tessera.formulation.base.resources import Demand
from tessera.formulation.base.tables import Ints
from tessera.formulation.round.problem import Problem, migration_price, placed_value
from tessera.formulation.state.given_demand import demands_of_columns
from tessera.formulation.state.node_choices import NodeChoices
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.placement.blocks import carve_share, indices_of, mask_of
from tessera.solvers.placement.free import FreeGpus, Spots
from tessera.solvers.placement.planned import PlannedRoom
from tessera.solvers.placement.rowspace import RowSpace
from tessera.solvers.placement.windows import ClosedWindows

Seat = tuple[int, Spots]
"""A job's column and GPUs."""


def spots_of(gang: Gang) -> Spots:
    """Return the gang as masks."""
    return tuple([(node, mask_of(indices)) for node, indices in gang.members])


def gang_of(spots: Spots) -> Gang:
    """Return masks as a gang."""
    return Gang(members=tuple((node, indices_of(mask)) for node, mask in spots))


class Board:
    """A placement under construction; ``seats`` holds the column and GPUs of the seated jobs."""

    def __init__(
        self,
        snapshot: Snapshot,
        problem: Problem,
        gangs: Mapping[int, Gang] | None = None,
        only: Mapping[int, int] | None = None,
        fastest_only: bool = False,
        by_plan: bool = False,
    ) -> None:
        """Set up a board without seats.

        ``gangs`` is the result of ``current_gangs``, if that is known already. If ``only`` is
        given, each job has at most this column; if it is None, a job may have any of its own. With
        ``fastest_only``, it may have only those that ``is_alternative`` does not refuse. With
        ``by_plan``, starts that are due have room kept on their nodes, and may take GPUs of others.
        """
        self.snapshot, self.problem, self._only = snapshot, problem, only
        self._fastest_only = fastest_only
        self.took_alternative = False
        """Whether a job has been given an alternative."""
        self.free = FreeGpus(snapshot)
        self.seats: dict[int, Seat] = {}
        self.gangs = current_gangs(snapshot) if gangs is None else gangs
        self.present = {job: spots_of(gang) for job, gang in self.gangs.items()}
        self._on: defaultdict[int, set[int]] | None = None
        cells, cell = problem.cells, problem.cell
        # These are views, since there may be millions of columns and only few are read.
        self._cell: Sequence[int] = cell.data
        self._demands = (
            demands_of_columns(snapshot.jobs, cells, problem.column_job, cell)
            if self.free.counts_more
            else None
        )
        self.gpus: Sequence[int] = cells.gpus[cell].data  # these four are by column
        self.gpu_type: Sequence[int] = cells.gpu_type[cell].data
        self.nodes: Sequence[int] = cells.nodes[cell].data
        self.value: Sequence[int] = problem.value.data
        self._job_start: Sequence[int] = problem.job_start.data
        self.current: list[int] = problem.current.tolist()  # these four are by job
        self.must_run: list[bool] = problem.must_run.tolist()
        self.movable: list[bool] = problem.movable.tolist()
        self._least_rate: list[float] = problem.least_rate.tolist()
        self.rows = RowSpace(problem)
        self._choices = NodeChoices(snapshot)
        self._windows = ClosedWindows(snapshot, problem)
        self.displaces_for_starts = by_plan or not len(snapshot.planned_starts)
        """Whether jobs that only start may take the GPUs of others. Else they are tried once more."""
        self._planned_room = PlannedRoom(snapshot, problem, by_plan)
        self._value_on: dict[tuple[int, int], float] = {}
        self._alternatives: dict[int, list[int]] = {}

    def demand(self, column: int) -> Demand | None:
        """Return the total demand of ``column``, or None if no node states more than its GPUs."""
        return None if self._demands is None else self._demands.of(column)

    def put(self, job: int, column: int, spots: Spots) -> None:
        """Seat ``job``, which has no seat, on GPUs that are free."""
        self.free.take(spots, self.demand(column))
        self.seats[job] = (column, spots)
        self._planned_room.forget(job, spots)
        if self._on is not None:
            for node, _ in spots:
                self._on[node].add(job)
        self.rows.take(column, self._count_moves(job, column, spots))

    def put_on(self, job: int, column: int, shares: Sequence[tuple[int, int]]) -> bool:
        """Seat ``job`` on these nodes, with this many GPUs on each. Return whether it was seated.

        It is not if the GPUs are not free in aligned blocks, if it lacks anything else there, if
        its shares are uneven, or if it avoids a node or may not move.
        """
        spots = tuple(
            [(node, carve_share(self.free.mask[node], gpus)) for node, gpus in sorted(shares)]
        )
        demand, avoided = self.demand(column), self.avoided(job, column)
        avoided |= self.closed(job, column, max(gpus for _, gpus in shares), len(shares))
        if self.pinned(job, column) or not all(
            mask and node not in avoided and self.free.gpu_type[node] == self.gpu_type[column]
            for node, mask in spots
        ):
            return False
        if demand is not None and not self.free.hold(spots, demand):
            return False
        if not (self._is_even(shares) and self.runs_on(column, len(spots))):
            return False
        self.put(job, column, spots)
        return True

    def _is_even(self, shares: Sequence[tuple[int, int]]) -> bool:
        """Return whether shares are equal, or whole nodes and one more, or equal except for one."""
        counts = [gpus for _, gpus in shares]
        partial = sum(gpus != self.free.size[node] for node, gpus in shares)
        differs = (
            sum(counts) % len(counts) != 0 and max(map(counts.count, counts)) == len(counts) - 1
        )
        return len(set(counts)) == 1 or partial <= 1 or differs

    def lift(self, job: int) -> Seat | None:
        """Take ``job`` off its GPUs; return the seat that it had."""
        seat = self.seats.pop(job, None)
        if seat is not None:
            column, spots = seat
            self.free.give(spots, self.demand(column))
            self._planned_room.forget(job, spots)
            if self._on is not None:
                for node, _ in spots:
                    self._on[node].discard(job)
            self.rows.give(column, self._count_moves(job, column, spots))
        return seat

    def _count_moves(self, job: int, column: int, spots: Spots) -> int:
        """Return 1 if moves count, and ``job``, which could stay, keeps its Cell on other GPUs, or 0."""
        if not self.rows.counts_moves:
            return 0
        now = self.present.get(job, ())
        whole = sum(mask.bit_count() for _, mask in now) == self.gpus[column]
        return int(column == self.current[job] and whole and spots != now)

    def jobs_on(self, node: int) -> set[int]:
        """Return the jobs that have GPUs of ``node``.

        Only searches need this, so the index is made on demand.
        """
        if self._on is None:
            self._on = defaultdict(set)
            for job, (_, spots) in self.seats.items():
                for seat_node, _ in spots:
                    self._on[seat_node].add(job)
        return self._on[node]

    def columns_of(self, job: int) -> Sequence[int]:
        """Return the columns that ``job`` may be given."""
        if self._only is not None:
            column = self._only.get(job)
            return range(0) if column is None else range(column, column + 1)
        columns = self.problem.columns_of(job)
        if self._fastest_only:
            return [column for column in columns if not self.is_alternative(column)]
        return columns

    def is_alternative(self, column: int) -> bool:
        """Return whether ``column`` is another way to run on the GPUs of a faster one of its job.

        It has the same GPU type and count, and is not what the job runs on.
        """
        return (
            column > self._job_start[job := self.job_of(column)]
            and self.gpus[column - 1] == self.gpus[column]
            and self.gpu_type[column - 1] == self.gpu_type[column]
            and column != self.current[job]
        )

    def alternatives(self, job: int, column: int) -> list[int]:
        """Return the job's other columns of the same GPU type and count, most valuable first."""
        if self._only is not None or self._fastest_only:
            return []
        if column not in self._alternatives:
            kind, gpus = self.gpu_type[column], self.gpus[column]
            same = [
                other
                for other in self.problem.columns_of(job)
                if self.gpu_type[other] == kind and self.gpus[other] == gpus and other != column
            ]
            same.sort(key=lambda other: (-self.value[other], other))
            self._alternatives[column] = same
        return self._alternatives[column]

    def has_gpus_of(self, job: int, column: int) -> bool:
        """Return whether ``job`` could stay on as many GPUs of a type as ``column`` has."""
        present = self.current[job]
        return (
            present >= 0
            and self.gpus[present] == self.gpus[column]
            and self.gpu_type[present] == self.gpu_type[column]
        )

    def is_replan(self, job: int, column: int) -> bool:
        """Return whether ``job`` may run ``column``, another plan, on the GPUs that it has."""
        spots = self.present.get(job, ())
        return (
            column != self.current[job]
            and len(spots) == self.nodes[column]
            and sum(mask.bit_count() for _, mask in spots) == self.gpus[column]
            and not any(node in self.avoided(job, column) for node, _ in spots)
            and not self._planned_room.closed(
                self, job, column, spots[0][1].bit_count(), len(spots), [node for node, _ in spots]
            )
        )

    def fewest_nodes(self, job: int, column: int) -> int:
        """Return the fewest nodes of ``column`` and the job's alternatives to it."""
        others = self.alternatives(job, column)
        return min([self.nodes[column], *(self.nodes[other] for other in others)])

    def job_of(self, column: int) -> int:
        """Return the job of ``column``."""
        return bisect_right(self._job_start, column) - 1

    def avoided(self, job: int, column: int) -> frozenset[int]:
        """Return the nodes that ``job`` must not run on with ``column``."""
        avoided, closed = self._choices.avoided(job), self._windows.closed(job, column)
        return avoided | closed if closed else avoided

    def closed(self, job: int, column: int, share: int, spread: int) -> frozenset[int]:
        """Return the nodes on which ``job`` would delay a planned start (``PlannedRoom.closed``)."""
        return self._planned_room.closed(self, job, column, share, spread)

    def may_leave_to(self, job: int, other: int, column: int) -> bool:
        """Return whether ``job`` may run on a node that ``other`` must not run on with ``column``."""
        return not self.avoided(other, column) <= self.avoided(job, self.seats[job][0])

    def reseat(self, seats: dict[int, Seat | None]) -> None:
        """Give these jobs these seats, whatever they have now. A job whose seat is None waits."""
        for job in seats:
            self.lift(job)
        for job, seat in seats.items():
            if seat is not None:
                self.took_alternative |= self.is_alternative(seat[0])
                self.put(job, *seat)

    def keep_all(self, wanted: dict[int, int]) -> list[int]:
        """Seat the jobs that keep their columns and GPUs, in order; return those that cannot stay.

        The board must have no seats yet.
        """
        rest = []
        take, now, current = self.free.take_if_free, self.present, self.current
        only_gpus = self._demands is None
        for job, column in wanted.items():
            spots = now.get(job) if column == current[job] else None
            demand = None if only_gpus else self.demand(column)
            if spots and take(spots, self.gpu_type[column], self.gpus[column], demand):
                self.seats[job] = (column, spots)
            else:
                rest.append(job)
        self.rows.reset(self.choice())
        return rest

    def keep(self, job: int, column: int) -> bool:
        """Seat ``job`` where it is, if all that it needs is free. Return whether it was seated."""
        if not self._stays(job, column):
            return False
        self.put(job, column, self.present[job])
        return True

    def _stays(self, job: int, column: int) -> bool:
        """Return whether ``job`` can stay where it is with ``column``.

        Its GPUs must all exist and be free, match the column, and have all other resources free.
        """
        spots = self.present.get(job, ())
        free, kind, count = self.free, self.gpu_type[column], 0
        for node, mask in spots:
            if free.mask[node] & mask != mask or free.gpu_type[node] != kind:
                return False
            count += mask.bit_count()
        if not spots or count != self.gpus[column]:
            return False
        demand = self.demand(column)
        return demand is None or free.hold(spots, demand)

    def find(self, job: int, column: int, max_nodes: int, *, aligned: bool = True) -> Spots | None:
        """Return the best free GPUs for ``job`` on the column's shape, or on a wider one.

        The result is on at most ``max_nodes`` nodes, and shapes with fewer nodes come first. Of one
        shape, nodes that the job prefers come first. Shapes on which the Cell is known not to run are
        skipped. Return None if there are no such GPUs.
        """
        kind, gpus, fewest = self.gpu_type[column], self.gpus[column], self.nodes[column]
        if self.free.total[kind] < gpus:
            return None
        near, demand = dict(self.present.get(job, ())), self.demand(column)
        closed = self._windows.closed(job, column)
        for layout in self.free.layouts(kind, gpus, fewest):
            if layout.nodes > max_nodes:
                continue
            if not (layout.mixed or self.runs_on(column, layout.nodes)):
                continue
            if self._planned_room.lasts_beyond(job, column, layout.nodes):
                continue
            delaying = self.closed(job, column, layout.each or layout.rest, layout.nodes)
            for avoided in self._choices.in_order(job):  # preferred nodes alone first
                avoid = avoided | closed | delaying if closed or delaying else avoided
                spots = self.free.find(
                    kind, layout, near, aligned=aligned, avoid=avoid, demand=demand
                )
                if spots and fewest <= len(spots) <= max_nodes and self.runs_on(column, len(spots)):
                    return spots
        return None

    def runs_on(self, column: int, nodes: int) -> bool:
        """Return whether the Cell of ``column`` runs on ``nodes`` nodes, and as fast as it must."""
        if nodes == self.nodes[column]:
            return True
        rate = self.problem.cells.placed_rate(self._cell[column], nodes)
        return rate > 0 and rate >= self._least_rate[self.job_of(column)]

    def worth_on(self, column: int, nodes: int) -> float:
        """Return the value of ``column`` on ``nodes`` nodes, in the problem's integers."""
        key = (column, nodes)
        if key not in self._value_on:
            self._value_on[key] = placed_value(self.problem, column, nodes)
        return self._value_on[key]

    def pinned(self, job: int, column: int) -> bool:
        """Return whether ``job`` may run ``column`` only on the GPUs that it has."""
        if self.movable[job] or column != self.current[job]:
            return False
        spots = self.present.get(job, ())
        return sum(mask.bit_count() for _, mask in spots) == self.gpus[column]

    def moved(self, job: int) -> bool:
        """Return whether ``job`` keeps its Cell on other GPUs than it has."""
        seat = self.seats.get(job)
        return (
            seat is not None and seat[0] == self.current[job] and seat[1] != self.present.get(job)
        )

    def kept(self, job: int) -> bool:
        """Return whether ``job`` keeps its Cell and its GPUs."""
        seat = self.seats.get(job)
        return (
            seat is not None and seat[0] == self.current[job] and seat[1] == self.present.get(job)
        )

    def worth(self, job: int) -> float:
        """Return the value of ``job`` in its seat, less the restart cost if it is moved.

        It is 0 if the job waits.
        """
        seat = self.seats.get(job)
        if seat is None:
            return 0.0
        column, spots = seat
        worth = self.worth_on(column, len(spots))
        if self.moved(job):
            nodes = 0 if len(spots) == self.nodes[column] else len(spots)
            worth -= migration_price(self.problem, job, column, nodes)
        return worth

    def degraded(self) -> frozenset[int]:
        """Return the jobs that are on more nodes than their Cell's shape has."""
        return frozenset(
            job for job, (column, spots) in self.seats.items() if len(spots) > self.nodes[column]
        )

    def choice(self) -> Ints:
        """Return the column of each job, int64[jobs]; -1 if it waits."""
        choice = np.full(len(self.problem.jobs), -1, dtype=np.int64)
        choice[list(self.seats)] = [column for column, _ in self.seats.values()]
        return choice

    def placement(self) -> Placement:
        """Return the gang of each seated job, by rising job.

        A job that stays keeps its Gang object.
        """
        now, current = self.present, self.current
        gangs: dict[int, Gang] = {}
        migrated = []
        for job in sorted(self.seats):
            column, spots = self.seats[job]
            stays = spots == now.get(job)
            gangs[job] = self.gangs[job] if stays else gang_of(spots)
            if not stays and column == current[job]:
                migrated.append(job)
        return Placement(gangs=gangs, migrated=frozenset(migrated))
