"""Schedules of pipelines: the order of passes in each lane, and one order for their controller.

A lane is the devices of the stages ``i`` with the same ``i % degree``. A pass is the forward or the
backward computation of one micro-batch on one stage. Nothing here knows JAX.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Pass(NamedTuple):
    """A forward or backward computation of a micro-batch on a stage."""

    stage: int
    micro_batch: int
    is_backward: bool


@dataclass(frozen=True, slots=True)
class Timetable:
    """When each pass begins, and when the last one ends, in the unit of the durations."""

    begins: dict[Pass, float]
    length: float


def order_lanes(
    schedule: str, degree: int, chunks: int, micro_batches: int
) -> tuple[tuple[Pass, ...], ...]:
    """Return the passes of each lane in their order.

    ``gpipe``: all forward passes, then all backward passes (Huang et al., NeurIPS 2019). ``1f1b``:
    Narayanan et al., SC 2021, section 2.2. ``interleaved``: the same, section 2.3. With one chunk
    ``interleaved`` is ``1f1b``; otherwise ``micro_batches`` is a multiple of ``degree``.

    Raises:
        ValueError: the schedule is unknown, or has other numbers of chunks or micro-batches.
    """
    if schedule == "gpipe" and chunks == 1:
        return tuple(_order_gpipe(stage, micro_batches) for stage in range(degree))
    if schedule in ("1f1b", "interleaved") and chunks == 1:
        return tuple(
            _alternate(
                [Pass(stage, m, False) for m in range(micro_batches)],
                [Pass(stage, m, True) for m in range(micro_batches)],
                lead=degree - stage - 1,
            )
            for stage in range(degree)
        )
    if schedule == "interleaved" and micro_batches % degree == 0:
        return tuple(_interleave(lane, degree, chunks, micro_batches) for lane in range(degree))
    raise ValueError(
        f"there is no schedule {schedule!r} of {chunks} chunks and {micro_batches} micro-batches on"
        f" {degree} lanes"
    )


def merge_lanes(lanes: Sequence[Sequence[Pass]]) -> tuple[Pass, ...]:
    """Return one order of all passes, in which a single controller can start them.

    It keeps the order of each lane, and what a pass needs comes before it. Passes come in the order
    in which an ideal pipeline begins them, so that no lane waits for the controller.
    """
    begins = simulate(lanes, forward=1.0, backward=2.0).begins
    return tuple(sorted(begins, key=lambda one: (begins[one], one)))


def simulate(lanes: Sequence[Sequence[Pass]], *, forward: float, backward: float) -> Timetable:
    """Return when passes begin if each starts as soon as its lane and its inputs allow it.

    ``forward`` and ``backward`` are the durations of a pass, above 0. Sending values takes no time.

    Raises:
        ValueError: the lanes wait for each other for ever.
    """
    last_stage = max(one.stage for lane in lanes for one in lane)
    begins: dict[Pass, float] = {}
    ends: dict[Pass, float] = {}
    heads = [0] * len(lanes)
    free_at = [0.0] * len(lanes)
    remaining = sum(len(lane) for lane in lanes)
    while remaining:
        before = remaining
        for index, lane in enumerate(lanes):
            while heads[index] < len(lane):
                item = lane[heads[index]]
                needs = list_needs(item, last_stage)
                if any(need not in ends for need in needs):
                    break
                begins[item] = max([free_at[index], *(ends[need] for need in needs)])
                ends[item] = begins[item] + (backward if item.is_backward else forward)
                free_at[index] = ends[item]
                heads[index] += 1
                remaining -= 1
        if remaining == before:
            raise ValueError("the lanes of this schedule wait for each other for ever")
    return Timetable(begins, max(free_at))


def list_needs(item: Pass, last_stage: int) -> list[Pass]:
    """Return the passes whose results a pass needs."""
    if not item.is_backward:
        return [item._replace(stage=item.stage - 1)] if item.stage else []
    own = item._replace(is_backward=False)
    return [own, item._replace(stage=item.stage + 1)] if item.stage < last_stage else [own]


def _order_gpipe(stage: int, micro_batches: int) -> tuple[Pass, ...]:
    forward = [Pass(stage, m, False) for m in range(micro_batches)]
    return (*forward, *(one._replace(is_backward=True) for one in forward))


def _alternate(forward: list[Pass], backward: list[Pass], *, lead: int) -> tuple[Pass, ...]:
    """Return ``lead`` forward passes, then one of each kind in turn, then what is left."""
    order = forward[:lead]
    for index, item in enumerate(forward[lead:]):
        order += [item, backward[index]]
    return (*order, *backward[len(forward[lead:]) :])


def _interleave(lane: int, degree: int, chunks: int, micro_batches: int) -> tuple[Pass, ...]:
    """Return the passes of a lane that takes micro-batches in groups of the degree.

    Each group goes through all chunks of the lane before the next group begins.
    """
    forward, backward = [], []
    for begin in range(0, micro_batches, degree):
        for chunk in range(chunks):
            for m in range(begin, begin + degree):
                forward.append(Pass(chunk * degree + lane, m, False))
                backward.append(Pass((chunks - 1 - chunk) * degree + lane, m, True))
    lead = 2 * (degree - lane - 1) + (chunks - 1) * degree
    return _alternate(forward, backward, lead=lead)
