"""The back-off of failed jobs, which grows after each consecutive failure."""

from __future__ import annotations

from typing import Final

import numpy as np

from tessera.formulation.base.moments import format_rfc3339
from tessera.formulation.job.reasons import Reason, ReasonCode
from tessera.formulation.round.draft import Draft

FIRST_S: Final = 30.0
"""Seconds of back-off after the first failure. Each further consecutive failure doubles them."""

MAX_S: Final = 1800.0
"""The longest back-off, in seconds."""

RAN_WELL_S: Final = 600.0
"""Seconds of running after which a job's failures are counted again from one."""

MAX_ERROR_CHARS: Final = 200
"""Largest number of characters of the last error that a reason repeats."""


def failed_jobs_wait(draft: Draft) -> Draft:
    """Leave a job without columns until its back-off ends, so that other jobs get its GPUs.

    A deadline that was promised to it is kept if there is a schedule that starts the job later.
    """
    jobs = draft.snapshot.jobs
    waits = np.flatnonzero((jobs.retry_s > draft.snapshot.now_s) & draft.has_columns).tolist()
    return draft.without(
        {job: back_off_reason(int(jobs.failures[job]), float(jobs.retry_s[job])) for job in waits}
    )


def back_off_reason(failures: int, retry_s: float, error: str = "") -> Reason:
    """Return the reason for a job that failed and is tried again at ``retry_s``.

    ``failures`` is the number of consecutive failures. ``error`` is the last error. If it is "",
    the reason does not repeat it.
    """
    times, retry = (
        "once" if failures == 1 else f"{failures} times in a row",
        format_rfc3339(retry_s),
    )
    short = error if len(error) <= MAX_ERROR_CHARS else f"{error[:MAX_ERROR_CHARS]}..."
    last = f", the last time with: {short}" if short else ""
    return Reason(
        code=ReasonCode.BACK_OFF,
        message=f"the job failed {times}{last}; it will be tried again at {retry}",
        next_step="read the last error, then fix its cause or cancel the job; to try it again at once,"
        " hold and release it",
        evidence=(("failures", str(failures)), ("retry", retry)),
    )


def back_off_over_reason() -> Reason:
    """Return the reason for a job whose back-off has ended since the last round."""
    return Reason(
        code=ReasonCode.BACK_OFF,
        message="the wait after its failure is over; the next round may start it",
        next_step="wait for the next round, or decide one now: `tessera round`",
    )
