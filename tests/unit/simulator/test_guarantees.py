"""Promises to guaranteed jobs, judged by the log of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tessera.formulation.values import Cell
from tessera.simulator.guarantees import find_broken_guarantees
from tessera.simulator.log import Segment
from tessera.simulator.run import Result
from tests.support.worlds import a_profile, a_scenario, an_arrival, simulate_scenario


def a_run(*segments: tuple[int, float, float], guaranteed: bool = True) -> Result:
    profiles = [a_profile(1, 2.0), a_profile(2, 1.0), a_profile(4, 0.5)]
    job = an_arrival("j", requested_gpus=2, guaranteed=guaranteed)
    result = simulate_scenario(a_scenario(job, profiles=profiles))
    return replace(
        result,
        segments=tuple(
            Segment(
                job=0,
                start_s=start_s,
                ready_s=start_s,
                end_s=end_s,
                cell=Cell(gpu_type="a100", gpus=gpus, pipeline_degree=1),
                members=((0, tuple(range(gpus))),),
                slowdown=1.0,
                iterations=1.0,
                ended_by="resize",
            )
            for gpus, start_s, end_s in segments
        ),
    )


@pytest.mark.parametrize(
    ("segments", "broken"),
    [
        ([(2, 0.0, 10.0)], []),
        ([(2, 0.0, 10.0), (4, 10.0, 20.0)], []),
        ([(4, 10.0, 20.0), (2, 0.0, 10.0)], []),
        ([(2, 0.0, 10.0), (1, 10.0, 20.0)], [0]),  # slower than on its request
        ([(2, 0.0, 10.0), (2, 11.0, 20.0)], [0]),  # without GPUs for a second
        ([], []),  # it never started
    ],
)
def test_a_promise_is_broken_by_a_pause_or_a_slower_cell(
    segments: list[tuple[int, float, float]], broken: list[int]
) -> None:
    assert find_broken_guarantees(a_run(*segments)) == broken


def test_best_effort_jobs_are_owed_nothing() -> None:
    assert find_broken_guarantees(a_run((1, 0.0, 1.0), (2, 5.0, 6.0), guaranteed=False)) == []
