"""The time for which jobs hold GPUs, if nothing but a promise or a failure takes them away."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.formulation.job.lifecycle import ACTIVE
from tessera.formulation.round.draft import Draft
from tessera.formulation.round.rates import work_left

OVERDUE_S: Final = 1.0
"""The seconds for which a job still runs at least if it should have ended since its last report."""
OVERDUE_SHARE: Final = 0.05
"""The same as a share of the time since that report, so that long silence causes few rounds."""


def is_dated(draft: Draft) -> Bools:
    """Return the jobs whose deadline is promised, bool[jobs]. Their schedules say which GPUs they hold."""
    jobs = draft.snapshot.jobs
    if draft.policy.deadline_mode == "ignore":
        return np.zeros(len(jobs), dtype=np.bool_)
    return jobs.admitted if draft.admission is None else draft.admission.admitted


def is_protected(draft: Draft) -> Bools:
    """Return the jobs with GPUs that no optimization may suspend or shrink below their request.

    The result is bool[jobs]. Jobs with a promised deadline go by their schedule. Jobs of unknown
    rate are protected only for as long as they are taken to run.
    """
    jobs, policy = draft.snapshot.jobs, draft.policy
    if not policy.keep_requests:
        return np.zeros(len(jobs), dtype=np.bool_)
    runs = jobs.among(ACTIVE) & (draft.current >= 0) & draft.promisable & (draft.weight > 0)
    overruns = ~np.isnan(jobs.assumed_efficiency)
    overruns &= draft.snapshot.now_s >= jobs.since_s + policy.default_run_s
    return runs & ~jobs.preemptible & ~jobs.opportunistic & ~is_dated(draft) & ~overruns


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Holds:
    """The times for which columns hold their GPUs: all until one time, a part of them until another.

    All arrays have one entry for each column. Times are in seconds since 1970. A job that holds more
    than it asked for can be shrunk to its request once it has settled, and one that may be suspended
    can leave then. ``part`` is the number of its GPUs after ``all_until_s``.
    """

    gpus: Ints
    all_until_s: Floats
    part: Ints
    part_until_s: Floats

    def scale_to(self, gpus: Ints, amount: Ints) -> Holds:
        """Return the holds of ``amount`` where columns have ``gpus``, in one piece if these differ."""
        is_whole = np.array_equal(gpus, amount)
        return self if is_whole else replace(self, gpus=amount, part=amount)

    def gpus_at(self, at_s: float) -> Ints:
        """Return the GPUs that each column holds at a time, int64[columns]."""
        surplus = np.where(self.all_until_s > at_s, self.gpus - self.part, 0)
        gpus: Ints = np.where(self.part_until_s > at_s, self.part, 0) + surplus
        return gpus


def holds_of(draft: Draft, column: Ints) -> Holds:
    """Return how long each of the columns (int64[any]) holds its GPUs from now on.

    A column of a job that is not its current one starts now. Jobs of unknown rate are taken to run for
    ``default_run_s``.
    """
    snapshot, jobs, policy = draft.snapshot, draft.snapshot.jobs, draft.policy
    job, now_s = draft.job[column], snapshot.now_s
    stays = ~draft.starts[column]
    begun_s = np.where(stays, jobs.since_s[job], now_s)
    starting_s = jobs.since_s[job] + draft.start_s[job] - now_s
    lag_s = np.where(stays, np.clip(starting_s, 0.0, jobs.restart_s[job]), jobs.restart_s[job])
    rate = _rates_as_placed(draft, column)
    work = _expect_work(
        work_left(snapshot)[job], rate, np.where(stays, unreported_s(draft)[job], 0)
    )
    end_s = now_s + lag_s + work / rate
    unknown = ~np.isnan(jobs.assumed_efficiency[job])
    end_s[unknown] = np.maximum(now_s, begun_s + policy.default_run_s)[unknown]
    end_s = np.minimum(end_s, now_s + jobs.run_left_s[job])
    gpus, request = draft.gpus[column], np.minimum(draft.gpus[column], jobs.requested_gpus[job])
    settling_s = (policy.change_spacing + (policy.change_spacing > 0)) * jobs.restart_s[job]
    free_s = begun_s + settling_s
    free_s = np.minimum(np.maximum(free_s, now_s), end_s)
    leaves = jobs.preemptible[job] & ~jobs.guaranteed[job]
    is_task = snapshot.profiling()[job]  # it gives way at once
    leaves, free_s = leaves | is_task, np.where(is_task, now_s, free_s)
    asked_rate = draft.rate_as_asked[job, draft.gpu_type[column]]
    shrinks = (request < gpus) & ~leaves & ~unknown & (asked_rate > 0)
    # A job that is shrunk once it has settled restarts, and then trains the rest as it asked to.
    samples = rate * np.maximum(0.0, free_s - now_s - lag_s)
    with np.errstate(divide="ignore", invalid="ignore"):
        slow_s = free_s + jobs.restart_s[job] + np.maximum(0.0, work - samples) / asked_rate
    part_until_s = np.where(shrinks & (free_s < end_s), slow_s, end_s)
    return Holds(
        gpus=gpus,
        all_until_s=np.where(leaves | shrinks, free_s, end_s),
        part=np.where(leaves, 0, np.where(shrinks, request, gpus)),
        part_until_s=np.minimum(part_until_s, now_s + jobs.run_left_s[job]),
    )


def unreported_s(draft: Draft) -> Floats:
    """Return the seconds for which each job has trained since it last reported progress, float64[jobs].

    Agents report progress now and then, and rounds run between two reports.
    """
    snapshot, jobs = draft.snapshot, draft.snapshot.jobs
    trains_s = np.maximum(jobs.progress_s, jobs.since_s + draft.start_s)
    times_s: Floats = np.where(jobs.progress_s > 0, np.maximum(snapshot.now_s - trains_s, 0.0), 0.0)
    return times_s


def _expect_work(work: Floats, rate: Floats, silent_s: Floats) -> Floats:
    """Return the work that is left after ``silent_s`` of training that was not reported.

    All arrays are float64[columns]. As long as no end is reported, a little work is left.
    """
    min_work = np.minimum(work, rate * np.maximum(OVERDUE_S, OVERDUE_SHARE * silent_s))
    is_silent, work_now = silent_s > 0, np.maximum(work - rate * silent_s, min_work)
    expected_work: Floats = np.where(is_silent, work_now, work)
    return expected_work


def settled_s(draft: Draft) -> Floats:
    """Return the time from which each job with GPUs may change, in seconds since 1970, float64[jobs]."""
    jobs, spacing = draft.snapshot.jobs, draft.policy.change_spacing
    times_s: Floats = jobs.since_s + (spacing + (spacing > 0)) * jobs.restart_s
    return times_s


def _rates_as_placed(draft: Draft, column: Ints) -> Floats:
    """Return samples/s of each column, on the nodes that its job has if it is its current one."""
    rate, nodes = draft.rate[column], draft.nodes_owned[draft.job[column]]
    cells, cell = draft.cells, draft.cell[column]
    wide = ~draft.starts[column] & (nodes > 0) & (nodes != cells.nodes[cell])
    for k in np.flatnonzero(wide).tolist():
        rate[k] = cells.rate_on(int(cell[k]), int(nodes[k])) or rate[k]
    return rate
