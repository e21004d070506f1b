"""Admission: promises first, and then as much new weight as one schedule of all can meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from tessera.formulation.base.tables import Floats, Ints
from tessera.formulation.round.admission import Admission
from tessera.formulation.round.columns import first_draft
from tessera.formulation.round.draft import Draft, do_not_check
from tessera.formulation.round.lookahead import (
    Lookahead,
    Picks,
    all_trained_samples,
    look_ahead,
    picks_of,
    segments_of,
    without_reserve,
)
from tessera.formulation.round.objectives import with_needs
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.promises import PHYSICAL, PROMISES
from tessera.formulation.round.promises.deadlines import deadlines_are_kept
from tessera.formulation.round.rates import work_left
from tessera.formulation.state.last_round import NO_SEGMENTS
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.base import Budget
from tessera.solvers.kernels.slotfit import SlotProblem
from tessera.solvers.lookahead.firstfit import (
    SlotSchedules,
    arrange_jobs,
    fit_in,
    keep_promised_schedules,
    slot_problem,
)
from tessera.solvers.lookahead.pricefit import by_deadline, fit_at_prices, weight_of_new
from tessera.solvers.lookahead.rollout import roll_out
from tessera.solvers.lookahead.search import ADMISSION, search_admission
from tessera.solvers.lookahead.validity import require_valid

__all__ = ["ADMISSION", "admit", "drafts_before_deadlines"]

MAX_JOBS_OF_THREE_ORDERS: Final = 1000
"""Number of new jobs above which only one order is tried before prices, not three."""
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
    inherited = picks_of(ahead, snapshot.schedule_segments)
    if not ahead.binding:
        return _planned(snapshot, policy, ahead, keep_promised_schedules(ahead, inherited))
    room = _by_order(ahead, inherited, slot_problem(ahead))
    if room.placed[ahead.promised | (ahead.weight > 0)].all():
        bound = weight_of_new(room)
        return _admission(snapshot, ahead, room, proven=True, bound=bound)
    priced = fit_at_prices(ahead, room)
    found = search_admission(ahead, inherited, priced, budget)
    bound = weight_of_new(found.room) if found.proven else priced.bound
    return _admission(
        snapshot, ahead, found.room, proven=found.proven, bound=bound, work=found.work
    )


def _planned(
    snapshot: Snapshot, policy: Policy, ahead: Lookahead, room: SlotSchedules
) -> Admission:
    """Return the schedule of the jobs without promises, with the promised ones in ``room``.

    Steady jobs keep what they once have, so they are fitted in first, by deadline.
    """
    steady = np.flatnonzero(ahead.steady & ~room.placed)
    fit_in(room, steady[np.argsort(ahead.deadline_s[steady], kind="stable")])
    rest = ~room.placed & ~ahead.steady & ~ahead.promised
    plan = roll_out(ahead, snapshot.jobs, room.free, rest, policy.round_s)
    bound = plan.bound + float(ahead.weight[room.placed & ~ahead.promised].sum())
    known = _admission(snapshot, ahead, room, proven=False, bound=bound)
    segments, admitted, least = (
        plan.schedule_segments(ahead),
        np.array(known.admitted),
        np.array(known.least_work),
    )
    admitted[ahead.job[plan.met]] = True
    now = segments.job[segments.start_s <= snapshot.now_s]
    least[now] = work_left(snapshot)[now]
    met = room.placed | plan.met
    alone = not room.placed.any() and not (ahead.steady & (ahead.weight > 0)).any()
    best = alone and plan.bound <= float(ahead.weight[plan.met].sum()) * (1 + 1e-12)
    return replace(
        known,
        admitted=admitted,
        schedule_segments=known.schedule_segments.followed_by(segments),
        least_work=least,
        proven=best or bool(met[ahead.weight > 0].all()),
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


def _by_order(ahead: Lookahead, inherited: Picks, problem: SlotProblem) -> SlotSchedules:
    """Return the best of several first fits.

    New jobs are fitted in by deadline, by weight, and by weight per GPU time. If this leaves jobs
    out, promises are moved to make room: then all jobs are scheduled again by deadline.
    """
    new = np.flatnonzero(~ahead.promised)
    kept = keep_promised_schedules(ahead, inherited, problem)
    rooms: list[SlotSchedules] = []
    for order in _orders(ahead):
        room = kept.copy()
        fit_in(room, new[order])
        rooms.append(room)
        if room.placed[new].all() or len(new) > MAX_JOBS_OF_THREE_ORDERS:
            break
    if not any(room.placed[new].all() for room in rooms):
        moved = arrange_jobs(ahead, _gpu_s(ahead) / np.maximum(ahead.weight, 1e-12), problem)
        if moved is not None:
            fit_in(moved, by_deadline(ahead, ~moved.placed))
            rooms.append(moved)
    return max(rooms, key=SlotSchedules.weight)


def _orders(ahead: Lookahead) -> Iterator[Ints]:
    new = np.flatnonzero(~ahead.promised)
    weight, deadline = ahead.weight[new], ahead.deadline_s[new]
    gpu_s = _gpu_s(ahead)[new]
    yield np.lexsort((-weight, deadline, weight <= 0))
    yield np.lexsort((deadline, -weight))
    yield np.lexsort((deadline, -weight / np.maximum(gpu_s, 1e-9)))


def _gpu_s(ahead: Lookahead) -> Floats:
    """Return the GPU-seconds of each job's work on its leanest Cell, float64[jobs]."""
    lean, some = np.full(len(ahead.job), np.inf), ahead.rate > 0
    gpus = ahead.cells.gpus[ahead.cell]
    np.minimum.at(lean, ahead.owner[some], gpus[some] / ahead.rate[some])
    return lean * ahead.work


def _admission(
    snapshot: Snapshot,
    ahead: Lookahead,
    room: SlotSchedules,
    *,
    proven: bool,
    bound: float,
    work: float = 0.0,
) -> Admission:
    """Return the admission of the jobs in ``room``, once its schedules have been checked."""
    jobs = snapshot.jobs
    require_valid(ahead, room.picks, room.placed)
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
        schedule_segments=segments_of(ahead, picks) if room.placed.any() else NO_SEGMENTS,
        least_work=least,
        until_s=float(ahead.boundary_s[1]),
        earliest_s=_earliest(snapshot, room, MOST_EARLIEST if ahead.binding else 0),
        given_up=frozenset(np.flatnonzero(jobs.admitted & dated & ~admitted).tolist()),
        proven=proven,
        bound=bound,
        work=work,
        reserve_s=reserve_s,
        bare_work=bare,
        binding=ahead.binding,
    )


def least_work(ahead: Lookahead, picks: Picks, *, moved: bool = False) -> Floats:
    """Return the samples that each job must train in the first slot, float64[jobs] (Eq. 29).

    With this many, the segments from the second slot on suffice. They include a restart at their start
    if the certificate continues through it without one. If ``moved``, jobs that continue keep their
    Cell, but on other GPUs, so there is no such restart.
    """
    later = all_trained_samples(ahead, picks, first=1)
    if ahead.slots > 1:
        job = np.flatnonzero((picks[:, 0] >= 0) & (picks[:, 1] == picks[:, 0]))
        on = picks[job, 0]
        again = 0.0 if moved else ahead.rate[on] * ahead.restart_s[job]
        later[job] -= np.where(ahead.stays[on], again, ahead.cost[on])
    return np.maximum(0.0, ahead.work - later)


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
        schedule_segments=NO_SEGMENTS,
        least_work=np.zeros(len(jobs)),
        until_s=snapshot.now_s + policy.round_s,
        earliest_s=np.full(len(jobs), np.nan),
        given_up=frozenset(np.flatnonzero(lost).tolist()),
        proven=True,
        bound=0.0,
    )
