"""The comparison of the next hours without and with changes, in futures of the same chance.

Both sides of a pair have the same true times, early ends and arrivals. Their difference is therefore
due to the change, and varies far less than either side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tessera.formulation.answer.unknown_rates import assume_rates
from tessera.formulation.base.tables import Bools, Floats
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.records.forecasts import EVENTS, FINISH, START, Band
from tessera.formulation.records.spreads import Spread
from tessera.formulation.records.what_if import HoursDifference, JobHours, PairedFigure
from tessera.formulation.state.snapshot import Snapshot
from tessera.simulator.forecasts.calibration import Correction
from tessera.simulator.forecasts.draws import Draw, History, draw_facts
from tessera.simulator.forecasts.forecast import make_band
from tessera.simulator.forecasts.future import FutureTimes, follow_future
from tessera.simulator.forecasts.rhythm import RoundRhythm
from tessera.simulator.what_if.rounds import unit_rates
from tessera.solvers.rounds.plan import RoundOutcome

COVERAGE: Final = 0.8
"""The probability with which the difference of one more pair lies in the interval."""

LEAST_PAIRS: Final = 9
"""The pairs of futures below which nothing is stated: one more difference is below all of 8 others, or
above all of them, with a probability of 2/9, which is more than the interval may leave out."""

HOUR_S: Final = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Side:
    """A snapshot at the beginning of futures, and the decision maker of their rounds.

    If the snapshot is ``settled``, a round has just been decided on it, and the next one needs an
    event.
    """

    snapshot: Snapshot
    decide: Callable[[Snapshot], RoundOutcome]
    settled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FollowedSide:
    """The sums of a side's futures. Arrays are float64[futures], or float64[futures, jobs]."""

    start_s: Floats
    finish_s: Floats
    waited_s: Sequence[Floats]  # of each job and arrival, by future
    soon_waits: Sequence[Bools]  # of the same
    soon_throughput: Floats  # effective GPUs
    work: Floats  # effective GPU-hours
    finished: Floats


def follow_pairs(
    before: Side,
    changed: Sequence[Side],
    history: History,
    *,
    futures: int,
    seed: int,
    rhythm: RoundRhythm,
    wanted: Callable[[], bool] = lambda: True,
    draw: Callable[[int], Draw] | None = None,
) -> list[FollowedSide]:
    """Follow up to ``futures`` futures of ``before`` and of each of ``changed``; return all sides.

    Jobs of ``before`` have the same indices on the other sides, which may have more. ``wanted`` is
    asked often; when it says no, the futures at hand are dropped on all sides. ``draw`` returns the
    facts of a future by number, for the side with the most jobs; by default, they are drawn.
    """
    sides = [_with_real_rates(side) for side in (before, *changed)]
    rhythm = replace(rhythm, to_horizon=True)
    most = max(sides, key=lambda side: len(side.snapshot.jobs)).snapshot

    def drawn(number: int) -> Draw:
        rng = np.random.default_rng([seed, number])
        return draw_facts(most, history, rhythm.horizon_s, rng)

    rows: list[list[_Followed]] = [[] for _ in sides]
    for number in range(futures):
        facts = (draw or drawn)(number)
        found = [_follow(side, facts, len(most.jobs), rhythm, wanted) for side in sides]
        if not wanted():
            break
        for row, one in zip(rows, found, strict=True):
            row.append(one)
    return [_summed(side.snapshot, row) for side, row in zip(sides, rows, strict=True)]


def _with_real_rates(side: Side) -> Side:
    return replace(side, snapshot=assume_rates(side.snapshot))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Followed:
    """A future of a side, with its effective GPU-hours of work and its effective GPUs soon."""

    times: FutureTimes
    work: float
    soon_throughput: float


def _follow(
    side: Side, facts: Draw, most: int, rhythm: RoundRhythm, wanted: Callable[[], bool]
) -> _Followed:
    """Return a future of a side. ``facts`` are for ``most`` jobs, of which it has the first ones."""
    own = len(side.snapshot.jobs)
    shares = np.append(facts.share[:own], facts.share[most:])
    rhythm = replace(rhythm, settled=side.settled)
    times = follow_future(side.snapshot, replace(facts, share=shares), side.decide, rhythm, wanted)
    everyone = side.snapshot.jobs.followed_by(facts.arrivals)
    batch = np.array([w.global_batch for w in side.snapshot.workloads], dtype=np.float64)
    per_unit = batch[everyone.workload] / unit_rates(replace(side.snapshot, jobs=everyone))
    return _Followed(
        times=times,
        work=float(np.nansum(times.trained * per_unit)) / HOUR_S,
        soon_throughput=float(np.nansum(times.soon_speed * per_unit)),
    )


def _summed(snapshot: Snapshot, rows: Sequence[_Followed]) -> FollowedSide:
    shape = len(rows), len(snapshot.jobs)
    starts = np.array([row.times.start_s for row in rows]).reshape(shape)
    finishes = np.array([row.times.finish_s for row in rows]).reshape(shape)
    return FollowedSide(
        start_s=starts - snapshot.now_s,
        finish_s=finishes - snapshot.now_s,
        waited_s=[row.times.waited_s for row in rows],
        soon_waits=[row.times.soon_waits for row in rows],
        soon_throughput=np.array([row.soon_throughput for row in rows]),
        work=np.array([row.work for row in rows]),
        finished=np.array([float(row.times.finished) for row in rows]),
    )


def compare_sides(
    sides: tuple[Side, Side], followed: tuple[FollowedSide, FollowedSide], removed: Sequence[str]
) -> dict[str, PairedFigure]:
    """Return the paired figures of two sides, by their names in ``HoursDifference``.

    For waiting, only jobs that are on both sides and not ``removed`` count, and all arrivals.
    """
    both = set(sides[0].snapshot.jobs.name) & set(sides[1].snapshot.jobs.name) - set(removed)
    waits_s, waiting = [], []
    for side, found in zip(sides, followed, strict=True):
        counted = np.array([name in both for name in side.snapshot.jobs.name], dtype=np.bool_)
        waits_s.append(np.array([_mean_wait_s(waited, counted) for waited in found.waited_s]))
        waiting.append(np.array([_count_waiting(waits, counted) for waits in found.soon_waits]))
    one, other = followed
    return {
        "soon_throughput": pair_figures(one.soon_throughput, other.soon_throughput),
        "soon_waiting": pair_figures(*waiting),
        "mean_wait_s": pair_figures(*waits_s),
        "work": pair_figures(one.work, other.work),
        "finished": pair_figures(one.finished, other.finished),
    }


def _mean_wait_s(waited_s: Floats, counted: Bools) -> float:
    arrived = waited_s[len(counted) :]
    every = np.append(waited_s[: len(counted)][counted], arrived[~np.isnan(arrived)])
    return float(every.mean()) if len(every) else 0.0


def _count_waiting(waits: Bools, counted: Bools) -> float:
    own = len(counted)
    return float(np.count_nonzero(waits[:own] & counted) + np.count_nonzero(waits[own:]))


def pair_figures(before: Floats, after: Floats) -> PairedFigure:
    """Return the means and the paired differences of two sides, float64[futures].

    What really happens is one more future. If it comes from the same distribution as ``n`` others,
    it lies below the i-th smallest of them with probability i / (n + 1). Quantiles are therefore
    those at Weibull's positions. NumPy's own hold that share of the futures at hand, but fewer of
    all others: 62 % in place of 80 % with 8 futures. The interval contains the mean in any case.
    """
    change = after - before
    tails = [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2]
    low, high = np.quantile(change, tails, method="weibull").tolist()
    mean = float(change.mean())
    return PairedFigure(
        before=float(before.mean()),
        after=float(after.mean()),
        change=mean,
        low=min(low, mean),
        high=max(high, mean),
    )


def compare_hours(
    sides: tuple[Side, Side],
    followed: tuple[FollowedSide, FollowedSide],
    rhythm: RoundRhythm,
    corrections: Mapping[str, Correction],
    *,
    removed: Sequence[str] = (),
    shown: Sequence[str] = (),
) -> HoursDifference | None:
    """Return the difference between two followed sides, or None if there are too few futures.

    ``removed`` are jobs that the change removes, and ``shown`` those whose starts and finishes are
    stated, with bands by ``corrections``.
    """
    futures = len(followed[0].work)
    if futures < LEAST_PAIRS:
        return None
    return HoursDifference(
        horizon_s=rhythm.horizon_s,
        futures=futures,
        **compare_sides(sides, followed, removed),
        jobs=tuple(
            _job_hours(sides, followed, rhythm, job, corrections, gone=job in removed)
            for job in shown
        ),
    )


def _job_hours(
    sides: tuple[Side, Side],
    followed: tuple[FollowedSide, FollowedSide],
    rhythm: RoundRhythm,
    job: str,
    corrections: Mapping[str, Correction],
    *,
    gone: bool,
) -> JobHours:
    bands: dict[str, Band | None] = {}
    for which, side, found in zip(("before", "after"), sides, followed, strict=True):
        for event in EVENTS:
            bands[f"{event}_{which}"] = None
            if job in side.snapshot.jobs.name and not (gone and which == "after"):
                index = side.snapshot.jobs.name.index(job)
                times_s = (found.start_s if event == START else found.finish_s)[:, index]
                if event == FINISH or _waits(side.snapshot, index):
                    known_s = np.sort(np.minimum(times_s, rhythm.horizon_s))
                    bands[f"{event}_{which}"] = make_band(
                        Spread(tuple(known_s.tolist())),
                        corrections[event],
                        side.snapshot.now_s,
                        rhythm.horizon_s,
                    )
    return JobHours(job=job, **bands)


def _waits(snapshot: Snapshot, job: int) -> bool:
    return bool(snapshot.jobs.among([JobState.QUEUED, JobState.STOPPING])[job])
