"""Forecasts of the jobs of a snapshot: sampled futures, calibrated bands and places in the queue."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np

from tessera.formulation.answer.unknown_rates import assume_rates, has_unknown_rate
from tessera.formulation.base.tables import Bools, Floats
from tessera.formulation.job.dependencies import CONDITIONS, Condition
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.records.forecasts import EVENTS, FINISH, START, Band, JobForecast
from tessera.formulation.records.spreads import ClusterForecast, Spread
from tessera.formulation.state.snapshot import Snapshot
from tessera.simulator.forecasts.calibration import Correction
from tessera.simulator.forecasts.draws import History, draw_facts
from tessera.simulator.forecasts.future import FutureTimes, follow_future
from tessera.simulator.forecasts.rhythm import RoundRhythm
from tessera.solvers.rounds.plan import RoundOutcome

HELD = "the job is held; release it with: tessera release JOB"
NO_ESTIMATE = "nobody knows how fast its model runs until its first iterations are measured"
WAITS_FOR_UNKNOWN = "the job waits for jobs of which nobody knows when they end as they must"
NO_CELL_RUNS = "no estimate says that its model runs on this cluster"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledTimes:
    """The times of the jobs of a snapshot in sampled futures, in seconds from the snapshot.

    ``start_s`` and ``finish_s`` are float64[futures, jobs]. What happens after the horizon, or
    never, has the horizon's time.
    """

    snapshot: Snapshot
    horizon_s: float
    start_s: Floats
    finish_s: Floats

    def of(self, event: str) -> Floats:
        """Return the times of ``START`` or ``FINISH``."""
        return self.start_s if event == START else self.finish_s

    def spread(self, event: str, job: int) -> Spread:
        """Return the spread of an event of a job."""
        return Spread(tuple(np.sort(self.of(event)[:, job]).tolist()))

    @property
    def waits(self) -> Bools:
        """Return whether each job has yet to start, bool[jobs]."""
        own = self.snapshot.jobs
        return own.among([JobState.QUEUED, JobState.STOPPING])


def sample_times(
    snapshot: Snapshot,
    history: History,
    decide: Callable[[Snapshot], RoundOutcome],
    *,
    futures: int,
    seed: int,
    rhythm: RoundRhythm,
    wanted: Callable[[], bool] = lambda: True,
) -> SampledTimes:
    """Return the times of jobs in up to ``futures`` futures of a snapshot.

    The same arguments give the same times. ``wanted`` is asked often; when it says no, the future
    at hand is dropped, and there are fewer. There may be none.
    """
    real = assume_rates(snapshot)
    times: list[FutureTimes] = []
    for number in range(futures):
        draw = draw_facts(real, history, rhythm.horizon_s, np.random.default_rng([seed, number]))
        followed = follow_future(real, draw, decide, rhythm, wanted)
        if not wanted():
            break
        times.append(followed)
    shape = len(times), len(snapshot.jobs)
    starts = np.array([one.start_s for one in times]).reshape(shape) - snapshot.now_s
    finishes = np.array([one.finish_s for one in times]).reshape(shape) - snapshot.now_s
    return SampledTimes(
        snapshot=snapshot,
        horizon_s=rhythm.horizon_s,
        start_s=np.minimum(starts, rhythm.horizon_s),
        finish_s=np.minimum(finishes, rhythm.horizon_s),
    )


def make_forecast(
    sampled: SampledTimes, corrections: Mapping[str, Correction], coverage: float
) -> ClusterForecast:
    """Return the forecast of each job, with bands of the given ``coverage``.

    ``corrections`` has that of each event.
    """
    snapshot, waits = sampled.snapshot, sampled.waits
    reasons = _reasons_without(snapshot)
    expected_s = np.where(waits, sampled.start_s.mean(axis=0), np.inf)
    order = [job for job in np.argsort(expected_s, kind="stable").tolist() if waits[job]]
    position = {job: place for place, job in enumerate(order, 1)}
    made: list[JobForecast] = []
    spreads: dict[tuple[str, str], Spread] = {}
    for job, name in enumerate(snapshot.jobs.name):
        bands: dict[str, Band | None] = dict.fromkeys(EVENTS)
        for event in EVENTS:
            if job in reasons or (event == START and not waits[job]):
                continue
            spreads[event, name] = spread = sampled.spread(event, job)
            bands[event] = make_band(spread, corrections[event], snapshot.now_s, sampled.horizon_s)
        made.append(
            JobForecast(
                job=name,
                created_s=snapshot.now_s,
                coverage=coverage,
                position=position.get(job, 0),
                start=bands[START],
                finish=bands[FINISH],
                why_not=reasons.get(job, ""),
            )
        )
    return ClusterForecast(
        created_s=snapshot.now_s,
        futures=len(sampled.start_s),
        jobs=tuple(made),
        spreads=spreads,
    )


def make_band(spread: Spread, correction: Correction, created_s: float, horizon_s: float) -> Band:
    """Return a band in seconds since 1970. Times beyond the horizon are not known."""
    low_s, median_s, high_s = correction.times(spread)
    known = [at_s if at_s < horizon_s else math.inf for at_s in (median_s, high_s)]
    return Band(
        low_s=created_s + min(low_s, horizon_s),
        median_s=created_s + known[0],
        high_s=created_s + known[1],
    )


def _reasons_without(snapshot: Snapshot) -> dict[int, str]:
    """Return why jobs have no forecast, by job."""
    jobs = snapshot.jobs
    reasons = {
        job: HELD for job in np.flatnonzero(jobs.among([JobState.HELD, JobState.HOLDING])).tolist()
    }
    unknown = has_unknown_rate(snapshot)
    runs = np.zeros(len(snapshot.workloads), dtype=np.bool_)
    runs[snapshot.estimates.workload[np.isfinite(snapshot.estimates.iter_time_s)]] = True
    for job in np.flatnonzero(unknown | ~runs[jobs.workload]).tolist():
        reasons.setdefault(job, NO_ESTIMATE if unknown[job] else NO_CELL_RUNS)
    for job in _wait_for_unknown(snapshot, reasons):
        reasons.setdefault(job, WAITS_FOR_UNKNOWN)
    return reasons


def _wait_for_unknown(snapshot: Snapshot, without: Collection[int]) -> list[int]:
    """Return the jobs that wait for the end of an array, for a failure, or for a job without a forecast.

    ``without`` are the jobs that have no forecast for other reasons.
    """
    d = snapshot.dependencies
    known = d.condition != CONDITIONS.index(Condition.FAILED)
    followed = np.bincount(d.job[known], minlength=len(snapshot.jobs))
    lacks = snapshot.jobs.unmet > followed
    lacks |= snapshot.jobs.among([JobState.CANCELLING, JobState.FAILING])
    lacks[list(without)] = True
    while (more := np.setdiff1d(d.job[lacks[d.on]], np.flatnonzero(lacks))).size:
        lacks[more] = True
    return np.flatnonzero(lacks & (snapshot.jobs.unmet > 0)).tolist()
