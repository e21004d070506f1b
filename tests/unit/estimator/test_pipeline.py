from __future__ import annotations

import numpy as np
import pytest

from tessera.estimator.hardware import A40
from tessera.estimator.pipeline import (
    Overlap,
    Pipelines,
    Sync,
    Transfers,
    iteration_s,
)
from tessera.estimator.plans import Candidates, Shape, Training
from tessera.estimator.rooflines import RooflineCompute
from tessera.formulation.job.execution_plan import Schedule
from tests.support.estimates import FlatNetwork, a_graph, pipelines_of, stage_costs
from tests.support.oracles.pipeline_events import simulated_s


def some_plans(**given: list[list[float]]) -> Pipelines:
    shape = np.shape(given["busy_s"])
    fields = {f: np.array(given.get(f, np.zeros(shape))) for f in Pipelines.__dataclass_fields__}
    return Pipelines(**fields)


BUSY = [[3.0, 6.0, 4.5]]


def iteration_seconds(overlap: Overlap, **given: list[list[float]]) -> float:
    return float(iteration_s(some_plans(busy_s=BUSY, **given), 5, overlap)[0])


def test_the_first_micro_batch_passes_all_stages_and_the_rest_follow_the_slowest() -> None:
    assert iteration_seconds(Overlap()) == 13.5 + 4 * 6


@pytest.mark.parametrize(
    ("transfers", "expected"),
    [
        (Transfers.ADDED, 13.5 + 9 + 4 * (6 + 7)),
        (Transfers.HIDDEN, 13.5 + 9 + 4 * 6),
        (Transfers.OVERLAPPED, 13.5 + 9 + 4 * 7),
        (Transfers.IN_LINE, 13.5 + 9 + 4 * (6 + 2 + 7)),
        (Transfers.FREE, 13.5 + 4 * 6),
    ],
)
def test_transfers_are_awaited_or_hidden(transfers: Transfers, expected: float) -> None:
    overlap = Overlap(transfers=transfers)
    wires = {"send_s": [[2.0, 7.0, 0.0]], "receive_s": [[0.0, 2.0, 7.0]]}
    assert iteration_seconds(overlap, **wires) == expected


@pytest.mark.parametrize(
    ("sync", "expected"),
    [(Sync.IN_TURN, 6.0), (Sync.TOGETHER, 5.0), (Sync.BEHIND, 3.5)],
)
def test_gradients_are_exchanged_after_or_behind_the_last_backward_pass(
    sync: Sync, expected: float
) -> None:
    seconds = iteration_seconds(
        Overlap(sync=sync), sync_s=[[5.0, 1.0, 0.0]], backward_s=[[1.5, 4.0, 3.0]]
    )
    assert seconds - iteration_seconds(Overlap()) == pytest.approx(expected)


def test_a_completely_hidden_exchange_takes_no_time() -> None:
    overlap = Overlap(sync=Sync.BEHIND)
    hidden = iteration_seconds(overlap, sync_s=[[1.0, 1.0, 1.0]], backward_s=[[1.5, 4.0, 3.0]])
    assert hidden == iteration_seconds(Overlap())


def test_stages_update_their_weights_at_once() -> None:
    assert (
        iteration_seconds(Overlap(), update_s=[[0.5, 2.0, 1.0]]) - iteration_seconds(Overlap())
        == 2.0
    )


def test_shorter_and_longer_plans_can_share_one_array() -> None:
    seconds = iteration_s(some_plans(busy_s=[[3.0, 6.0, 4.5], [8.0, 5.0, 0.0]]), 5)
    assert seconds.tolist() == [13.5 + 24, 13 + 32]


def test_plans_refer_to_rows_of_candidates() -> None:
    rows = {"start": [0, 0, 2], "end": [4, 2, 4], "dp": [2, 1, 1], "tp": [2, 2, 1], "ep": [1] * 3}
    candidates = Candidates(
        **{f: np.array(v, dtype=np.int64) for f, v in rows.items()}, sp=np.zeros(3, dtype=bool)
    )
    costs = stage_costs(
        a_graph(),
        Training(global_batch=64),
        A40,
        Shape(nodes=1, gpus_per_node=4),
        candidates,
        RooflineCompute(hardware=A40),
        FlatNetwork(),
    )
    plans = pipelines_of(costs, np.array([[1, 2], [0, -1]]))
    assert plans.busy_s.tolist() == [costs.busy_s[[1, 2]].tolist(), [costs.busy_s[0], 0.0]]
    assert plans.sync_s.tolist() == [[0.0, 0.0], [costs.sync_s[0], 0.0]]


@pytest.mark.parametrize("schedule", [Schedule.GPIPE, Schedule.ONE_F_ONE_B])
def test_even_stages_take_exactly_the_time_of_the_formula(schedule: Schedule) -> None:
    seconds = simulated_s(schedule, [1.0] * 4, [2.0] * 4, 8)
    assert seconds == (4 + 7) * 3.0


def test_1f1b_may_exceed_the_formula_if_passes_are_disproportional() -> None:
    """A micro-batch takes 2 s forward in one stage, 2 s backward in another: 8 s by the formula."""
    forward, backward = [2.0, 0.0, 0.0], [0.0, 2.0, 0.0]
    seconds = simulated_s(Schedule.ONE_F_ONE_B, forward, backward, 3)
    assert seconds == 10.0
    assert seconds <= simulated_s(Schedule.GPIPE, forward, backward, 3)
