"""Changes of a board that repair fragmentation.

Each change is tried, valued by its true gain, and undone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import nsmallest

from tessera.formulation.base.resources import Capacity, Demand
from tessera.formulation.round.problem import migration_price
from tessera.solvers.placement.blocks import carve_share
from tessera.solvers.placement.board import Board, Seat
from tessera.solvers.placement.free import Layout

MAX_VICTIM_SETS = 8
"""Sets of jobs to move that are tried for one column; the cheapest are found first."""

MAX_EXTRA_NODES = 32
"""Nodes whose clearing is priced in addition to those that a layout needs.

These are the nodes with most GPUs free."""

Clearing = tuple[float, int, tuple[int, ...]]
"""The cost, the node, and the jobs to take off it."""

Cost = Callable[[int], float | None]
"""A map from a job to the least cost of taking it off its GPUs, in the problem's integers.

If the cost is None, the job must stay."""


@dataclass(slots=True)
class TrialEffort:
    """The amount of searching that is left; it ends for good once time is up."""

    expired: Callable[[], bool]
    trials: int
    over: bool = field(default=False, init=False)

    def spend(self, trials: int = 1) -> bool:
        """Return whether ``trials`` more may be made, and count them."""
        self.over = self.over or self.trials <= 0 or self.expired()
        self.trials -= trials
        return not self.over


@dataclass(frozen=True, slots=True)
class SeatChange:
    """New seats of some jobs, and their gain in the problem's integers.

    A job whose seat is None waits.
    """

    gain: float
    seats: dict[int, Seat | None]


@dataclass(frozen=True, slots=True)
class Aim:
    """The goal of a trial: ``job`` on ``column``, on at most ``max_nodes`` nodes."""

    job: int
    column: int
    max_nodes: int
    aligned: bool = True
    displacing: bool = False  # jobs that are taken off and find no other place may be left waiting
    in_place: bool = False  # on the GPUs that it has now, and no others


def try_change(board: Board, aim: Aim, victims: Iterable[int] = ()) -> SeatChange | None:
    """Return the change that takes ``victims`` off, seats ``aim.job``, and seats the victims again.

    The board is left as it was. A victim keeps its column and gets no worse shape, or else takes an
    alternative. A victim that may be displaced waits if it finds no place. Return None if the
    change is impossible.
    """
    touched = [aim.job, *(job for job in victims if job != aim.job)]
    before = {job: board.seats.get(job) for job in touched}
    value = sum(board.worth(job) for job in touched)
    limits = board.rows.overdraft()
    for job in touched:
        board.lift(job)
    change = None
    if (
        seat_job(board, aim)
        and all(
            reseat_victim(board, job, before[job], aim.displacing)
            for job in sorted(touched[1:], key=lambda job: victim_order(board, job, before[job]))
        )
        and is_within(board, limits)
    ):
        after = {job: board.seats.get(job) for job in touched}
        change = SeatChange(sum(board.worth(job) for job in touched) - value, after)
    board.reseat(before)
    return change


def is_within(board: Board, limits: list[int]) -> bool:
    """Return whether no row that counts waiting or moving jobs is overdrawn beyond ``limits``."""
    return all(now <= before for now, before in zip(board.rows.overdraft(), limits, strict=True))


def seat_job(board: Board, aim: Aim) -> bool:
    """Seat ``aim.job``, which has no seat, as aimed. Return whether there was room."""
    if not board.rows.affords(aim.column):
        return False
    if aim.in_place or board.pinned(aim.job, aim.column):
        return board.keep(aim.job, aim.column)
    spots = board.find(aim.job, aim.column, aim.max_nodes, aligned=aim.aligned)
    if spots is None:
        return False
    board.put(aim.job, aim.column, spots)
    return True


def victim_order(board: Board, job: int, seat: Seat | None) -> tuple[bool, int, int]:
    """Return a sort key: promised jobs before others, big ones before small ones."""
    return (not board.must_run[job], -board.gpus[seat[0]] if seat else 0, job)


def reseat_victim(board: Board, job: int, seat: Seat | None, displacing: bool) -> bool:
    """Seat ``job`` where it was, or elsewhere on no worse a shape, or on an alternative.

    Return whether it has a seat or may wait.
    """
    if seat is None:
        return True
    column, spots = seat
    if board.rows.affords(column):
        if board.free.are_free(spots, board.demand(column)):
            board.put(job, column, spots)
            return True
        if not board.pinned(job, column):
            same = board.find(job, column, max(board.nodes[column], len(spots)))
            if same is not None:
                board.put(job, column, same)
                return True
    if board.movable[job] and any(
        seat_job(board, Aim(job, other, board.nodes[other]))
        for other in board.alternatives(job, column)
    ):
        return True
    return displacing and not board.must_run[job]


def moving_cost(board: Board, job: int, column: int) -> Cost:
    """Return the cost of moving other jobs within their Cells to make room for ``job``.

    Only jobs with fewer GPUs than ``column`` may be moved, and equally large ones on more nodes
    than they need: than their column has, or a narrower alternative. A job of any size may be moved
    if it may run on nodes that ``job`` must not run on. A job that was already moved,
    or that starts in this round, moves free of charge. A job that may not be moved stays. ``job``
    itself costs nothing.
    """

    def cost(victim: int) -> float | None:
        if victim == job:
            return 0.0
        own_column = board.seats[victim][0]
        spread = len(board.seats[victim][1]) > board.fewest_nodes(victim, own_column)
        is_large = board.gpus[own_column] >= board.gpus[column] + spread
        if is_large and not board.may_leave_to(victim, job, column):
            return None
        if not board.kept(victim):
            return 0.0
        return migration_price(board.problem, victim, own_column) if board.movable[victim] else None

    return cost


def displacing_cost(board: Board, job: int, column: int) -> Cost:
    """Return the cost of taking GPUs from other jobs for the must-run ``job``: their whole value.

    Other must-run jobs may only be moved.
    """
    moving = moving_cost(board, job, column)

    def cost(victim: int) -> float | None:
        return moving(victim) if board.must_run[victim] else board.worth(victim)

    return cost


def victim_sets(board: Board, column: int, max_nodes: int, cost: Cost) -> Iterator[tuple[int, ...]]:
    """Yield sets of jobs to take off so that ``column`` may fit, cheapest first for each layout."""
    seen: set[tuple[int, ...]] = {()}
    kind, gpus, fewest = board.gpu_type[column], board.gpus[column], board.nodes[column]
    for layout in board.free.layouts(kind, gpus, fewest):
        if layout.nodes > max_nodes or layout.mixed or not board.runs_on(column, layout.nodes):
            continue
        for victims in _sets_of(board, column, layout, cost):
            if victims not in seen:
                seen.add(victims)
                yield victims


def _sets_of(board: Board, column: int, layout: Layout, cost: Cost) -> Iterator[tuple[int, ...]]:
    if layout.count == 0:
        for _, _, victims in _clearings(board, column, layout.rest, 1, cost)[:MAX_VICTIM_SETS]:
            yield victims
        return
    only = layout.each if layout.whole else 0
    cleared = _clearings(board, column, layout.each, layout.count, cost, only)
    if len(cleared) < layout.count:
        return
    if layout.rest:
        chosen = cleared[: layout.count]
        taken = {node for _, node, _ in chosen}
        rests = _clearings(board, column, layout.rest, layout.count + 1, cost)
        for rest in [r for r in rests if r[1] not in taken][:MAX_VICTIM_SETS]:
            yield _union([*chosen, rest])
        return

    def gpus_to_seat(clearing: Clearing) -> tuple[int, float, int]:
        _, node, victims = clearing
        return sum(board.gpus[board.seats[job][0]] for job in victims), clearing[0], node

    # The cheapest victims may be as large as the job. Those with few GPUs are easier to seat again.
    for order in (cleared, sorted(cleared, key=gpus_to_seat)):
        sure, others = order[: layout.count - 1], order[layout.count - 1 :]
        for last in others[: MAX_VICTIM_SETS // 2]:
            yield _union([*sure, last])


def _union(clearings: Iterable[Clearing]) -> tuple[int, ...]:
    return tuple(sorted({job for _, _, victims in clearings for job in victims}))


def _clearings(
    board: Board, column: int, gpus: int, need: int, cost: Cost, only: int = 0
) -> list[Clearing]:
    """Return the ways to clear room for ``gpus`` of ``column`` on one node, cheapest first.

    The search covers the emptiest nodes: ``need`` of them and some more. If ``only`` is not 0, just
    nodes of that size are searched.
    """
    job = board.job_of(column)
    avoid = board.avoided(job, column)
    avoid |= board.closed(job, column, gpus, -(-board.gpus[column] // gpus))
    demand = board.demand(column)
    share = Demand(gpus=gpus) if demand is None else demand.on_node(gpus)
    nodes = [
        node
        for node in board.free.of_type[board.gpu_type[column]]
        if board.free.size[node] >= gpus
        and (not only or board.free.size[node] == only)
        and node not in avoid
    ]
    emptiest = nsmallest(
        need + MAX_EXTRA_NODES, nodes, key=lambda n: (-board.free.mask[n].bit_count(), n)
    )
    clearings = []
    for node in emptiest:
        clearing = _clear(board, node, share, cost)
        if clearing is not None:
            clearings.append((clearing[0], node, clearing[1]))
    return sorted(clearings)


def _clear(
    board: Board, node: int, share: Demand, cost: Cost
) -> tuple[float, tuple[int, ...]] | None:
    """Return the cost and the jobs whose removal makes room for ``share`` on ``node``, or None.

    The cheapest jobs are taken off until there is room. Then those that are not needed are put
    back, the most expensive first.
    """
    mask, left = board.free.mask[node], board.free.left(node)
    offers: list[tuple[float, int, int]] = []  # cost, job, its GPUs here
    for job in board.jobs_on(node):
        price = cost(job)
        if price is not None:
            offers.append((price, job, dict(board.seats[job][1])[node]))
    offers.sort()
    off: list[tuple[float, int, int]] = []
    for offer in offers:
        if _has_room(mask, left, share):
            break
        off.append(offer)
        mask |= offer[2]
        left = left and left.plus(_share_of(board, offer))
    if not _has_room(mask, left, share):
        return None
    for offer in reversed(off.copy()):
        back = left and left.minus(_share_of(board, offer))
        if _has_room(mask & ~offer[2], back, share):
            mask, left = mask & ~offer[2], back
            off.remove(offer)
    return sum(price for price, _, _ in off), tuple(sorted(job for _, job, _ in off))


def _has_room(mask: int, left: Capacity | None, share: Demand) -> bool:
    """Return whether ``share`` fits into the free GPUs ``mask`` and the capacity ``left``.

    If ``left`` is None, only GPUs count.
    """
    return bool(carve_share(mask, share.gpus)) and (left is None or left.fits(share))


def _share_of(board: Board, offer: tuple[float, int, int]) -> Demand:
    """Return the share of its demand that a job which may be taken off a node has there."""
    _, job, mask = offer
    demand = board.demand(board.seats[job][0])
    gpus = mask.bit_count()
    return Demand(gpus=gpus) if demand is None else demand.on_node(gpus)


def find_sitters(board: Board, job: int, column: int) -> tuple[int, ...]:
    """Return the other jobs that keep ``job`` from running ``column`` on the GPUs that it owns now.

    They hold some of these GPUs, or are on a node that does not have enough of the other resources.
    """
    owned, demand = dict(board.present.get(job, ())), board.demand(column)
    short = {
        node
        for node, mask in owned.items()
        if demand is not None and not board.free.fits(node, demand.on_node(mask.bit_count()))
    }
    others = {
        other
        for node in owned
        for other in board.jobs_on(node)
        if other != job and (node in short or dict(board.seats[other][1])[node] & owned[node])
    }
    return tuple(sorted(others))


def best_change(
    board: Board,
    job: int,
    columns: Iterable[int],
    moves_for: int,
    effort: TrialEffort,
    *,
    required: bool = False,
) -> SeatChange | None:
    """Return the most valuable way to seat ``job``, which waits or has a poorer seat now.

    The columns are tried best first. For each column, the ways are: where the job is, the best
    shape, moves of others that make room for the best shape (only for the column ``moves_for``),
    and worse shapes. Only changes that gain count, but with ``required`` any change does. Return
    None if there is no such change.
    """
    base = board.worth(job)
    best: SeatChange | None = None
    for column in sorted(columns, key=lambda c: (-board.value[c], c)):
        ceiling = board.value[column] - base
        if best is not None and best.gain >= ceiling:
            break
        for change in _ways(board, job, column, column == moves_for, effort):
            if (required or change.gain > 0) and (best is None or change.gain > best.gain):
                best = change
    return best


def _ways(
    board: Board, job: int, column: int, moves: bool, effort: TrialEffort
) -> Iterator[SeatChange]:
    fewest, most = board.nodes[column], board.gpus[column]
    seat = board.seats.get(job)
    if seat is not None and seat[0] == column:
        most = len(seat[1]) - 1  # only a better shape is of use
    if most < fewest:
        return
    if column == board.current[job] and not board.kept(job):
        stay = try_change(
            board, Aim(job, column, most, in_place=True), find_sitters(board, job, column)
        )
        if stay is not None:
            yield stay
    direct = try_change(board, Aim(job, column, fewest))
    if direct is not None:
        yield direct
        return
    if moves and not effort.over:
        cost = moving_cost(board, job, column)
        for victims in victim_sets(board, column, fewest, cost):
            if not effort.spend():
                break
            change = try_change(board, Aim(job, column, fewest), victims)
            if change is not None:
                yield change
    worse = try_change(board, Aim(job, column, most))
    if worse is not None:
        yield worse
