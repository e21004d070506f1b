"""The search of CP-SAT for more admitted weight, among the jobs that prices leave undecided."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from tessera.formulation.base.tables import Bools
from tessera.formulation.round.lookahead import Lookahead, Picks
from tessera.solvers.base import Budget
from tessera.solvers.lookahead import exact
from tessera.solvers.lookahead.firstfit import SlotSchedules, fit_in
from tessera.solvers.lookahead.integers import to_integers
from tessera.solvers.lookahead.pricefit import PricedRoom, by_deadline, weight_of_new
from tessera.solvers.lookahead.validity import is_valid

ADMISSION: Final = "admission"
"""Name under which the work of the search is recorded."""
MOST_WORK: Final = 0.4
"""Deterministic seconds of the search: about two wall seconds."""
WORK_PER_S: Final = 0.1
"""Deterministic seconds planned for each remaining wall second.

The round itself needs most of the time."""
MAX_UNFILTERED_PAIRS: Final = 5_000
"""Number of (option, slot) pairs up to which all are searched.

If there are more, only those of the options that pay best are searched."""
MAX_PAIRS: Final = 12_000
"""Number of pairs above which the answer at prices stands.

CP-SAT's presolve alone would take seconds, and no work limit counts it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SearchedRoom:
    """The room after the search, whether its weight is proven best, and the search's work."""

    room: SlotSchedules
    proven: bool
    work: float = 0.0


def search_admission(
    ahead: Lookahead, inherited: Picks, priced: PricedRoom, budget: Budget
) -> SearchedRoom:
    """Return CP-SAT's room if it is better and valid, else that of ``priced``.

    Jobs that no better room admits, as their price proves, take no part. Nothing is searched if the
    bound proves the room best, if too many pairs are left, or if there is no time.
    """
    room = priced.room
    kept = bool(room.placed[ahead.promised].all())
    if kept and priced.bound <= weight_of_new(room) * (1 + 1e-12):
        return SearchedRoom(room=room, proven=True)
    limit = _work_limit(budget)
    allowed, complete = _searchable(ahead, priced, all_kept=kept)
    if limit <= 0 or budget.expired() or allowed is None:
        return SearchedRoom(room=room, proven=False)
    whole = to_integers(ahead, inherited, allowed)
    result = exact.solve_admission(whole, budget, limit, (room.picks, room.placed))
    if not result.repeatable:
        return SearchedRoom(room=room, proven=False)
    proven = result.proven and complete
    if result.picks is None or result.admitted is None:
        return SearchedRoom(room=room, proven=False, work=limit)
    before = exact.weight_of(whole, room.placed)
    if exact.weight_of(whole, result.admitted) <= before:
        return SearchedRoom(room=room, proven=proven, work=limit)
    better = _room_of(ahead, result.picks, result.admitted, room)
    if better is None:  # the answer breaks a rule, so its proof is not trusted either
        return SearchedRoom(room=room, proven=False, work=limit)
    fit_in(better, by_deadline(ahead, ~better.placed & ~ahead.promised))
    return SearchedRoom(room=better, proven=proven, work=limit)


def _work_limit(budget: Budget) -> float:
    given = budget.work.get(ADMISSION, MOST_WORK)
    left_s = budget.remaining_s()
    in_time = max(0.0, left_s) * WORK_PER_S if math.isfinite(left_s) else given
    return float(min(given, MOST_WORK, in_time))


def _searchable(
    ahead: Lookahead, priced: PricedRoom, *, all_kept: bool
) -> tuple[Bools | None, bool]:
    """Return the (option, slot) pairs to search, bool[options, slots], and whether they suffice.

    Pairs suffice if they are those of all jobs that a better room may admit. If there are too many,
    each job keeps the options that it has or was given, and on each GPU type its leanest and its
    fastest option. The result is None if that is still too many.
    """
    picks, owner, last = priced.room.picks, ahead.owner, priced.room.problem.last
    undecided = _undecided(ahead, priced, all_kept=all_kept)
    if int(last[undecided].sum()) > MAX_PAIRS:
        return None, False
    keep, last = undecided[owner], last[owner]
    complete = int(last[keep].sum()) <= MAX_UNFILTERED_PAIRS
    if not complete:
        best = ahead.stays | _leanest_and_fastest(ahead)
        best[picks[picks >= 0]] = True
        keep &= best
    if int(last[keep].sum()) > MAX_PAIRS:
        return None, False
    return ahead.allowed() & keep[:, None], complete


def _undecided(ahead: Lookahead, priced: PricedRoom, *, all_kept: bool) -> Bools:
    """Return the jobs that a room of more weight may admit, bool[jobs].

    The dual value less what a new job pays beyond its weight is a bound on the weight of rooms that
    admit it. This does not hold if a promise was not kept, because the bound is without it.
    """
    if not all_kept:
        return np.ones(len(ahead.job), dtype=np.bool_)
    loss = np.maximum(priced.prices.cost - ahead.weight, 0.0)
    may: Bools = priced.prices.bound - loss > weight_of_new(priced.room)
    return ahead.promised | (may & (ahead.weight > 0))


def _leanest_and_fastest(ahead: Lookahead) -> Bools:
    """Return, for each job and GPU type, the two options that it keeps, bool[options]."""
    best, kind = np.zeros(len(ahead.cell), dtype=np.bool_), ahead.cells.gpu_type[ahead.cell]
    rows = np.flatnonzero(~ahead.stays)
    for key in (ahead.rate / ahead.cells.gpus[ahead.cell], ahead.rate):
        order = rows[np.lexsort((-key[rows], kind[rows], ahead.owner[rows]))]
        pair = ahead.owner[order] * ahead.types + kind[order]
        best[order[np.append(True, pair[1:] != pair[:-1])[: len(order)]]] = True
    return best


def _room_of(
    ahead: Lookahead, picks: Picks, admitted: Bools, room: SlotSchedules
) -> SlotSchedules | None:
    """Return the room with these schedules, or None if one breaks a rule; no answer is trusted."""
    picks = np.where(admitted[:, None], picks, -1)
    if not is_valid(ahead, picks, admitted):
        return None
    better = SlotSchedules(ahead, room.problem)
    refused = better.give(np.flatnonzero(admitted), picks)
    return None if refused.any() else better
