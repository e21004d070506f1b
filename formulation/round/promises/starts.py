"""Laws over time: jobs keep their requests, and nobody starves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from tessera.formulation.base.moments import SAME_S
from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.formulation.job.lifecycle import ACTIVE
from tessera.formulation.round.draft import Draft, RowUse
from tessera.formulation.round.problem import CouplingRow, RowKind
from tessera.formulation.round.promises.guarantee import ROUNDING
from tessera.formulation.round.promises.packing import Packing
from tessera.formulation.round.starts.holds import Holds, holds_of, is_dated, is_protected
from tessera.formulation.round.starts.planner import plan_starts
from tessera.formulation.round.starts.pools import Pools
from tessera.formulation.round.starts.shares import segments_of_round
from tessera.formulation.round.starts.ways import columns_of_starts
from tessera.formulation.state.last_round import NO_PLANNED_STARTS, PlannedStarts, ScheduleSegments

MAX_ROWS: Final = 8
"""Rows for the planned starts on a GPU type."""
MANY_COLUMNS: Final = 50_000
"""Columns above which a GPU type has only ``FEW_ROWS`` rows, so that large rounds stay fast."""
FEW_ROWS: Final = 2


def jobs_keep_what_they_asked_for(draft: Draft) -> Draft:
    """Drop the columns on which a running job would have less than it asked for (Eq. 34b).

        x_c = 0  where n_c < min(n_k, N_j), or c is on another GPU type and r_c < min(r_k, R_j)

    ``k`` is the current column of the job j, ``N`` the GPUs of its request, and ``R`` its rate on them, if
    it asked for a GPU type. This holds for jobs that are protected (``is_protected``).
    """
    jobs = draft.snapshot.jobs
    protects = is_protected(draft)
    if not protects.any():
        return draft
    column = np.flatnonzero(protects[draft.job] & draft.starts)
    job = draft.job[column]
    current = draft.current[job]
    min_gpus = np.minimum(draft.gpus[current], jobs.requested_gpus[job])
    request_type = jobs.requested_gpu_type[job]
    rate = np.where(request_type >= 0, draft.rate_as_asked[job, request_type], 0.0)
    floor = np.minimum(draft.rate[current], rate)
    keep = np.ones(len(draft.cell), dtype=np.bool_)
    keep[column] = draft.gpus[column] >= min_gpus
    same_type = draft.gpu_type[column] == draft.gpu_type[current]
    keep[column] &= same_type | (draft.rate[column] >= floor * (1 - ROUNDING))
    return draft.only(keep)


def running_jobs_go_on(draft: Draft) -> Draft:
    """Mark the protected jobs, as far as they fit next to everything that is promised (Eq. 34c).

    They are suspended only for guaranteed jobs within their quota, for quotas that are reclaimed, and
    for other promises.
    """
    stays = is_protected(draft) & ~draft.must_run
    if not stays.any():
        return draft
    candidate = replace(draft, must_run=draft.must_run | stays)
    witness = _present_columns(candidate)
    if _fits(candidate, witness):
        return replace(candidate, witness=witness)
    packing = Packing(draft, np.ones(len(draft.current)))
    if not packing.sound:
        return draft
    packing.restore()
    stays &= packing.column >= 0
    return replace(draft, must_run=draft.must_run | stays, witness=np.array(packing.column))


def planned_starts_are_kept(draft: Draft) -> Draft:
    """Start the jobs whose planned start is due, and let no other job delay a planned one (Eq. 39b).

        sum_c h_c(s) x_c  +  sum_{j planned for s} n_j [j waits]  <=  schedulable GPUs of t

    There is a row for each GPU type ``t`` and each time ``s`` at which a planned start begins. ``h_c(s)``
    are the GPUs that column ``c`` still holds then. Quotas also have such rows. Far times share rows
    (``_group``).
    """
    starts, column = NO_PLANNED_STARTS, np.zeros(0, dtype=np.int64)
    is_due = np.zeros(0, dtype=np.bool_)
    if draft.policy.promise_starts:
        plan = draft.plan or plan_starts(draft)
        starts = plan.starts
        waits = np.zeros(len(draft.current), dtype=np.bool_)  # until a later time
        waits[starts.job[starts.start_s > draft.snapshot.now_s + SAME_S]] = True
        waits &= ~draft.snapshot.jobs.among(ACTIVE)
        witness = None if draft.witness is None else np.where(waits, -1, draft.witness)
        draft = replace(draft, plan=plan, must_run=draft.must_run & ~waits, witness=witness)
    if len(starts):
        column = columns_of_starts(draft, starts)
        due = (starts.start_s <= draft.snapshot.now_s + SAME_S) & (column >= 0)
        draft, column, is_due = _start(draft, starts, column, due)
    return replace(draft, rows=(*draft.rows, *_rows(draft, starts, column, is_due)))


def _present_columns(draft: Draft) -> Ints:
    """Return the columns of the witness, or else those on which must-run jobs are, int64[jobs]."""
    stays = np.where(draft.must_run, draft.current, -1)
    return stays if draft.witness is None else np.where(draft.witness >= 0, draft.witness, stays)


def _fits(draft: Draft, choice: Ints) -> bool:
    """Return whether a choice (int64[jobs]) lets all must-run jobs run, within every row."""
    if (choice[draft.must_run] < 0).any():
        return False
    columns = choice[choice >= 0]
    gpus = np.bincount(
        draft.gpu_type[columns], draft.gpus[columns], minlength=len(draft.snapshot.gpu_types)
    )
    if (gpus > draft.snapshot.schedulable_gpus()).any():
        return False
    is_chosen = np.zeros(len(draft.cell), dtype=np.bool_)
    is_chosen[columns] = True
    waits = choice < 0
    return all(
        int(row.amount[is_chosen[row.column]].sum())
        + int(row.idle_amount[waits[row.idle_job]].sum())
        <= row.row.capacity
        for row in draft.rows
    )


def _start(
    draft: Draft, starts: PlannedStarts, column: Ints, due: Bools
) -> tuple[Draft, Ints, Bools]:
    """Mark the jobs that are due, with columns that are as fast as planned.

    Return the draft, the column of each planned start in it, and which starts are marked. Those that do
    not fit next to other promises and limits are not.
    """
    witness = _present_columns(draft)
    rows = np.flatnonzero(due)
    for shrinks in (False, True):
        choice = _shrink_jobs(draft, witness) if shrinks else np.array(witness)
        choice[starts.job[rows]] = column[rows]
        must_run = np.array(draft.must_run)
        must_run[starts.job[rows]] = True
        if _fits(replace(draft, must_run=must_run), choice):
            break
    else:
        rows, choice = _pack_starts(draft, starts, column, rows)
    is_marked = np.zeros(len(due), dtype=np.bool_)
    is_marked[rows] = True
    must_run = np.array(draft.must_run)
    must_run[starts.job[rows]] = True
    min_rate = np.zeros(len(draft.current))
    min_rate[starts.job[rows]] = draft.rate[column[rows]] * (1 - ROUNDING)
    keep = draft.rate >= min_rate[draft.job]
    position = np.cumsum(keep) - 1
    draft = replace(draft, must_run=must_run, witness=choice).only(keep)
    has_column = (column >= 0) & keep[column] if len(keep) else column >= 0
    return draft, np.where(has_column, position[column], -1) if len(keep) else column, is_marked


def _shrink_jobs(draft: Draft, witness: Ints) -> Ints:
    """Return the witness in which running jobs have the fewest GPUs that they may have on their type."""
    choice = np.array(witness)
    may_shrink = draft.must_run & (draft.current >= 0)
    for job in np.flatnonzero(may_shrink & (witness == draft.current)).tolist():
        columns = np.array(draft.columns_of(job), dtype=np.int64)
        columns = columns[draft.gpu_type[columns] == draft.gpu_type[draft.current[job]]]
        if len(columns) and int(draft.gpus[columns].min()) < int(draft.gpus[draft.current[job]]):
            choice[job] = int(columns[np.argmin(draft.gpus[columns])])
    return choice


def _pack_starts(
    draft: Draft, starts: PlannedStarts, column: Ints, rows: Ints
) -> tuple[Ints, Ints]:
    """Return the rows of due starts that fit one after another, and a witness for them."""
    packing = Packing(draft, np.ones(len(draft.current)))
    if not packing.sound:
        return rows[:0], _present_columns(draft)
    fitting_rows = []
    for row in rows.tolist():
        job = int(starts.job[row])
        if packing.fits(job, int(column[row])):
            packing.seat(job, int(column[row]))
            fitting_rows.append(row)
    return np.array(fitting_rows, dtype=np.int64), np.array(packing.column)


class _Spans(NamedTuple):
    """The GPUs of one type that are spoken for, and when: int64 and float64, [spans] each."""

    start_s: Floats
    end_s: Floats
    gpus: Ints

    def gpus_at(self, at_s: float) -> Ints:
        """Return the GPUs of each span at a time, int64[spans]."""
        active = (self.start_s <= at_s + SAME_S) & (self.end_s > at_s + SAME_S)
        return np.where(active, self.gpus, 0)


@dataclass(frozen=True, slots=True, eq=False)
class _Limit:
    """GPUs of a type, or a quota: what each column and each planned start uses of it."""

    name: str
    capacity: int
    amount: Ints  # int64[columns]
    start_gpus: Ints  # int64[starts]
    segment_gpus: Ints  # int64[segments]


def _limits(
    draft: Draft, starts: PlannedStarts, column: Ints, segments: ScheduleSegments
) -> Iterator[_Limit]:
    """Yield what planned starts need: GPUs of types, and quotas."""
    gpus = draft.snapshot.schedulable_gpus().tolist()
    for number, gpu_type in enumerate(draft.snapshot.gpu_types):
        yield _Limit(
            gpu_type.name,
            gpus[number],
            np.where(draft.gpu_type == number, draft.gpus, 0),
            np.where(starts.gpu_type == number, starts.gpus, 0),
            np.where(segments.gpu_type == number, segments.gpus, 0),
        )
    for pool in Pools(draft).tenants:
        start_amount = np.zeros_like(column)
        start_amount[column >= 0] = pool.amount[column[column >= 0]]
        yield _Limit(pool.name, pool.size, pool.amount, start_amount, np.zeros_like(segments.gpus))


def _rows(draft: Draft, starts: PlannedStarts, column: Ints, due: Bools) -> list[RowUse]:
    """Return the rows of all GPU types and quotas (Eq. 39b)."""
    max_rows = FEW_ROWS if len(draft.cell) > MANY_COLUMNS else MAX_ROWS
    counts, segments, now_s = (
        ~is_dated(draft)[draft.job],
        segments_of_round(draft),
        draft.snapshot.now_s,
    )
    steady = np.zeros(len(draft.cell), dtype=np.bool_)
    steady[draft.current[draft.current >= 0]] = True
    steady[column[due & (column >= 0)]] = True
    rows, has_columns = [], draft.has_columns[starts.job]
    for limit in _limits(draft, starts, column, segments):
        waits, has_segments = (limit.start_gpus > 0) & ~due, limit.segment_gpus > 0
        moments = np.append(starts.start_s[waits], segments.start_s[has_segments])
        if draft.admission is not None:
            # A schedule may leave a job without its GPUs until the next slot, but no longer.
            slot_s = draft.admission.until_s
            goes_on = (
                has_segments & (segments.start_s <= now_s + SAME_S) & (segments.end_s > slot_s)
            )
            if goes_on.any():
                moments = np.append(moments, slot_s)
        moments = np.unique(moments[moments > now_s + SAME_S])
        if not len(moments):
            continue
        columns = np.flatnonzero(counts & (limit.amount > 0))
        holds = holds_of(draft, columns).scale_to(draft.gpus[columns], limit.amount[columns])
        no_columns, waits = waits & ~has_columns, waits & has_columns
        start_spans = _Spans(starts.start_s[waits], starts.end_s[waits], limit.start_gpus[waits])
        fixed_spans = _Spans(
            np.append(segments.start_s[has_segments], starts.start_s[no_columns]),
            np.append(segments.end_s[has_segments], starts.end_s[no_columns]),
            np.append(limit.segment_gpus[has_segments], limit.start_gpus[no_columns]),
        )
        for number, group in enumerate(_group(moments, max_rows)):
            capacity, amount, idle = _use(group, holds, steady[columns], start_spans, fixed_spans)
            row = CouplingRow(
                kind=RowKind.RESERVED,
                subject=f"{limit.name}/{number}",
                capacity=max(0, limit.capacity - capacity),
            )
            use, waiting = amount > 0, idle > 0
            use_of_row = RowUse(
                row=row,
                column=columns[use],
                amount=amount[use],
                idle_job=starts.job[waits][waiting],
                idle_amount=idle[waiting],
            )
            rows.append(_with_room(draft, use_of_row))
    return rows


def _group(moments: Floats, max_groups: int) -> list[Floats]:
    """Return the times in at most ``max_groups`` groups. The first half of them have one time each."""
    if len(moments) <= max_groups:
        return [moments[k : k + 1] for k in range(len(moments))]
    single = max_groups // 2
    return [
        *(moments[k : k + 1] for k in range(single)),
        *np.array_split(moments[single:], max_groups - single),
    ]


def _use(
    moments: Floats, holds: Holds, stays: Bools, starts: _Spans, fixed_spans: _Spans
) -> tuple[int, Ints, Ints]:
    """Return what a group of times takes in any case, and by column and by planned start.

    What is there at all of its times, such as the GPUs of a job that runs on beyond them, counts as long
    as it stays there. What is there at some of them counts at the worst of these times, whether it stays
    or not. For one time, the row is exact. ``stays`` is bool[columns], those that run on or are due.
    """
    first_s, last_s = float(moments[0]), float(moments[-1])
    amount = np.where(stays, holds.gpus_at(last_s), holds.gpus_at(first_s))
    amounts = [starts.gpus_at(at_s) for at_s in moments.tolist()]
    common: Ints = np.min(amounts, axis=0)
    partly = [
        int((amounts_then - common).sum())
        + int(fixed_spans.gpus_at(at_s).sum())
        + int((holds.gpus_at(at_s) - amount)[stays].sum())
        for amounts_then, at_s in zip(amounts, moments.tolist(), strict=True)
    ]
    return max(partly), amount, common


def _with_room(draft: Draft, use: RowUse) -> RowUse:
    """Return the row with room for the witness. Times that are estimated again may leave it none."""
    witness = _present_columns(draft)
    is_chosen = np.zeros(len(draft.cell), dtype=np.bool_)
    is_chosen[witness[witness >= 0]] = True
    runs = draft.snapshot.jobs.among(ACTIVE) & (draft.current >= 0) & (witness < 0)
    is_chosen[draft.current[runs & ~draft.must_run]] = True
    need = int(use.amount[is_chosen[use.column]].sum())
    need += int(use.idle_amount[witness[use.idle_job] < 0].sum())
    return replace(use, row=replace(use.row, capacity=max(use.row.capacity, need)))
