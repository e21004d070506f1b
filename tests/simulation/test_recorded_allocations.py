"""Replays of recorded allocations: computed by hand, and of the simulator's own runs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tessera.formulation.errors import InvalidInput
from tessera.simulator.overheads import Overheads
from tessera.simulator.recordings import Hold, ReplayResult, nodes_for_holds, replay_holds
from tessera.simulator.run import Result
from tessera.simulator.scenario import Scenario
from tests.support.cells import with_cell
from tests.support.worlds import (
    COSTLY,
    FREE,
    POLICIES,
    a_random_scenario,
    a_scenario,
    an_arrival,
    simulate_scenario,
    some_specs,
)


def a_hold(job: int = 0, start_s: float = 0.0, end_s: float = math.inf, **overrides: Any) -> Hold:
    """Return a hold of one A100."""
    fields = {"job": job, "start_s": start_s, "end_s": end_s, "nodes": 1} | overrides
    gpus = fields["nodes"] * fields.pop("gpus_per_node", 1)
    return Hold(**with_cell(fields | {"gpus": gpus}))


def replay_of(*holds: Hold, costs: Overheads = FREE, arrivals: int = 1) -> ReplayResult:
    """Replay holds of jobs of 1,000 iterations, 1 s each on one GPU, that scale linearly."""
    jobs = [an_arrival(f"job-{i}") for i in range(arrivals)]
    nodes = nodes_for_holds(holds, {"a100": 4})
    return replay_holds(a_scenario(*jobs, nodes=nodes, types=["a100"]), holds, costs)


def test_each_hold_pays_its_start_and_resumes_from_what_was_trained() -> None:
    replay = replay_of(a_hold(end_s=100.0), a_hold(start_s=300.0, gpus_per_node=2), costs=COSTLY)

    # 11 s to load, 20 to search: 69 iterations by 100 s; then 7 to save, 11 to load, 30 to search
    assert replay.end_s.tolist() == [348.0 + (1000 - 69) / 2]
    assert [s.ready_s for s in replay.segments] == [31.0, 348.0]


def test_a_finished_job_ignores_its_later_holds() -> None:
    replay = replay_of(a_hold(end_s=1500.0), a_hold(start_s=2000.0))

    assert replay.end_s.tolist() == [1000.0]
    assert len(replay.segments) == 1


def test_a_job_that_loses_its_last_hold_does_not_finish() -> None:
    replay = replay_of(a_hold(end_s=400.0))

    assert replay.end_s.tolist() == [math.inf]
    assert [s.iterations for s in replay.segments] == [400.0]


@pytest.mark.parametrize(
    "holds", [(a_hold(end_s=20.0), a_hold(start_s=10.0)), (a_hold(job=1),)], ids=["overlap", "job"]
)
def test_impossible_holds_are_refused(holds: tuple[Hold, ...]) -> None:
    with pytest.raises(InvalidInput, match="holds"):
        replay_of(*holds)


def test_holds_before_the_arrival_are_refused() -> None:
    scenario = a_scenario(an_arrival("late", at_s=50.0))

    with pytest.raises(InvalidInput, match="late overlap, or begin before it arrives"):
        replay_holds(scenario, [a_hold(start_s=40.0)], FREE)


def test_too_few_nodes_are_named() -> None:
    scenario = a_scenario(an_arrival("wide"), nodes=some_specs(("a100", 1, 4)))

    with pytest.raises(InvalidInput, match="too few"):
        replay_holds(scenario, [a_hold(nodes=2, gpus_per_node=4)], FREE)


def holds_of(result: Result) -> list[Hold]:
    """Return the holds of a run's jobs, whose gangs must be even."""
    holds = []
    for s in result.segments:
        assert len({len(gpus) for _, gpus in s.members}) == 1, (
            "the gang has unequal GPU counts on its nodes"
        )
        holds.append(
            a_hold(
                s.job,
                s.start_s,
                math.inf if s.ended_by == "finish" else s.end_s,
                gpu_type=s.cell.gpu_type,
                nodes=len(s.members),
                gpus_per_node=len(s.members[0][1]),
                plan=s.cell.plan,
                pipeline_degree=s.cell.pipeline_degree,
            )
        )
    return holds


@pytest.mark.parametrize("policy", ["greedy", "fcfs", "ilp"])
@pytest.mark.parametrize("seed", range(3))
def test_the_simulators_own_allocations_replay_to_its_own_times(policy: str, seed: int) -> None:
    scenario: Scenario = a_random_scenario(seed, jobs=6)
    run = simulate_scenario(scenario, POLICIES[policy], overheads=COSTLY)
    holds = holds_of(run)
    sizes = {node.gpu_type: node.gpus for node in scenario.nodes}
    replayed = a_scenario(
        *scenario.arrivals,
        nodes=nodes_for_holds(holds, sizes),
        profiles=scenario.profiles,
        types=[kind.name for kind in scenario.gpu_types],
    )

    replay = replay_holds(replayed, holds, COSTLY)

    assert len(replay.segments) == len(run.segments) > 0
    np.testing.assert_allclose(replay.end_s, np.where(np.isfinite(run.end_s), run.end_s, np.inf))
