"""Deadlines as promises: those that a round may make, and those that it must keep."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tessera.formulation.base.moments import format_rfc3339
from tessera.formulation.base.tables import Bools, Floats, Ints, concatenate_ranges
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.job.reasons import Reason, ReasonCode
from tessera.formulation.round.admission import Admission
from tessera.formulation.round.draft import Draft
from tessera.formulation.round.lookahead import rates_if_kept, reserve_columns
from tessera.formulation.round.policy import KEEP_MODE
from tessera.formulation.round.promises.guarantee import ROUNDING
from tessera.formulation.round.promises.launched import is_launched
from tessera.formulation.round.rates import work_left
from tessera.formulation.state.snapshot import STATE_CODE

_NOW_S: Final = 1e-3


def deadlines_are_kept(draft: Draft) -> Draft:
    """Leave jobs with deadlines only the columns that keep them, according to the policy's mode.

    ``ignore`` keeps all columns. ``myopic`` applies Eq. (20). ``keep``, ``look-ahead`` and
    ``planned`` apply Eq. (29) with the certificates of an admission that was decided before.
    ``keep`` and ``planned`` refuse no job. Jobs whose promises are waived, and those that ran
    before without one, continue as well as they can: a deadline never stops a running job.
    """
    mode = draft.policy.deadline_mode
    if mode == "ignore" or not np.isfinite(draft.snapshot.jobs.deadline_s).any():
        return draft
    if mode == "myopic":
        return fast_enough_from_now_on(draft)
    return draft if draft.admission is None else certificates_are_kept(draft, draft.admission)


def fast_enough_from_now_on(draft: Draft) -> Draft:
    """Drop columns on which a job with a deadline would finish too late (Arena Eq. 6; Eq. 20).

        W_j <= r_c (D_j - now - restart_j)    where c starts, moves or resizes j
        W_j <= r_c (D_j - now - the rest of its last restart)    for the c that it runs on

    A job that runs by this rule is admitted, and must run from then on. Waiting jobs that no column
    serves are dropped early (Crius section 8.5).
    """
    jobs = draft.snapshot.jobs
    fast = finishes_in_time(draft)
    dated = np.isfinite(jobs.deadline_s) & draft.promisable & draft.has_columns
    served = np.zeros(len(jobs), dtype=np.bool_)
    served[draft.job[fast]] = True
    lapsed = np.flatnonzero(jobs.admitted & dated & ~served)
    held = dated & served
    draft = draft.only(fast | ~held[draft.job])
    draft = _dropped(draft, dated & ~served & _new(draft) & ~jobs.admitted)
    spare_s = jobs.deadline_s - draft.snapshot.now_s - jobs.restart_s
    with np.errstate(divide="ignore", invalid="ignore"):
        least = np.where(held & (spare_s > 0), work_left(draft.snapshot) / spare_s, 0.0)
    can_move = ~held | ((spare_s > 0) & (_current_rate(draft) >= least * (1 - ROUNDING)))
    must_run = draft.must_run | (held & jobs.admitted)
    return replace(
        draft,
        must_run=must_run,
        witness=np.where(must_run, draft.current, -1),  # unchanged, everything promised fits
        least_rate=np.maximum(draft.least_rate, least * (1 - ROUNDING)),
        movable=draft.movable & can_move,
        admits=draft.admits | frozenset(np.flatnonzero(held).tolist()),
        lapsed=draft.lapsed | frozenset(lapsed.tolist()),
    )


def certificates_are_kept(draft: Draft, admission: Admission) -> Draft:
    """Leave admitted jobs only the columns after which their certificates still hold (Eq. 29).

    Refused waiting jobs get no columns, with a reason that has the earliest deadline that would be
    met. They are dropped if not even the empty cluster would meet the deadline. If an admission
    does not bind, jobs that it does not plan keep their columns.
    """
    jobs = draft.snapshot.jobs
    dated = np.isfinite(jobs.deadline_s) & draft.promisable & draft.has_columns
    out = dated & ~admission.admitted & _new(draft) & (draft.policy.deadline_mode != KEEP_MODE)
    out[list(admission.given_up)] = False
    draft = _refused(draft, admission, out)
    draft = replace(draft, lapsed=draft.lapsed | admission.given_up)
    bound = np.flatnonzero(admission.admitted & dated).tolist()
    certified = certified_columns(draft, admission)
    stay = rates_if_kept(draft, np.array(bound, dtype=np.int64))
    needs = {
        job: need
        for job in bound
        if admission.least_work[job] > 0
        and (need := _need(draft, admission, job, int(certified[job]), stay)) is not None
    }
    keep = np.ones(len(draft.cell), dtype=np.bool_)
    must_run, least = np.array(draft.must_run), np.array(draft.least_rate)
    movable = np.array(draft.movable)
    for job, need in needs.items():
        keep[need.columns.start : need.columns.stop] = need.keep
        must_run[job], movable[job] = True, movable[job] and need.movable
        least[job] = max(least[job], need.least_rate)
    draft = _witnessed(draft, certified, list(needs))
    draft = replace(draft, must_run=must_run, least_rate=least, movable=movable).only(keep)
    starts_s = np.full(len(jobs), np.inf)
    np.minimum.at(starts_s, admission.schedule_segments.job, admission.schedule_segments.start_s)
    later = np.isfinite(starts_s) & (starts_s > draft.snapshot.now_s + _NOW_S)
    planned = {
        job: _planned(draft, admission, job, float(starts_s[job])) for job in bound if later[job]
    }
    return replace(draft, absent={**draft.absent, **planned})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Need:
    columns: range
    keep: Bools  # bool[columns]
    least_rate: float
    movable: bool


def _need(
    draft: Draft, admission: Admission, job: int, certified: int, stay: tuple[Floats, Floats]
) -> _Need | None:
    """Return the columns that ``job`` may run until the next slot, or None if it is not limited.

    ``certified`` is the column that the certificate has now, or -1. ``stay`` has the rate and the
    remaining restart time of each job if it stays unchanged.

    The job may run any column with which it trains ``least_work`` until then, restart included. It
    may also run the certificate's own column at its own rate, because the certificate pays the
    restart later. Placement knows one least rate for all columns of a job. If the certificate's
    rate is below what others need, the others are therefore dropped. If nothing is promised, only
    the column that the schedule has now is left.
    """
    work = float(admission.least_work[job])
    columns = draft.columns_of(job)
    if work <= 0 or not len(columns):
        return None
    snapshot = draft.snapshot
    span = slice(columns.start, columns.stop)
    until_s = min(admission.until_s, float(snapshot.jobs.deadline_s[job]))
    length_s = until_s - snapshot.now_s
    after_s = length_s - float(snapshot.jobs.restart_s[job])
    rate, current = draft.rate[span], int(draft.current[job]) - columns.start
    stay_rate, lag_s = stay
    own = certified - columns.start
    if own >= 0 and not (admission.binding or snapshot.jobs.admitted[job]):
        # If it could grow, this round's objective would move it, and the next round's plan again.
        keep = np.arange(len(columns)) == own
        return _Need(columns=columns, keep=keep, least_rate=0.0, movable=True)
    # The rate that a column needs if the job has to restart for it.
    other = work / after_s if after_s > 0 else math.inf
    keep = rate >= other * (1 - ROUNDING)
    if current >= 0:
        stays = float(stay_rate[job]) * (length_s - float(lag_s[job])) >= work * (1 - ROUNDING)
        keep[current] = stays or own == current
    least = other if math.isfinite(other) else 0.0
    # The certificate's own column is always kept, at its own rate.
    if own >= 0 and own != current:
        if rate[own] < other:
            kept_current = current >= 0 and bool(keep[current])
            keep[:] = False
            if current >= 0:
                keep[current] = kept_current
            least = float(rate[own])
        keep[own] = True
    if not keep.any():  # the job is behind its certificate: it stays as close to it as possible
        return _Need(columns=columns, keep=~keep, least_rate=0.0, movable=True)
    moves = current < 0 or bool(rate[current] >= other * (1 - ROUNDING))
    if not moves and admission.bare_work is not None and keep[current] and after_s > 0:
        bare = max(0.0, float(admission.bare_work[job])) / after_s
        is_enough = rate >= bare * (1 - ROUNDING)
        if is_enough[current]:
            # A move may spend the reserve, also one to as many GPUs on fewer nodes.
            moves, least = True, min(least, bare)
            nodes, gpus = draft.cells.nodes[draft.cell[span]], draft.gpus[span]
            gpu_type = draft.gpu_type[span]
            is_narrower = (gpus == gpus[current]) & (gpu_type == gpu_type[current])
            is_narrower &= nodes < nodes[current]
            keep |= is_narrower & is_enough
    return _Need(columns=columns, keep=keep, least_rate=least * (1 - ROUNDING), movable=moves)


def certified_columns(draft: Draft, admission: Admission) -> Ints:
    """Return the column that the certificate has for each job now, int64[jobs].

    It is -1 if it has none. Of several shapes, it is the one that the job runs on, or else the
    narrowest, on which certificates count.
    """
    segments, cells = admission.schedule_segments, draft.cells
    begun = np.flatnonzero(segments.start_s <= draft.snapshot.now_s + _NOW_S)
    first = draft.job_start[segments.job[begun]]
    count = draft.job_start[segments.job[begun] + 1] - first
    column, segment = concatenate_ranges(first, count), np.repeat(begun, count)
    same = np.ones(len(column), dtype=np.bool_)
    for name in segments.CELL:
        same &= getattr(cells, name)[draft.cell[column]] == getattr(segments, name)[segment]
    column, segment = column[same], segment[same]
    job = segments.job[segment]
    order = np.lexsort(
        (column, cells.nodes[draft.cell[column]], draft.current[job] != column, segment)
    )
    result = np.full(len(draft.current), -1, dtype=np.int64)
    result[job[order][::-1]] = column[order][::-1]
    return result


def _witnessed(draft: Draft, certified: Ints, jobs: list[int]) -> Draft:
    """Return the draft with the present columns from the certificates of ``jobs`` as witness."""
    witness = np.full(len(draft.current), -1, dtype=np.int64)
    columns, _ = reserve_columns(draft, ~_members(draft, jobs))
    witness[draft.job[columns]] = columns
    witness[jobs] = certified[jobs]
    return replace(draft, witness=witness)


def _planned(draft: Draft, admission: Admission, job: int, starts_s: float) -> Reason:
    """Explain an admitted job whose first segment starts later, at ``starts_s``."""
    start = format_rfc3339(starts_s)
    bound = admission.binding or draft.snapshot.jobs.admitted[job]
    plan = "the job's deadline is promised, and its schedule" if bound else "this round's schedule"
    return Reason(
        code=ReasonCode.DEADLINE_PLANNED,
        message=f"{plan} starts it at {start}",
        next_step="nothing to do: it starts then, or earlier if GPUs are free",
        evidence=(("start", start), ("deadline", _deadline(draft, job))),
    )


def _refused(draft: Draft, admission: Admission, out: Bools) -> Draft:
    """Drop the columns of the jobs ``out`` (bool[jobs]).

    They are too late in any case, or cannot be served together with what is promised.
    """
    late = out & (_finish_s(draft) > draft.snapshot.jobs.deadline_s * (1 + 1e-15))
    refused = out & ~late & admission.binding
    reasons = {
        job: _refusal(draft, float(admission.earliest_s[job]), job)
        for job in np.flatnonzero(refused).tolist()
    }
    return _dropped(draft.without(reasons), late)


def _refusal(draft: Draft, earliest_s: float, job: int) -> Reason:
    deadline = _deadline(draft, job)
    known = math.isfinite(earliest_s)
    earliest = format_rfc3339(earliest_s) if known else ""
    advice = f"; the earliest deadline that would be met is {earliest}" if known else ""
    return Reason(
        code=ReasonCode.DEADLINE_REFUSED,
        message=f"no schedule was found that meets the job's deadline {deadline} and keeps"
        f" all promises{advice}",
        next_step=f"ask for a deadline of {earliest} or later, or raise the job's weight"
        if known
        else "ask for a later deadline, or wait for promised jobs to end",
        evidence=(("deadline", deadline), *((("earliest_deadline", earliest),) if known else ())),
    )


def _dropped(draft: Draft, late: Bools) -> Draft:
    """Drop the columns of the jobs ``late`` (bool[jobs]).

    Queued jobs are rejected for good, unless nodes that are away may return.
    """
    finish_s, jobs = _finish_s(draft), draft.snapshot.jobs
    late_jobs = np.flatnonzero(late).tolist()
    queued = jobs.state == STATE_CODE[JobState.QUEUED]
    whole = bool(draft.snapshot.nodes.schedulable.all())
    draft = draft.without({job: _too_late(draft, float(finish_s[job]), job) for job in late_jobs})
    gone = frozenset(job for job in late_jobs if whole and queued[job])
    return replace(draft, rejected=draft.rejected | gone)


def _too_late(draft: Draft, finish_s: float, job: int) -> Reason:
    deadline_s, finish = float(draft.snapshot.jobs.deadline_s[job]), format_rfc3339(finish_s)
    past, deadline = deadline_s <= draft.snapshot.now_s, _deadline(draft, job)
    return Reason(
        code=ReasonCode.DEADLINE_PAST if past else ReasonCode.DEADLINE_UNREACHABLE,
        message=f"the job's deadline {deadline} has passed"
        if past
        else f"even alone and starting now, the job would end at {finish}, after its deadline {deadline}",
        next_step=f"submit the job with a deadline of {finish} or later, or without one",
        evidence=(("deadline", deadline), ("finish", finish), ("earliest_deadline", finish)),
    )


def finishes_in_time(draft: Draft) -> Bools:
    """Return whether each column would finish its job by its deadline, bool[columns] (Eq. 20)."""
    jobs = draft.snapshot.jobs
    left_s = (jobs.deadline_s - draft.snapshot.now_s)[draft.job]
    rate, pause_s = _rate_and_pause(draft)
    with np.errstate(invalid="ignore"):
        done = rate * np.maximum(left_s - pause_s, 0.0)
    work = work_left(draft.snapshot)[draft.job]
    is_in_time = (work <= done * (1 + ROUNDING)) & ((left_s > 0) | (work <= 0))
    return np.asarray(is_in_time, dtype=np.bool_)


def _finish_s(draft: Draft) -> Floats:
    """Return the time at which each job would end if it started now on its quickest column.

    It is inf if the job has no column.
    """
    rate, pause_s = _rate_and_pause(draft)
    finish_s = np.full(len(draft.current), np.inf)
    with np.errstate(divide="ignore"):
        np.minimum.at(
            finish_s,
            draft.job,
            draft.snapshot.now_s + pause_s + work_left(draft.snapshot)[draft.job] / rate,
        )
    return finish_s


def _rate_and_pause(draft: Draft) -> tuple[Floats, Floats]:
    """Return samples/s of each column and the seconds before it trains, both float64[columns]."""
    rate, pause_s = np.array(draft.rate), draft.snapshot.jobs.restart_s[draft.job]
    dated = np.flatnonzero(np.isfinite(draft.snapshot.jobs.deadline_s) & (draft.current >= 0))
    stay_rate, lag_s = rates_if_kept(draft, dated)
    rate[draft.current[dated]], pause_s[draft.current[dated]] = stay_rate[dated], lag_s[dated]
    return rate, pause_s


def _current_rate(draft: Draft) -> Floats:
    """Return samples/s of each job's current column at its Cell's own shape, or 0 without one."""
    rate = np.zeros(len(draft.current))
    stays = draft.current >= 0
    rate[stays] = draft.rate[draft.current[stays]]
    return rate


def _new(draft: Draft) -> Bools:
    """Return whether each job has never run, bool[jobs]."""
    never: Bools = ~is_launched(draft.snapshot) & (draft.snapshot.jobs.generation == 0)
    return never


def _members(draft: Draft, jobs: list[int]) -> Bools:
    is_member = np.zeros(len(draft.current), dtype=np.bool_)
    is_member[jobs] = True
    return is_member


def _deadline(draft: Draft, job: int) -> str:
    """Return the deadline of ``job`` to the second, as it is shown for the job itself."""
    return format_rfc3339(math.floor(draft.snapshot.jobs.deadline_s[job]))
