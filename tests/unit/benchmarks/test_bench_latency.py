from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tessera.benchmarks.estimator.latency import RecordedPlan, run_latency_section
from tessera.formulation.base.tables import Floats
from tessera.simulator.data import data_dir
from tests.support.estimates import FlatNetwork

NETWORK = FlatNetwork(across_bytes_per_s=1.0)


def a_recorded_plan(data: list[int], tensor: list[int], **given: Floats) -> RecordedPlan:
    """Return a plan whose stages send 8 bytes each."""
    stages = len(data)
    nothing = np.zeros(stages)
    fields = {
        "forward_s": nothing,
        "backward_s": nothing,
        "sync_s": nothing,
        "update_s": nothing,
        "handed_bytes": np.array([8.0] * (stages - 1) + [0.0]),
    }
    return RecordedPlan(
        group="g",
        model="bert",
        params="1.3B",
        iter_time_s=1.0,
        data=np.array(data),
        tensor=np.array(tensor),
        **(fields | given),
    )


@pytest.mark.parametrize(
    ("data", "tensor", "there", "back"),
    [
        ([2, 2], [1, 1], 8, 8),  # halves in turn
        # the whole for each tensor part; half of the samples each on the way back
        ([2, 1], [1, 2], 16, 8),
        ([1, 2], [2, 1], 8, 16),
        ([1, 1], [2, 2], 16, 8),  # each partner sends back a part
    ],
)
def test_transfers_between_stages_with_unlike_degrees_take_turns(
    data: list[int], tensor: list[int], there: float, back: float
) -> None:
    transfers_s = a_recorded_plan(data, tensor).transfers_s(NETWORK)
    assert [x.tolist() for x in transfers_s] == [[there, 0.0], [back, 0.0]]


def test_an_iteration_is_rebuilt_as_the_artifact_does() -> None:
    plan = a_recorded_plan(
        [1, 1, 1],
        [1, 1, 1],
        forward_s=np.array([1.0, 2.0, 1.0]),
        sync_s=np.array([1.0, 0.0, 3.0]),
        backward_s=np.array([2.0, 2.0, 2.5]),
        update_s=np.array([0.5, 0.25, 0.0]),
    )
    assert plan.rebuilt_s(None) == 10.5 + 15 * 4.0 + 4.0 + 0.5
    assert plan.rebuilt_s(NETWORK) == plan.rebuilt_s(None) + 2 * 16 + 15 * 16
    phases = 4.0 + 15 * 2.0 + 6.5 + 15 * 2.5
    assert plan.two_phases_s(NETWORK) == phases + 2 * (16 + 15 * 8) + 4.0 + 0.5


def test_recorded_plans_are_rebuilt_within_five_percent() -> None:
    figures = run_latency_section(arena_folder(), range(1)).figures
    assert figures["latency_plans"] == 615
    assert figures["latency_median_error"] <= 0.05
    assert figures["latency_median_error_without_transfer"] > figures["latency_median_error"]


def arena_folder() -> Path:
    folder = data_dir()
    if folder is None or not (folder / "arena" / "history").is_dir():
        pytest.skip("the Arena data set is not there (TESSERA_DATA)")
    return folder / "arena"
