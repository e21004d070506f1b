"""Limits of profiling: the order of sizes, what an early stop leaves usable, and overdue tasks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.estimator.profiling.limits import (
    SLACK_S,
    ProfilingLimits,
    elapsed_s,
    overdue_tasks,
    time_left_s,
)
from tessera.estimator.profiling.measurements import MeasuredLayers, measure_layers
from tessera.estimator.profiling.order import Size, SizeOrder
from tessera.estimator.profiling.records import ProfileRecord
from tessera.estimator.profiling.stages import StepMaker
from tessera.estimator.profiling.tasks import ProfilingOptions, StepTarget, task_of
from tessera.estimator.profiling.timing import TimingEffort
from tessera.formulation.base.errors import NotAllowed
from tessera.formulation.base.values import Workload
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.records.estimates import ProfilingJob
from tessera.service.profiling.clock import TaskClock
from tests.support.laws import examples

LIMITS = ProfilingLimits(workload_s=100.0, task_gpu_s=50.0)
TINY = StepMaker(target="tests.support.tiny_step:step", arguments={"width": 8})
TEXT = task_of(
    Workload(model="tiny", params="1K", global_batch=64),
    StepTarget(target=TINY.target, arguments=(("width", 8),)),
    "a100",
    ProfilingOptions(samples=(1, 2), tp=(1, 2)),
).command[0]


def measure_order(sizes: list[Size], largest: int = 10**9) -> list[Size]:
    """Return the sizes in their order on a device where ``largest`` samples fit."""
    order, attempts = SizeOrder(sizes), list[Size]()
    while (size := order.next_size()) is not None:
        attempts.append(size)
        if size[0] > largest:
            order.drop(size)
        else:
            order.finish(size)
    return attempts


def test_the_ends_of_each_degree_come_before_what_lies_between_them() -> None:
    sizes = [(s, tp) for tp in (2, 1) for s in (8, 4, 2, 1)]
    assert measure_order(sizes) == [
        *((1, 1), (8, 1), (1, 2), (8, 2)),
        *((2, 1), (2, 2), (4, 1), (4, 2)),
    ]


def test_after_a_size_that_does_not_fit_the_middle_of_the_rest_is_tried() -> None:
    sizes = [(2**k, 1) for k in range(8)]
    tried = measure_order(sizes, largest=4)
    assert tried[:4] == [(1, 1), (128, 1), (8, 1), (2, 1)]
    assert set(tried) == {(1, 1), (128, 1), (8, 1), (2, 1), (4, 1)}


@examples(60)
@given(
    samples=st.sets(st.integers(1, 300), min_size=1, max_size=12),
    degrees=st.sets(st.sampled_from([1, 2, 4]), min_size=1),
    largest=st.integers(0, 300),
    ended=st.integers(0, 40),
)
def test_each_size_is_tried_at_most_once_and_ends_as_measured_left_out_or_too_large(
    samples: set[int], degrees: set[int], largest: int, ended: int
) -> None:
    sizes = [(s, tp) for tp in degrees for s in samples]
    order, attempts = SizeOrder(sizes), list[Size]()
    while len(attempts) < ended and (size := order.next_size()) is not None:
        attempts.append(size)
        if size[0] > largest:
            order.drop(size)
        else:
            order.finish(size)
    assert len(set(attempts)) == len(attempts)
    parts = [order.usable_sizes(), order.unusable_sizes(), order.too_large()]
    assert sorted(size for part in parts for size in part) == sorted(sizes)
    assert all(s <= largest for s, _ in order.usable_sizes())
    assert all(s > largest for s, _ in order.too_large())
    if order.next_size() is None:
        assert not order.unusable_sizes()
    measured = {tp: [s for s, t in attempts if t == tp and s <= largest] for tp in degrees}
    for tp, each in measured.items():
        if len(each) >= 2:
            assert {s for s, t in order.usable_sizes() if t == tp} == set(each)


class Reports:
    """Records as they are measured. After ``most`` of them, a limit is reached."""

    def __init__(self, most: int) -> None:
        self.most, self.records = most, list[ProfileRecord]()

    def report(self, record: ProfileRecord, _total: int) -> None:
        self.records.append(record)

    def stop_reason(self) -> str:
        return "a limit" if len(self.records) >= self.most else ""


def measure(
    most: int, sizes: tuple[Size, ...], known: list[ProfileRecord]
) -> tuple[MeasuredLayers, Reports]:
    reports = Reports(most)
    measured = measure_layers(
        TINY,
        sizes,
        known=known,
        date="2026-11-24",
        report=reports.report,
        effort=TimingEffort(warmups=0, repeats=1, host_s=0.0),
        stop_reason=reports.stop_reason,
    )
    return measured, reports


@pytest.mark.full
def test_measuring_ends_between_two_records_and_only_whole_sizes_are_used() -> None:
    sizes = ((1, 1), (2, 1), (4, 1))
    whole, all_reports = measure(10**6, sizes, [])
    kinds = len(whole.layers)
    assert kinds >= 2
    assert len(all_reports.records) == 3 * kinds
    assert (whole.left_out, whole.stop_reason) == ((), "")
    measured, reports = measure(2 * kinds + 1, sizes, [])
    assert len(reports.records) == 2 * kinds + 1
    assert measured.stop_reason == "a limit"
    assert measured.left_out == ((2, 1),)  # between the two that are complete
    assert {(r.samples, r.tp) for r in measured.records} == {(1, 1), (4, 1)}
    assert len(measured.records) == 2 * kinds
    resumed, rest = measure(10**6, sizes, reports.records)
    assert len(rest.records) == kinds - 1
    assert {r.samples for r in resumed.records} == {1, 2, 4}
    assert not resumed.left_out


def test_a_single_size_of_several_is_not_used_but_that_of_one_is() -> None:
    (whole, _) = measure(10**6, ((2, 1),), [])
    kinds = len(whole.layers)
    alone, reports = measure(2 * kinds - 1, ((1, 1), (2, 1)), [])
    assert (alone.records, alone.left_out) == ((), ((1, 1), (2, 1)))
    only, _ = measure(0, ((1, 1),), reports.records[:kinds])
    assert len(only.records) == kinds
    assert not only.left_out


def test_a_limit_that_was_reached_before_leaves_everything_out() -> None:
    nothing, reports = measure(0, ((1, 1), (2, 1)), [])
    assert (nothing.records, nothing.left_out) == ((), ((1, 1), (2, 1)))
    assert not reports.records


def a_task(gpu_type: str = "a100", **changed: Any) -> ProfilingJob:
    fields: dict[str, Any] = {
        "name": f"profile-abc-{gpu_type}",
        "gpu_type": gpu_type,
        "state": JobState.QUEUED,
        "last_error": "",
        "service_gpu_s": 0.0,
        "age_s": 500.0,
        "task": TEXT,
    }
    return ProfilingJob(**(fields | changed))


def test_the_time_counts_from_the_first_start_of_a_task_of_the_same_step() -> None:
    waits, runs = a_task(), a_task("v100", state=JobState.RUNNING, started_ago_s=30.0)
    ended = a_task("a40", state=JobState.SUCCEEDED, started_ago_s=70.0)
    other = a_task("a10", name="profile-xyz-a10", started_ago_s=99.0)
    assert elapsed_s(waits, [waits]) == 0.0
    assert elapsed_s(waits, [waits, runs, ended, other]) == 70.0
    assert time_left_s(waits, [waits, runs, ended], LIMITS) == 30.0
    assert time_left_s(waits, [waits, replace(ended, started_ago_s=400.0)], LIMITS) == 0.0
    late = replace(waits, age_s=50.0)  # its GPU type joined the cluster after the first start
    assert elapsed_s(late, [late, runs, ended]) == 30.0


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"started_ago_s": 100.0}, ""),
        ({"started_ago_s": 101.0}, "waited for a GPU"),
        ({"started_ago_s": 101.0, "state": JobState.RUNNING}, ""),
        ({"started_ago_s": 101.0 + SLACK_S, "state": JobState.RUNNING}, "did not end"),
        ({"started_ago_s": 900.0, "age_s": 901.0, "state": JobState.SUCCEEDED}, ""),
        ({"started_ago_s": 900.0, "age_s": 901.0, "state": JobState.CANCELLING}, ""),
        ({"service_gpu_s": 50.0 + SLACK_S}, ""),
        ({"service_gpu_s": 51.0 + SLACK_S, "state": JobState.RUNNING}, "50 GPU-seconds"),
    ],
)
def test_tasks_past_a_limit_are_overdue_and_say_which(changed: dict[str, Any], says: str) -> None:
    task = a_task(**changed)
    overdue = overdue_tasks([task], LIMITS)
    assert bool(overdue) == bool(says)
    for name, gap in overdue:
        assert name == task.name
        assert gap is not None
        assert says in gap.reason
        assert gap.source == json.loads(TEXT)["source"]
        assert gap.left_out == ((1.0, 1), (2.0, 1), (1.0, 2), (2.0, 2))


class Seconds:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_clock_counts_earlier_processes_and_the_time_that_the_server_gives(
    tmp_path: Path,
) -> None:
    now, path = Seconds(), str(tmp_path / "held.json")
    first = TaskClock.resume(path, LIMITS, now, now())
    now.now += 30.0
    assert first.stop_reason() == ""
    first.save()
    second = TaskClock.resume(path, LIMITS, now, now())
    assert second.held_s == 30.0
    now.now += 19.0
    assert second.stop_reason() == ""
    now.now += 1.0
    assert "50 GPU-seconds" in second.stop_reason()
    third = TaskClock.resume(str(tmp_path / "other.json"), LIMITS, now, now())
    now.now += 5.0
    third.set_left(10.0)
    now.now += 9.0
    assert third.stop_reason() == ""
    now.now += 1.0
    assert "100 s" in third.stop_reason()


def test_a_device_on_which_nothing_fits_is_still_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr("tessera.estimator.profiling.measurements.profile_stage", refuse)
    with pytest.raises(NotAllowed, match="does not fit"):
        measure(10**6, ((1, 1), (2, 1)), [])
