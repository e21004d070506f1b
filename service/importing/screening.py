"""Finding the jobs of a trace that cannot be what their author meant, and refusing or dropping them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from formulation.errors import InvalidInput
from formulation.resources import EstimateRecord, JobSpec, NodeSpec
from formulation.snapshot import GpuType
from service.importing.speeds import Room, Speeds
from service.importing.trace import Arrival, Asked

OnBad = Literal["refuse", "drop"]
NAMES_SHOWN = 5

REPEATED = "repeat the name of an earlier job"
EMPTY = "have no iterations to run, or last no time"
UNKNOWN_MODEL = "run a model, size and batch of which there is no estimate"
ABSENT_TYPE = "ask for a GPU type that the cluster lacks"
TOO_LARGE = "ask for more GPUs than the cluster has of the type"
NOT_PROFILED = "ask for a type and number of GPUs that nobody has tried for their model"
INFEASIBLE = "ask for a type and number of GPUs on which their model does not run"
NEVER_RUNS = "run a model that runs nowhere on the cluster"
EARLY = "arrive before 0"


class Dropped(NamedTuple):
    """A bad job, why it is bad (one of the constants above) and what of it."""

    job: str
    reason: str
    detail: str = ""


_T = TypeVar("_T", Arrival, Asked)


@dataclass(frozen=True, slots=True)
class Screened:
    """The jobs that are left by arrival, the bad ones, and those that came after a later one."""

    arrivals: list[Arrival]
    dropped: list[Dropped]
    reordered: list[str]

    def message(self) -> str:
        """Return a line for each reason: how many jobs, and the first of them; "": nothing to say."""
        return "\n".join([*bad_lines(self.dropped), *order_lines(self.reordered)])


@dataclass(frozen=True, slots=True)
class ScreenedDurations:
    """As ``Screened``, of jobs without models."""

    jobs: list[Asked]
    dropped: list[Dropped]
    reordered: list[str]

    def message(self) -> str:
        """Return as ``Screened.message``."""
        return "\n".join([*bad_lines(self.dropped), *order_lines(self.reordered)])


def screen(
    arrivals: Sequence[Arrival],
    profiles: Iterable[EstimateRecord],
    gpu_types: Sequence[GpuType],
    nodes: Sequence[NodeSpec],
    on_bad: OnBad = "refuse",
) -> Screened:
    """Return the jobs that can be simulated on a cluster, by arrival.

    Bad are jobs that repeat a name, have no iterations, arrive before 0, run a model without estimates, or
    ask for GPUs on which the cluster or the profiles say they cannot run: one that asks for no type must
    run on some type with its number of GPUs. Jobs out of order are put in order, which loses nothing.

    Raises:
        InvalidInput: ``on_bad`` is "refuse" and jobs are bad or out of order; all reasons with their counts.
    """
    room = Room.of(nodes)
    speeds = Speeds(profiles, room)
    known = {kind.name for kind in gpu_types}
    kept, dropped = _sift(arrivals, lambda one: _bad(one, speeds, room, known))
    ordered, reordered = _in_order(kept)
    found = Screened(ordered, dropped, reordered)
    if on_bad == "refuse":
        _refuse(found.message(), len(arrivals))
    return found


def screen_durations(jobs: Sequence[Asked], on_bad: OnBad = "refuse") -> ScreenedDurations:
    """Return the jobs that can be redrawn, by arrival: unique, of some duration. Raises as ``screen``."""

    def bad(one: Asked) -> Dropped | None:
        return (
            None if one.duration_s > 0 else Dropped(one.spec.name, EMPTY, f"{one.duration_s:g} s")
        )

    kept, dropped = _sift(jobs, bad)
    ordered, reordered = _in_order(kept)
    found = ScreenedDurations(ordered, dropped, reordered)
    if on_bad == "refuse":
        _refuse(found.message(), len(jobs))
    return found


def bad_lines(dropped: Sequence[Dropped]) -> list[str]:
    """Return a line for each reason, the most frequent first: how many jobs and the first of them."""
    by_reason: dict[str, list[Dropped]] = defaultdict(list)
    for one in dropped:
        by_reason[one.reason].append(one)
    ranked = sorted(by_reason.items(), key=lambda item: -len(item[1]))
    return [_line(f"{_jobs(len(found))} {reason}", found) for reason, found in ranked]


def order_lines(reordered: Sequence[str]) -> list[str]:
    """Return a line on jobs out of order; none where there are none."""
    if not reordered:
        return []
    found = [Dropped(name, "") for name in reordered]
    return [_line(f"{_jobs(len(found))} stood below jobs that arrive later", found)]


def _bad(one: Arrival, speeds: Speeds, room: Room, known: set[str]) -> Dropped | None:
    """Return what is wrong with a job, the most basic of it; None: nothing."""
    spec = one.spec
    work = spec.workload
    cell = f"{spec.requested_gpus} {spec.requested_type or 'GPUs of any type'}"
    if not one.arrival_s >= 0:
        return Dropped(spec.name, EARLY, f"{one.arrival_s:g} s")
    if spec.iterations < 1:
        return Dropped(spec.name, EMPTY, f"{spec.iterations} iterations")
    if spec.requested_type and spec.requested_type not in known:
        return Dropped(spec.name, ABSENT_TYPE, spec.requested_type)
    if not speeds.knows(work):
        return Dropped(spec.name, UNKNOWN_MODEL, f"{work.model} {work.params} {work.global_batch}")
    if spec.requested_gpus > _most(spec, room):
        return Dropped(spec.name, TOO_LARGE, cell)
    if not speeds.cells(work):
        return Dropped(spec.name, NEVER_RUNS, f"{work.model} {work.params}")
    if speeds.iter_time_s(spec) == float("inf"):
        kinds = [spec.requested_type] if spec.requested_type else sorted(known)
        tried = any(speeds.tried(work, kind, spec.requested_gpus) for kind in kinds)
        detail = f"{work.model} {work.params} on {cell}"
        return Dropped(spec.name, INFEASIBLE if tried else NOT_PROFILED, detail)
    return None


def _most(spec: JobSpec, room: Room) -> int:
    """Return the most GPUs of one type that a job may ask for."""
    if spec.requested_type:
        return room.gpus.get(spec.requested_type, 0)
    return max(room.gpus.values(), default=0)


def _sift(
    items: Sequence[_T], bad: Callable[[_T], Dropped | None]
) -> tuple[list[_T], list[Dropped]]:
    """Return the good ones and the bad ones; of a repeated name the first good one is kept."""
    kept, dropped, names = [], [], set[str]()
    for one in items:
        name = one.spec.name
        wrong = Dropped(name, REPEATED) if name in names else bad(one)
        if wrong is None:
            names.add(name)
            kept.append(one)
        else:
            dropped.append(wrong)
    return kept, dropped


def _in_order(items: Sequence[_T]) -> tuple[list[_T], list[str]]:
    """Return the jobs by arrival, and the names of those that stood below one that arrives later."""
    late, latest_s = [], float("-inf")
    for one in items:
        if one.arrival_s < latest_s:
            late.append(one.spec.name)
        latest_s = max(latest_s, one.arrival_s)
    return sorted(items, key=lambda one: one.arrival_s), late


def _line(text: str, found: Sequence[Dropped]) -> str:
    shown = ", ".join(
        f"{one.job} ({one.detail})" if one.detail else one.job for one in found[:NAMES_SHOWN]
    )
    return f"{text}: {shown}{', ...' if len(found) > NAMES_SHOWN else ''}"


def _jobs(count: int) -> str:
    return "1 job" if count == 1 else f"{count:,} jobs"


def _refuse(message: str, jobs: int) -> None:
    if message:
        raise InvalidInput(
            "arrivals", f"({jobs:,} jobs) are not fit to run; correct them, or have them dropped and put"
            f" in order:\n{message}",
        )  # fmt: skip
