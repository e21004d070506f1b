"""Path selection on cases worked out by hand, and against plain hashing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from tessera.formulation.errors import InvalidInput
from tessera.formulation.network.contention import Contention, demand_of
from tessera.solvers.network.baselines.ecmp import hash_bundles
from tessera.solvers.network.paths import least_comm_s, offered_duty, select_paths
from tests.support.contentions import a_contention

BOTH = np.array([0, 1])


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


def test_jobs_choose_in_order_and_each_takes_the_emptiest_path() -> None:
    three = _contention_of_bytes([4.0], [3.0], [2.0])
    assert select_paths(three, np.array([0, 1, 2])).tolist() == [0, 1, 1]
    assert select_paths(three, np.array([2, 1, 0])).tolist() == [0, 1, 0]


def test_the_bundles_of_a_job_choose_by_descending_bytes_and_avoid_each_other() -> None:
    assert select_paths(_contention_of_bytes([1.0, 2.0, 4.0]), np.array([0])).tolist() == [1, 1, 0]


def test_the_lowest_path_wins_ties_however_candidates_are_listed() -> None:
    case = _contention_of_bytes([1.0])
    assert select_paths(case, np.array([0])).tolist() == [0]
    turned = replace(case, candidate=np.array([1, 0]))
    assert select_paths(turned, np.array([0])).tolist() == [1]


def test_traffic_on_fixed_links_is_considered() -> None:
    case = _contention_of_bytes([4.0], [3.0], fixed={1: {0: 1.0}})
    assert select_paths(case, np.array([0, 1])).tolist() == [1, 0]


def test_the_fullest_link_decides_and_ties_are_decided_by_the_sum() -> None:
    paths = (0, 1), (2, 3), (4, 5)
    fixed = {0: {0: 3.0, 2: 2.0, 3: 2.0, 4: 2.0, 5: 1.0}}
    case = _contention_of_bytes([], [1.0], paths=paths, fixed=fixed, speed=[1.0] * 6)
    assert select_paths(case, BOTH).tolist() == [2]


def test_the_fastest_idle_path_is_chosen() -> None:
    assert select_paths(_contention_of_bytes([1.0], speed=(1.0, 2.0)), np.array([0])).tolist() == [
        1
    ]


def test_a_bundle_without_a_choice_keeps_its_path() -> None:
    assert select_paths(
        _contention_of_bytes([1.0], paths=((),), speed=()), np.array([0])
    ).tolist() == [0]
    assert select_paths(_contention_of_bytes([], []), BOTH).tolist() == []


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
        ours.append(offered_duty(case, select_paths(case, order))[fabric].max())
        plain.append(offered_duty(case, hash_bundles(case, seed))[fabric].max())
    assert np.mean(ours) < 0.8 * np.mean(plain)
