"""Times of collectives, computed from links and from measured tables."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tessera.estimator.collectives import (
    CommRecord,
    Curve,
    Layout,
    LinkNetwork,
    LinkRates,
    TableNetwork,
    Tables,
    curves_of,
    fit_links,
    read_curves,
    write_records,
)
from tessera.estimator.collectives.fitting import fit_kinds, groups_of
from tessera.estimator.collectives.kriging import (
    SimilarityWeights,
    fit_kriging,
    layout_covariance,
    layout_differences,
    tune_weights,
)
from tessera.estimator.collectives.links import link_seconds
from tessera.estimator.hardware import A10, A40, A100, H100, V100
from tessera.estimator.plans import Groups, Primitive, Shape
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats
from tessera.simulator.data import data_dir

RATES = LinkRates(
    launch_s=1e-5, step_s=2e-6, hop_s=1e-5, link_bytes_per_s=1e10, network_bytes_per_s=2e9
)
TWO_BY_TWO = Shape(nodes=2, gpus_per_node=2)
SIZES = (1024, 65536, 2**22, 2**26)


def groups_of_layouts(*layouts: tuple[int, int, int]) -> Groups:
    """Return one group for each (size, nodes, node_groups)."""
    columns = np.array(layouts, dtype=np.int64).T
    return Groups(size=columns[0], nodes=columns[1], node_groups=columns[2])


def payloads_of(*values: float) -> Floats:
    """Return payloads."""
    return np.array(values, dtype=np.float64)


def a_record(**fields: object) -> CommRecord:
    """Return the record of a pair of GPUs in an a10 node."""
    base = CommRecord(
        primitive="all-reduce",
        gpu_type="a10",
        network="default",
        num_nodes=1,
        gpus_per_node=2,
        group_size=2,
        group_nodes=1,
        group_gpus_per_node=2,
        num_groups=1,
        bytes=1024,
        time_s=1e-4,
    )
    return replace(base, **fields)  # type: ignore[arg-type]


def a_curve(
    primitive: Primitive = Primitive.ALL_REDUCE,
    *,
    size: int = 2,
    nodes: int = 1,
    node_groups: int = 1,
    machine: Shape = TWO_BY_TWO,
    gpu_type: str = "a10",
    rates: LinkRates = RATES,
    times: float = 1.0,
    sizes: tuple[int, ...] = SIZES,
) -> Curve:
    """Return a table whose times are exactly ``times`` those of links with these rates."""
    layout = Layout(
        primitive=primitive,
        gpu_type=gpu_type,
        network="default",
        machine=machine,
        size=size,
        nodes=nodes,
        node_groups=node_groups,
    )
    payload = payloads_of(*sizes)
    seconds = times * link_seconds(rates, primitive, payload, groups_of([layout] * len(payload)))
    return Curve(layout=layout, payload_bytes=payload, seconds=seconds)


def some_curves(times: float = 1.0) -> list[Curve]:
    """Return tables of all primitives, within one node and across two."""
    found = []
    for primitive in Primitive:
        found += [
            a_curve(primitive, times=times),
            a_curve(primitive, nodes=2, node_groups=2, times=times),
        ]
        if primitive is not Primitive.SEND:
            found.append(a_curve(primitive, size=4, nodes=2, times=times))
    return found


def a_network(curves: list[Curve] | None = None, **fields: object) -> TableNetwork:
    """Return a network of two a10 nodes."""
    tables = Tables.of(curves or some_curves())
    base = TableNetwork(tables=tables, hardware=A10, shape=TWO_BY_TWO)
    return replace(base, _known={}, **fields)  # type: ignore[arg-type]


def test_a_ring_all_reduce_in_a_node_matches_the_textbook() -> None:
    network = LinkNetwork(hardware=A10, shape=Shape(nodes=1, gpus_per_node=4), rates=RATES)
    seconds = network.seconds(Primitive.ALL_REDUCE, payloads_of(1e8), groups_of_layouts((4, 1, 1)))
    assert seconds[0] == pytest.approx(1e-5 + 6 * 2e-6 + 1.5 * 1e8 / 1e10)


def test_concurrent_groups_across_nodes_share_the_port() -> None:
    network = LinkNetwork(hardware=A10, shape=TWO_BY_TWO, rates=RATES)
    alone, shared = network.seconds(
        Primitive.ALL_GATHER, payloads_of(1e9, 1e9), groups_of_layouts((2, 2, 1), (2, 2, 2))
    )
    assert alone == pytest.approx(1e-5 + 1e-5 + 0.5 * 1e9 / 2e9)
    assert shared == pytest.approx(1e-5 + 1e-5 + 1e9 / 2e9)


def test_small_all_reduces_over_many_nodes_take_the_tree() -> None:
    shape = Shape(nodes=64, gpus_per_node=1)
    network = LinkNetwork(hardware=A10, shape=shape, rates=RATES)
    seconds = network.seconds(Primitive.ALL_REDUCE, payloads_of(8), groups_of_layouts((64, 64, 1)))
    assert seconds[0] == pytest.approx(1e-5 + 2 * 6 * 1e-5, rel=1e-3)


def test_all_to_all_sends_through_the_port_only_what_leaves_the_node() -> None:
    network = LinkNetwork(hardware=A10, shape=TWO_BY_TWO, rates=RATES)
    seconds = network.seconds(Primitive.ALL_TO_ALL, payloads_of(4e8), groups_of_layouts((4, 2, 1)))
    assert seconds[0] == pytest.approx(1e-5 + 2e-6 + 2 * 1e-5 + 1e8 / 1e10 + 4e8 / 2e9)


@pytest.mark.parametrize("primitive", list(Primitive))
def test_groups_of_one_and_empty_payloads_take_no_time(primitive: Primitive) -> None:
    for network in (LinkNetwork(hardware=A10, shape=TWO_BY_TWO), a_network()):
        seconds = network.seconds(
            primitive, payloads_of(1e6, 0, 1e6), groups_of_layouts((1, 1, 1), (2, 1, 1), (2, 1, 1))
        )
        assert seconds[:2].tolist() == [0, 0]
        assert seconds[2] > 0


@pytest.mark.parametrize(
    ("payload", "layout", "complaint"),
    [
        (math.nan, (2, 1, 1), "payload_bytes: must be finite"),
        (-1.0, (2, 1, 1), "payload_bytes: must be finite"),
        (1.0, (2, 3, 1), "do not fit on 2 nodes of 2 GPUs"),
        (1.0, (8, 2, 1), "groups of 8 GPUs on 2 nodes"),
        (1.0, (2, 1, 0), "0 groups of 2 GPUs"),
    ],
)
def test_invalid_payloads_and_impossible_layouts_are_refused(
    payload: float, layout: tuple[int, int, int], complaint: str
) -> None:
    for network in (LinkNetwork(hardware=A10, shape=TWO_BY_TWO), a_network()):
        with pytest.raises(InvalidInput, match=complaint):
            network.seconds(Primitive.ALL_GATHER, payloads_of(payload), groups_of_layouts(layout))


def test_practical_rates_are_below_data_sheets_and_dedicated_ports_are_better_used() -> None:
    for kind in (A10, H100):
        assert (LinkRates.usual(kind).costs > LinkRates.of(kind).costs).all()
    rails = replace(H100, network_bytes_per_s=400e9)
    shares = [
        LinkRates.usual(kind).network_bytes_per_s / kind.network_bytes_per_s
        for kind in (H100, rails)
    ]
    assert shares == pytest.approx([0.25, 0.8])


def test_fitting_recovers_the_rates_behind_the_tables() -> None:
    sizes = tuple(2**k for k in range(2, 31))
    curves = [
        a_curve(p, size=s, nodes=n, machine=Shape(nodes=n, gpus_per_node=8), sizes=sizes)
        for p in (Primitive.ALL_REDUCE, Primitive.ALL_TO_ALL)
        for s, n in ((2, 1), (8, 1), (2, 2), (16, 2), (32, 4))
    ]
    fits = fit_links(curves, LinkRates.of(A10))
    assert fits.costs == pytest.approx(RATES.costs, rel=0.1)
    blind = fit_links([a_curve()], LinkRates.of(A10))
    assert blind.network_bytes_per_s == pytest.approx(A10.network_bytes_per_s)


def test_a_type_without_measured_ports_uses_the_ports_of_others() -> None:
    slow = replace(RATES, network_bytes_per_s=A10.network_bytes_per_s / 5)
    curves = [
        a_curve(rates=slow),
        a_curve(nodes=2, rates=slow, node_groups=2),
        a_curve(gpu_type="v100", machine=Shape(nodes=1, gpus_per_node=2)),
    ]
    fits = fit_kinds(curves)
    found = {k.gpu_type: r.network_bytes_per_s for k, r in fits.rates.items()}
    assert found["v100"] / V100.network_bytes_per_s == pytest.approx(
        found["a10"] / A10.network_bytes_per_s, rel=0.2
    )


def test_a_measured_table_is_matched_at_its_sizes_and_interpolated_logarithmically() -> None:
    curve = a_curve(nodes=2, node_groups=2)
    network = a_network()
    seconds = network.seconds(
        Primitive.ALL_REDUCE, curve.payload_bytes, groups_of_layouts(*[(2, 2, 2)] * 4)
    )
    assert seconds == pytest.approx(curve.seconds)
    middle = math.sqrt(SIZES[2] * SIZES[3])
    between = network.seconds(
        Primitive.ALL_REDUCE, payloads_of(middle), groups_of_layouts((2, 2, 2))
    )
    assert between[0] == pytest.approx(math.sqrt(curve.seconds[2] * curve.seconds[3]))


def test_below_the_smallest_size_the_time_is_kept_and_above_the_largest_the_bandwidth() -> None:
    curve = a_curve()
    seconds = a_network().seconds(
        Primitive.ALL_REDUCE,
        payloads_of(1, 10 * SIZES[-1]),
        groups_of_layouts((2, 1, 1), (2, 1, 1)),
    )
    assert seconds == pytest.approx([curve.seconds[0], 10 * curve.seconds[-1]])


def test_an_unmeasured_layout_deviates_from_the_links_as_measured_ones_do() -> None:
    held = Layout(
        primitive=Primitive.ALL_REDUCE,
        gpu_type="a10",
        network="default",
        machine=TWO_BY_TWO,
        size=4,
        nodes=2,
        node_groups=1,
    )
    for times in (1.0, 3.0):
        truth = a_curve(size=4, nodes=2, times=times)
        network = a_network([c for c in some_curves(times) if c.layout != held])
        seconds = network.seconds(
            Primitive.ALL_REDUCE, payloads_of(*SIZES), groups_of_layouts(*[(4, 2, 1)] * 4)
        )
        assert seconds == pytest.approx(truth.seconds, rel=0.15)
        assert not network.measured(Primitive.ALL_REDUCE, groups_of_layouts((4, 2, 1)))[0]


def test_uncertainty_is_larger_for_unmeasured_layouts() -> None:
    network = a_network()
    at, off, filled = network.uncertainty(
        Primitive.ALL_REDUCE,
        payloads_of(SIZES[3], SIZES[3] * 8, SIZES[3]),
        groups_of_layouts((2, 1, 1), (2, 1, 1), (2, 2, 1)),
    )
    assert 0 < at < off
    assert at < filled
    assert (
        replace(network, hardware=V100, _known={}).uncertainty(
            Primitive.ALL_REDUCE, payloads_of(SIZES[3]), groups_of_layouts((2, 1, 1))
        )[0]
        > filled
    )
    assert (
        network.uncertainty(Primitive.ALL_REDUCE, payloads_of(1e6), groups_of_layouts((1, 1, 1)))[0]
        == 0
    )


def test_control_message_time_is_subtracted_from_sends_but_no_more() -> None:
    slow = replace(RATES, launch_s=2e-3)
    curves = [c for c in some_curves() if c.layout.primitive is not Primitive.SEND]
    curves += [a_curve(Primitive.SEND, rates=slow), a_curve(Primitive.SEND, nodes=2, rates=slow)]
    payload, pair = payloads_of(*SIZES), groups_of_layouts(*[(2, 1, 1)] * 4)
    with_control = a_network(curves).seconds(Primitive.SEND, payload, pair)
    without = a_network(curves, control_messages=False).seconds(Primitive.SEND, payload, pair)
    assert with_control[0] == pytest.approx(2e-3, rel=0.01)
    assert (without > 0).all()
    assert without == pytest.approx(
        LinkNetwork(hardware=A10, shape=TWO_BY_TWO, rates=RATES).seconds(
            Primitive.SEND, payload, pair
        ),
        abs=3e-4,
    )


def test_the_network_must_be_named_for_a_type_measured_on_several() -> None:
    other = a_curve(nodes=2)
    curves = [*some_curves(), replace(other, layout=replace(other.layout, network="ib"))]
    with pytest.raises(InvalidInput, match="a10 was measured on several; name one of default, ib"):
        a_network(curves)
    tables = Tables.of(curves)
    TableNetwork(tables=tables, hardware=A10, shape=TWO_BY_TWO, network="ib")
    with pytest.raises(InvalidInput, match="use one of default, ib"):
        TableNetwork(tables=tables, hardware=A10, shape=TWO_BY_TWO, network="tcp")
    with pytest.raises(InvalidInput, match="one measured table"):
        Tables.of([])


def test_kriging_reproduces_known_values_and_leave_one_out_agrees_with_refitting() -> None:
    curves = some_curves()
    layouts = [c.layout for c in curves]
    rng = np.random.default_rng(0)
    values = rng.normal(size=(len(curves), 3))
    sure = replace(SimilarityWeights(), noise=1e-9)
    assert fit_kriging(layouts, values, sure).predict(layouts)[0] == pytest.approx(values, abs=1e-5)
    model = fit_kriging(layouts, values, SimilarityWeights())
    closed = values[0] - model.dual[0] / model.inverse[0, 0]
    left_out, _ = fit_kriging(layouts[1:], values[1:], SimilarityWeights()).predict(layouts[:1])
    assert left_out[0] == pytest.approx(closed)


def test_gathers_are_similar_to_scatters_and_sends_to_nothing_else() -> None:
    layouts = [a_curve(p).layout for p in Primitive]
    for common in (0.0, 100.0):
        likeness = replace(SimilarityWeights(), common=common)
        alike = layout_covariance(layout_differences(layouts, layouts), likeness) / (1 + common)
        by = {
            (a.primitive, b.primitive): alike[i, j]
            for i, a in enumerate(layouts)
            for j, b in enumerate(layouts)
        }
        assert by[Primitive.SEND, Primitive.SEND] == pytest.approx(1)
        assert (
            by[Primitive.SEND, Primitive.ALL_GATHER]
            < by[Primitive.ALL_REDUCE, Primitive.ALL_GATHER]
            < by[Primitive.REDUCE_SCATTER, Primitive.ALL_GATHER]
            < 0.95
        )


def test_tuning_finds_which_differences_matter() -> None:
    layouts = [
        a_curve(p, size=s, machine=Shape(nodes=1, gpus_per_node=8)).layout
        for p in (Primitive.ALL_REDUCE, Primitive.ALL_TO_ALL)
        for s in (2, 4, 8)
    ]
    by_size = np.array([[math.log2(x.size)] for x in layouts])
    start = replace(SimilarityWeights(), primitive=1.0, size=1.0)
    result = tune_weights(layouts, by_size, start)
    assert result.primitive < start.primitive


def test_written_rows_read_back_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    rows = [a_record(), a_record(bytes=2048, time_s=2e-4, device="2 x A10", spread=0.1)]
    write_records(path, rows)
    (curve,) = read_curves(path)
    assert curve.payload_bytes.tolist() == [1024, 2048]
    assert curve.seconds.tolist() == pytest.approx([1e-4, 2e-4])
    assert curve.layout == a_curve(machine=Shape(nodes=1, gpus_per_node=2)).layout


def test_repeated_sizes_are_merged_and_degenerate_rows_dropped() -> None:
    rows = [a_record(), a_record(time_s=4e-4), a_record(bytes=4, degenerate=1)]
    (curve,) = curves_of(rows)
    assert curve.payload_bytes.tolist() == [1024]
    assert curve.seconds.tolist() == pytest.approx([2e-4])
    with pytest.raises(InvalidInput, match="has no measurement"):
        curves_of(rows[-1:])


def test_beside_counts_the_groups_on_the_same_nodes() -> None:
    across = a_record(num_nodes=4, group_nodes=2, group_gpus_per_node=1, num_groups=4)
    within = a_record(num_nodes=4, gpus_per_node=4, num_groups=8)
    assert [c.layout.node_groups for c in curves_of([across, within])] == [2, 2]


@pytest.mark.parametrize(
    ("field", "text", "complaint"),
    [
        ("time_s", "", "time_s is empty"),
        ("time_s", "nan", "time_s must be positive and finite, not nan"),
        ("time_s", "0", "time_s must be positive"),
        ("time_s", "fast", "time_s must be a number, not 'fast'"),
        ("bytes", "0", "bytes must be at least 1"),
        ("primitive", "broadcast", "unknown primitive 'broadcast'"),
        ("group_size", "4", "group_size 4 is not"),
        ("num_groups", "2", "2 such groups do not fit"),
        ("degenerate", "2", "degenerate must be"),
        ("spread", "wide", "spread must be a number"),
    ],
)
def test_a_wrong_field_of_a_table_is_named_with_its_line(
    tmp_path: Path, field: str, text: str, complaint: str
) -> None:
    path = tmp_path / "comm.csv"
    write_records(path, [a_record(), a_record(bytes=2048)])
    header, first, second = path.read_text(encoding="utf-8").splitlines()
    cells = second.split(",")
    cells[header.split(",").index(field)] = text
    path.write_text("\n".join([header, first, ",".join(cells)]), encoding="utf-8")
    with pytest.raises(InvalidInput, match=rf"comm\.csv:3: {complaint}"):
        read_curves(path)


def test_a_short_line_and_a_missing_column_are_named(tmp_path: Path) -> None:
    path = tmp_path / "comm.csv"
    write_records(path, [a_record()])
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text(f"{lines[0]}\nall-reduce,a10\n", encoding="utf-8")
    with pytest.raises(InvalidInput, match=r"comm\.csv:2: network is empty"):
        read_curves(path)
    path.write_text(lines[0].replace("time_s", "time"), encoding="utf-8")
    with pytest.raises(InvalidInput, match="has no column time_s"):
        read_curves(path)
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_curves(tmp_path / "none.csv")


@pytest.fixture(scope="module")
def published() -> tuple[Curve, ...]:
    folder = data_dir()
    if folder is None:
        pytest.skip("no published data: set TESSERA_DATA")
    return read_curves(folder / "arena" / "comm.csv")


@pytest.mark.full
def test_the_published_tables_are_read_completely(published: tuple[Curve, ...]) -> None:
    assert len(published) == 261
    assert sum(len(c.seconds) for c in published) == 48_022 - 440
    (one,) = [
        c
        for c in published
        if c.layout.gpu_type == "a40"
        and c.layout.network == "default"
        and c.layout.primitive is Primitive.SEND
        and c.layout.nodes == 2
    ]
    assert one.payload_bytes[-1] == 133_693_440


def test_published_types_shapes_and_networks_all_have_times(published: tuple[Curve, ...]) -> None:
    tables = Tables.of(published)
    for kind, shape, network in (
        (A100, Shape(nodes=4, gpus_per_node=4), ""),
        (V100, Shape(nodes=2, gpus_per_node=8), ""),
        (A40, Shape(nodes=8, gpus_per_node=2), "ib"),
        (H100, Shape(nodes=2, gpus_per_node=8), ""),
    ):
        found = TableNetwork(tables=tables, hardware=kind, shape=shape, network=network)
        payload = np.repeat(payloads_of(1, 1e4, 1e7, 1e10), 2)
        places = groups_of_layouts(*[(2, 1, 1), (shape.gpus, shape.nodes, 1)] * 4)
        for primitive in Primitive:
            seconds = found.seconds(primitive, payload, places)
            assert (seconds > 1e-6).all()
            assert (seconds[-2:] > 50 * seconds[:2]).all()


def test_tables_predict_a_held_back_layout_closely(published: tuple[Curve, ...]) -> None:
    held = [c for c in published if c.layout.gpu_type == "a10" and c.layout.size == 4]
    errors = []
    for curve in held[::4]:
        tables = Tables.of([c for c in published if c is not curve])
        layout = curve.layout
        network = TableNetwork(tables=tables, hardware=A10, shape=layout.machine)
        places = groups_of([layout] * len(curve.seconds))
        seconds = network.seconds(layout.primitive, curve.payload_bytes, places)
        errors.append(np.abs(seconds / curve.seconds - 1))
    assert np.median(np.concatenate(errors)) < 0.1
