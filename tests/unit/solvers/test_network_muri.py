"""The efficiency of Muri's groups of jobs that share GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tessera.formulation.tables import Floats
from tessera.solvers.network.jobs.muri import group_efficiency, interleaved_s


def a_group(*stages: Sequence[float]) -> Floats:
    """Return one group of these jobs, padded with jobs that do nothing."""
    size = len(stages[0])
    found = np.zeros((1, size, size))
    found[0, : len(stages)] = stages
    return found


def test_two_complementary_jobs_interleave_perfectly() -> None:
    pair = a_group((3.0, 1.0), (1.0, 3.0))  # 3 s of both, then 1 s of both
    assert (interleaved_s(pair)[0], group_efficiency(pair)[0]) == pytest.approx((4.0, 1.0))


def test_two_equal_jobs_wait_for_the_longer_stage_of_the_other_in_every_slot() -> None:
    pair = a_group((3.0, 1.0), (3.0, 1.0))
    assert (interleaved_s(pair)[0], group_efficiency(pair)[0]) == pytest.approx((6.0, 8 / 12))


def test_two_jobs_that_need_the_same_resource_gain_nothing() -> None:
    pair = a_group((4.0, 0.0), (4.0, 0.0))
    assert interleaved_s(pair) == pytest.approx([8.0])
    assert group_efficiency(pair) == pytest.approx([0.5])


def test_a_single_job_takes_the_sum_of_its_stages() -> None:
    assert interleaved_s(a_group((1.0, 2.0, 3.0, 4.0))) == pytest.approx([10.0])
    assert group_efficiency(a_group((1.0, 2.0, 3.0, 4.0))) == pytest.approx([0.25])


def test_the_best_of_all_orders_is_used() -> None:
    a, b, c = (5.0, 1.0, 1.0, 1.0), (1.0, 5.0, 1.0, 1.0), (5.0, 1.0, 5.0, 1.0)
    # shifted by three slots; otherwise 12
    assert interleaved_s(a_group(a, b)) == pytest.approx([8.0])
    assert interleaved_s(a_group(a, a)) == pytest.approx([12.0])
    assert interleaved_s(a_group(c, c)) == pytest.approx([12.0])  # shifted by two; otherwise 20
    assert interleaved_s(a_group(a, a, a, a)) == pytest.approx([20.0])


def test_many_groups_get_the_results_of_single_calls() -> None:
    stage_s = np.random.default_rng(0).exponential(1.0, (20, 3, 3))
    singly = np.concatenate([interleaved_s(one[None]) for one in stage_s])
    assert interleaved_s(stage_s) == pytest.approx(singly)
