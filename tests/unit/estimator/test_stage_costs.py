from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from tessera.estimator.costs import candidates_of, message_counts
from tessera.estimator.graph import Graph
from tessera.estimator.hardware import A40, A100
from tessera.estimator.memory import MemoryCopies, States
from tessera.estimator.pipeline import (
    Overlap,
    Pipelines,
    Sync,
    Transfers,
    iteration_s,
)
from tessera.estimator.plans import (
    Candidates,
    Groups,
    Network,
    Primitive,
    Shape,
    StageCosts,
    Training,
)
from tessera.estimator.rooflines import RooflineCompute
from tessera.formulation.base.errors import TesseraError
from tessera.formulation.base.tables import Floats, Ints
from tessera.formulation.job.execution_plan import Schedule
from tests.support.estimates import (
    FlatNetwork,
    a_graph,
    a_layer,
    one_candidate,
    pipelines_of,
    stage_costs,
)
from tests.support.oracles.pipeline_events import simulated_s

SIXTEEN = Shape(nodes=4, gpus_per_node=4)
TRAINING = Training(global_batch=256, micro_batches=16)


@dataclass
class RecordingNetwork:
    """A network on which every collective is free and recorded."""

    asked: list[tuple[Primitive, Floats, Groups]] = field(default_factory=list)

    def seconds(self, primitive: Primitive, payload_bytes: Floats, groups: Groups) -> Floats:
        self.asked.append((primitive, payload_bytes, groups))
        return np.zeros(len(payload_bytes))

    def of(self, primitive: Primitive) -> list[tuple[float, int, int, int]]:
        """Return (bytes, size, nodes, node_groups) of each collective that moves something."""
        return [
            (float(b), int(s), int(n), int(k))
            for kind, payload, g in self.asked
            for b, s, n, k in zip(payload, g.size, g.nodes, g.node_groups, strict=True)
            if kind is primitive and b > 0 and s > 1
        ]


def stage_costs_of(
    candidates: Candidates,
    graph: Graph | None = None,
    *,
    network: Network | None = None,
    training: Training = TRAINING,
    shape: Shape = SIXTEEN,
    **options: Any,
) -> StageCosts:
    return stage_costs(
        graph or a_graph(),
        training,
        A40,
        shape,
        candidates,
        RooflineCompute(hardware=A40),
        network or FlatNetwork(),
        **options,
    )


def recorded_collectives(
    candidate: Candidates, graph: Graph | None = None, **given: Any
) -> RecordingNetwork:
    recording = RecordingNetwork()
    stage_costs_of(candidate, graph, network=recording, **given)
    return recording


def test_candidates_are_all_segments_on_all_powers_of_two_of_gpus() -> None:
    candidates = candidates_of(a_graph(), Shape(nodes=1, gpus_per_node=4), sequence_parallel=False)
    rows = {
        (int(a), int(b), int(d), int(t))
        for a, b, d, t in zip(
            candidates.start, candidates.end, candidates.dp, candidates.tp, strict=True
        )
    }
    shapes = [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4)]
    segments = [(a, b) for a in range(4) for b in range(a + 1, 5)]
    assert rows == {(*segment, *shape) for segment in segments for shape in shapes}
    assert len(candidates) == len(rows)


def test_a_job_without_a_pipeline_may_have_any_number_of_gpus() -> None:
    candidates = candidates_of(a_graph(), Shape(nodes=3, gpus_per_node=8))
    assert {24, 16, 8} <= set(candidates.gpus.tolist())
    assert set(candidates.tp[candidates.gpus == 24].tolist()) == {1, 2, 4, 8}


def test_candidates_keep_to_the_limits_of_their_layers() -> None:
    graph = a_graph(a_layer(tensor_limit=2.0), a_layer(experts=4.0, expert_weights=1e8))
    candidates = candidates_of(graph, SIXTEEN)
    assert candidates.tp[candidates.start == 0].max() == 2
    assert candidates.tp[candidates.start == 1].max() == 8
    assert candidates.ep[candidates.end == 1].max() == 1
    assert candidates.ep[candidates.end == 2].max() == 4
    assert np.all(candidates.gpus % candidates.ep == 0)
    assert not candidates.sp[candidates.tp == 1].any()
    assert np.isfinite(stage_costs_of(candidates, graph).forward_s).all()


@pytest.mark.parametrize(
    "candidate",
    [
        one_candidate(tp=16),
        one_candidate(dp=32),
        one_candidate(dp=2, ep=2),
    ],
    ids=[
        "tensor degree above the heads",
        "more replicas than samples",
        "expert degree without experts",
    ],
)
def test_impossible_candidates_take_infinite_time(candidate: Candidates) -> None:
    assert np.isinf(stage_costs_of(candidate).forward_s).all()


def test_a_segment_costs_the_sum_of_its_layers() -> None:
    graph = a_graph(a_layer(), a_layer(flops=3e12, boundary=5e6), a_layer(weights=7e8))
    whole = stage_costs_of(one_candidate(0, 3, dp=2, tp=2), graph)
    parts = [stage_costs_of(one_candidate(i, i + 1, dp=2, tp=2), graph) for i in range(3)]
    for name in ("forward_s", "backward_s", "comm_s", "sync_s", "update_s", "state_bytes"):
        assert getattr(whole, name) == pytest.approx(sum(getattr(p, name) for p in parts)), name


def test_rows_do_not_depend_on_other_rows() -> None:
    graph = a_graph(a_layer(experts=8.0, expert_weights=1e9, exchanged=4e6), a_layer(reduced=1e6))
    candidates = candidates_of(graph, SIXTEEN)
    together = stage_costs_of(candidates, graph)
    for k in range(0, len(candidates), 17):
        alone = stage_costs_of(one_row(candidates, k), graph)
        for name in StageCosts.__dataclass_fields__:
            if name != "candidates":
                assert getattr(alone, name)[0] == pytest.approx(getattr(together, name)[k]), name


def one_row(found: Candidates, k: int) -> Candidates:
    return Candidates(**{f: getattr(found, f)[[k]] for f in Candidates.__dataclass_fields__})


def test_replicas_that_cannot_share_a_micro_batch_equally_cannot_run() -> None:
    assert not np.isfinite(stage_costs_of(one_candidate(dp=3)).forward_s).any()
    training = replace(TRAINING, global_batch=16 * 6 * 3)  # each of three replicas gets 6 samples
    assert np.isfinite(stage_costs_of(one_candidate(dp=3), training=training).forward_s).all()


def test_a_tensor_group_reduces_once_per_pass_and_boundary() -> None:
    graph = a_graph(a_layer(reduced=4e6, boundary=2e6))
    for checkpointing, passes in ((False, 2), (True, 3)):
        training = replace(TRAINING, checkpointing=checkpointing)
        costs = stage_costs_of(
            one_candidate(dp=4, tp=2), graph, training=training, network=FlatNetwork(latency_s=1.0)
        )
        payload = 2 * 4e6 * 4  # 4 samples
        assert costs.comm_s == pytest.approx(passes * (2 * 1.0 + 2 * 0.5 * payload / 100e9))


def test_a_divided_sequence_moves_the_same_number_of_bytes() -> None:
    whole, divided = (stage_costs_of(one_candidate(tp=4, sp=sp)) for sp in (False, True))
    assert divided.comm_s == pytest.approx(whole.comm_s)
    recording = recorded_collectives(one_candidate(tp=4, sp=True))
    assert recording.of(Primitive.REDUCE_SCATTER)
    assert recording.of(Primitive.ALL_GATHER)


@pytest.mark.parametrize(
    ("dp", "tp", "tensor", "data"),
    [  # (size, nodes, node_groups) on nodes of four
        (1, 4, (4, 1, 1), None),
        (2, 2, (2, 1, 2), (2, 1, 2)),
        (8, 2, (2, 1, 2), (8, 4, 2)),
        (4, 1, None, (4, 1, 1)),
        (16, 1, None, (16, 4, 1)),
        (2, 8, (8, 2, 1), (2, 2, 4)),
        (4, 4, (4, 1, 1), (4, 4, 4)),
    ],
)
def test_groups_are_laid_out_on_nodes_with_tensor_parts_inside(
    dp: int, tp: int, tensor: tuple[int, ...] | None, data: tuple[int, ...] | None
) -> None:
    graph = a_graph(a_layer(boundary=0.0, reduced=4e6, weights=1e8))
    found = recorded_collectives(one_candidate(dp=dp, tp=tp), graph).of(Primitive.ALL_REDUCE)
    activations = 2 * 4e6 * 16 / dp
    layouts = {bytes_: tuple(where) for bytes_, *where in found}
    assert layouts.get(activations) == tensor
    assert layouts.get(2 * 1e8 / tp) == data


def test_experts_exchange_in_their_groups_and_synchronise_over_their_copies() -> None:
    graph = a_graph(a_layer(reduced=0.0, experts=8.0, expert_weights=8e8, exchanged=6e6))
    recording = recorded_collectives(one_candidate(dp=16, ep=4), graph)
    assert set(recording.of(Primitive.ALL_TO_ALL)) == {(2 * 6e6 / 2, 4, 1, 1)}  # 1 sample, one way
    assert (2 * 8e8 / 4, 4, 4, 4) in recording.of(Primitive.ALL_REDUCE)
    assert (2 * 1e8, 16, 4, 1) in recording.of(Primitive.ALL_REDUCE)  # the other weights


def test_shared_weights_are_exchanged_by_all_only_if_gradients_differ() -> None:
    graph = a_graph(a_layer(reduced=0.0, weights=0.0, shared_weights=1e6))
    whole = recorded_collectives(one_candidate(dp=2, tp=2), graph).of(Primitive.ALL_REDUCE)
    divided = recorded_collectives(one_candidate(dp=2, tp=2, sp=True), graph).of(
        Primitive.ALL_REDUCE
    )
    assert [size for _, size, _, _ in whole] == [2]
    assert [size for _, size, _, _ in divided] == [4]


def test_a_stage_sends_its_boundary_and_the_last_one_sends_nothing() -> None:
    one_node = Shape(nodes=1, gpus_per_node=4)
    bytes_ = 2 * 2e6 * 16  # boundary of a micro-batch of 16 samples in half precision
    inside = stage_costs_of(one_candidate(0, 2), shape=one_node)
    across = stage_costs_of(one_candidate(0, 2))
    assert inside.send_s == pytest.approx(2 * bytes_ / 100e9)
    assert across.send_s == pytest.approx(2 * bytes_ / 10e9)
    assert stage_costs_of(one_candidate(2, 4)).send_s == 0.0


def test_tensor_parts_send_a_part_each_and_gather_unless_the_sequence_is_divided() -> None:
    graph = a_graph(a_layer(reduced=0.0), a_layer(reduced=0.0))
    bytes_ = 2 * 2e6 * 16
    whole, divided = (
        recorded_collectives(one_candidate(0, 1, tp=4, sp=sp), graph) for sp in (False, True)
    )
    assert whole.of(Primitive.SEND) == [(bytes_ / 4, 2, 2, 4)]
    assert whole.of(Primitive.ALL_GATHER) == [(bytes_, 4, 1, 1)]
    assert divided.of(Primitive.SEND) == whole.of(Primitive.SEND)
    assert not divided.of(Primitive.ALL_GATHER)


def test_the_next_stage_receives_what_one_stage_sends() -> None:
    graph = a_graph(a_layer(boundary=1e6), a_layer(boundary=3e6), a_layer())
    first, second, third = (stage_costs_of(one_candidate(i, i + 1), graph) for i in range(3))
    assert first.receive_s == third.send_s == 0.0
    assert first.send_s == second.receive_s > 0.0
    assert second.send_s == third.receive_s == pytest.approx(3 * first.send_s)


def test_zero_divides_states_among_replicas() -> None:
    parameters, width, whole = 1e8, 2, 16.0
    expected = [whole, 4 + 12 / 4, 2 + 14 / 4, 16 / 4]
    for stage, bytes_ in enumerate(expected):
        costs = stage_costs_of(one_candidate(dp=4), states=States(zero=stage))
        assert costs.state_bytes == pytest.approx(parameters * bytes_), stage
    offloaded = stage_costs_of(one_candidate(dp=4), states=States(zero=2, offload=True))
    assert offloaded.state_bytes == pytest.approx(parameters * (width + width / 4))


def test_zero_exchanges_in_two_halves_and_in_stage_3_in_every_micro_batch() -> None:
    def exchanged(stage: int) -> tuple[float, float]:
        costs = stage_costs_of(one_candidate(dp=4), states=States(zero=stage))
        return float(costs.sync_s[0]), float(costs.comm_s[0])

    whole = 2 * 0.75 * 2e8 / 100e9  # a ring's all-reduce of 200 MB among four
    assert exchanged(0) == pytest.approx((whole, 0.0))
    assert exchanged(1) == pytest.approx((whole, 0.0))
    assert exchanged(2) == pytest.approx((whole / 2, whole / 2))
    assert exchanged(3) == pytest.approx((0.0, 3 * whole / 2))


def test_an_update_takes_memory_traffic_on_the_gpu_or_transfers_to_the_host() -> None:
    here = stage_costs_of(one_candidate(dp=4)).update_s[0]
    divided = stage_costs_of(one_candidate(dp=4), states=States(zero=1)).update_s[0]
    offloaded = States(zero=1, offload=True, host_bytes_per_s=1e9, host_update_bytes_per_s=4e9)
    host = stage_costs_of(one_candidate(dp=4), states=offloaded).update_s[0]
    assert here == pytest.approx(2 * 16 * 1e8 / (0.8 * 696e9))
    assert divided == pytest.approx(here / 4)
    two_share_the_host = 2 * 2 * 16 * 0.25e8 / 4e9
    assert host == pytest.approx(4 * 0.25e8 / 1e9 + two_share_the_host)


def test_offloading_uses_the_rates_of_the_hardwares_host() -> None:
    usual = stage_costs_of(one_candidate(dp=4), states=States(zero=1, offload=True)).update_s[0]
    moved_s = 4 * 0.25e8 / (A40.host_bytes_per_s / 2)
    updated_s = 2 * 2 * 16 * 0.25e8 / A40.host_update_bytes_per_s
    assert usual == pytest.approx(moved_s + updated_s)


def test_checkpointing_keeps_only_inputs_and_costs_a_forward_pass() -> None:
    plain = stage_costs_of(one_candidate(1, 3))
    thrifty = stage_costs_of(one_candidate(1, 3), training=replace(TRAINING, checkpointing=True))
    assert plain.flight_bytes == pytest.approx(2 * 16 * (2 * 2e6 + 2 * 3e7))
    assert thrifty.flight_bytes == pytest.approx(2 * 16 * 2 * 2e6)
    assert thrifty.working_bytes - plain.working_bytes == pytest.approx(2 * 16 * 3e7)
    assert thrifty.backward_s - plain.backward_s == pytest.approx(plain.forward_s)


def test_activations_kept_by_all_tensor_parts_are_divided_with_the_sequence() -> None:
    graph = a_graph(*[a_layer(unsplit=1e7)] * 2)
    whole, divided = (
        stage_costs_of(one_candidate(1, 2, tp=4, sp=sp), graph) for sp in (False, True)
    )
    assert whole.flight_bytes == pytest.approx(2 * 16 * (2e6 + 1e7 + 2e7 / 4))
    assert divided.flight_bytes == pytest.approx(2 * 16 * (2e6 + 3e7) / 4)


def test_copies_of_layers_stages_and_gradients_add_to_the_working_memory() -> None:
    thrifty = replace(TRAINING, checkpointing=True)

    def working(**given: float) -> float:
        copies = MemoryCopies(**({"layer": 0.0} | given))
        return float(
            stage_costs_of(one_candidate(0, 3), training=thrifty, copies=copies).working_bytes[0]
        )

    none = working()
    assert none == pytest.approx(2 * 16 * 2e6)  # only the boundaries, nothing to exchange
    assert working(layer=2.0) - none == pytest.approx(2 * 2 * 16 * (2 * 4e7 + 3e7))
    assert working(stage=2.0) - none == pytest.approx(2 * 2 * 16 * 9e7)
    assert working(gradients=0.0) == none
    one, two = (
        stage_costs_of(one_candidate(3, 4, dp=2), copies=MemoryCopies(gradients=g))
        for g in (1.0, 2.0)
    )
    assert two.working_bytes - one.working_bytes == pytest.approx(2 * 1e8)
    with pytest.raises(TesseraError):
        MemoryCopies(layer=-1.0)


def test_buffers_are_as_large_as_the_largest_collective() -> None:
    alone, parted = (stage_costs_of(one_candidate(3, 4, tp=tp)).working_bytes[0] for tp in (1, 2))
    activations, edges, reduced = 8e7, 2e6 + 2e6, 2e6
    assert alone == pytest.approx(2 * 16 * (activations + edges))
    assert parted == pytest.approx(2 * 16 * (activations / 2 + edges + reduced))
    gathered = stage_costs_of(one_candidate(3, 4, dp=16), states=States(zero=3)).working_bytes[0]
    assert gathered == pytest.approx(2 * (activations + edges + 1e8))


def test_reductions_are_split_into_messages_of_the_size_of_a_boundary() -> None:
    graph = a_graph(a_layer(reduced=4e6), a_layer(reduced=0.0), a_layer(reduced=2e6, boundary=0.0))
    assert message_counts(graph).tolist() == [2.0, 1.0, 1.0]


def test_a_faster_gpu_is_faster() -> None:
    def forward_s(hardware: Any) -> Ints | Floats:
        costs = stage_costs(
            a_graph(),
            TRAINING,
            hardware,
            SIXTEEN,
            one_candidate(0, 4),
            RooflineCompute(hardware=hardware),
            FlatNetwork(),
        )
        return costs.forward_s

    assert forward_s(A100) < forward_s(A40)


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
