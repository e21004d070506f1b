"""Checks for jobs of a trace that cannot be as their author intended.

Such jobs are refused or dropped.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.values import GpuType
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.records.jobs import JobSpec
from tessera.simulator.traces.dependencies import drop_absent_dependencies
from tessera.simulator.traces.speeds import ClusterRoom, Speeds
from tessera.simulator.traces.trace import Arrival, DurationJob

OnBad = Literal["refuse", "drop"]
NAMES_SHOWN = 5

REPEATED = "the name of an earlier job"
EMPTY = "no iterations to run, or no duration"
UNKNOWN_MODEL = "a model, size and batch without estimates"
ABSENT_TYPE = "a GPU type that the cluster lacks"
TOO_LARGE = "more GPUs than the cluster has of the type"
NOT_PROFILED = "a type and number of GPUs without estimates for the model"
INFEASIBLE = "a type and number of GPUs on which the model does not run"
NEVER_RUNS = "a model, size and batch that run nowhere on the cluster"
EARLY = "an arrival before 0"


class DroppedJob(NamedTuple):
    """A bad job with the reason (one of the constants above) and the wrong detail."""

    job: str
    reason: str
    detail: str = ""


_T = TypeVar("_T", Arrival, DurationJob)


@dataclass(frozen=True)  # no slots: in Python 3.11 a parametrised generic cannot be frozen as well
class ScreenedTrace(Generic[_T]):
    """The remaining jobs by arrival, the bad ones, and those that were out of order.

    The remaining jobs wait for no bad one.
    """

    arrivals: list[_T]
    dropped: list[DroppedJob]
    reordered: list[str]

    def message(self) -> str:
        """Return a line for each reason, with the number of jobs and the first of them.

        If no job is bad or out of order, return "".
        """
        return "\n".join([*bad_lines(self.dropped), *order_lines(self.reordered)])


def screen_jobs(
    arrivals: Sequence[Arrival],
    profiles: Iterable[EstimateRecord],
    gpu_types: Sequence[GpuType],
    nodes: Sequence[NodeSpec],
    on_bad: OnBad = "refuse",
) -> ScreenedTrace[Arrival]:
    """Return the jobs that can be simulated on a cluster, by arrival.

    A job is bad if it repeats a name, has no iterations, arrives before 0 or runs a model without
    estimates. It is also bad if it requests GPUs on which it cannot run, according to the cluster
    or the profiles. A job that requests no GPU type must run on some type with its number of GPUs.
    Jobs that are out of order are sorted and not dropped.

    Raises:
        InvalidInput: ``on_bad`` is "refuse" and jobs are bad or out of order; the message has all
            reasons with their counts.
    """
    room = ClusterRoom.of(nodes)
    speeds = Speeds(profiles, room)
    known = {kind.name for kind in gpu_types}
    return _screened(arrivals, lambda one: _bad(one, speeds, room, known), on_bad)


def screen_profiled(
    arrivals: Sequence[Arrival], profiles: Iterable[EstimateRecord], on_bad: OnBad = "refuse"
) -> ScreenedTrace[Arrival]:
    """Return the jobs whose durations are known, on any cluster.

    Otherwise this works like ``screen_jobs``.
    """
    speeds = Speeds(profiles)
    return _screened(
        arrivals, lambda one: _malformed(one) or _unknown_speed(one.spec, speeds), on_bad
    )


def screen_form(arrivals: Sequence[Arrival], on_bad: OnBad = "refuse") -> ScreenedTrace[Arrival]:
    """Return the jobs with a unique name and some iterations, on any cluster.

    Otherwise this works like ``screen_jobs``.
    """
    return _screened(arrivals, _malformed, on_bad)


def screen_durations(
    jobs: Sequence[DurationJob], on_bad: OnBad = "refuse"
) -> ScreenedTrace[DurationJob]:
    """Return the jobs with a unique name and a duration, which can be redrawn.

    Otherwise this works like ``screen_jobs``.
    """

    def bad(one: DurationJob) -> DroppedJob | None:
        if not one.arrival_s >= 0:
            return DroppedJob(one.spec.name, EARLY, f"{one.arrival_s:g} s")
        return (
            None
            if one.duration_s > 0
            else DroppedJob(one.spec.name, EMPTY, f"{one.duration_s:g} s")
        )

    return _screened(jobs, bad, on_bad)


def bad_lines(dropped: Sequence[DroppedJob]) -> list[str]:
    """Return a line for each reason, most frequent first: the number of jobs and the first ones."""
    by_reason: dict[str, list[DroppedJob]] = defaultdict(list)
    for one in dropped:
        by_reason[one.reason].append(one)
    ranked = sorted(by_reason.items(), key=lambda item: -len(item[1]))
    return [_line(f"{_jobs(len(jobs))} with {reason}", jobs) for reason, jobs in ranked]


def order_lines(reordered: Sequence[str]) -> list[str]:
    """Return a line about the jobs that are out of order, or no line without such jobs."""
    if not reordered:
        return []
    late = [DroppedJob(name, "") for name in reordered]
    return [_line(f"{_jobs(len(late))} listed after a job that arrives later", late)]


def _malformed(one: Arrival) -> DroppedJob | None:
    if not one.arrival_s >= 0:
        return DroppedJob(one.spec.name, EARLY, f"{one.arrival_s:g} s")
    if one.spec.iterations < 1:
        return DroppedJob(one.spec.name, EMPTY, f"{one.spec.iterations} iterations")
    return None


def _bad(one: Arrival, speeds: Speeds, room: ClusterRoom, known: set[str]) -> DroppedJob | None:
    """Return the most basic fault of a job, or None if the job is good."""
    spec = one.spec
    if (misshapen := _malformed(one)) is not None:
        return misshapen
    if spec.requested_gpu_type and spec.requested_gpu_type not in known:
        return DroppedJob(spec.name, ABSENT_TYPE, spec.requested_gpu_type)
    if speeds.knows(spec.workload) and spec.requested_gpus > _most(spec, room):
        return DroppedJob(spec.name, TOO_LARGE, _cell(spec))
    return _unknown_speed(spec, speeds)


def _unknown_speed(spec: JobSpec, speeds: Speeds) -> DroppedJob | None:
    """Return the reason why a job's speed as requested is unknown, or None if it is known."""
    work = spec.workload
    if not speeds.knows(work):
        return DroppedJob(
            spec.name, UNKNOWN_MODEL, f"{work.model} {work.params} {work.global_batch}"
        )
    if not speeds.cells(work):
        return DroppedJob(spec.name, NEVER_RUNS, f"{work.model} {work.params}")
    if speeds.iter_time_s(spec) < math.inf:
        return None
    tried = speeds.tried(work, spec.requested_gpu_type, spec.requested_gpus)
    detail = f"{work.model} {work.params} on {_cell(spec)}"
    return DroppedJob(spec.name, INFEASIBLE if tried else NOT_PROFILED, detail)


def _cell(spec: JobSpec) -> str:
    return f"{spec.requested_gpus} {spec.requested_gpu_type or 'GPUs of any type'}"


def _most(spec: JobSpec, room: ClusterRoom) -> int:
    """Return the largest number of GPUs of one type that a job may request."""
    if spec.requested_gpu_type:
        return room.gpus.get(spec.requested_gpu_type, 0)
    return max(room.gpus.values(), default=0)


def _screened(
    items: Sequence[_T], bad: Callable[[_T], DroppedJob | None], on_bad: OnBad
) -> ScreenedTrace[_T]:
    kept, dropped = _sift(items, bad)
    ordered, reordered = in_order(drop_absent_dependencies(kept))
    screened = ScreenedTrace(ordered, dropped, reordered)
    if on_bad == "refuse" and (message := screened.message()):
        raise InvalidInput(
            "arrivals",
            f"({len(items):,} jobs) cannot be run as they are; correct the jobs below, or have bad jobs"
            f" dropped and the others sorted:\n{message}",
        )
    return screened


def _sift(
    items: Sequence[_T], bad: Callable[[_T], DroppedJob | None]
) -> tuple[list[_T], list[DroppedJob]]:
    """Return the good items and the bad ones.

    Of items with the same name, the first good one is kept.
    """
    kept, dropped, names = [], [], set[str]()
    for one in items:
        name = one.spec.name
        wrong = DroppedJob(name, REPEATED) if name in names else bad(one)
        if wrong is None:
            names.add(name)
            kept.append(one)
        else:
            dropped.append(wrong)
    return kept, dropped


def in_order(items: Sequence[_T]) -> tuple[list[_T], list[str]]:
    """Return the jobs by arrival, and the names of those listed after a job that arrives later."""
    late, latest_s = [], float("-inf")
    for one in items:
        if one.arrival_s < latest_s:
            late.append(one.spec.name)
        latest_s = max(latest_s, one.arrival_s)
    return sorted(items, key=lambda one: one.arrival_s), late


def _line(text: str, jobs: Sequence[DroppedJob]) -> str:
    shown = ", ".join(
        f"{one.job} ({one.detail})" if one.detail else one.job for one in jobs[:NAMES_SHOWN]
    )
    return f"{text}: {shown}{', ...' if len(jobs) > NAMES_SHOWN else ''}"


def _jobs(count: int) -> str:
    return "1 job" if count == 1 else f"{count:,} jobs"
