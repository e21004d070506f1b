"""The plan of a round: its jobs with deadlines, their options, and what is free in each slot."""

from __future__ import annotations

import numpy as np

from formulation.draft import Draft
from formulation.lookahead.grid import SAME_S, boundaries
from formulation.lookahead.kept import reserved, staying
from formulation.lookahead.plan import Lookahead
from formulation.rates import work_left
from formulation.tables import Floats, Ints


def look_ahead(base: Draft, draft: Draft) -> Lookahead:
    """State the plan of the jobs with deadlines.

    ``base`` has the columns that are physically there, ``draft`` those that the rules leave this round. What
    was promised and is bound to its column for now, or has none, may use the former later on. Those that were
    promised and those that have columns take part, where their deadlines lie ahead; new ones that are bound
    do not.
    """
    snapshot, policy = base.snapshot, base.policy
    jobs = snapshot.jobs
    steady = jobs.guaranteed | policy.run_to_completion
    bound = draft.must_run & ~steady
    whole = jobs.admitted & (bound | ~draft.has_columns)
    open_ = np.isfinite(jobs.deadline_s) & (jobs.deadline_s > snapshot.now_s)
    has = np.where(whole, base.has_columns, draft.has_columns & (jobs.admitted | ~bound))
    taking = np.flatnonzero(open_ & has & (work_left(snapshot) > 0))
    until_s = float(jobs.deadline_s[taking].max(initial=snapshot.now_s))
    boundary_s = boundaries(snapshot.now_s, until_s, policy.round_s)
    # one slot beyond all deadlines: what is free there is free for good
    boundary_s = boundaries(snapshot.now_s, boundary_s[-1] + SAME_S, policy.round_s)
    columns = [(base if whole[j] else draft) for j in taking.tolist()]
    stay_rate, lag_s = staying(base, taking)
    cell, rate, stays, now, lag, floor, owner = [], [], [], [], [], [], []
    for index, (job, source) in enumerate(zip(taking.tolist(), columns, strict=True)):
        span = slice(int(source.job_start[job]), int(source.job_start[job + 1]))
        kinds, gpus = source.gpu_type[span], source.gpus[span]
        least = np.array([gpus[kinds == kind].min() for kind in kinds], dtype=np.int64)
        current = int(source.current[job]) - span.start if source.current[job] >= 0 else -1
        left = set(draft.cell[draft.columns_of(job)].tolist())
        order = [*([current] if current >= 0 else []), *range(span.stop - span.start)]
        for position, column in enumerate(order):
            stay = position == 0 and current >= 0
            cell.append(int(source.cell[span.start + column]))
            rate.append(float(stay_rate[job]) if stay else float(source.rate[span.start + column]))
            stays.append(stay)
            now.append(cell[-1] in left)
            lag.append(float(lag_s[job]) if stay else 0.0)
            floor.append(int(least[column]))
            owner.append(index)
    rows = [row for row in draft.rows if not len(row.idle_job)]
    option_cell, option_owner = np.array(cell, np.int64), np.array(owner, np.int64)
    keeps = steady[taking]
    return Lookahead(
        boundary_s=boundary_s, names=tuple(jobs.name[j] for j in taking.tolist()), job=taking,
        work=work_left(snapshot)[taking],
        total_work=(jobs.iterations * snapshot.global_batch)[taking],
        deadline_s=jobs.deadline_s[taking], restart_s=jobs.restart_s[taking],
        weight=draft.weight[taking], promised=jobs.admitted[taking], steady=keeps,
        held=np.where(keeps & draft.must_run[taking], jobs.current_type[taking], -1),
        option_start=np.searchsorted(option_owner, np.arange(len(taking) + 1)).astype(np.int64),
        cells=base.cells, cell=option_cell, rate=np.array(rate), stays=np.array(stays, np.bool_),
        now=np.array(now, np.bool_), lag_s=np.array(lag), floor=np.array(floor, np.int64),
        use=_use(draft, taking, option_owner, option_cell),
        capacity=_free(draft, taking, boundary_s, [row.capacity for row in rows]),
    )  # fmt: skip


def _use(draft: Draft, taking: Ints, owner: Ints, cell: Ints) -> Ints:
    """Return what each option uses of each resource, int64[options, resources]."""
    types = len(draft.snapshot.gpu_types)
    rows = [row for row in draft.rows if not len(row.idle_job)]
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


def _free(draft: Draft, taking: Ints, boundary_s: Floats, limits: list[int]) -> Ints:
    """Return what is left in each slot beside jobs that must run and are not planned (Eq. 28)."""
    snapshot, types = draft.snapshot, len(draft.snapshot.gpu_types)
    rows = [row for row in draft.rows if not len(row.idle_job)]
    whole = np.append(snapshot.schedulable_gpus(), np.array(limits, np.int64))
    free = np.repeat(whole[:, None], len(boundary_s) - 1, axis=1)
    planned = np.zeros(len(snapshot.jobs), dtype=np.bool_)
    planned[taking] = True
    for column, until_s in reserved(draft, ~planned):
        slots = boundary_s[:-1] < until_s
        free[int(draft.gpu_type[column]), slots] -= int(draft.gpus[column])
        for r, row in enumerate(rows):
            free[types + r, slots] -= int(row.amount[row.column == column].sum())
    return np.maximum(free, 0)
