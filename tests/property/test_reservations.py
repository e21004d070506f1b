"""Laws of reservations on random workloads: during a window, its GPUs serve only entitled jobs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tessera.formulation.records.reservations import ReservationSpec
from tessera.simulator.run import Decider, Result
from tessera.simulator.scenario import Scenario
from tessera.solvers.rounds.options import RoundOptions
from tests.support.laws import scaled
from tests.support.worlds import COSTLY, a_scenario, an_arrival, simulate_scenario, some_specs

GPUS = 24
RESERVATIONS = (
    ReservationSpec(name="r", start_s=4000, end_s=8000, gpu_type="a100", gpus=10, tenant="a"),
    ReservationSpec(name="m", start_s=6000.0, end_s=7000.0, nodes=("a100-1",), maintenance=True),
    ReservationSpec(
        name="n", start_s=5050.0, end_s=6550.0, nodes=("a100-0",), label_key="k", label_value="v"
    ),
)


def a_random_scenario(seed: int) -> Scenario:
    """Return jobs of two tenants on six nodes, under more load than these can bear."""
    rng = np.random.default_rng(seed)
    arrivals = [
        an_arrival(
            f"j{i}",
            float(at_s),
            iterations=int(rng.integers(2_000, 20_000)),
            requested_gpus=int(rng.choice([1, 2, 4])),
            tenant=str(rng.choice(["a", "b"])),
            pinned=bool(rng.random() >= 0.8),
            guaranteed=bool(rng.random() < 0.2),
            labels={"k": "v"} if rng.random() < 0.3 else {},
        )
        for i, at_s in enumerate(np.sort(rng.uniform(0, 9_000, 40)))
    ]
    scenario = a_scenario(*arrivals, nodes=some_specs(("a100", 6, 4)))
    return replace(scenario, reservations=RESERVATIONS)


def find_trespasses(scenario: Scenario, result: Result) -> list[str]:
    """Return the times at which jobs had GPUs that a window had for others."""
    found = []
    serves = [
        {
            j
            for j, one in enumerate(scenario.arrivals)
            if r.serves((one.spec.tenant,), one.spec.labels)
        }
        for r in RESERVATIONS
    ]
    moments = sorted({t for s in result.segments for t in (s.start_s, s.end_s)})
    for at_s in moments:
        now = [s for s in result.segments if s.start_s <= at_s < s.end_s]
        away = sum(4 for r in RESERVATIONS if r.maintenance and r.start_s <= at_s < r.end_s)
        for r, own in zip(RESERVATIONS, serves, strict=True):
            if not r.start_s <= at_s < r.end_s:
                continue
            others = [s for s in now if s.job not in own]
            used = sum(len(gpus) for s in others for _, gpus in s.members)
            on = {result.nodes[node] for s in others for node, _ in s.members} & set(r.nodes)
            if on or (r.gpus and used > GPUS - away - r.gpus):
                found.append(f"{r.name} at {at_s}: {used} GPUs, {on}")
    return found


@pytest.mark.parametrize(
    "options",
    [
        RoundOptions(solver="greedy"),
        RoundOptions(solver="cp-sat"),
        RoundOptions(solver="pricing"),
        RoundOptions(solver="greedy", keep_requests=False),
        *(RoundOptions(scheduler=name) for name in ("fcfs", "gavel", "sia", "arena")),
    ],
    ids=lambda options: options.scheduler or f"{options.solver}{options.keep_requests}",
)
@pytest.mark.parametrize("seed", range(scaled(2)))
def test_no_job_uses_gpus_during_a_window_that_does_not_serve_it(
    seed: int, options: RoundOptions
) -> None:
    scenario = a_random_scenario(seed)
    result = simulate_scenario(
        scenario,
        decide=Decider(options, work=0.02),
        overheads=COSTLY,
        on_events=True,
        spacing_s=None if options.scheduler else 60.0,
    )
    assert result.refused == 0
    assert find_trespasses(scenario, result) == []
    assert np.isfinite(result.end_s).all()


def test_rounds_without_the_reservations_would_use_the_gpus() -> None:
    scenario = a_random_scenario(0)
    result = simulate_scenario(replace(scenario, reservations=()), overheads=COSTLY)
    assert find_trespasses(scenario, result)
