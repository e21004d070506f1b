"""A benchmark of forecasts: how often jobs start and finish in their bands, and how wide these are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Final

import numpy as np
import typer

from tessera.benchmarks.harness.options import SeedsOption, with_sweep
from tessera.benchmarks.harness.registry import register_case
from tessera.benchmarks.schedulers.foretold import ForetoldEvent, ForetoldRun, read_events
from tessera.formulation.base.tables import Bools, Floats
from tessera.formulation.records.forecasts import EVENTS
from tessera.formulation.records.spreads import PastSpread
from tessera.simulator.comparison.workload import PHILLY, SYNTHETIC, WorkloadSpec
from tessera.simulator.figures import Figure, Report
from tessera.simulator.forecasts.calibration import learn_corrections
from tessera.simulator.sweeps.runner import Sweep

HOUR_S: Final = 3600.0
RUNS: Final[Mapping[str, ForetoldRun]] = {
    "philly": ForetoldRun(
        work=WorkloadSpec(trace=PHILLY, gpus_share=0.2, jobs_share=0.25),
        horizon_s=48 * HOUR_S,
        moments=10,
        futures=16,
    ),
    "philly-like": ForetoldRun(
        work=WorkloadSpec(
            trace=SYNTHETIC, gpus_share=0.05, jobs=600, load=0.8, arrivals_as="philly-like"
        ),
        horizon_s=12 * HOUR_S,
        moments=10,
        futures=16,
    ),
}
"""The runs: a published trace, and jobs that are drawn to resemble it but are much shorter."""
FIRST_COME: Final = "fcfs"
"""The scheduler of the bounds. Its waits are long and differ, so that forecasts of them matter."""
COVERAGE: Final = 0.8
MOST_OFF: Final = 0.05
LARGEST_RATIO: Final = 0.7
LEAST_EVENTS: Final = 100
"""The events of each kind below which bounds are not judged, since chance decides."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JudgedBands:
    """Bands in seconds from their forecasts, with what happened. All are float64[events].

    Times beyond the horizon are those of the horizon. ``sampled_s`` are the uncorrected medians.
    """

    low_s: Floats
    median_s: Floats
    high_s: Floats
    after_s: Floats

    @classmethod
    def of(cls, rows: Sequence[tuple[float, float, float, float]]) -> JudgedBands:
        """Return the bands of rows of (low, median, high, what happened)."""
        low, median, high, after = np.array(rows, dtype=np.float64).reshape(-1, 4).T
        return cls(low_s=low, median_s=median, high_s=high, after_s=after)

    def __len__(self) -> int:
        """Return the number of bands."""
        return len(self.low_s)

    @property
    def covered(self) -> Bools:
        """Return whether each event lies in its band."""
        covered: Bools = (self.low_s <= self.after_s) & (self.after_s <= self.high_s)
        return covered

    @property
    def width_s(self) -> Floats:
        """Return the width of each band."""
        return self.high_s - self.low_s


def judge_run(events: Sequence[ForetoldEvent], horizon_s: float) -> dict[str, JudgedBands]:
    """Return the bands of each event of a run, calibrated with what was known at each forecast.

    A band whose end lies beyond the horizon is left out.
    """
    rows: dict[str, list[tuple[float, float, float, float]]] = {event: [] for event in EVENTS}
    for made_s in sorted({one.made_s for one in events}):
        past = {event: _known(events, event, made_s, horizon_s) for event in EVENTS}
        corrections = learn_corrections(past, COVERAGE)
        for one in events:
            if one.made_s != made_s:
                continue
            band = corrections[one.event].times(one.spread)
            if band[2] < horizon_s:
                rows[one.event].append((*band, min(one.after_s, horizon_s)))
    return {event: JudgedBands.of(found) for event, found in rows.items()}


def _known(
    events: Sequence[ForetoldEvent], event: str, now_s: float, horizon_s: float
) -> list[PastSpread]:
    """Return what is known ``now_s`` of the forecasts of an event before."""
    known = []
    for one in events:
        if one.event == event and one.made_s < now_s:
            passed_s = min(now_s - one.made_s, horizon_s)
            happened = one.after_s <= passed_s
            after_s = one.after_s if happened else passed_s
            known.append(PastSpread(spread=one.spread, after_s=after_s, happened=happened))
    return known


def narrowest_offsets_s(times_s: Floats, coverage: float) -> float:
    """Return the width of the narrowest interval that holds a share of ``times_s`` (float64[n])."""
    ordered = np.sort(times_s)
    count = max(1, int(np.ceil(coverage * len(ordered) - 1e-9)))
    widths: Floats = ordered[count - 1 :] - ordered[: len(ordered) - count + 1]
    return float(widths.min())


def pool_bands(parts: Sequence[JudgedBands]) -> JudgedBands:
    """Return all bands together."""
    return JudgedBands(
        low_s=np.concatenate([one.low_s for one in parts]),
        median_s=np.concatenate([one.median_s for one in parts]),
        high_s=np.concatenate([one.high_s for one in parts]),
        after_s=np.concatenate([one.after_s for one in parts]),
    )


def band_ratio(parts: Sequence[JudgedBands], around_medians: bool) -> float:
    """Return the mean width of bands over that of the narrowest fixed offsets that cover as much.

    Each run of ``parts`` has offsets of its own, chosen with hindsight. They count from the time of
    the forecast, or with ``around_medians`` from the median that the forecast states.
    """
    fixed = [
        narrowest_offsets_s(
            one.after_s - (one.median_s if around_medians else 0.0), float(one.covered.mean())
        )
        * len(one)
        for one in parts
        if len(one)
    ]
    return float(sum(one.width_s.sum() for one in parts) / sum(fixed))


@register_case(
    "eta",
    smoke={"seeds": 1, "moments": 2, "futures": 2, "jobs": 60, "workers": 0},
    coverage_error=("<=", MOST_OFF),
    band_ratio=("<=", LARGEST_RATIO),
)
@with_sweep
def measure_forecasts(
    *,
    seeds: SeedsOption = 3,
    moments: Annotated[
        int, typer.Option(min=1, help="Number of forecasts of all jobs in each run.")
    ] = 10,
    futures: Annotated[int, typer.Option(min=1, help="Sampled futures of each forecast.")] = 16,
    jobs: Annotated[
        int, typer.Option(min=1, help="Number of jobs of the drawn trace, and most of Philly's.")
    ] = 600,
    scheduler: Annotated[
        str, typer.Option(help="Published scheduler that decides. Empty: the default policy.")
    ] = FIRST_COME,
    seed: int = 0,
    sweep: Sweep,
) -> Report:
    """Forecast starts and finishes of live jobs in two traces, and compare them with what happened.

    The traces are Philly as Arena publishes it (every fourth job, on a fifth of the GPUs, followed
    for 48 h), and drawn jobs with its habits that are much shorter (12 h). A forecast knows the
    snapshot after a round and the submissions before it; arrivals to come are hidden. The truth
    differs from what rounds see: times of Cells by 10 % on average, and a quarter of the jobs ends
    early. Futures have the rounds of the truth, with a faster solver if one is used. Bands are
    corrected by earlier forecasts of the same run and what had happened by then.

    ``coverage_start`` and ``coverage_finish`` are the shares of events in their 80 % bands;
    ``coverage_error`` is the larger distance from 0.8. ``band_ratio`` is the mean width over that of
    the narrowest fixed offsets from the time of the forecast that cover as many events, for the
    worse of starts and finishes. The offsets are chosen for each run with hindsight.
    ``band_ratio_median_*`` have fixed offsets from the stated medians, and no bound: even perfect
    knowledge of each job's spread leaves that ratio above 1, since fixed offsets give up the jobs
    that are hard to forecast. Bands do not: ``coverage_narrow`` and ``coverage_wide`` are the
    coverage of the narrower and the wider half. A band whose end lies beyond the horizon is open and
    not judged; ``open_share`` is their share. ``median_error_*_s`` are median distances from the
    stated medians.

    The bounds are for first-come, first-served rounds. Under the default policy (``--scheduler
    ""``) a waiting job starts within a few rounds, or waits for as long as others are worth more,
    and starts can hardly be foretold. Bounds are then waived, as with fewer than 100 events of a
    kind. Every constant of forecasts was chosen on seeds from 101 on.
    """
    runs = {
        f"{name}, seed {one}": replace(
            _sized(run, one, jobs), moments=moments, futures=futures, scheduler=scheduler
        )
        for name, run in RUNS.items()
        for one in range(seed, seed + seeds)
    }
    results = sweep.run([run.task(name) for name, run in runs.items()])
    judged, counts = {}, {}
    for name, result in results.items():
        events = read_events(result)
        judged[name] = judge_run(events, runs[name].horizon_s)
        counts[name] = len(events)
    figures = _figures(list(judged.values()), sum(counts.values()))
    fewest = min(figures[f"events_{event}"] for event in EVENTS)
    judged_at_all = fewest >= LEAST_EVENTS and scheduler == FIRST_COME
    return Report(
        seed=seed,
        figures=figures,
        waived=frozenset() if judged_at_all else frozenset({"coverage_error", "band_ratio"}),
        table=[{"run": name, **_figures([bands], counts[name])} for name, bands in judged.items()],
    )


def _sized(run: ForetoldRun, seed: int, jobs: int) -> ForetoldRun:
    """Return the run with the jobs of a seed. With fewer jobs, all of its times are shorter."""
    share = min(1.0, jobs / RUNS["philly-like"].work.jobs)
    rounds = max(1, round(share * run.work.rounds))
    work = replace(run.work, seed=seed, jobs=jobs, rounds=rounds)
    return replace(run, work=work, horizon_s=run.horizon_s * share)


def _figures(parts: Sequence[Mapping[str, JudgedBands]], events: int) -> dict[str, Figure]:
    """Return the figures of runs with ``events`` forecast events in all."""
    figures: dict[str, Figure] = {}
    every = []
    for event in EVENTS:
        own = [part[event] for part in parts]
        bands = pool_bands(own)
        figures[f"events_{event}"] = len(bands)
        if not len(bands):
            continue
        every.append(bands)
        figures |= {
            f"coverage_{event}": float(bands.covered.mean()),
            f"width_{event}_s": float(bands.width_s.mean()),
            f"median_error_{event}_s": float(np.median(np.abs(bands.after_s - bands.median_s))),
            f"band_ratio_{event}": band_ratio(own, around_medians=False),
            f"band_ratio_median_{event}": band_ratio(own, around_medians=True),
        }
    if not every:
        return figures
    both = pool_bands(every)
    wide = both.width_s > np.median(both.width_s)
    coverage = [figures[f"coverage_{event}"] for event in EVENTS if f"coverage_{event}" in figures]
    ratios = [
        figures[f"band_ratio_{event}"] for event in EVENTS if f"band_ratio_{event}" in figures
    ]
    return figures | {
        "coverage_error": max(abs(one - COVERAGE) for one in coverage),
        "coverage_narrow": float(both.covered[~wide].mean()),
        "coverage_wide": float(both.covered[wide].mean()) if wide.any() else np.nan,
        "band_ratio": max(ratios),
        "open_share": 1.0 - len(both) / events,
    }
