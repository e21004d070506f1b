"""Laws of the times of collectives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tessera.estimator.collectives import LinkNetwork, LinkRates, TableNetwork, Tables, curves_of
from tessera.estimator.collectives.records import CommRecord
from tessera.estimator.hardware import CATALOGUE, Hardware
from tessera.estimator.plans import Groups, Primitive, Shape
from tests.support.laws import examples

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
