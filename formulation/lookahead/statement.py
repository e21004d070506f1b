"""The jobs of a round with deadlines, their options, and the free resources in each slot."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tessera.formulation.cells import find_most_compact
from tessera.formulation.draft import Draft, RowUse
from tessera.formulation.lookahead.check import WORK_TOLERANCE
from tessera.formulation.lookahead.grid import SAME_S, slot_boundaries
from tessera.formulation.lookahead.plan import Lookahead, picks_of, trained_samples
from tessera.formulation.lookahead.reservations import rates_if_kept, reserve_columns
from tessera.formulation.policy import KEEP_MODE, PLANNED_MODE
from tessera.formulation.rates import work_left
from tessera.formulation.snapshot import Legs, Nodes
from tessera.formulation.tables import Floats, Ints


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
    steady = jobs.guaranteed | policy.run_to_completion
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
    columns = [(base if whole[j] else draft) for j in taking.tolist()]
    stay_rate, lag_s = rates_if_kept(base, taking)
    cell, rate, stays, now, lag, floor, owner = [], [], [], [], [], [], []
    # List the options of each job. The one that stays comes first.
    for index, (job, source) in enumerate(zip(taking.tolist(), columns, strict=True)):
        span = slice(int(source.job_start[job]), int(source.job_start[job + 1]))
        kinds, gpus = source.gpu_type[span], source.gpus[span]
        least = np.array([gpus[kinds == kind].min() for kind in kinds], dtype=np.int64)
        current = int(source.current[job]) - span.start if source.current[job] >= 0 else -1
        left = set(draft.cell[draft.columns_of(job)].tolist())
        compact = find_most_compact(base.cells, source.cell[span])
        order = [*([current] if current >= 0 else []), *np.flatnonzero(compact).tolist()]
        for position, column in enumerate(order):
            stay = position == 0 and current >= 0
            cell.append(int(source.cell[span.start + column]))
            rate.append(float(stay_rate[job]) if stay else float(source.rate[span.start + column]))
            stays.append(stay)
            now.append(cell[-1] in left)
            lag.append(float(lag_s[job]) if stay else 0.0)
            floor.append(int(least[column]))
            owner.append(index)
    option_cell, option_owner = np.array(cell, np.int64), np.array(owner, np.int64)
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
        option_start=np.searchsorted(option_owner, np.arange(len(taking) + 1)).astype(np.int64),
        cells=base.cells,
        cell=option_cell,
        rate=np.array(rate),
        stays=np.array(stays, np.bool_),
        now=np.array(now, np.bool_),
        lag_s=np.array(lag),
        floor=np.array(floor, np.int64),
        use=_use(draft, taking, option_owner, option_cell),
        capacity=_free(draft, taking, boundary_s),
        binding=policy.deadline_mode != PLANNED_MODE,
        check=draft.check,
    )
    return _with_reserve(ahead, snapshot.legs) if may_be_scattered(snapshot.nodes) else ahead


def _column_rows(draft: Draft) -> list[RowUse]:
    """Return the rows that waiting jobs do not use."""
    return [use for use in draft.rows if not len(use.idle_job)]


def may_be_scattered(nodes: Nodes) -> bool:
    """Return whether free GPUs of a type may be on several nodes, so that jobs may have to move."""
    several = nodes.gpu_type[nodes.gpus > 1]
    return len(np.unique(several)) < len(several)


def _with_reserve(ahead: Lookahead, legs: Legs) -> Lookahead:
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
    picks = picks_of(more, legs)
    for job in np.flatnonzero(can & ahead.promised).tolist():
        short = ahead.work[job] - trained_samples(more, job, picks[job])
        can[job] = short <= WORK_TOLERANCE * ahead.total_work[job]
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
    for r, row in enumerate(rows):
        amount = {
            (int(draft.job[c]), int(draft.cell[c])): int(a)
            for c, a in zip(row.column.tolist(), row.amount.tolist(), strict=True)
        }
        for option, (job, which) in enumerate(zip(owner.tolist(), cell.tolist(), strict=True)):
            use[option, types + r] = amount.get((int(taking[job]), which), 0)
    return use


def _free(draft: Draft, taking: Ints, boundary_s: Floats) -> Ints:
    """Return the free resources in each slot, int64[resources, slots] (Eq. 28).

    Jobs that must run and are not planned keep theirs.
    """
    snapshot, types = draft.snapshot, len(draft.snapshot.gpu_types)
    rows = _column_rows(draft)
    whole = np.append(
        snapshot.schedulable_gpus(), np.array([use.row.capacity for use in rows], np.int64)
    )
    free = np.repeat(whole[:, None], len(boundary_s) - 1, axis=1)
    planned = np.zeros(len(snapshot.jobs), dtype=np.bool_)
    planned[taking] = True
    for column, until_s in reserve_columns(draft, ~planned):
        slots = boundary_s[:-1] < until_s
        free[int(draft.gpu_type[column]), slots] -= int(draft.gpus[column])
        for r, row in enumerate(rows):
            free[types + r, slots] -= int(row.amount[row.column == column].sum())
    return np.maximum(free, 0)
