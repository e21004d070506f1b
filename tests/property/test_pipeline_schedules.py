"""Laws of the schedules of pipelines, and their lengths against published formulas."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.jax.schedules import Pass, list_needs, merge_lanes, order_lanes, simulate
from tests.support.laws import examples

LAW = examples(100)


class Shape(NamedTuple):
    schedule: str
    degree: int
    chunks: int
    micro_batches: int

    @property
    def lanes(self) -> tuple[tuple[Pass, ...], ...]:
        return order_lanes(*self)

    @property
    def stages(self) -> int:
        return self.degree * self.chunks


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved"]))
    degree = draw(st.integers(1, 6))
    chunks = draw(st.integers(1, 4)) if schedule == "interleaved" else 1
    groups = draw(st.integers(1, 4))
    micro_batches = groups * degree if chunks > 1 else draw(st.integers(1, 13))
    return Shape(schedule, degree, chunks, micro_batches)


@given(shapes())
@LAW
def test_each_pass_is_in_its_lane_exactly_once(shape: Shape) -> None:
    for lane, passes in enumerate(shape.lanes):
        stages = range(lane, shape.stages, shape.degree)
        expected = {
            Pass(stage, m, is_backward)
            for stage in stages
            for m in range(shape.micro_batches)
            for is_backward in (False, True)
        }
        assert set(passes) == expected
        assert len(passes) == len(expected)


@given(shapes())
@LAW
def test_the_merged_order_keeps_lanes_and_starts_what_a_pass_needs_before_it(shape: Shape) -> None:
    lanes = shape.lanes
    order = merge_lanes(lanes)
    place = {item: index for index, item in enumerate(order)}
    assert len(place) == len(order) == sum(map(len, lanes))
    for lane in lanes:
        assert [place[item] for item in lane] == sorted(place[item] for item in lane)
    for item in order:
        assert all(place[need] < place[item] for need in list_needs(item, shape.stages - 1))


@given(shapes())
@LAW
def test_micro_batches_in_flight_are_at_most_what_the_schedule_promises(shape: Shape) -> None:
    for lane, passes in enumerate(shape.lanes):
        held, most = 0, 0
        for item in passes:
            held += -1 if item.is_backward else 1
            most = max(most, held)
        assert held == 0
        if shape.schedule == "gpipe":
            assert most == shape.micro_batches
        elif shape.chunks == 1:
            assert most == min(shape.degree - lane, shape.micro_batches)
        else:  # the warm-up of Narayanan et al., and the pass that follows it
            warm_up = 2 * (shape.degree - lane - 1) + (shape.chunks - 1) * shape.degree
            assert most == min(warm_up + 1, shape.chunks * shape.micro_batches)


@given(shapes(), st.sampled_from([1.0, 2.0, 3.0]))
@LAW
def test_the_bubble_is_as_long_as_the_published_formula(shape: Shape, backward: float) -> None:
    """The bubble is (p - 1) / m of the work, and (p - 1) / (v m) if chunks are interleaved."""
    work = (1.0 + backward) * shape.chunks * shape.micro_batches
    bubble = (shape.degree - 1) / (shape.chunks * shape.micro_batches)
    length = simulate(shape.lanes, forward=1.0, backward=backward).length
    assert length == pytest.approx(work * (1 + bubble))


def test_1f1b_of_two_lanes_is_the_order_of_the_paper() -> None:
    first, second = order_lanes("1f1b", 2, 1, 3)
    assert [(p.micro_batch, p.is_backward) for p in first] == [
        (0, False), (1, False), (0, True), (2, False), (1, True), (2, True),
    ]  # fmt: skip
    assert [(p.micro_batch, p.is_backward) for p in second] == [
        (0, False), (0, True), (1, False), (1, True), (2, False), (2, True),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("schedule", "chunks", "micro_batches"),
    [("gpipe", 2, 4), ("1f1b", 2, 4), ("interleaved", 2, 3), ("zigzag", 1, 4)],
)
def test_a_schedule_that_does_not_exist_is_refused(
    schedule: str, chunks: int, micro_batches: int
) -> None:
    with pytest.raises(ValueError, match="there is no schedule"):
        order_lanes(schedule, 2, chunks, micro_batches)


def test_lanes_that_wait_for_each_other_are_refused() -> None:
    backward_first = (Pass(0, 0, True), Pass(0, 0, False))
    with pytest.raises(ValueError, match="wait for each other"):
        simulate([backward_first], forward=1.0, backward=1.0)
