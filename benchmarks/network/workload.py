"""A random two-week trace with the published statistics of Crux's trace. All else is ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tessera.estimator.families import family_traffic
from tessera.formulation.errors import InvalidInput
from tessera.formulation.tables import Floats
from tessera.simulator.network.trace import TraceJob, TraceResult

DAY_S: Final = 86_400.0
GPU_TYPE: Final = "a100-80"
PEAK_FLOP_PER_S: Final = 312e12
"""The peak of one A100 in 16 bits, without sparsity (data sheet)."""

GPU_COUNTS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
COUNT_SHARES: Final = (0.19, 0.09, 0.10, 0.25, 0.125, 0.08, 0.05, 0.07, 0.03, 0.015)
"""The shares of jobs by number of GPUs, which are ours.

As in Crux (section 6), more than a tenth have 128 GPUs or more, and the largest has 512.
"""

_SMALL: Final = {
    "resnet": 4,
    "resnet-152": 2,
    "nmt": 2,
    "nmt-base": 2,
    "bert": 2,
    "bert-base": 2,
    "multi-interests": 2,
    "multi-interests-2x": 1,
    "ctr": 2,
    "transformer-nlp": 1,
}
_MIDDLE: Final = {
    "resnet": 1,
    "nmt": 1,
    "bert": 3,
    "bert-base": 1,
    "multi-interests": 1,
    "ctr": 1,
    "transformer-nlp": 2,
    "gpt": 3,
}
_LARGE: Final = {"gpt": 6, "bert": 2, "transformer-nlp": 2}


def models_of(gpus: int) -> dict[str, int]:
    """Return our weights of model families for jobs of this size. Large jobs are mostly GPTs."""
    return _SMALL if gpus <= 8 else _MIDDLE if gpus <= 32 else _LARGE


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceWorkload:
    """The distributions from which a trace is drawn.

    Jobs arrive by a Poisson process whose rate varies by ``swing`` over a day. Their compute times
    are log-normal with a standard deviation of the logarithm of ``spread``. The mean is such that
    jobs want a share of ``demand`` of the GPUs on average.
    """

    days: float = 14.0
    jobs_a_day: float = 360.0  # 5,040 in two weeks; Crux: more than 5,000
    gpus: int = 2_000
    demand: float = 0.6
    spread: float = 1.2
    swing: float = 0.5
    largest: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        if not (self.days > 0 and self.jobs_a_day > 0 and self.demand > 0 and self.spread >= 0):
            raise InvalidInput("workload", "days, jobs and demand must be above 0")
        if not (0 <= self.swing <= 1 and self.largest >= 1):
            raise InvalidInput("swing", "must be in [0, 1], and the largest job must have GPUs")

    @property
    def sizes(self) -> tuple[list[int], Floats]:
        """Return the jobs' sizes and their shares, without sizes above ``largest``."""
        kept = [
            (size, share)
            for size, share in zip(GPU_COUNTS, COUNT_SHARES, strict=True)
            if size <= self.largest
        ]
        share = np.array([share for _, share in kept])
        return [size for size, _ in kept], share / share.sum()

    @property
    def mean_s(self) -> float:
        """Return the mean compute time of a job."""
        sizes, share = self.sizes
        return self.demand * self.gpus * DAY_S / (self.jobs_a_day * float(share @ sizes))


def jobs_of(w: TraceWorkload) -> list[TraceJob]:
    """Return the jobs of a trace in the order of their arrival."""
    rng = np.random.default_rng(w.seed)
    sizes, share = w.sizes
    at_s = _arrivals(w, rng)
    gpus = rng.choice(sizes, len(at_s), p=share).tolist()
    factor = rng.lognormal(-(w.spread**2) / 2, w.spread, len(at_s))
    result = []
    for number, (arrival_s, size, lasts) in enumerate(zip(at_s, gpus, factor, strict=True)):
        weights = models_of(size)
        chance = np.array(list(weights.values()), dtype=np.float64)
        family = str(rng.choice(list(weights), p=chance / chance.sum()))
        traffic = family_traffic(family, GPU_TYPE, size).traffic()
        result.append(
            TraceJob(
                name=f"{family}-{number}",
                arrival_s=float(arrival_s),
                gpus=size,
                traffic=traffic,
                iterations=max(1.0, float(lasts) * w.mean_s / traffic.compute_s),
            )
        )
    return result


def _arrivals(w: TraceWorkload, rng: np.random.Generator) -> Floats:
    """Return ascending arrival times, from a Poisson process of the highest rate, thinned."""
    most = w.jobs_a_day * (1 + w.swing)
    at = np.sort(rng.uniform(0, w.days, rng.poisson(most * w.days)))
    rate = w.jobs_a_day * (1 + w.swing * np.sin(2 * np.pi * at))
    result: Floats = at[rng.uniform(0, most, len(at)) < rate] * DAY_S
    return result


def trace_statistics(jobs: Sequence[TraceJob], result: TraceResult) -> dict[str, float]:
    """Return the statistics that Crux publishes of its trace, for these jobs as they ran."""
    gpus = np.array([job.gpus for job in jobs])
    started = np.isfinite(result.start_s)
    at = result.start_s[started]
    running = [
        (result.start_s <= t) & (result.end_s > t) for t in at.tolist()
    ]  # at each start, since that is where peaks occur
    held = np.array([int(gpus[now].sum()) for now in running])
    peak = int(np.argmax(held)) if len(held) else 0
    ever = result.ever_contended[started]
    return {
        "jobs": len(jobs),
        "started": int(started.sum()),
        "jobs_of_128": float((gpus >= 128).mean()) if len(gpus) else 0.0,
        "largest": int(gpus.max(initial=0)),
        "peak_gpus": int(held.max(initial=0)),
        "peak_jobs": int(running[peak].sum()) if len(held) else 0,
        "contended_jobs": float(ever.mean()) if len(ever) else 0.0,
        "contended_gpus": _share(gpus[started], ever),
        "contended_gpu_time": result.contended_gpu_s / result.held_gpu_s
        if result.held_gpu_s
        else 0.0,
    }


def _share(weight: np.ndarray, chosen: np.ndarray) -> float:
    return float(weight[chosen].sum() / weight.sum()) if weight.sum() else 0.0
