"""The division of a start into its launch and its first iteration."""

from __future__ import annotations

import pytest

from tessera.service.agent.keeper.reporting import LEAST_PART_S, divide_start


def test_the_first_iteration_counts_from_when_the_ranks_run() -> None:
    assert divide_start(2.0, 5.0) == (2.0, 3.0)


@pytest.mark.parametrize("first_s", [2.0, 1.5, 0.5])
def test_ranks_that_are_seen_late_were_there_before_the_first_iteration(first_s: float) -> None:
    launch_s, first_iteration_s = divide_start(2.0, first_s)
    assert launch_s + first_iteration_s == pytest.approx(first_s)
    assert first_iteration_s == pytest.approx(LEAST_PART_S)


@pytest.mark.parametrize("times", [(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, -1.0)])
def test_no_part_of_a_known_start_is_0(times: tuple[float, float]) -> None:
    assert min(divide_start(*times)) > 0
