"""The progress that programs report: what cannot be true is ignored, and the rest is timed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.service.agent.keeper.measures import PAIRS, ProgressMeter
from tests.support.laws import examples

ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**400), 10**400),
    st.integers(0, 120),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=2),
    st.sampled_from(["1e400", "nan", "-inf", "7", "1_0"]),
)


@pytest.mark.parametrize(
    "lie", [-1, 101, math.nan, math.inf, 10**400, "many", "nan", "1e300", [1], None, True]
)
def test_a_number_of_iterations_that_cannot_be_true_is_ignored(lie: object) -> None:
    meter = ProgressMeter(100, 4)
    assert not meter.feed(1.0, lie)
    assert (meter.iterations, meter.advanced_s) == (4, None)
    assert meter.remark.endswith("that was ignored")


@pytest.mark.parametrize("stated", [7, 7.9, "7", " 7.0 "])
def test_whole_iterations_are_taken_from_numbers_and_texts(stated: object) -> None:
    meter = ProgressMeter(100, 0)
    assert meter.feed(1.0, stated)
    assert meter.iterations == 7


def test_iterations_never_go_back() -> None:
    meter = ProgressMeter(100, None)
    meter.feed(1.0, 5)
    assert not meter.feed(2.0, 4)
    assert (meter.iterations, meter.remark) == (
        5,
        "the program reported 4 iterations after 5; that was ignored",
    )


def test_one_source_may_be_behind_another_but_none_goes_back() -> None:
    meter = ProgressMeter(100, 10)
    meter.feed(1.0, 20, source="file")
    assert not meter.feed(2.0, 15, source="output")
    assert meter.remark == ""
    meter.feed(3.0, 12, source="output")
    assert "12 iterations after 15" in meter.remark
    meter.feed(4.0, 5, source="trainer")
    assert "5 iterations, but was to go on from iteration 10" in meter.remark
    assert meter.iterations == 20


def test_the_iteration_time_is_a_median_of_the_latest_pairs() -> None:
    meter, now_s = ProgressMeter(10_000, 0), 0.0
    for step, step_s in enumerate([9.0] * 40 + [2.0] * (PAIRS - 1) + [50.0], start=1):
        now_s += step_s
        meter.feed(now_s, step)
    assert meter.iter_time_s == 2.0


def test_an_iteration_of_several_in_one_report_has_an_equal_part() -> None:
    meter = ProgressMeter(100, 10)
    meter.feed(100.0, 20)  # includes the start, so it is not timed
    assert meter.iter_time_s == 0.0
    meter.feed(130.0, 40)
    assert meter.iter_time_s == 1.5


def test_the_program_may_say_when_an_iteration_was_done_unless_that_is_absurd() -> None:
    meter = ProgressMeter(100, 0)
    meter.feed(10.0, 1, done_s=9.0)
    meter.feed(12.0, 2, done_s=9.5)
    assert meter.iter_time_s == 0.5
    meter.feed(20.0, 3, done_s=1e9)
    assert meter.iter_time_s == 10.5  # of the pairs 0.5 and 10.5


def test_a_program_without_a_checkpoint_of_ours_begins_where_it_says() -> None:
    meter = ProgressMeter(100, None)
    meter.feed(5.0, 60)
    assert [meter.resumed, meter.iterations, meter.first_s] == [60, 60, None]
    meter.feed(7.0, 61)
    assert [meter.resumed, meter.first_s, meter.iter_time_s] == [60, 7.0, 2.0]


def test_a_program_that_goes_on_from_a_checkpoint_has_its_first_iteration_after_it() -> None:
    meter = ProgressMeter(100, 60)
    assert not meter.feed(5.0, 60)
    assert meter.feed(7.0, 61)
    assert [meter.resumed, meter.first_s] == [60, 7.0]


def test_a_stall_counts_from_the_last_progress_or_from_the_start_if_its_limit_is_stated() -> None:
    meter = ProgressMeter(100, 0)
    assert meter.stalls_at_s(0.0, 5.0) == math.inf
    assert meter.stalls_at_s(3.0, 5.0) == 8.0
    meter.feed(10.0, 1)
    assert meter.stalls_at_s(3.0, 5.0) == 13.0
    assert meter.stalls_at_s(0.0, 5.0) == 610.0
    meter.feed(110.0, 2)
    assert meter.stalls_at_s(0.0, 5.0) == 110.0 + 20 * 100.0
    meter.feed(500.0, 2)  # a repeated report is no progress
    assert meter.stalls_at_s(3.0, 5.0) == 113.0


def test_the_end_is_complete_only_with_all_iterations() -> None:
    meter = ProgressMeter(3, 0)
    meter.feed(1.0, 2)
    assert not meter.is_complete
    meter.feed(2.0, 3)
    assert meter.is_complete


def test_the_largest_memory_and_the_latest_loss_count() -> None:
    meter = ProgressMeter(10, 0)
    meter.feed(1.0, 1, loss="0.5", memory_bytes=9)
    meter.feed(2.0, 2, loss=-0.25, memory_bytes=7)
    meter.feed(3.0, 3, loss=math.inf, memory_bytes=-1)
    assert (meter.loss, meter.memory_bytes) == (-0.25, 9)
    assert meter.remark == "the program reported the loss inf; that was ignored"


@examples(300)
@given(st.lists(st.tuples(ANYTHING, ANYTHING, ANYTHING, ANYTHING), max_size=8), st.booleans())
def test_whatever_is_reported_the_measures_are_possible(
    reports: list[tuple[object, object, object, object]], knows_start: bool
) -> None:
    meter = ProgressMeter(100, 3 if knows_start else None)
    before = meter.iterations
    for now_s, report in enumerate(reports):
        meter.feed(float(now_s), *report)
        assert before <= meter.iterations <= 100
        assert 0 <= meter.iter_time_s < math.inf
        assert meter.loss is None or math.isfinite(meter.loss)
        assert 0 <= meter.memory_bytes <= 1 << 60
        before = meter.iterations
