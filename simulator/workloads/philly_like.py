"""A seeded stream of training jobs that resembles production traces (Philly, ATC 2019)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from tessera.estimator.samples import sample_profiles
from tessera.formulation.base.tables import Floats
from tessera.formulation.base.values import Workload
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.records.jobs import JobSpec
from tessera.simulator.traces.trace import Arrival

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """The distributions of arrivals, requested GPUs and durations. The defaults are judgement.

    With the defaults, a job asks for 3.2 GPUs for 2.1 h on average, which is about the work of
    1,280 GPUs.
    """

    mean_gap_s: float = 20.0
    burst_share: float = 0.8
    """Share of short gaps between arrivals. Their mean is a fifth of the overall mean."""
    gap_sigma: float = 1.0  # of the logarithm of gaps
    day_swing: float = 0.6
    """Share by which the rate of arrivals varies over a day. It is lowest at midnight, i.e. time 0."""
    median_s: float = 1_800.0
    duration_sigma: float = 1.7  # of the logarithm of durations
    shortest_s: float = 60.0
    longest_s: float = 30 * DAY_S
    gpus: tuple[int, ...] = (1, 2, 4, 8, 16)
    gpu_shares: tuple[float, ...] = (0.45, 0.20, 0.20, 0.10, 0.05)


def philly_like(
    jobs: int,
    seed: int,
    *,
    profiles: Iterable[EstimateRecord] | None = None,
) -> list[Arrival]:
    """Return jobs by time of arrival.

    Each job requests a configuration that runs according to ``profiles``. Its number of iterations
    follows from its drawn duration. If ``profiles`` is None, the sample profiles are used. The same
    arguments give the same jobs.
    """
    habits = Habits()
    known = runnable_workloads(sample_profiles() if profiles is None else profiles, habits.gpus)
    rng = np.random.default_rng(seed)
    arrivals = arrival_times_s(rng, jobs, habits)
    seconds = rng.lognormal(math.log(habits.median_s), habits.duration_sigma, jobs)
    seconds = np.clip(seconds, habits.shortest_s, habits.longest_s)
    offered = [(n, p) for n, p in zip(habits.gpus, habits.gpu_shares, strict=True) if n in known]
    shares = np.array([p for _, p in offered])
    counts = rng.choice([n for n, _ in offered], size=jobs, p=shares / shares.sum())
    drawn = []
    for i, (gpus, duration_s) in enumerate(zip(counts.tolist(), seconds.tolist(), strict=True)):
        gpu_type, work, iter_time_s = draw_configuration(rng, known[gpus])
        spec = JobSpec(
            name=f"job-{i:05d}",
            workload=work,
            requested_gpus=gpus,
            requested_gpu_type=gpu_type,
            iterations=max(1, round(duration_s / iter_time_s)),
        )
        drawn.append(Arrival(float(arrivals[i]), spec))
    return drawn


def arrival_times_s(rng: Generator, jobs: int, habits: Habits) -> Floats:
    """Return ascending arrival times in seconds since a midnight, float64[jobs].

    Gaps are a mixture of two log-normal distributions (bursts and lulls), in a time that runs at the
    rate of the day.
    """
    warped = np.cumsum(gaps_s(rng, jobs, habits))
    clock, run = daily_clock(warped[-1] if jobs else 0.0, habits.day_swing)
    return np.interp(warped, run, clock)


def gaps_s(rng: Generator, jobs: int, habits: Habits) -> Floats:
    """Return the gaps (bursts and lulls) without the daily swing, float64[jobs]."""
    short = rng.random(jobs) < habits.burst_share
    long_mean = (1 - habits.burst_share / 5) / max(1 - habits.burst_share, 1e-9)
    mean = np.where(short, 1 / 5, long_mean) * habits.mean_gap_s
    return rng.lognormal(np.log(mean) - habits.gap_sigma**2 / 2, habits.gap_sigma)


def daily_clock(until_s: float, swing: float) -> tuple[Floats, Floats]:
    """Return seconds since a midnight in steps of 300, and the times of a clock at the day's rate.

    The rate is 1 - ``swing`` at midnight, 1 + ``swing`` at noon, and 1 on average. Both times reach
    ``until_s``.
    """
    amplitude = swing * DAY_S / (2 * math.pi)
    clock = np.arange(0.0, until_s + amplitude + 600.0, 300.0)
    return clock, clock - amplitude * np.sin(2 * math.pi * clock / DAY_S)


Choices = dict[str, dict[str, list[tuple[Workload, float]]]]
"""GPU type -> model -> (workload, seconds of an iteration)."""


def runnable_workloads(
    profiles: Iterable[EstimateRecord], gpus: Sequence[int]
) -> dict[int, Choices]:
    """Return the workloads that run on each GPU count, at their fastest shape, degree and plan."""
    fastest: dict[tuple[int, str, Workload], float] = defaultdict(lambda: math.inf)
    for e in profiles:
        key = (e.cell.gpus, e.cell.gpu_type, e.workload)
        if e.cell.gpus in gpus and math.isfinite(e.iter_time_s):
            fastest[key] = min(fastest[key], e.iter_time_s)
    choices: dict[int, Choices] = {}
    for (count, kind, work), iter_time_s in fastest.items():
        by_model = choices.setdefault(count, {}).setdefault(kind, {})
        by_model.setdefault(work.model, []).append((work, iter_time_s))
    return choices


def draw_configuration(rng: Generator, choices: Choices) -> tuple[str, Workload, float]:
    """Draw a GPU type, then a model, then one of its sizes and batches, each uniformly."""
    gpu_type = list(choices)[rng.integers(len(choices))]
    by_model = choices[gpu_type]
    sizes = by_model[list(by_model)[rng.integers(len(by_model))]]
    work, iter_time_s = sizes[rng.integers(len(sizes))]
    return gpu_type, work, iter_time_s
