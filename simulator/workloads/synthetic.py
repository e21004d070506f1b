"""Jobs of given distributions that load a cluster to a given degree.

The draws and the sources of their numbers:

* Arrivals are a Poisson process (as in Gavel, OSDI 2020, section 7.1), Philly-like bursts by day
  and night (``philly_like``), or all at time 0, like the static traces of the same section.
* Durations as requested are log-normal with a median of 30 min and a sigma of 1.7 (judgement:
  Philly's are heavy-tailed, ATC 2019, section 3). As "large-models", their median is 8 h
  (judgement: such jobs take hours to weeks). Or they are Gavel's: 10^x minutes, with x uniform in
  1.5 to 3 for four of five jobs, and in 3 to 4 for the fifth.
* GPU counts follow Philly by judgement. Or they are Gavel's, after the same trace: 70 % one, 25 %
  two or four, 5 % eight.
* The GPU type, then the model, then the size and batch are drawn uniformly among those that run on
  the GPUs (Crius, section 8.1, also draws types and GPU counts for its traces).
* Deadlines are the duration times a tightness, which is uniform in a range (ElasticFlow, ASPLOS
  2023: 0.5 to 1.5).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal

import numpy as np
from numpy.random import Generator

from tessera.formulation.errors import InvalidInput
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.records.jobs import JobSpec
from tessera.formulation.tables import Floats
from tessera.simulator.traces.redraw import LARGE_FROM, with_large_share
from tessera.simulator.traces.shaping import with_deadlines
from tessera.simulator.traces.speeds import ClusterRoom, Speeds, gpu_seconds
from tessera.simulator.traces.trace import Arrival
from tessera.simulator.workloads.philly_like import (
    DAY_S,
    Habits,
    daily_clock,
    draw_configuration,
    gaps_s,
    runnable_workloads,
)

ArrivalProcess = Literal["poisson", "philly-like", "at-once"]
Durations = Literal["log-normal", "large-models", "gavel"]

_HABITS: Final = Habits()
PHILLY_GPUS: Final[Mapping[int, float]] = MappingProxyType(
    dict(zip(_HABITS.gpus, _HABITS.gpu_shares, strict=True))
)
LARGE_MEDIAN_S: Final = 8 * 3600.0
"""Median duration of "large-models"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticTrace:
    """A distribution of traces.

    ``load`` is the GPU-hours that jobs request, divided by those that the cluster has until the
    last arrival. It determines the rate of arrivals, except for arrivals "at-once".
    """

    jobs: int
    load: float = 0.8
    arrivals: ArrivalProcess = "poisson"
    durations: Durations = "log-normal"
    median_s: float = _HABITS.median_s  # of log-normal durations
    sigma: float = _HABITS.duration_sigma  # of their logarithm
    shortest_s: float = _HABITS.shortest_s
    longest_s: float = _HABITS.longest_s
    gpu_shares: Mapping[int, float] = field(default_factory=lambda: PHILLY_GPUS)
    """The share of jobs by GPU count. Counts on which no workload runs are left out, and the shares
    of the others grow."""
    large_share: float | None = (
        None  # of jobs with models from LARGE_FROM parameters; None: as drawn
    )
    large_from: float = LARGE_FROM
    tightness: tuple[float, float] | None = None  # None: no deadlines

    def __post_init__(self) -> None:
        """Refuse values that have no meaning."""
        if self.jobs < 0:
            raise InvalidInput("jobs", "must be 0 or more")
        if not 0 < self.load < math.inf:
            raise InvalidInput("load", "must be a positive number")
        if not (0 < self.shortest_s <= self.longest_s < math.inf and self.median_s > 0):
            raise InvalidInput("durations", "must be above 0, and the shortest at most the longest")
        shares = self.gpu_shares.values()
        if not shares or min(shares) < 0 or not 0 < sum(shares) < math.inf:
            raise InvalidInput(
                "gpu_shares", "must give at least one GPU count a share above 0, and none below"
            )

    def draw(
        self, profiles: Iterable[EstimateRecord], nodes: Sequence[NodeSpec], seed: int
    ) -> list[Arrival]:
        """Return jobs by arrival. The same arguments give the same jobs.

        According to ``profiles``, each job runs as requested on the empty cluster.

        Raises:
            InvalidInput: no workload runs on any of the GPU counts.
        """
        room = ClusterRoom.of(nodes)
        fitting = [record for record in profiles if room.holds(record)]
        seeds = np.random.SeedSequence(seed).generate_state(4)
        speeds = Speeds(fitting, room)
        arrivals = self._requests(np.random.default_rng(seeds[0]), fitting)
        if self.large_share is not None:
            arrivals = with_large_share(
                arrivals, speeds, self.large_share, int(seeds[1]), self.large_from
            )
        if self.tightness is not None:
            arrivals = with_deadlines(arrivals, speeds, self.tightness, int(seeds[2]))
        span_s = float(gpu_seconds(arrivals, speeds).sum()) / (self.load * max(room.total_gpus, 1))
        times = self._times_s(np.random.default_rng(seeds[3]), span_s).tolist()
        return [a._replace(arrival_s=t) for a, t in zip(arrivals, times, strict=True)]

    def _requests(self, rng: Generator, profiles: Sequence[EstimateRecord]) -> list[Arrival]:
        """Return the jobs, all with arrival time 0."""
        known = runnable_workloads(profiles, tuple(self.gpu_shares))
        if not self.jobs:
            return []
        offered = [(n, share) for n, share in self.gpu_shares.items() if n in known and share > 0]
        if not offered:
            raise InvalidInput(
                "gpu_shares",
                f"name the GPU counts {sorted(self.gpu_shares)}, on which no workload runs",
            )
        shares = np.array([share for _, share in offered])
        seconds = self._durations_s(rng).tolist()
        counts = rng.choice([n for n, _ in offered], size=self.jobs, p=shares / shares.sum())
        arrivals = []
        for i, (duration_s, gpus) in enumerate(zip(seconds, counts.tolist(), strict=True)):
            gpu_type, work, iter_time_s = draw_configuration(rng, known[gpus])
            spec = JobSpec(
                name=f"job-{i:05d}",
                workload=work,
                requested_gpus=gpus,
                requested_type=gpu_type,
                iterations=max(1, round(duration_s / iter_time_s)),
            )
            arrivals.append(Arrival(0.0, spec))
        return arrivals

    def _durations_s(self, rng: Generator) -> Floats:
        if self.durations == "gavel":
            short = rng.random(self.jobs) < 0.8
            exponent = np.where(
                short, rng.uniform(1.5, 3.0, self.jobs), rng.uniform(3.0, 4.0, self.jobs)
            )
            seconds: Floats = 60.0 * np.power(10.0, exponent)
        else:
            median_s = LARGE_MEDIAN_S if self.durations == "large-models" else self.median_s
            seconds = rng.lognormal(math.log(median_s), self.sigma, self.jobs)
        return np.minimum(np.maximum(seconds, self.shortest_s), self.longest_s)

    def _times_s(self, rng: Generator, span_s: float) -> Floats:
        """Return ascending times of arrival, the last at ``span_s``, float64[jobs]."""
        if self.arrivals == "at-once" or not self.jobs:
            return np.zeros(self.jobs)
        poisson = self.arrivals == "poisson"
        gaps = rng.exponential(size=self.jobs) if poisson else gaps_s(rng, self.jobs, _HABITS)
        passed: Floats = np.cumsum(gaps)
        if poisson:
            return passed * (span_s / float(passed[-1]))
        clock, run = daily_clock(span_s + DAY_S, _HABITS.day_swing)
        end = float(np.interp(span_s, clock, run))
        return np.interp(passed * (end / float(passed[-1])), run, clock)
