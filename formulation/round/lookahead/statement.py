"""The jobs of a round with deadlines, their options, and the free resources in each slot."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tessera.formulation.base.moments import SAME_S
from tessera.formulation.base.tables import Bools, Floats, Ints, concatenate_ranges
from tessera.formulation.round.draft import Draft, RowUse
from tessera.formulation.round.lookahead.grid import slot_boundaries
from tessera.formulation.round.lookahead.plan import (
    WORK_TOLERANCE,
    Lookahead,
    all_trained_samples,
    picks_of,
)
from tessera.formulation.round.lookahead.reservations import rates_if_kept, reserve_columns
from tessera.formulation.round.policy import KEEP_MODE, PLANNED_MODE
from tessera.formulation.round.rates import work_left
from tessera.formulation.state.cells import most_compact_by_job
from tessera.formulation.state.last_round import ScheduleSegments
from tessera.formulation.state.reservations import reserved_gpus
from tessera.formulation.state.snapshot import Nodes, Snapshot


def look_ahead(base: Draft, draft: Draft) -> Lookahead:
    """State the scheduling problem of the jobs with deadlines.

    ``base`` has the columns that are physically possible, ``draft`` those that the rules leave in
    this round. A promised job that is bound to its column for now, or has none, may use the columns
    of ``base`` later.

    Schedules count GPUs and not nodes, so only columns on the fewest nodes of their type and count
    are options, and the one that a job runs on. A job that has the GPUs can have such a column.

    Promised jobs and jobs with columns take part if their deadlines are in the future. New jobs
    that are bound do not. Under ``keep``, no new job does.
    """
    snapshot, policy = base.snapshot, base.policy
    jobs = snapshot.jobs
    steady = jobs.guaranteed
    bound = draft.must_run & ~steady
    # Bound or columnless promised jobs may choose among all physical columns later.
    whole = jobs.admitted & (bound | ~draft.has_columns)
    open_ = np.isfinite(jobs.deadline_s) & (jobs.deadline_s > snapshot.now_s)
    if policy.deadline_mode == KEEP_MODE:
        open_ &= jobs.admitted
    has = np.where(whole, base.has_columns, draft.has_columns & (jobs.admitted | ~bound))
    taking = np.flatnonzero(open_ & has & (work_left(snapshot) > 0))
    until_s = float(jobs.deadline_s[taking].max(initial=snapshot.now_s))
    boundary_s = slot_boundaries(snapshot.now_s, until_s, policy.round_s)
    # One slot lies beyond all deadlines: what is free there is free forever.
    boundary_s = slot_boundaries(snapshot.now_s, boundary_s[-1] + SAME_S, policy.round_s)
    stay_rate, lag_s = rates_if_kept(base, taking)
    options = _options(base, draft, taking, whole[taking])
    owner, cell, stays = options.owner, options.cell, options.stays
    keeps = steady[taking]
    ahead = Lookahead(
        boundary_s=boundary_s,
        names=tuple(jobs.name[j] for j in taking.tolist()),
        job=taking,
        work=work_left(snapshot)[taking],
        total_work=(jobs.iterations * snapshot.global_batch)[taking],
        deadline_s=jobs.deadline_s[taking],
        restart_s=jobs.restart_s[taking],
        reserve_s=np.zeros(len(taking)),
        weight=draft.weight[taking],
        promised=jobs.admitted[taking],
        steady=keeps,
        held=np.where(keeps & draft.must_run[taking], jobs.current_type[taking], -1),
        option_start=np.searchsorted(owner, np.arange(len(taking) + 1)).astype(np.int64),
        cells=base.cells,
        cell=cell,
        rate=np.where(stays, stay_rate[taking[owner]], base.cells.rate[cell]),
        stays=stays,
        now=options.now,
        lag_s=np.where(stays, lag_s[taking[owner]], 0.0),
        floor=options.floor,
        use=_use(draft, taking, owner, cell),
        types=len(snapshot.gpu_types),
        capacity=_free(draft, taking, boundary_s),
        binding=policy.deadline_mode != PLANNED_MODE,
        check=draft.check,
    )
    return (
        _with_reserve(ahead, snapshot.schedule_segments)
        if may_be_scattered(snapshot.nodes)
        else ahead
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Options:
    """The options of all jobs, job after job. The one that stays comes first."""

    owner: Ints  # int64[options], index into the jobs that take part
    cell: Ints  # int64[options]
    stays: Bools
    now: Bools  # whether the rules of this round leave it for the first slot
    floor: Ints  # GPUs of the job's smallest column on the type


def _options(base: Draft, draft: Draft, taking: Ints, whole: Bools) -> _Options:
    """Return the options of the jobs ``taking``, from ``base`` where ``whole`` (bool[taking])."""
    start = np.where(whole, base.job_start[taking], draft.job_start[taking])
    count = np.where(whole, base.job_start[taking + 1], draft.job_start[taking + 1]) - start
    column, owner = concatenate_ranges(start, count), np.repeat(np.arange(len(taking)), count)
    of_base, cells = whole[owner], base.cells
    cell = np.zeros(len(column), dtype=np.int64)
    cell[of_base] = base.cell[column[of_base]]
    cell[~of_base] = draft.cell[column[~of_base]]
    current = np.where(whole, base.current[taking], draft.current[taking])
    stays = column == current[owner]
    kind, gpus, types = cells.gpu_type[cell], cells.gpus[cell], len(draft.snapshot.gpu_types)
    least = np.full(len(taking) * types, np.iinfo(np.int64).max)
    np.minimum.at(least, owner * types + kind, gpus)
    compact = most_compact_by_job(cells, cell, owner)
    # The column that a job runs on is an option that stays, and may be started again later.
    row = np.concatenate([np.flatnonzero(stays), np.flatnonzero(compact)])
    is_stay = np.arange(len(row)) < int(stays.sum())
    order = np.argsort(2 * owner[row] + ~is_stay, kind="stable")
    row, is_stay = row[order], is_stay[order]
    now = ~of_base[row]
    if not now.all():
        left = draft.job * len(cells) + draft.cell
        now |= np.isin(taking[owner[row]] * len(cells) + cell[row], left)
    return _Options(
        owner=owner[row],
        cell=cell[row],
        stays=is_stay,
        now=now,
        floor=least[owner[row] * types + kind[row]],
    )


def _column_rows(draft: Draft) -> list[RowUse]:
    """Return the rows that waiting jobs do not use."""
    return [use for use in draft.rows if not len(use.idle_job)]


def may_be_scattered(nodes: Nodes) -> bool:
    """Return whether free GPUs of a type may be on several nodes, so that jobs may have to move."""
    several = nodes.gpu_type[nodes.gpus > 1]
    return len(np.unique(several)) < len(several)


def _with_reserve(ahead: Lookahead, segments: ScheduleSegments) -> Lookahead:
    """Return the problem in which jobs have the time of one more restart in reserve.

    A job can then be moved once when another needs its block. Each start, and each option that
    stays, is charged one more restart. Some jobs have no reserve: those that have been moved, and
    those that could not have it even alone. Jobs without a promise have none either, because they
    would be moved to keep it.
    """
    more = _charged(ahead, ahead.restart_s)
    can = np.zeros(len(ahead.job), dtype=np.bool_)
    pause_s = np.where(more.stays, more.lag_s, more.restart_s[more.owner])
    left_s = (ahead.deadline_s - ahead.boundary_s[0])[ahead.owner] - pause_s
    can[ahead.owner[ahead.rate * left_s >= ahead.work[ahead.owner]]] = True
    can &= ahead.promised | ahead.binding
    picks = picks_of(more, segments)
    short = ahead.work - all_trained_samples(more, picks)
    can &= ~ahead.promised | (short <= WORK_TOLERANCE * ahead.total_work)
    return _charged(ahead, np.where(can, ahead.restart_s, 0.0))


def _charged(ahead: Lookahead, reserve_s: Floats) -> Lookahead:
    return replace(
        ahead,
        restart_s=ahead.restart_s + reserve_s,
        reserve_s=reserve_s,
        lag_s=ahead.lag_s + np.where(ahead.stays, reserve_s[ahead.owner], 0.0),
    )


def without_reserve(ahead: Lookahead) -> Lookahead:
    """Return the problem in which only restarts are charged, without the reserve."""
    return _charged(ahead, -ahead.reserve_s)


def _use(draft: Draft, taking: Ints, owner: Ints, cell: Ints) -> Ints:
    """Return the use of each resource by each option, int64[options, resources]."""
    types = len(draft.snapshot.gpu_types)
    rows = _column_rows(draft)
    use = np.zeros((len(cell), types + len(rows)), dtype=np.int64)
    use[np.arange(len(cell)), draft.cells.gpu_type[cell]] = draft.cells.gpus[cell]
    wanted = taking[owner] * len(draft.cells) + cell
    for r, row in enumerate(rows):
        known = draft.job[row.column] * len(draft.cells) + draft.cell[row.column]
        order = np.argsort(known)
        at = np.minimum(np.searchsorted(known[order], wanted), max(len(known) - 1, 0))
        if len(known):
            use[:, types + r] = np.where(known[order][at] == wanted, row.amount[order][at], 0)
    return use


def _free(draft: Draft, taking: Ints, boundary_s: Floats) -> Ints:
    """Return the resources that are free for all of each slot, int64[resources, slots] (Eq. 28).

    Others have them at other times: jobs that must run and are not planned keep theirs until they end or
    have settled, and planned starts and windows to come have theirs.
    """
    snapshot, types = draft.snapshot, len(draft.snapshot.gpu_types)
    rows = _column_rows(draft)
    size = np.append(
        snapshot.schedulable_gpus(), np.array([use.row.capacity for use in rows], np.int64)
    )
    starts, windows = snapshot.planned_starts, snapshot.reservations
    other_starts = np.flatnonzero(~np.isin(starts.job, taking))
    to_come = np.flatnonzero(_excludes(snapshot, taking))
    moments = np.concatenate(
        [boundary_s[:-1], starts.start_s[other_starts], windows.start_s[to_come]]
    )
    moments = np.unique(moments[(moments >= boundary_s[0]) & (moments < boundary_s[-1])])
    other_jobs = np.ones(len(snapshot.jobs), dtype=np.bool_)
    other_jobs[taking] = False
    column, holds = reserve_columns(draft, other_jobs)
    row_use = [_amounts_of(row, len(draft.cell))[column] for row in rows]
    window_gpus = reserved_gpus(snapshot)[to_come]
    use = np.zeros((len(size), len(moments)), dtype=np.int64)
    for k, at_s in enumerate(moments.tolist()):
        np.add.at(use[:, k], draft.gpu_type[column], holds.gpus_at(at_s + SAME_S))
        starting = other_starts[starts.are_active(at_s)[other_starts]]
        np.add.at(use[:, k], starts.gpu_type[starting], starts.gpus[starting])
        use[:types, k] += window_gpus[windows.are_active(at_s)[to_come]].sum(axis=0)
        runs = holds.part_until_s > at_s + SAME_S
        use[types:, k] = [int(amount[runs].sum()) for amount in row_use]
    max_use = np.maximum.reduceat(use, np.searchsorted(moments, boundary_s[:-1]), axis=1)
    return np.maximum(size[:, None] - max_use, 0)


def _amounts_of(row: RowUse, columns: int) -> Ints:
    """Return what each column uses of a row, int64[columns]."""
    amount = np.zeros(columns, dtype=np.int64)
    amount[row.column] = row.amount
    return amount


def _excludes(snapshot: Snapshot, taking: Ints) -> Bools:
    """Return which windows to come take GPUs from schedules, bool[reservations].

    Those that serve a job of ``taking`` do not, because schedules do not tell jobs apart there. The
    windows that have begun have rows, which hold for all slots.
    """
    table, entitlements = snapshot.reservations, snapshot.entitlements
    to_come: Bools = table.start_s > snapshot.now_s
    to_come[entitlements.reservation[np.isin(entitlements.job, taking)]] = False
    return to_come
