"""Draws of what a snapshot does not say: true times, early ends, and the jobs to come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.random import Generator

from tessera.formulation.base.tables import Floats, Ints, array_columns
from tessera.formulation.base.values import EstimateSource, Workload
from tessera.formulation.records.forecasts import Submission
from tessera.formulation.state.snapshot import Jobs, Snapshot

SD_OF_SOURCE: Final = {
    EstimateSource.MEASURED: 0.03,
    EstimateSource.PROFILED: 0.1,
    EstimateSource.ANALYTIC: 0.2,
    EstimateSource.REPLAYED: 0.0,
    EstimateSource.ASSUMED: 1.0,
}
"""The standard deviation of the logarithm of a time whose estimate states none. These are judgement."""
BLOCK_JOBS: Final = 8
"""Consecutive submissions that are drawn together, so that bursts stay bursts."""
DAY_S: Final = 86_400.0
DAYS_FOR_HOURS: Final = 3.0
"""The days of history from which on arrivals are drawn by hour of day."""
HOURS_ALIKE: Final = 2.0
"""The hours of day by which a block may begin earlier or later than the time it is drawn for."""
LEAST_SPAN_S: Final = 900.0
"""The least time in which the submissions of a history count as made. A new cluster often begins with a
burst, which would otherwise be taken to go on for ever."""
LEAST_ENDED: Final = 10
"""The ended jobs below which no early ends are drawn, since their rate is not known."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draw:
    """The facts of one future that no snapshot states.

    ``iter_time_s`` is float64[estimates], the true times of the snapshot's estimates. ``share`` is
    float64[jobs, then arrivals], the share of its iterations after which each job ends.
    ``arrivals`` are the jobs to come, in order of ``submit_s``.
    """

    iter_time_s: Floats
    share: Floats
    arrivals: Jobs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class History:
    """The submissions of the last days, in order, as rows of a snapshot's jobs.

    ``jobs`` has only submissions whose workloads have estimates in the snapshot. ``gap_s`` is
    float64[jobs], the time from the previous submission of any workload, at the rate of all
    submissions. ``ended_share`` is float64[ended], the trained shares of jobs that have ended.
    """

    jobs: Jobs
    gap_s: Floats
    ended_share: Floats

    @classmethod
    def of(cls, submissions: Sequence[Submission], snapshot: Snapshot) -> History:
        """Return the history of a snapshot, from submissions before it.

        A submission of a workload that has no estimates in the snapshot counts for the rate of
        arrivals only: futures draw another job in its place.
        """
        ordered = sorted(submissions, key=lambda one: one.submit_s)
        share = np.array([one.trained_share for one in ordered], dtype=np.float64)
        estimated = set(np.unique(snapshot.estimates.workload).tolist())
        index = {w: i for i, w in enumerate(snapshot.workloads) if i in estimated}
        known = [one for one in ordered if one.workload in index]
        span_s = max(snapshot.now_s - ordered[0].submit_s, LEAST_SPAN_S) if ordered else 0.0
        submit_s = np.array([one.submit_s for one in known])
        gap_s = np.diff(submit_s, prepend=ordered[0].submit_s) if known else np.zeros(0)
        if known and gap_s.sum() > 0:  # the known ones arrive at the rate of all
            gap_s = gap_s * (span_s / len(ordered)) / (gap_s.sum() / len(known))
        return cls(
            jobs=_rows(known, index, snapshot),
            gap_s=gap_s,
            ended_share=share[~np.isnan(share)],
        )


def _rows(known: Sequence[Submission], index: Mapping[Workload, int], snapshot: Snapshot) -> Jobs:
    types = {kind.name: i for i, kind in enumerate(snapshot.gpu_types)}
    restart_s = float(np.median(snapshot.jobs.restart_s)) if len(snapshot.jobs) else 60.0
    return Jobs.from_rows(
        [
            {
                "name": f"arrival-{i}",
                "workload": index[one.workload],
                "iterations": float(one.iterations),
                "iterations_left": float(one.iterations),
                "requested_gpus": one.requested_gpus,
                "requested_gpu_type": types.get(one.requested_gpu_type, -1),
                "tenant": one.tenant,
                "priority": one.priority,
                "weight": one.weight,
                "guaranteed": one.guaranteed,
                "submit_s": one.submit_s,
                "queued_s": one.submit_s,
                "restart_s": restart_s,
            }
            for i, one in enumerate(known)
        ]
    )


def draw_facts(snapshot: Snapshot, history: History, horizon_s: float, rng: Generator) -> Draw:
    """Return a draw for one future of ``snapshot``, with arrivals for ``horizon_s`` seconds."""
    arrivals = _draw_arrivals(snapshot, history, horizon_s, rng)
    jobs = snapshot.jobs
    total = np.maximum(jobs.iterations, 1e-9)
    trained = np.append(1.0 - jobs.iterations_left / total, np.zeros(len(arrivals)))
    return Draw(
        iter_time_s=_draw_times(snapshot, rng),
        share=_draw_shares(trained, history.ended_share, rng),
        arrivals=arrivals,
    )


def _draw_times(snapshot: Snapshot, rng: Generator) -> Floats:
    """Return the true times of the estimates, float64[estimates].

    All shapes of a Cell share one factor, as if one model had predicted their times.
    """
    e = snapshot.estimates
    if not len(e):
        return e.iter_time_s
    usual = np.array([SD_OF_SOURCE[EstimateSource(code)] for code in range(len(EstimateSource))])
    sd = np.where(np.isnan(e.sd), usual[e.source], e.sd)
    keys = np.stack([e.workload, e.gpu_type, e.gpus, e.pipeline_degree, e.plan])
    _, cell = np.unique(keys, axis=1, return_inverse=True)
    cell = cell.ravel()
    factor: Floats = np.exp(sd * rng.standard_normal(int(cell.max()) + 1)[cell])
    return e.iter_time_s * factor


def _draw_shares(trained: Floats, ended: Floats, rng: Generator) -> Floats:
    """Return the share of its iterations after which each job ends, float64[jobs].

    It is that of an ended job that had trained more than the job has (float64[jobs] ``trained``).
    """
    if len(ended) < LEAST_ENDED:
        return np.ones(len(trained))
    ordered = np.append(np.sort(ended), 1.0)
    first = np.minimum(np.searchsorted(ordered, trained, side="right"), len(ordered) - 1)
    return ordered[rng.integers(first, len(ordered))]


def _draw_arrivals(snapshot: Snapshot, history: History, horizon_s: float, rng: Generator) -> Jobs:
    """Return the jobs to come: blocks of consecutive submissions, with their gaps."""
    count = len(history.jobs)
    if not count or not history.gap_s.sum() > 0:
        return Jobs.from_rows([])
    hours = history.jobs.submit_s / 3600.0 % 24.0
    by_hour = history.gap_s.sum() >= DAYS_FOR_HOURS * DAY_S
    at_s = snapshot.now_s - float(rng.random()) * float(history.gap_s.mean())
    rows: list[int] = []
    submit_s: list[float] = []
    while at_s < snapshot.now_s + horizon_s:
        first = _draw_block(hours if by_hour else None, at_s, count, rng)
        for row in range(first, min(first + BLOCK_JOBS, count)):
            at_s += float(history.gap_s[row])
            if at_s > snapshot.now_s:
                rows.append(row)
                submit_s.append(at_s)
    return _renamed(history.jobs, np.array(rows, dtype=np.int64), np.array(submit_s))


def _draw_block(hours: Floats | None, at_s: float, count: int, rng: Generator) -> int:
    """Return the first submission of a block; ``hours`` (float64[jobs]) are their hours of day."""
    if hours is None:
        return int(rng.integers(count))
    apart = np.abs((hours - at_s / 3600.0 + 12.0) % 24.0 - 12.0)
    alike = np.flatnonzero(apart <= HOURS_ALIKE)
    return int(rng.choice(alike)) if len(alike) else int(rng.integers(count))


def _renamed(jobs: Jobs, rows: Ints, submit_s: Floats) -> Jobs:
    """Return the jobs of ``rows`` as arrivals at ``submit_s``, each with a name of its own."""
    columns = {name: getattr(jobs, name)[rows] for name in array_columns(Jobs)}
    return Jobs(
        name=tuple(f"arrival-{i}" for i in range(len(rows))),
        tenant=tuple(jobs.tenant[row] for row in rows.tolist()),
        **columns | {"submit_s": submit_s, "queued_s": submit_s},
    )
