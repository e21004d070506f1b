"""Workloads of many kinds, on which a policy should never be far behind the best scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from numpy.random import Generator

from tessera.benchmarks.schedulers.streams import (
    HOUR_S,
    SIZE_SHARES,
    SIZES,
    SPACING_S,
    SPEEDS,
    GpuPool,
    JobStream,
    ScalingModel,
    StreamDraft,
    draw_durations_s,
    draw_times_s,
)
from tessera.formulation.base.tables import Floats
from tessera.simulator.comparison.workload import (
    PHILLY,
    SYNTHETIC,
    WorkloadSpec,
    check_trace,
    make_scenario,
)
from tessera.simulator.overheads import preset_overheads
from tessera.simulator.run import Conditions
from tessera.simulator.truth import perturb_estimates

ArrivalPattern = Literal["even", "bursts", "at-once"]

MODELS: Final = 6
"""The number of models of a drawn workload."""
NODES: Final = 4
"""The number of nodes of a drawn cluster, unless it has more GPU types."""
BURSTS: Final = 5
BURST_S: Final = 600.0
"""The number of bursts of a workload, and the time within which the jobs of one arrive."""
MAX_DURATION_S: Final = 24 * HOUR_S
"""The longest duration of a drawn job as requested. A longer one would be most of a mean JCT."""
TRACE_PERIOD_S: Final = HOUR_S
"""The largest time between rounds of traces, which last for weeks."""
LARGE_SHARES: Final = (0.4, 0.3, 0.2, 0.1)
"""The shares of four sizes of gangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadKind:
    """The distributions of a drawn workload.

    Durations as requested are log-normal. Each job requests one of the ``types`` GPU types, and may
    run on all of them unless the kind ``pins_type``. Rates grow by powers of the number of GPUs between
    ``powers``. An elastic job runs on any number of GPUs, and a rigid one only on its request.
    """

    elastic_share: float = 0.0
    median_s: float = HOUR_S
    sigma: float = 0.5
    sizes: tuple[int, ...] = SIZES
    shares: tuple[float, ...] = SIZE_SHARES
    types: int = 1
    load: float = 1.0
    powers: tuple[float, float] = (0.7, 0.95)
    pattern: ArrivalPattern = "even"
    pins_type: bool = False
    error: float = 0.0
    """The mean relative error of the estimates."""
    overheads: str = "default"

    def draw(self, rng: Generator, jobs: int) -> JobStream:
        """Return a workload of this kind."""
        names = list(SPEEDS)[: self.types]
        nodes = max(1, NODES // self.types)
        draft = StreamDraft(
            *(GpuPool(gpu_type=name, nodes=nodes) for name in names),
            models=[self._draw_model(rng, index, names) for index in range(MODELS)],
        )
        gpus = rng.choice(self.sizes, jobs, p=self.shares)
        gpus = np.minimum(gpus, nodes * draft.pools[0].node_gpus)
        durations_s = draw_durations_s(rng, jobs, self.median_s, self.sigma)
        durations_s = np.minimum(durations_s, MAX_DURATION_S)
        times_s = self._draw_times_s(rng, gpus * durations_s, draft.gpus)
        models, elastic = rng.integers(MODELS, size=jobs), rng.random(jobs) < self.elastic_share
        for i in range(jobs):
            draft.add(
                float(times_s[i]),
                int(gpus[i]),
                float(durations_s[i]),
                model=f"model-{models[i]}",
                elastic=bool(elastic[i]),
                requested_gpu_type=str(rng.choice(names)),
                pinned_gpu_type=self.pins_type,
            )
        stream = draft.finish().change_conditions(
            exact=not self.error, overheads=preset_overheads(self.overheads)
        )
        if not self.error:
            return stream
        visible = perturb_estimates(stream.scenario.profiles, self.error, int(rng.integers(2**31)))
        return stream.change_conditions(visible=visible, measures=True)

    def _draw_model(self, rng: Generator, index: int, names: list[str]) -> ScalingModel:
        favors = {name: float(rng.uniform(0.6, 1.4)) for name in names}
        return ScalingModel(name=f"model-{index}", power=rng.uniform(*self.powers), favors=favors)

    def _draw_times_s(self, rng: Generator, gpu_s: Floats, gpus: int) -> Floats:
        """Return ascending arrival times of jobs that need ``gpu_s``, float64[jobs]."""
        times_s = draw_times_s(rng, gpu_s, gpus, self.load)
        if self.pattern == "at-once":
            return np.zeros_like(times_s)
        if self.pattern == "bursts":
            gap_s = times_s[-1] / BURSTS
            times_s = np.floor(times_s / gap_s) * gap_s + rng.uniform(0, BURST_S, len(times_s))
        return np.sort(times_s)


_GANGS: Final[tuple[int, ...]] = (4, 8, 16, 32)

DRAWN_KINDS: Final[Mapping[str, WorkloadKind]] = {
    "rigid-light": WorkloadKind(),
    "rigid-heavy": WorkloadKind(median_s=0.3 * HOUR_S, sigma=1.8, types=2),
    "rigid-gangs": WorkloadKind(sizes=_GANGS, shares=LARGE_SHARES, load=0.8),
    "rigid-small": WorkloadKind(sizes=(1, 2), shares=(0.8, 0.2), sigma=1.0, load=0.9),
    "rigid-overload": WorkloadKind(sigma=1.0, load=2.0),
    "rigid-idle": WorkloadKind(sigma=1.0, load=0.5),
    "rigid-pinned": WorkloadKind(sigma=1.0, types=4, pins_type=True, sizes=(1, 2, 4, 8)),
    "elastic-light": WorkloadKind(elastic_share=1.0),
    "elastic-heavy": WorkloadKind(elastic_share=1.0, median_s=0.3 * HOUR_S, sigma=1.8, types=2),
    "elastic-gangs": WorkloadKind(elastic_share=1.0, sizes=_GANGS, shares=LARGE_SHARES, load=0.8),
    "elastic-overload": WorkloadKind(elastic_share=1.0, sigma=1.0, load=4.0),
    "elastic-idle": WorkloadKind(elastic_share=1.0, sigma=1.0, load=0.5),
    "elastic-8-types": WorkloadKind(elastic_share=1.0, sigma=1.0, types=8, load=1.5),
    "mixed-4-types": WorkloadKind(elastic_share=0.5, sigma=1.0, types=4),
    "mixed-8-types": WorkloadKind(elastic_share=0.5, sigma=1.5, types=8, load=0.7),
    "mixed-bursts": WorkloadKind(elastic_share=0.5, sigma=1.0, types=2, pattern="bursts"),
    "mixed-at-once": WorkloadKind(elastic_share=0.5, sigma=1.0, types=2, pattern="at-once"),
    "minutes-and-days": WorkloadKind(
        elastic_share=1.0, median_s=0.15 * HOUR_S, sigma=2.2, types=3, load=0.66
    ),
    "poor-scaling": WorkloadKind(elastic_share=1.0, sigma=1.0, powers=(0.3, 0.6)),
    "good-scaling": WorkloadKind(elastic_share=1.0, sigma=1.0, powers=(0.95, 1.0)),
    "wrong-estimates": WorkloadKind(elastic_share=0.5, sigma=1.0, types=2, error=0.3),
    "costly-restarts": WorkloadKind(elastic_share=0.5, sigma=1.0, overheads="testbed-full"),
}
"""Drawn workloads by name."""

TRACES: Final[Mapping[str, WorkloadSpec]] = {
    "philly": WorkloadSpec(trace=PHILLY, gpus_share=0.1, jobs_share=0.1),
    "philly-half": WorkloadSpec(trace=PHILLY, gpus_share=0.05, jobs_share=0.1),
    "testbed-a": WorkloadSpec(trace="arena-testbed-a", jobs_share=0.5),
    "testbed-b": WorkloadSpec(trace="arena-testbed-b", gpus_share=0.25, jobs_share=0.5),
    "morphling-base": WorkloadSpec(trace="morphling-base", jobs_share=0.3),
    "sample-models": WorkloadSpec(trace=SYNTHETIC, gpus_share=0.05, jobs=100),
}
"""Traces, and jobs of published models with sample profiles, by name. A seed draws their jobs."""

WORKLOADS: Final = (*DRAWN_KINDS, *TRACES)


def make_workload(name: str, seed: int, jobs: int) -> JobStream:
    """Return a workload with the jobs of a seed. The number of a trace's jobs is its own.

    Raises:
        KeyError: there is no such workload.
        MissingData: it needs a file that does not exist.
    """
    if name in DRAWN_KINDS:
        return DRAWN_KINDS[name].draw(np.random.default_rng([seed, *name.encode()]), jobs)
    scenario = make_scenario(replace(TRACES[name], seed=seed)).scenario
    conditions = Conditions(on_events=True, spacing_s=SPACING_S, round_s=TRACE_PERIOD_S)
    return JobStream(scenario=scenario, conditions=conditions)


def check_workload(name: str) -> None:
    """Check that a workload can be made, before anything runs.

    Raises:
        MissingData: it needs a file that does not exist.
    """
    if name in TRACES:
        check_trace(TRACES[name].trace)
