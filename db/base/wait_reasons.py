"""The reasons why jobs do not run.

They follow from the jobs' present state, or from the last round if its reason still applies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import sqlalchemy as sa

from tessera.db.base.decisions import find_reasons
from tessera.db.base.dependencies import stored_dependencies
from tessera.db.base.documents import reason_from
from tessera.formulation.job.dependencies import waiting_reason
from tessera.formulation.job.lifecycle import WAITING, JobState
from tessera.formulation.job.reasons import Reason, ReasonCode, held_reason, leaving_reason
from tessera.formulation.round.promises.backoff import back_off_over_reason, back_off_reason

WaitReason = tuple[Reason | None, int]
"""A reason, and the round that gave it. The round is 0 if no round did."""

_PAST_REASONS: Final = frozenset(
    {ReasonCode.HELD, ReasonCode.LEAVING, ReasonCode.BACK_OFF, ReasonCode.WAITS_FOR_JOBS}
)
"""Reasons that only describe the job's state at the time of the round."""


def reasons_of(connection: sa.Connection, rows: Sequence[sa.RowMapping]) -> dict[int, WaitReason]:
    """Return the known reasons why jobs of one cluster do not run, by key.

    ``rows`` are rows of the queries in ``tessera.db.base.rows``. A rejected job has the reason of the
    round that rejected it. A reason that follows from the job's present state has precedence over
    the last round that was not refused. So has a later finding about its estimates.
    """
    waiting = {row["name"]: row["id"] for row in rows if row["state"] in WAITING}
    given: dict[int, WaitReason] = {}
    if waiting:
        for job, reason, number in find_reasons(connection, rows[0]["cluster_id"], waiting):
            given[waiting[job]] = (reason, number)
    return {row["id"]: _why(row, *given.get(row["id"], (None, 0))) for row in rows}


def _why(row: sa.RowMapping, given: Reason | None, number: int) -> WaitReason:
    """Return why the job of ``row`` does not run.

    ``given`` is the reason that round ``number`` gave, if any.
    """
    state = JobState(row["state"])
    if row["rejection"] is not None:
        return reason_from(row["rejection"]["reason"]), int(row["rejection"]["round"])
    if state in (JobState.HELD, JobState.HOLDING):
        return held_reason(state, row["name"], row["held_s"]), 0
    if state in (JobState.CANCELLING, JobState.FAILING):
        return leaving_reason(state), 0
    if state not in WAITING:
        return None, 0
    if row["unmet"]:
        unmet = [d for d in stored_dependencies(row["dependencies"]) if not d.met]
        return waiting_reason(unmet), 0
    if row["retry_s"] is not None and row["retry_s"] > row["now_s"]:
        return back_off_reason(row["failures"], row["retry_s"], row["last_error"]), 0
    if given is not None and given.code in _PAST_REASONS:
        given, number = (back_off_over_reason() if given.code is ReasonCode.BACK_OFF else None), 0
    if state is JobState.QUEUED:
        return _of_estimating(row, given), number
    return (leaving_reason(state), 0) if given is None else (given, number)


def _of_estimating(row: sa.RowMapping, reason: Reason | None) -> Reason | None:
    """Return why a queued job waits, with the latest facts about its workload's estimates."""
    if reason is not None and reason.code not in _WITHOUT_ESTIMATE:
        return reason
    if row["waits_for"] is not None:
        latest = reason_from(row["waits_for"])
        underivable = latest is not None and latest.code is ReasonCode.NO_ESTIMATE
        if row["requested_gpu_type"] and underivable:
            return None if reason is None else _RUNS_WITHOUT
        return latest
    return reason if reason is None or not row["derived_from"] else _ESTIMATED_SINCE


_WITHOUT_ESTIMATE: Final = frozenset({ReasonCode.NO_ESTIMATE, ReasonCode.ESTIMATING})

_RUNS_WITHOUT = Reason(
    code=ReasonCode.ESTIMATING,
    message="since the last round it is known that its Cells cannot be estimated, so it will run on the"
    " GPUs that it requests, at an unknown rate",
    next_step="wait for the next round, or run one",
)

_ESTIMATED_SINCE = Reason(
    code=ReasonCode.ESTIMATING,
    message="its Cells have been estimated since the last round",
    next_step="wait for the next round, or run one",
)
