"""Laws of estimates, of times of collectives, and of pipelines, for any model and GPUs."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.estimator.architectures.transformer import Transformer, transformer_graph
from tessera.estimator.cells import Runtime, Setting, plan_cells
from tessera.estimator.collectives import LinkNetwork, LinkRates, TableNetwork, Tables, curves_of
from tessera.estimator.collectives.records import CommRecord
from tessera.estimator.costs import candidates_of
from tessera.estimator.graph import Graph
from tessera.estimator.hardware import A10, A100, CATALOGUE, GIB, H100, V100, Hardware
from tessera.estimator.layouts import settings_of
from tessera.estimator.memory import States, limit_bytes
from tessera.estimator.pipeline import Overlap, Pipelines, Transfers, iteration_s
from tessera.estimator.plans import (
    Candidates,
    Groups,
    PricedPlan,
    Primitive,
    Shape,
    StageCosts,
    Training,
)
from tessera.estimator.rooflines import RooflineCompute
from tessera.formulation.job.execution_plan import Schedule
from tests.support.estimates import a_graph, a_layer, one_candidate
from tests.support.laws import examples
from tests.support.oracles.pipeline_events import simulated_s

DEGREES = (1, 2, 3, 4)

SHAPES = ((1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (2, 3), (6, 1), (3, 2), (1, 7), (2, 4), (3, 4))

FASTER = ("fp16_flops", "memory_bytes_per_s", "link_bytes_per_s", "network_bytes_per_s")


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Draw a few layers of different sizes, some with experts."""
    scale = st.sampled_from([0.25, 1.0, 3.0])
    layers = []
    for _ in range(draw(st.integers(1, 4))):
        work, size = draw(scale), draw(scale)
        moe = draw(st.booleans())
        layers.append(
            a_layer(
                flops=1e12 * work,
                weights=1e8 * size,
                shared_weights=1e5,
                kept=3e7 * work,
                unsplit=1e7 * work,
                boundary=2e6,
                tensor_limit=draw(st.sampled_from([1.0, 2.0, 8.0])),
                experts=8.0 if moe else 1.0,
                expert_weights=4e8 * size if moe else 0.0,
                exchanged=4e6 if moe else 0.0,
            )
        )
    return a_graph(*layers)


@st.composite
def jobs(draw: st.DrawFn) -> Setting:
    """Draw a job on some GPUs; some node sizes are not powers of two."""
    hardware = draw(st.sampled_from([A100, A10, V100, H100]))
    nodes, per_node = draw(st.sampled_from(SHAPES))
    batch = draw(st.sampled_from([1, 8, 48, 256]))
    training = Training(
        global_batch=batch,
        micro_batches=min(batch, draw(st.sampled_from([1, 2, 8]))),
        checkpointing=draw(st.booleans()),
        schedule=draw(st.sampled_from([Schedule.GPIPE, Schedule.ONE_F_ONE_B])),
    )
    shape = Shape(nodes=nodes, gpus_per_node=per_node)
    states = States(zero=draw(st.integers(0, 3)), offload=draw(st.booleans()))
    return a_setting_on(hardware, draw(graphs()), training, shape, Runtime(states=states))


def a_setting_on(
    hardware: Hardware, graph: Graph, training: Training, shape: Shape, runtime: Runtime
) -> Setting:
    return Setting(
        graph=graph,
        training=training,
        hardware=hardware,
        shape=shape,
        runtime=runtime,
        compute=RooflineCompute(hardware=hardware),
        network=LinkNetwork(hardware=hardware, shape=shape),
    )


def on_hardware(job: Setting, hardware: Hardware) -> Setting:
    """Return the same job on other GPUs."""
    return a_setting_on(hardware, job.graph, job.training, job.shape, job.runtime)


def every_stage(job: Setting) -> tuple[Candidates, StageCosts]:
    candidates = candidates_of(job.graph, job.shape)
    return candidates, job.costs(candidates)


def check_never_slower(better: dict[int, PricedPlan], than: dict[int, PricedPlan]) -> None:
    assert set(than) <= set(better)
    for degree, plan in than.items():
        assert better[degree].iter_time_s <= plan.iter_time_s * (1 + 1e-9)


@given(jobs(), st.sampled_from(FASTER), st.floats(1.0, 8.0))
@examples(60)
def test_faster_gpus_links_and_ports_never_make_a_job_slower(
    job: Setting, rate: str, times: float
) -> None:
    faster = replace(job.hardware, **{rate: times * getattr(job.hardware, rate)})
    check_never_slower(plan_cells(on_hardware(job, faster), DEGREES), plan_cells(job, DEGREES))


@given(jobs(), st.floats(1.0, 4.0))
@examples(60)
def test_more_memory_loses_no_degree_and_no_time(job: Setting, times: float) -> None:
    tight = replace(job.hardware, memory_bytes=8 * GIB)
    roomy = replace(job.hardware, memory_bytes=round(times * tight.memory_bytes))
    check_never_slower(
        plan_cells(on_hardware(job, roomy), DEGREES), plan_cells(on_hardware(job, tight), DEGREES)
    )


@given(jobs())
@examples(60)
def test_a_plan_covers_the_layers_uses_all_gpus_and_fits_in_memory(job: Setting) -> None:
    for degree, plan in plan_cells(job, DEGREES).items():
        assert len(plan.stages) == degree
        assert plan.gpus == job.shape.gpus
        ends = [stage.end for stage in plan.stages]
        assert [stage.start for stage in plan.stages] == [0, *ends[:-1]]
        assert ends[-1] == len(job.graph)
        assert max(plan.memory_bytes) <= limit_bytes(job.hardware.memory_bytes)
        assert 0 < plan.iter_time_s < np.inf


@given(jobs(), st.integers(2, 6))
@examples(60)
def test_n_times_the_micro_batches_take_at_most_n_times_as_long(job: Setting, times: int) -> None:
    few = job.training
    many = replace(
        few, global_batch=times * few.global_batch, micro_batches=times * few.micro_batches
    )
    plenty = replace(job.hardware, memory_bytes=10**15)
    job = on_hardware(job, plenty)
    if many.micro_batch != few.micro_batch:
        return
    short, long = plan_cells(job, DEGREES), plan_cells(replace(job, training=many), DEGREES)
    assert set(short) == set(long)
    for degree, plan in short.items():
        assert plan.iter_time_s < long[degree].iter_time_s <= times * plan.iter_time_s * (1 + 1e-9)


@given(jobs())
@examples(60)
def test_costs_are_nonnegative_and_infinite_only_for_impossible_stages(job: Setting) -> None:
    candidates, costs = every_stage(job)
    amounts = [
        costs.backward_s,
        costs.comm_s,
        costs.send_s,
        costs.receive_s,
        costs.sync_s,
        costs.update_s,
        costs.state_bytes,
        costs.flight_bytes,
        costs.working_bytes,
    ]
    assert all(np.isfinite(a).all() and (a >= 0).all() for a in amounts)
    assert not np.isnan(costs.forward_s).any()
    shared = job.training.micro_batch % candidates.dp == 0
    assert np.array_equal(np.isfinite(costs.forward_s), shared)
    alone = candidates.gpus == 1
    assert not costs.comm_s[alone].any()
    assert not costs.sync_s[alone].any()
    if job.runtime.states.zero < 2:
        assert (costs.sync_s[candidates.dp > 1] > 0).all()
    assert (costs.comm_s[candidates.tp > 1] > 0).all()


@given(jobs())
@examples(60)
def test_a_stage_with_more_tensor_parallelism_holds_no_more_memory(job: Setting) -> None:
    _, costs = every_stage(job)
    c = costs.candidates
    held = costs.state_bytes + costs.flight_bytes
    rows = zip(c.start, c.end, c.dp, c.tp, c.ep, c.sp, strict=True)
    keys = {tuple(int(v) for v in row): k for k, row in enumerate(rows)}
    for (start, end, dp, tp, ep, sp), k in keys.items():
        if (other := keys.get((start, end, dp, 2 * tp, ep, sp))) is not None:
            assert held[other] <= held[k] * (1 + 1e-9)


@given(jobs())
@examples(30)
def test_each_stage_of_zero_leaves_at_most_the_states_of_the_one_before_on_a_gpu(
    job: Setting,
) -> None:
    held = [priced.state_bytes for priced in costs_by_zero_stage(job)]
    for less, more in zip(held[1:], held[:-1], strict=True):
        assert (less <= more * (1 + 1e-9)).all()


@given(jobs())
@examples(30)
def test_zero_changes_nothing_without_replicas(job: Setting) -> None:
    first, *others = costs_by_zero_stage(job)
    c = first.candidates
    whole = (c.dp == 1) & (c.ep == c.gpus) & ~c.sp
    for other in others:
        for name in ("comm_s", "sync_s", "update_s", "state_bytes", "working_bytes"):
            assert np.array_equal(getattr(other, name)[whole], getattr(first, name)[whole])


def costs_by_zero_stage(job: Setting) -> list[StageCosts]:
    """Return the costs of every pipeline stage for each stage of ZeRO."""
    runtimes = [replace(job.runtime, states=States(zero=zero)) for zero in range(4)]
    return [every_stage(replace(job, runtime=runtime))[1] for runtime in runtimes]


@given(
    st.integers(1, 16), st.integers(1, 6), st.integers(0, 4), st.integers(0, 4), st.integers(0, 4)
)
@examples(200)
def test_a_group_spans_as_many_nodes_as_its_worst_placed_gpus(
    per_node: int, nodes: int, log_gpus: int, log_tp: int, log_ep: int
) -> None:
    shape = Shape(nodes=nodes, gpus_per_node=per_node)
    gpus = 2**log_gpus if 2**log_gpus <= shape.gpus else shape.gpus
    tp, ep = math.gcd(gpus, 2**log_tp), math.gcd(gpus, 2**log_ep)
    setting, _ = settings_of(one_candidate(dp=gpus // tp, tp=tp, ep=ep), 256, shape)
    strides = [
        (setting.tensor, 1),
        (setting.data, tp),
        (setting.expert, 1),
        (setting.expert_data, ep),
    ]
    for groups, stride in strides:
        size = int(groups.size[0])
        members = [
            [first + offset + stride * i for i in range(size)]
            for first in range(0, gpus, size * stride)
            for offset in range(stride)
        ]
        most = max(len({gpu // per_node for gpu in group}) for group in members)
        missed = most - groups.nodes[0]  # a group of several nodes may be on one more
        assert missed in ((0,) if size * stride <= per_node else (0, 1))


@given(jobs(), st.integers(1, 100), st.integers(1, 100))
@examples(60)
def test_micro_batches_are_equal_and_as_many_as_possible(
    job: Setting, batch: int, micro_batches: int
) -> None:
    asked = replace(job.training, global_batch=batch, micro_batches=micro_batches)
    run = asked.within(micro_batches)
    assert run.micro_batches * run.micro_batch == batch
    assert run.micro_batches <= micro_batches
    assert not [n for n in range(run.micro_batches + 1, micro_batches + 1) if batch % n == 0]
    counts = {p.micro_batches for p in plan_cells(replace(job, training=asked), DEGREES).values()}
    assert counts <= {run.micro_batches}


@given(st.sampled_from([3.0, 6.0, 12.0, 48.0]))
def test_gpus_have_equally_many_experts_and_heads(experts: float) -> None:
    graph = a_graph(a_layer(experts=experts, expert_weights=1e8, exchanged=1e6))
    candidates = candidates_of(graph, Shape(nodes=4, gpus_per_node=16))
    assert not (experts % candidates.ep).any()
    assert candidates.ep.max() == math.gcd(int(experts), 64)
    decoder = Transformer(
        name="m", layers=2, hidden=64 * int(experts), heads=int(experts), sequence=16, vocabulary=64
    )
    assert transformer_graph(decoder).tensor_limit[1] == math.gcd(int(experts), 64)


kinds = st.sampled_from(CATALOGUE)

primitives = st.sampled_from(list(Primitive))

payloads = st.floats(1, 1e10)


@st.composite
def places(draw: st.DrawFn) -> tuple[Shape, Groups]:
    """Draw nodes and one group on them."""
    shape = Shape(nodes=draw(st.integers(1, 16)), gpus_per_node=draw(st.integers(1, 16)))
    nodes = draw(st.integers(1, shape.nodes))
    inside = draw(st.integers(1, shape.gpus_per_node))
    beside = draw(st.integers(1, max(1, shape.gpus_per_node // inside)))
    size = nodes * inside
    columns = (np.array([x], dtype=np.int64) for x in (size, nodes, beside))
    return shape, Groups(**dict(zip(("size", "nodes", "node_groups"), columns, strict=True)))


def collective_s(
    network: LinkNetwork | TableNetwork, p: Primitive, payload: float, g: Groups
) -> float:
    """Return the seconds of one collective."""
    return float(network.seconds(p, np.array([payload]), g)[0])


@given(kinds, places(), primitives, payloads, st.floats(1, 100))
@examples(60)
def test_more_bytes_or_more_concurrent_groups_never_take_less_time(
    kind: Hardware, place: tuple[Shape, Groups], primitive: Primitive, payload: float, more: float
) -> None:
    shape, group = place
    network = LinkNetwork(hardware=kind, shape=shape)
    base = collective_s(network, primitive, payload, group)
    assert collective_s(network, primitive, payload * more, group) >= base
    assert (
        collective_s(network, primitive, payload, replace(group, node_groups=group.node_groups + 1))
        >= base
    )


@given(kinds, places(), payloads)
@examples(60)
def test_an_all_reduce_is_never_longer_than_a_reduce_scatter_and_an_all_gather(
    kind: Hardware, place: tuple[Shape, Groups], payload: float
) -> None:
    shape, group = place
    network = LinkNetwork(hardware=kind, shape=shape)
    scatter = collective_s(network, Primitive.REDUCE_SCATTER, payload, group)
    gather = collective_s(network, Primitive.ALL_GATHER, payload, group)
    reduce = collective_s(network, Primitive.ALL_REDUCE, payload, group)
    assert reduce <= (scatter + gather) * (1 + 1e-9)


@given(places(), primitives, st.lists(payloads, min_size=2, max_size=8))
@examples(60)
def test_a_batch_of_rows_gives_the_same_times_as_single_rows(
    place: tuple[Shape, Groups], primitive: Primitive, amounts: list[float]
) -> None:
    shape, group = place
    rows = [
        CommRecord(
            primitive="all-reduce",
            gpu_type="a100",
            network="default",
            num_nodes=1,
            gpus_per_node=2,
            group_size=2,
            group_nodes=1,
            group_gpus_per_node=2,
            num_groups=1,
            bytes=size,
            time_s=1e-5 + size / 1e10,
        )
        for size in (1024, 2**20, 2**26)
    ]
    kind = next(k for k in CATALOGUE if k.name == "a100")
    tables = Tables.of(curves_of(rows))
    for network in (
        LinkNetwork(hardware=kind, shape=shape, rates=LinkRates.of(kind)),
        TableNetwork(tables=tables, hardware=kind, shape=shape),
    ):
        columns = (np.repeat(x, len(amounts)) for x in (group.size, group.nodes, group.node_groups))
        many = Groups(**dict(zip(("size", "nodes", "node_groups"), columns, strict=True)))
        together = network.seconds(primitive, np.array(amounts), many)
        assert (np.isfinite(together) & ((together > 0) | (group.size[0] == 1))).all()
        np.testing.assert_allclose(
            together, [collective_s(network, primitive, x, group) for x in amounts]
        )


Passes = list[tuple[float, float]]

seconds = st.floats(0.01, 10.0)

passes = st.lists(st.tuples(seconds, seconds), min_size=1, max_size=5)

batches = st.integers(1, 8)


def formula_s(busy: list[float], micro_batches: int, send: list[float] | None = None) -> float:
    row = np.array([busy])
    wires = np.zeros_like(row) if send is None else np.array([send])
    nothing = np.zeros_like(row)
    plans = Pipelines(
        busy_s=row,
        send_s=wires,
        receive_s=nothing,
        backward_s=nothing,
        sync_s=nothing,
        update_s=nothing,
    )
    return float(iteration_s(plans, micro_batches, Overlap(transfers=Transfers.ADDED))[0])


@given(st.lists(seconds, min_size=1, max_size=5), seconds, batches)
@examples(100)
def test_proportional_passes_make_gpipe_exact_and_1f1b_no_longer(
    forward: list[float], ratio: float, micro_batches: int
) -> None:
    backward = [ratio * f for f in forward]
    busy = [f + b for f, b in zip(forward, backward, strict=True)]
    expected = formula_s(busy, micro_batches)
    gpipe = simulated_s(Schedule.GPIPE, forward, backward, micro_batches)
    one_by_one = simulated_s(Schedule.ONE_F_ONE_B, forward, backward, micro_batches)
    assert gpipe == pytest.approx(expected)
    assert one_by_one <= expected * (1 + 1e-9)


@given(passes, batches)
@examples(100)
def test_the_formula_lies_between_the_lower_bound_and_the_time_of_two_phases(
    stages: Passes, micro_batches: int
) -> None:
    forward, backward = [f for f, _ in stages], [b for _, b in stages]
    busy = [f + b for f, b in stages]
    least = max(sum(busy[:i]) + micro_batches * own for i, own in enumerate(busy))
    phases = formula_s(forward, micro_batches) + formula_s(backward, micro_batches)
    gpipe = simulated_s(Schedule.GPIPE, forward, backward, micro_batches)
    one_by_one = simulated_s(Schedule.ONE_F_ONE_B, forward, backward, micro_batches)
    assert gpipe == pytest.approx(phases)
    assert least * (1 - 1e-9) <= one_by_one <= gpipe * (1 + 1e-9)
    assert least * (1 - 1e-9) <= formula_s(busy, micro_batches) <= phases * (1 + 1e-9)


@given(passes, batches, st.lists(seconds, min_size=5, max_size=5))
@examples(100)
def test_transfers_without_waiting_cost_gpipe_their_sum(
    stages: Passes, micro_batches: int, wires: list[float]
) -> None:
    forward, backward = [f for f, _ in stages], [b for _, b in stages]
    between = wires[: len(stages) - 1]
    plain = simulated_s(Schedule.GPIPE, forward, backward, micro_batches)
    found = simulated_s(Schedule.GPIPE, forward, backward, micro_batches, [*between, 0.0])
    assert found == pytest.approx(plain + 2 * sum(between))
