"""Jobs of given distributions that load a cluster to a given degree.

The draws and the sources of their numbers:

* Arrivals are a Poisson process (as in Gavel, OSDI 2020, section 7.1), Philly-like bursts by day
  and night (``philly_like``), or all at time 0, like the static traces of the same section.
* Durations as requested are log-normal with a median of 30 min and a sigma of 1.7 (judgement:
  Philly's are heavy-tailed, ATC 2019, section 3).
* GPU counts follow Philly by judgement.
* The GPU type, then the model, then the size and batch are drawn uniformly among those that run on
  the GPUs (Crius, section 8.1, also draws types and GPU counts for its traces).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.random import Generator

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.records.jobs import JobSpec
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

_HABITS: Final = Habits()


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticTrace:
    """A distribution of traces.

    ``load`` is the GPU-hours that jobs request, divided by those that the cluster has until the
    last arrival. It determines the rate of arrivals, except for arrivals "at-once".
    """

    jobs: int
    load: float = 0.8
    arrivals: ArrivalProcess = "poisson"

    def __post_init__(self) -> None:
        """Refuse values that have no meaning."""
        if self.jobs < 0:
            raise InvalidInput("jobs", "must be 0 or more")
        if not 0 < self.load < math.inf:
            raise InvalidInput("load", "must be a positive number")

    def draw(
        self, profiles: Iterable[EstimateRecord], nodes: Sequence[NodeSpec], seed: int
    ) -> list[Arrival]:
        """Return jobs by arrival. The same arguments give the same jobs.

        According to ``profiles``, each job runs as requested on the empty cluster. GPU counts on
        which no workload runs are left out, and the shares of the others grow.

        Raises:
            InvalidInput: no workload runs on any of the GPU counts.
        """
        room = ClusterRoom.of(nodes)
        fitting = [record for record in profiles if room.holds(record)]
        seeds = np.random.SeedSequence(seed).generate_state(4)
        speeds = Speeds(fitting, room)
        arrivals = self._requests(np.random.default_rng(seeds[0]), fitting)
        span_s = float(gpu_seconds(arrivals, speeds).sum()) / (self.load * max(room.total_gpus, 1))
        times = self._times_s(np.random.default_rng(seeds[3]), span_s).tolist()
        return [a._replace(arrival_s=t) for a, t in zip(arrivals, times, strict=True)]

    def _requests(self, rng: Generator, profiles: Sequence[EstimateRecord]) -> list[Arrival]:
        """Return the jobs, all with arrival time 0."""
        known = runnable_workloads(profiles, _HABITS.gpus)
        if not self.jobs:
            return []
        wanted = zip(_HABITS.gpus, _HABITS.gpu_shares, strict=True)
        offered = [(n, share) for n, share in wanted if n in known]
        if not offered:
            raise InvalidInput("profiles", f"run no workload on {list(_HABITS.gpus)} GPUs")
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
                requested_gpu_type=gpu_type,
                iterations=max(1, round(duration_s / iter_time_s)),
            )
            arrivals.append(Arrival(0.0, spec))
        return arrivals

    def _durations_s(self, rng: Generator) -> Floats:
        seconds = rng.lognormal(math.log(_HABITS.median_s), _HABITS.duration_sigma, self.jobs)
        return np.minimum(np.maximum(seconds, _HABITS.shortest_s), _HABITS.longest_s)

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
