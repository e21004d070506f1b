"""Admission: promises first, and then as much new weight as one schedule of all can meet."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from tessera.formulation.admission import Admission
from tessera.formulation.columns import first_draft
from tessera.formulation.draft import Draft, do_not_check
from tessera.formulation.lookahead import (
    WORK_TOLERANCE,
    Lookahead,
    Picks,
    legs_of,
    look_ahead,
    picks_of,
    trained_samples,
    without_reserve,
)
from tessera.formulation.objectives import with_needs
from tessera.formulation.policy import Policy
from tessera.formulation.promises import PHYSICAL, PROMISES
from tessera.formulation.promises.deadlines import deadlines_are_kept
from tessera.formulation.rates import work_left
from tessera.formulation.snapshot import NO_LEGS, Snapshot
from tessera.formulation.tables import Bools, Floats
from tessera.solvers.base import Budget
from tessera.solvers.lookahead import exact
from tessera.solvers.lookahead.firstfit import (
    SlotSchedules,
    arrange_jobs,
    fit_in,
    keep_promised_schedules,
)
from tessera.solvers.lookahead.integers import IntegerAdmission, to_integers
from tessera.solvers.lookahead.rollout import roll_out

ADMISSION: Final = "admission"
"""Name under which the work of the search is recorded."""
MOST_WORK: Final = 0.4
"""Deterministic seconds of the search: about two wall seconds."""
WORK_PER_S: Final = 0.1
"""Deterministic seconds planned for each remaining wall second.

The round itself needs most of the time."""
MAX_UNFILTERED_VARIABLES: Final = 5_000
"""Number of (option, slot) pairs up to which all are searched.

If there are more, only those of the options that pay best are searched."""
MOST_VARIABLES: Final = 12_000
"""Number of pairs above which there is no search.

Presolve alone would take seconds, and no work limit counts it."""
MAX_JOBS_OF_THREE_ORDERS: Final = 100
"""Number of new jobs above which only one order of admission is tried, not three."""
MOST_EARLIEST: Final = 64
"""Number of refused jobs, by deadline, for which the earliest possible deadline is computed."""


def admit(snapshot: Snapshot, policy: Policy, budget: Budget) -> Admission:
    """Decide which deadlines are promised, so that one schedule meets them all.

    Existing promises come first. The schedule that each of them has is expressed in today's slots,
    and is the answer to fall back to. New jobs are then fitted in by deadline; if all fit, nothing
    is left to prove. Otherwise CP-SAT searches for a schedule that admits more weight (``exact``).
    Promises are given up only if they no longer fit together, least weight first.

    Under ``planned``, no new job is promised anything (``rollout``). Under ``keep``, jobs without a
    promise take no part.
    """
    if not np.isfinite(snapshot.jobs.deadline_s).any():
        return _nothing(snapshot, policy)
    base, draft = drafts_before_deadlines(snapshot, policy, budget.check)
    ahead = look_ahead(base, draft)
    if not len(ahead.job):
        return _nothing(snapshot, policy)
    inherited = picks_of(ahead, snapshot.legs)
    if not ahead.binding:
        return _planned(snapshot, policy, ahead, keep_promised_schedules(ahead, inherited))
    room = _by_order(ahead, inherited)
    wanted = ahead.promised | (ahead.weight > 0)
    proven, work = bool(room.placed[wanted].all()), 0.0
    if not proven:
        room, proven, work = _searched(ahead, inherited, room, budget)
    return _admission(snapshot, ahead, room, proven=proven, work=work)


def _planned(
    snapshot: Snapshot, policy: Policy, ahead: Lookahead, room: SlotSchedules
) -> Admission:
    """Return the schedule of the jobs without promises, with the promised ones in ``room``.

    Steady jobs keep what they once have, so they are fitted in first, by deadline.
    """
    steady = np.flatnonzero(ahead.steady & ~room.placed)
    fit_in(room, steady[np.argsort(ahead.deadline_s[steady], kind="stable")].tolist())
    rest = ~room.placed & ~ahead.steady & ~ahead.promised
    plan = roll_out(ahead, snapshot.jobs, room.free, rest, policy.round_s)
    known = _admission(snapshot, ahead, room, proven=False, work=0.0)
    legs, admitted, least = plan.legs(ahead), np.array(known.admitted), np.array(known.least_work)
    admitted[ahead.job[plan.met]] = True
    now = legs.job[legs.start_s <= snapshot.now_s]
    least[now] = work_left(snapshot)[now]
    met = room.placed | plan.met
    return replace(
        known,
        admitted=admitted,
        legs=known.legs.followed_by(legs),
        least_work=least,
        proven=bool(met[ahead.weight > 0].all()),
    )


def drafts_before_deadlines(
    snapshot: Snapshot, policy: Policy, check: Callable[[], None] = do_not_check
) -> tuple[Draft, Draft]:
    """Return the columns that physically exist, and those that the rules before deadlines leave."""
    base = replace(first_draft(snapshot, policy), check=check)
    for rule in PHYSICAL:
        base = rule(base)
    base = draft = with_needs(base)
    for rule in PROMISES[: PROMISES.index(deadlines_are_kept)]:
        check()
        draft = rule(draft)
    return base, draft


def _by_order(ahead: Lookahead, inherited: Picks) -> SlotSchedules:
    """Return the best of several first fits.

    New jobs are fitted in by deadline, by weight, and by weight per GPU time. If this leaves jobs
    out, promises are moved to make room: then all jobs are scheduled again by deadline.
    """
    new = np.flatnonzero(~ahead.promised)
    weigh = lambda room: float(ahead.weight[room.placed].sum())  # noqa: E731
    rooms: list[SlotSchedules] = []
    for order in _orders(ahead):
        room = keep_promised_schedules(ahead, inherited)
        fit_in(room, [int(new[i]) for i in order])
        rooms.append(room)
        if room.placed[new].all() or len(new) > MAX_JOBS_OF_THREE_ORDERS:
            break
    if not any(room.placed[new].all() for room in rooms):
        moved = arrange_jobs(ahead, _gpu_s(ahead) / np.maximum(ahead.weight, 1e-12))
        if moved is not None:
            left = np.flatnonzero(~moved.placed)
            fit_in(moved, left[np.argsort(ahead.deadline_s[left], kind="stable")].tolist())
            rooms.append(moved)
    return max(rooms, key=weigh)


def _orders(ahead: Lookahead) -> Iterator[list[int]]:
    new = np.flatnonzero(~ahead.promised)
    weight, deadline = ahead.weight[new], ahead.deadline_s[new]
    gpu_s = _gpu_s(ahead)[new]
    yield np.lexsort((-weight, deadline, weight <= 0)).tolist()
    yield np.lexsort((deadline, -weight)).tolist()
    yield np.lexsort((deadline, -weight / np.maximum(gpu_s, 1e-9))).tolist()


def _gpu_s(ahead: Lookahead) -> Floats:
    """Return the GPU-seconds of each job's work on its leanest Cell, float64[jobs]."""
    lean, some = np.full(len(ahead.job), np.inf), ahead.rate > 0
    gpus = ahead.cells.gpus[ahead.cell]
    np.minimum.at(lean, ahead.owner[some], gpus[some] / ahead.rate[some])
    return lean * ahead.work


def _searched(
    ahead: Lookahead, inherited: Picks, room: SlotSchedules, budget: Budget
) -> tuple[SlotSchedules, bool, float]:
    """Return CP-SAT's room if it is better and valid, whether it is proven, and the work."""
    limit = _work_limit(budget)
    allowed, whole_set = _searchable(ahead, room)
    if limit <= 0 or budget.expired() or allowed.sum() > MOST_VARIABLES:
        return room, False, 0.0
    whole = to_integers(ahead, inherited, allowed)
    result = exact.solve_admission(whole, budget, limit, (room.picks, room.placed))
    if not result.repeatable:
        return room, False, 0.0
    if result.picks is None or result.admitted is None:
        return room, False, limit
    better = _checked(ahead, result.picks, result.admitted)
    if better is None or _weight(whole, better) < _weight(whole, room):
        return room, False, limit
    left = np.flatnonzero(~better.placed & ~ahead.promised)
    fit_in(better, left[np.argsort(ahead.deadline_s[left], kind="stable")].tolist())
    return better, result.proven and whole_set, limit


def _weight(whole: IntegerAdmission, room: SlotSchedules) -> int:
    return exact.weight_of(whole, room.placed)


def _work_limit(budget: Budget) -> float:
    given = budget.work.get(ADMISSION, MOST_WORK)
    left_s = budget.remaining_s()
    in_time = max(0.0, left_s) * WORK_PER_S if math.isfinite(left_s) else given
    return float(min(given, MOST_WORK, in_time))


def _searchable(ahead: Lookahead, room: SlotSchedules) -> tuple[Bools, bool]:
    """Return the (option, slot) pairs to search, bool[options, slots], and whether they are all.

    If there are too many, each job keeps the options that it has or was given, and on each GPU type
    its leanest and its fastest option.
    """
    allowed = room.ok
    if int(allowed.sum()) <= MAX_UNFILTERED_VARIABLES:
        return allowed, True
    keep = ahead.stays.copy()
    keep[room.picks[room.picks >= 0]] = True
    per_gpu = ahead.rate / ahead.cells.gpus[ahead.cell]
    for job in range(len(ahead.job)):
        span = np.array(ahead.options_of(job))
        kinds = ahead.cells.gpu_type[ahead.cell[span]]
        for kind in np.unique(kinds):
            own = span[(kinds == kind) & ~ahead.stays[span]]
            if len(own):
                keep[own[np.argmax(per_gpu[own])]] = True
                keep[own[np.argmax(ahead.rate[own])]] = True
    return allowed & keep[:, None], False


def _checked(ahead: Lookahead, picks: Picks, admitted: Bools) -> SlotSchedules | None:
    """Return the room with these schedules, or None if one breaks a rule; no answer is trusted."""
    room = SlotSchedules(ahead)
    for job in np.flatnonzero(admitted).tolist():
        used = np.flatnonzero(picks[job] >= 0)
        late = (
            ahead.work[job] - trained_samples(ahead, job, picks[job])
            > WORK_TOLERANCE * ahead.total_work[job]
        )
        off = late or not room.ok[picks[job, used], used].all()
        if off or not room.give(job, picks[job]):
            return None
    return room


def _admission(
    snapshot: Snapshot, ahead: Lookahead, room: SlotSchedules, *, proven: bool, work: float
) -> Admission:
    jobs = snapshot.jobs
    admitted = np.zeros(len(jobs), dtype=np.bool_)
    admitted[ahead.job[room.placed]] = True
    admitted |= jobs.admitted & (work_left(snapshot) <= 0)  # about to end, in time or not
    picks = np.where(room.placed[:, None], room.picks, -1)
    least = np.zeros(len(jobs))
    least[ahead.job] = np.where(room.placed, least_work(ahead, picks), 0.0)
    bare, reserve_s = np.array(least), np.zeros(len(jobs))
    if ahead.reserve_s.any():
        reserve_s[ahead.job] = ahead.reserve_s
        spent = least_work(without_reserve(ahead), picks, moved=True)
        bare[ahead.job] = np.where(room.placed, spent, 0.0)
    dated = np.isfinite(jobs.deadline_s)
    return Admission(
        admitted=admitted,
        legs=legs_of(ahead, picks) if room.placed.any() else NO_LEGS,
        least_work=least,
        until_s=float(ahead.boundary_s[1]),
        earliest_s=_earliest(snapshot, room, MOST_EARLIEST if ahead.binding else 0),
        given_up=frozenset(np.flatnonzero(jobs.admitted & dated & ~admitted).tolist()),
        proven=proven,
        work=work,
        reserve_s=reserve_s,
        bare_work=bare,
        binding=ahead.binding,
    )


def least_work(ahead: Lookahead, picks: Picks, *, moved: bool = False) -> Floats:
    """Return the samples that each job must train in the first slot, float64[jobs] (Eq. 29).

    With this many, the legs from the second slot on suffice. They include a restart at their start
    if the certificate continues through it without one. If ``moved``, jobs that continue keep their
    Cell, but on other GPUs, so there is no such restart.
    """
    cost, least = ahead.cost, np.zeros(len(ahead.job))
    for job in range(len(ahead.job)):
        later = trained_samples(ahead, job, picks[job], first=1)
        on = int(picks[job, 0])
        if ahead.slots > 1 and on >= 0 and int(picks[job, 1]) == on:
            again = 0.0 if moved else ahead.rate[on] * ahead.restart_s[job]
            price = again if ahead.stays[on] else cost[on]
            later -= float(price)
        least[job] = max(0.0, float(ahead.work[job]) - later)
    return least


def _earliest(snapshot: Snapshot, room: SlotSchedules, most: int) -> Floats:
    """Return the earliest deadline of each refused job that could still be met.

    It is computed for the first ``most`` jobs by deadline, and is inf for other refused jobs. It is
    NaN for jobs that were not refused.
    """
    ahead = room.ahead
    earliest = np.full(len(snapshot.jobs), np.nan)
    refused = np.flatnonzero(~room.placed & ~ahead.promised)
    earliest[ahead.job[refused]] = np.inf
    order = refused[np.argsort(ahead.deadline_s[refused], kind="stable")]
    for job in order[:most].tolist():
        earliest[ahead.job[job]] = room.earliest_s(job)
    return earliest


def _nothing(snapshot: Snapshot, policy: Policy) -> Admission:
    """Return the admission of a round without open deadlines, in which late promises are given up."""
    jobs = snapshot.jobs
    kept = jobs.admitted & (work_left(snapshot) <= 0) & np.isfinite(jobs.deadline_s)
    lost = jobs.admitted & np.isfinite(jobs.deadline_s) & ~kept
    return Admission(
        admitted=kept,
        legs=NO_LEGS,
        least_work=np.zeros(len(jobs)),
        until_s=snapshot.now_s + policy.round_s,
        earliest_s=np.full(len(jobs), np.nan),
        given_up=frozenset(np.flatnonzero(lost).tolist()),
        proven=True,
    )
