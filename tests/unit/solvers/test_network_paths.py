"""Path selection by hand and against plain hashing, and measured traffic in place of estimates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.answer.network.contention import Contention, demand_of
from tessera.formulation.answer.network.flows import NetworkJob, build_contention, sent_by_hosts
from tessera.formulation.answer.network.measured import (
    MAX_CREDIBLE_FACTOR,
    TrafficMeasurement,
    correct_bytes,
    correct_times,
)
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats
from tessera.formulation.state.topologies.topology import Topology
from tessera.formulation.state.traffic import Pattern
from tessera.solvers.network.baselines.ecmp import hash_bundles
from tessera.solvers.network.paths import least_comm_s, select_paths
from tests.support.contentions import a_contention
from tests.support.laws import examples
from tests.support.topologies import a_clos, a_job, an_exchange


def _contention_of_bytes(
    *bundles: Sequence[float],
    paths: Sequence[Sequence[int]] = ((0,), (1,)),
    fixed: Mapping[int, Mapping[int, float]] | None = None,
    speed: Sequence[float] = (1.0, 1.0),
) -> Contention:
    """Return one job for each row of bundles (bytes); a bundle may take any path, and T is 10 s."""
    jobs = len(bundles)
    taken = [(fixed or {}).get(job, {}) for job in range(jobs)]
    sent = np.array([b for row in bundles for b in row], dtype=np.float64)
    return Contention(
        jobs=tuple(f"job-{i}" for i in range(jobs)),
        work_flop=np.ones(jobs),
        compute_s=np.full(jobs, 10.0),
        start_s=np.zeros(jobs),
        gpus=np.ones(jobs, dtype=np.int64),
        fixed_start=np.cumsum([0, *map(len, taken)]),
        fixed_link=np.array([e for row in taken for e in row], dtype=np.int64),
        fixed_bytes=np.array([b for row in taken for b in row.values()], dtype=np.float64),
        fixed_delay_s=np.zeros(jobs),
        bundle_start=np.cumsum([0, *map(len, bundles)]),
        bundle_bytes=sent,
        bundle_messages=np.ones(len(sent), dtype=np.int64),
        candidate_start=np.arange(len(sent) + 1) * len(paths),
        candidate=np.tile(np.arange(len(paths)), len(sent)),
        path_start=np.cumsum([0, *map(len, paths)]),
        path_link=np.array([e for path in paths for e in path], dtype=np.int64),
        path_delay_s=np.zeros(len(paths)),
        link_bytes_per_s=np.array(speed, dtype=np.float64),
    )


THREE_ROWS = _contention_of_bytes([4.0], [3.0], [2.0])

THREE_PATHS = _contention_of_bytes(
    [],
    [1.0],
    paths=((0, 1), (2, 3), (4, 5)),
    fixed={0: {0: 3.0, 2: 2.0, 3: 2.0, 4: 2.0, 5: 1.0}},
    speed=[1.0] * 6,
)


@pytest.mark.parametrize(
    ("case", "order", "chosen"),
    [
        # jobs choose in order, and each takes the emptiest path
        (THREE_ROWS, [0, 1, 2], [0, 1, 1]),
        (THREE_ROWS, [2, 1, 0], [0, 1, 0]),
        # the bundles of a job choose by descending bytes and avoid each other
        (_contention_of_bytes([1.0, 2.0, 4.0]), [0], [1, 1, 0]),
        # traffic on fixed links counts
        (_contention_of_bytes([4.0], [3.0], fixed={1: {0: 1.0}}), [0, 1], [1, 0]),
        # the fullest link decides, and the sum decides ties
        (THREE_PATHS, [0, 1], [2]),
        # of idle paths, the fastest is chosen
        (_contention_of_bytes([1.0], speed=(1.0, 2.0)), [0], [1]),
        # a bundle without a choice keeps its path
        (_contention_of_bytes([1.0], paths=((),), speed=()), [0], [0]),
        (_contention_of_bytes([], []), [0, 1], []),
    ],
)
def test_paths_are_chosen_as_worked_out_by_hand(
    case: Contention, order: list[int], chosen: list[int]
) -> None:
    assert select_paths(case, np.array(order)).tolist() == chosen


def test_the_lowest_path_wins_ties_however_candidates_are_listed() -> None:
    case = _contention_of_bytes([1.0])
    assert select_paths(case, np.array([0])).tolist() == [0]
    turned = replace(case, candidate=np.array([1, 0]))
    assert select_paths(turned, np.array([0])).tolist() == [1]


def test_orders_that_do_not_name_each_job_once_are_refused() -> None:
    for order in ([0], [0, 0], [0, 1, 2]):
        with pytest.raises(InvalidInput):
            select_paths(_contention_of_bytes([1.0], [1.0]), np.array(order))


def test_the_least_communication_time_uses_the_best_choice_for_each_bundle_alone() -> None:
    case = _contention_of_bytes([3.0, 4.0], [], fixed={0: {0: 2.5}}, speed=(1.0, 2.0))
    assert least_comm_s(case).tolist() == [2.5, 0]
    for seed in range(20):
        some = a_contention(seed)
        assert (
            least_comm_s(some) <= demand_of(some, hash_bundles(some, seed)).comm_s + 1e-12
        ).all()


def test_links_are_less_congested_on_average_than_with_hashing() -> None:
    ours, plain = [], []
    for seed in range(60):
        case = a_contention(seed, jobs=8, aggregations=4)
        order = np.argsort(-case.work_flop / least_comm_s(case), kind="stable")
        fabric = slice(2 * 15, None)
        ours.append(demand_of(case, select_paths(case, order)).offered[fabric].max())
        plain.append(demand_of(case, hash_bundles(case, seed)).offered[fabric].max())
    assert np.mean(ours) < 0.8 * np.mean(plain)


TOPOLOGY = a_clos(4)

RING, INSIDE = 1e9, 3e9


def a_job_on_two_hosts(name: str = "job") -> NetworkJob:
    """Return a ring over two hosts of two GPUs, and a ring inside each host."""
    return a_job(
        [("host-0", (0, 1)), ("host-1", (0, 1))],
        an_exchange([[0, 1, 2, 3]], RING),
        an_exchange([[0, 1], [2, 3]], INSIDE),
        name=name,
    )


def bytes_by_link(topology: Topology, job: NetworkJob) -> dict[str, float]:
    """Return the bytes of one job on each link, if it uses its first paths."""
    found, _ = build_contention(topology, [job])
    demand = demand_of(found, np.zeros(len(found.bundle_bytes), dtype=np.int64))
    sent = demand.busy_s * topology.links.bytes_per_s[demand.link]
    return {
        topology.link_name(link): size
        for link, size in zip(demand.link.tolist(), sent.tolist(), strict=True)
    }


def iteration_alone_s(found: Contention) -> Floats:
    comm_s = least_comm_s(found)
    return np.where(
        comm_s > 0, np.maximum(found.compute_s, found.start_s + comm_s), found.compute_s
    )


def test_the_bytes_a_host_sends_to_others_are_those_on_its_uplinks() -> None:
    (sent,) = sent_by_hosts(TOPOLOGY, [a_job_on_two_hosts()])
    assert sent == {"host-0": RING, "host-1": RING}
    on_links = bytes_by_link(TOPOLOGY, a_job_on_two_hosts())
    for host in (0, 1):
        assert on_links[f"host-{host}/pcie-0 > host-{host}/nic-0"] == pytest.approx(RING)


def test_a_chain_sends_both_ways_and_a_job_on_one_host_sends_nothing() -> None:
    chain = a_job(
        [("host-0", (0,)), ("host-1", (0,)), ("host-2", (0,))],
        an_exchange([[0, 1, 2]], 5.0, Pattern.CHAIN),
        name="chain",
    )
    single = a_job([("host-3", (0, 1))], an_exchange([[0, 1]], 5.0), name="single")
    assert sent_by_hosts(TOPOLOGY, [chain, single]) == [
        {"host-0": 5.0, "host-1": 10.0, "host-2": 5.0},
        {},
    ]


@examples(25)
@given(factor=st.floats(1 / MAX_CREDIBLE_FACTOR, MAX_CREDIBLE_FACTOR))
def test_bytes_between_hosts_are_scaled_to_the_measured_ones_and_those_inside_stay(
    factor: float,
) -> None:
    job = a_job_on_two_hosts()
    seen = {
        "job": TrafficMeasurement(sent_bytes={"host-0": RING * factor, "host-1": RING * factor})
    }
    (found,), notes, used = correct_bytes(TOPOLOGY, [job], seen)
    assert used == {"job"}
    ring, inside = found.traffic.exchanges
    assert ring.sent_bytes == pytest.approx(RING * factor)
    assert inside.sent_bytes == INSIDE
    (sent,) = sent_by_hosts(TOPOLOGY, [found])
    assert sent["host-0"] == pytest.approx(RING * factor)
    assert notes == [("job", f"measured on 2 nodes: {factor:.3g} times the estimate")]


def test_the_median_of_several_nodes_is_used_and_unmeasured_jobs_stay_unchanged() -> None:
    three = a_job(
        [(f"host-{i}", (0, 1)) for i in range(3)],
        an_exchange([[0, 1, 2, 3, 4, 5]], RING),
        name="three",
    )
    other = a_job_on_two_hosts("other")
    measured = {"host-0": 1.1 * RING, "host-1": 1.2 * RING, "host-2": 40 * RING}
    found, notes, used = correct_bytes(
        TOPOLOGY,
        [other, three],
        {
            "three": TrafficMeasurement(sent_bytes=measured),
            "gone": TrafficMeasurement(sent_bytes={}),
        },
    )
    assert found[0] is other
    assert found[1].traffic.exchanges[0].sent_bytes == pytest.approx(1.2 * RING)
    assert used == {"three"}
    assert [job for job, _ in notes] == ["three"]


@pytest.mark.parametrize("factor", [0.01, 0.24, 4.1, 1e6])
def test_an_implausible_factor_is_reported_and_not_used(factor: float) -> None:
    job = a_job_on_two_hosts()
    seen = {"job": TrafficMeasurement(sent_bytes={"host-1": RING * factor}, period_s=1.0)}
    (found,), [(_, note)], used = correct_bytes(TOPOLOGY, [job], seen)
    assert found is job
    assert used == set()
    assert "measured on 1 node: " in note
    assert "not credible" in note


def test_a_measurement_without_an_estimate_is_reported_and_not_used() -> None:
    job = a_job_on_two_hosts()
    (found,), [(_, note)], used = correct_bytes(
        TOPOLOGY, [job], {"job": TrafficMeasurement(sent_bytes={"host-3": 1e9})}
    )
    assert found is job
    assert used == set()
    assert "not used" in note


@examples(50)
@given(scale=st.floats(0.3, 3.5), start=st.floats(0, 1), ring=st.floats(1e8, 4e9))
def test_after_the_correction_an_iteration_alone_has_the_measured_period(
    scale: float, start: float, ring: float
) -> None:
    job = a_job_on_two_hosts()
    exchange = replace(job.traffic.exchanges[0], sent_bytes=ring)
    job = replace(job, traffic=replace(job.traffic, start_s=start, exchanges=(exchange,)))
    c, _ = build_contention(TOPOLOGY, [job, a_job_on_two_hosts("other")])
    comm_s = least_comm_s(c)
    period_s = max(scale * c.compute_s[0], scale * c.start_s[0] + comm_s[0])
    found, notes = correct_times(c, comm_s, np.array([period_s, np.nan]))
    assert iteration_alone_s(found)[0] == pytest.approx(period_s)
    assert found.start_s[0] * c.compute_s[0] == pytest.approx(c.start_s[0] * found.compute_s[0])
    assert (found.compute_s[1], found.start_s[1]) == (c.compute_s[1], c.start_s[1])
    assert np.array_equal(least_comm_s(found), comm_s)
    assert notes == [("job", f"an iteration takes {period_s:.3g} s")]


@pytest.mark.parametrize("period_s", [1e-3, 0.05, 50.0])
def test_a_period_impossible_for_the_traffic_is_reported_and_not_used(
    period_s: float,
) -> None:
    """The ring takes 0.1 s at 10 GB/s, and compute takes 1 s."""
    c, _ = build_contention(TOPOLOGY, [a_job_on_two_hosts()])
    found, [(_, note)] = correct_times(c, least_comm_s(c), np.array([period_s]))
    assert np.array_equal(found.compute_s, c.compute_s)
    assert np.array_equal(found.start_s, c.start_s)
    assert "does not fit" in note
