"""The price of a given execution plan: laws of its switches, and agreement with the search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.estimator.cells import Setting, plan_cells
from tessera.estimator.graph import Graph, merge_layers, merged_ends
from tessera.estimator.pipeline import Pipelines, iteration_s
from tessera.estimator.pricing.flights import held_bytes, interleaved_order
from tessera.estimator.pricing.price import PlanPrice, price_plan
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.execution_plan import (
    ExecutionPlan,
    Offload,
    PlanStage,
    Precision,
    Recomputation,
    Schedule,
    ZeroStage,
)
from tests.support.estimates import a_graph, a_layer
from tests.support.stated import a_decoder, a_mixture, a_plan, a_setting


def prices(setting: Setting, plans: Sequence[ExecutionPlan]) -> list[PlanPrice]:
    return [price_plan(setting, plan) for plan in plans]


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_a_plan_of_the_search_has_the_same_price_on_its_own_layers(degree: int) -> None:
    setting = a_setting(graph=merge_layers(a_decoder(), 16))
    found = plan_cells(setting, [degree])[degree]
    stages = tuple(PlanStage(start=s.start, end=s.end, dp=s.dp, tp=s.tp) for s in found.stages)
    plan = ExecutionPlan(stages=stages, micro_batch=8, accumulation=8)
    price = price_plan(setting, plan)
    assert price.iter_time_s == pytest.approx(found.iter_time_s)
    assert price.memory_bytes == pytest.approx(found.memory_bytes)
    assert price.overflow is None


def test_selective_recomputation_saves_what_korthikanti_says() -> None:
    # Without flash attention and dropout, 2 a s^2 elements of scores are kept (eq. 1, less dropout).
    graph = a_decoder(sequence=1024, vocabulary=1000)
    setting = a_setting(8, 8, graph)
    stage = {"dp": 1, "tp": 8}
    plans = [
        a_plan((18,), stage, micro_batch=8, accumulation=1, recomputation=kind)
        for kind in (Recomputation.NONE, Recomputation.SELECTIVE)
    ]
    none, selective = (price.memory_bytes[0] for price in prices(setting, plans))
    of_block = 2 * 8 * (24 * 1024**2) / 8  # bytes of 8 samples on one of 8 GPUs
    recomputed = 1  # the backward pass has the scores of one block at a time
    assert none - selective == pytest.approx((16 - recomputed) * of_block)


def test_fused_attention_leaves_little_for_selective_recomputation() -> None:
    setting = a_setting(graph=a_decoder(flash=True))
    plans = [a_plan(recomputation=k) for k in (Recomputation.NONE, Recomputation.SELECTIVE)]
    none, selective = prices(setting, plans)
    assert selective.memory_bytes[0] == pytest.approx(none.memory_bytes[0], rel=0.01)


def test_offload_moves_states_off_the_gpu_and_takes_time() -> None:
    plans = [a_plan(zero=ZeroStage.PARAMETERS, offload=offload) for offload in Offload]
    none, optimizer, parameters = prices(a_setting(), plans)
    assert none.memory_bytes > optimizer.memory_bytes > parameters.memory_bytes
    assert none.iter_time_s < optimizer.iter_time_s < parameters.iter_time_s


def test_a_context_degree_of_one_changes_nothing_and_a_hidden_ring_is_like_replicas() -> None:
    # Two GPUs on halves of 8 samples do what two replicas of 4 samples do, if the ring is hidden.
    setting = a_setting()
    replicas = price_plan(setting, a_plan(stage={"dp": 4, "tp": 2}))
    halves = price_plan(setting, a_plan(stage={"dp": 2, "tp": 2, "cp": 2}))
    assert halves.iter_time_s == pytest.approx(replicas.iter_time_s)
    assert halves.memory_bytes == pytest.approx(replicas.memory_bytes)


def test_a_ring_that_attention_does_not_hide_takes_time() -> None:
    # On short sequences there is little attention, while keys and values still travel.
    setting = a_setting(16, 64, a_decoder(sequence=256, flash=True), gpu="l20")
    replicas = price_plan(setting, a_plan((18,), {"dp": 16}, micro_batch=64, accumulation=1))
    rings = price_plan(setting, a_plan((18,), {"cp": 16}, micro_batch=64, accumulation=1))
    assert rings.iter_time_s > 1.01 * replicas.iter_time_s


def test_products_in_fp8_are_faster_but_not_twice_as_fast() -> None:
    setting = a_setting()
    plans = [a_plan(precision=p) for p in (Precision.BF16, Precision.FP8)]
    half, eighth = (price.iter_time_s for price in prices(setting, plans))
    assert half / 2 < eighth < half


def test_experts_are_divided_by_their_degree() -> None:
    setting = a_setting(graph=a_mixture())
    whole, divided = prices(setting, [a_plan(stage={"dp": 4, "tp": 2, "ep": ep}) for ep in (1, 8)])
    assert divided.memory_bytes[0] < whole.memory_bytes[0] / 2


def test_a_stage_without_experts_allows_any_expert_degree() -> None:
    graph = a_mixture(layers=4, every=4, first=3)
    plan = a_plan((3, 6), {"dp": 4, "tp": 2, "ep": 8})
    assert np.isfinite(price_plan(a_setting(graph=graph), plan).iter_time_s)


@given(chunks=st.sampled_from([1, 2, 4, 8]), seed=st.integers(0, 999))
def test_more_chunks_never_make_a_longer_bubble(chunks: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    busy_s, none = rng.uniform(0.1, 1.0, (1, 4)), np.zeros((1, 4))
    pipelines = Pipelines(
        busy_s=busy_s, send_s=none, receive_s=none, backward_s=none, sync_s=none, update_s=none
    )
    fewer, more = (iteration_s(pipelines, 8, chunks=n)[0] for n in (chunks, 2 * chunks))
    assert 8 * busy_s.max() <= more <= fewer


@pytest.mark.parametrize(
    ("stages", "chunks", "count"), [(2, 2, 4), (4, 2, 8), (4, 3, 8), (3, 4, 9)]
)
def test_the_time_of_equal_chunks_is_that_of_megatrons_order_of_passes(
    stages: int, chunks: int, count: int
) -> None:
    none = np.zeros((1, stages))
    equal = Pipelines(
        busy_s=np.full((1, stages), 3.0 * chunks),
        send_s=none,
        receive_s=none,
        backward_s=none,
        sync_s=none,
        update_s=none,
    )
    formula_s = float(iteration_s(equal, count, chunks=chunks)[0])
    assert formula_s == pytest.approx(run_interleaved_s(stages, chunks, count))


def run_interleaved_s(stages: int, chunks: int, count: int) -> float:
    """Run Megatron-LM's order of passes: 1 s forward and 2 s backward for each chunk."""
    orders = [_passes(stage, stages, chunks, count) for stage in range(stages)]
    ended: dict[tuple[int, bool, int], float] = {}
    free, turn = [0.0] * stages, [0] * stages
    while any(turn[s] < len(orders[s]) for s in range(stages)):
        for s in range(stages):
            while turn[s] < len(orders[s]):
                back, part, batch = orders[s][turn[s]]
                place = part * stages + s
                before = (place, False, batch) if back else (place - 1, False, batch)
                needs = [before] if place or back else []
                if back and place + 1 < stages * chunks:
                    needs.append((place + 1, True, batch))
                if any(need not in ended for need in needs):
                    break
                ready = max((ended[need] for need in needs), default=0.0)
                free[s] = max(free[s], ready) + (2.0 if back else 1.0)
                ended[place, back, batch] = free[s]
                turn[s] += 1
    return max(free)


def _passes(stage: int, stages: int, chunks: int, count: int) -> list[tuple[bool, int, int]]:
    """Return the passes of a stage in order: whether backward, chunk, micro-batch."""
    forward, backward, ahead = interleaved_order(stage, stages, chunks, count)
    batches = [k // (stages * chunks) * stages + k % stages for k in range(len(forward))]
    ahead -= 1 if ahead < len(forward) else 0  # a forward pass comes first in each pair
    order = [(False, int(forward[k]), batches[k]) for k in range(ahead)]
    for k in range(len(forward)):
        if ahead + k < len(forward):
            order.append((False, int(forward[ahead + k]), batches[ahead + k]))
        order.append((True, int(backward[k]), batches[k]))
    return order


@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (4, 2), (8, 3)])
def test_the_first_stage_holds_what_korthikanti_says(stages: int, chunks: int) -> None:
    # Activations of L (1 + (p - 1) / (p m)) layers, i.e. of p m + p - 1 chunks (section 4.2.3).
    held = held_bytes(Schedule.INTERLEAVED, np.ones((chunks, stages)), 8 * stages)
    assert held[0] == stages * chunks + stages - 1
    assert (np.diff(held) < 0).all()


def test_interleaving_is_faster_and_keeps_more_activations() -> None:
    setting = a_setting(32, 64)
    few = price_plan(setting, a_plan((5, 9, 13, 18)))
    chunked = a_plan((3, 5, 7, 9, 11, 13, 15, 18), schedule=Schedule.INTERLEAVED, chunks=2)
    many = price_plan(setting, chunked)
    assert many.iter_time_s < few.iter_time_s
    assert many.memory_bytes[0] > few.memory_bytes[0]
    assert len(many.memory_bytes) == 4


def test_unequal_stages_are_priced_one_by_one() -> None:
    stages = (
        PlanStage(start=0, end=6, dp=8),
        PlanStage(start=6, end=18, dp=2, tp=4, sp=True),
    )
    plan = ExecutionPlan(stages=stages, micro_batch=8, accumulation=8)
    price = price_plan(a_setting(), plan)
    assert len(set(price.memory_bytes)) == 2
    slower = replace(plan, stages=(replace(stages[0], end=2), replace(stages[1], start=2)))
    assert price_plan(a_setting(), slower).iter_time_s > price.iter_time_s


def test_a_plan_that_does_not_fit_says_by_how_much_and_where() -> None:
    price = price_plan(a_setting(batch=1024, gpu="a100-80"), a_plan(micro_batch=128))
    assert price.overflow is not None
    assert price.overflow.stage == 0
    assert price.overflow.needed_bytes == pytest.approx(price.memory_bytes[0])
    assert "activations in flight alone need" in str(price.overflow)


@pytest.mark.parametrize(
    ("plan", "field", "said"),
    [
        (a_plan((9, 17)), "stages", "end at layer 17, but the model has 18 layers"),
        (a_plan(stage={"dp": 8}, accumulation=4), "micro_batch", "the global batch is 64"),
        (a_plan(stage={"dp": 2}), "stages", "have 4 GPUs, but there are 16"),
        (a_plan(shape=(12, 4)), "shape", "12[+]4 GPUs, but the GPUs are on nodes of 8[+]8"),
        (a_plan(stage={"tp": 8, "ep": 8}), "stages\\[0\\].ep", "the model has no experts"),
        (a_plan(stage={"cp": 8, "dp": 1}), None, ""),
    ],
)
def test_a_plan_that_does_not_suit_the_setting_is_refused(
    plan: ExecutionPlan, field: str | None, said: str
) -> None:
    if field is None:
        price_plan(a_setting(), plan)
        return
    with pytest.raises(InvalidInput, match=f"{field}: .*{said}"):
        price_plan(a_setting(), plan)


def test_a_tensor_degree_must_divide_the_heads_but_need_not_be_a_power_of_two() -> None:
    six = {"dp": 1, "tp": 6}
    assert price_plan(a_setting(12), a_plan(stage=six)).iter_time_s > 0
    with pytest.raises(InvalidInput, match="tp: is 16, but must divide the 24 attention heads"):
        price_plan(a_setting(32), a_plan(stage={"dp": 1, "tp": 16}))


@pytest.mark.parametrize(
    "changes",
    [
        {"recomputation": Recomputation.SELECTIVE},
        {"precision": Precision.FP8},
        {"stage": {"cp": 8}},
    ],
)
def test_switches_that_need_attention_are_refused_where_it_is_not_known(
    changes: dict[str, object],
) -> None:
    setting = a_setting(graph=a_graph(*[a_layer(kind="b")] * 18))
    with pytest.raises(InvalidInput, match="does not say which operators are attention"):
        price_plan(setting, a_plan(**changes))  # type: ignore[arg-type]


def test_fp8_is_refused_on_a_gpu_without_it() -> None:
    with pytest.raises(InvalidInput, match="a100-80, which has no products in fp8"):
        price_plan(a_setting(gpu="a100-80"), a_plan(precision=Precision.FP8))


def test_coarse_layers_end_where_the_model_has_been_cut() -> None:
    graph: Graph = a_decoder()
    ends = merged_ends(graph, 16)
    coarse = merge_layers(graph, 16)
    assert ends[-1] == len(graph)
    assert coarse.flops == pytest.approx(np.add.reduceat(graph.flops, [0, *ends[:-1]]))
