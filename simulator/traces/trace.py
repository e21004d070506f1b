"""Traces, i.e. jobs with their arrival times, from a CSV file (format: docs/traces.md)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

from tessera.estimator.files.userfiles import read_bytes, to_text
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.values import Workload
from tessera.formulation.job.dependencies import Dependency
from tessera.formulation.records.jobs import JobSpec
from tessera.simulator.traces.csvfile import CsvRow, Mistakes, header_of, parse_rows
from tessera.simulator.traces.dependencies import (
    AFTER_COLUMN,
    drop_absent_dependencies,
    read_dependencies,
    require_no_circle,
)
from tessera.simulator.traces.profiles import MAX_COUNT

REQUIRED = (
    "job_id",
    "submit_time_s",
    "model",
    "params",
    "global_batch",
    "num_iterations",
    "num_gpus",
)
OPTIONAL = (
    "arena_round",
    "gpu_type",
    "deadline_s",
    "tenant",
    "guaranteed",
    "plan",
    AFTER_COLUMN,
)
EXACT_ITERATIONS_COLUMN = "iterations"
"""A column that replaces ``num_iterations``. Its iterations are exact and never divided."""
DURATION_COLUMNS = ("job_id", "submit_time_s", "duration_s", "num_gpus")
"""The columns of a trace without models, as in public traces. The other columns are drawn
(``redraw``)."""
PLAN_LABEL = "plan"
"""The label with the execution plan that a job was submitted with."""
MAX_ITERATIONS = 10**12
MAX_TIME_S = 1e12


class Arrival(NamedTuple):
    """A job and its arrival time in seconds since the trace began.

    The spec's ``deadline_s`` counts from the arrival. A caller that submits the job must add the
    time of submission.
    """

    arrival_s: float
    spec: JobSpec


class DurationJob(NamedTuple):
    """A job of which only GPUs and duration are known.

    Its spec's workload and iterations have no meaning.
    """

    arrival_s: float
    duration_s: float
    spec: JobSpec


_T = TypeVar("_T", Arrival, DurationJob)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """The options for reading a trace. Defaults follow the Arena artifact's simulator."""

    iteration_divisor: int = 5
    """The divisor of iterations. The artifact has 5, because its generator multiplied by 5."""
    round_s: float | None = 300.0
    """Seconds by which ``arena_round`` is multiplied to get a job's arrival, if the file has that
    column. If it is None, jobs arrive at ``submit_time_s``, less the smallest of all."""
    limit: int | None = None
    """The number of rows to read, from the first. If it is None, all are read."""
    screened: bool = False
    """Whether the caller screens the jobs. Repeated names, jobs without iterations or duration, and
    the order are then not checked here."""

    def __post_init__(self) -> None:
        """Refuse values that have no meaning."""
        if self.iteration_divisor < 1:
            raise InvalidInput("iteration_divisor", "must be 1 or more")
        if self.round_s is not None and not (math.isfinite(self.round_s) and self.round_s > 0):
            raise InvalidInput("round_s", "must be a positive number of seconds")
        if self.limit is not None and self.limit < 0:
            raise InvalidInput("limit", "must be 0 or more")


def read_trace(
    path: Path,
    *,
    iteration_divisor: int = 5,
    round_s: float | None = 300.0,
    limit: int | None = None,
) -> list[Arrival]:
    """Read a file, with the options of ``TraceOptions``.

    Raises:
        InvalidInput: the file cannot be read, or its first 20 mistakes.
    """
    options = TraceOptions(iteration_divisor=iteration_divisor, round_s=round_s, limit=limit)
    return parse_trace(read_bytes(path), path.name, options)


def parse_trace(data: bytes, file: str, options: TraceOptions | None = None) -> list[Arrival]:
    """Return the jobs by arrival. Jobs that arrive at the same time stay in the file's order.

    Raises:
        InvalidInput: the first 20 mistakes, one on each line.
    """
    options = options or TraceOptions()
    text = to_text(file, data)
    header = header_of(text)
    if "duration_s" in header and not {"num_iterations", EXACT_ITERATIONS_COLUMN} & set(header):
        raise InvalidInput("", f"{file}: has durations but no models; draw models with --redraw")
    required = tuple(
        EXACT_ITERATIONS_COLUMN
        if c == "num_iterations" and EXACT_ITERATIONS_COLUMN in header
        else c
        for c in REQUIRED
    )
    arrivals, mistakes = [], Mistakes(file)
    for timed in _timed(text, mistakes, options, required):
        spec = _spec(timed, options)
        if timed.row.ok:
            arrivals.append((timed.time_s, spec))
    mistakes.check()
    first_s = _first_s([time_s for time_s, _ in arrivals], header, options)
    moved = [Arrival(time_s - first_s, spec) for time_s, spec in arrivals]
    return _finished(moved, file, options)


def parse_durations(
    data: bytes, file: str, options: TraceOptions | None = None
) -> list[DurationJob]:
    """Return the jobs of a file with the columns ``DURATION_COLUMNS`` by arrival, to be redrawn.

    Raises:
        InvalidInput: the first 20 mistakes, one on each line.
    """
    options = options or TraceOptions()
    text = to_text(file, data)
    jobs, mistakes = [], Mistakes(file)
    for timed in _timed(text, mistakes, options, DURATION_COLUMNS):
        duration_s = timed.row.decimal("duration_s", 0.0, MAX_TIME_S, above=not options.screened)
        spec = _request(timed, Workload(model="", params="", global_batch=1), 1)
        if timed.row.ok:
            jobs.append(DurationJob(timed.time_s, duration_s, spec))
    mistakes.check()
    first_s = _first_s([a.arrival_s for a in jobs], header_of(text), options)
    moved = [a._replace(arrival_s=a.arrival_s - first_s) for a in jobs]
    return _finished(moved, file, options)


def _finished(jobs: list[_T], file: str, options: TraceOptions) -> list[_T]:
    """Return the jobs in their order. Those that the limit leaves out are not waited for."""
    require_no_circle(file, jobs)
    if options.limit is not None:
        jobs = drop_absent_dependencies(jobs)
    return jobs if options.screened else sorted(jobs, key=lambda job: job.arrival_s)


class _TimedRow(NamedTuple):
    """A row with its time of submission and its job's arrival, both on the file's clock."""

    row: CsvRow
    submit_s: float
    time_s: float
    after: tuple[Dependency, ...]


def _timed(
    text: str, mistakes: Mistakes, options: TraceOptions, required: tuple[str, ...]
) -> Iterator[_TimedRow]:
    """Yield the rows.

    It is a mistake to repeat the name of a row without mistakes, or to wait for a job of no row.
    """
    by_round = "arena_round" in header_of(text)
    lines: dict[str, int] = {}
    names = set[str]()
    waiting: list[tuple[CsvRow, str]] = []
    for row in islice(parse_rows(text, mistakes, required, OPTIONAL), options.limit):
        submit_s = time_s = row.decimal("submit_time_s", -MAX_TIME_S, MAX_TIME_S)
        if by_round and options.round_s is not None:
            time_s = options.round_s * row.whole("arena_round", 0, MAX_COUNT)
        after = read_dependencies(row)
        yield _TimedRow(row, submit_s, time_s, after)
        name = row.get("job_id")
        names.add(name)
        waiting += [(row, dependency.job) for dependency in after]
        if row.ok and name in lines and not options.screened:
            row.wrong("job_id", f"must be unique; line {lines[name]} has the same")
        if row.ok:
            lines.setdefault(name, row.line)
    for row, name in waiting if options.limit is None else ():
        if name not in names:
            row.wrong(AFTER_COLUMN, f"must name jobs of the file; it has no {name}")


def _first_s(times_s: list[float], header: tuple[str, ...], options: TraceOptions) -> float:
    """Return the time that counts as 0: round 0, or the first submission."""
    if options.round_s is not None and "arena_round" in header:
        return 0.0
    return min(times_s, default=0.0)


def _spec(timed: _TimedRow, options: TraceOptions) -> JobSpec:
    row = timed.row
    exact = EXACT_ITERATIONS_COLUMN in row.fields
    minimum = 0 if options.screened else 1
    iterations = row.whole(
        EXACT_ITERATIONS_COLUMN if exact else "num_iterations", minimum, MAX_ITERATIONS
    )
    if not exact:
        iterations = max(min(1, iterations), iterations // options.iteration_divisor)
    workload = Workload(
        model=row.name("model"),
        params=row.name("params"),
        global_batch=row.whole("global_batch", 1, MAX_COUNT),
    )
    return _request(timed, workload, iterations)


def _request(timed: _TimedRow, workload: Workload, iterations: int) -> JobSpec:
    row = timed.row
    plan = row.name("plan", optional=True)
    return JobSpec(
        name=row.name("job_id"),
        workload=workload,
        iterations=iterations,
        requested_gpus=row.whole("num_gpus", 1, 100_000),
        requested_gpu_type=row.gpu_type("gpu_type", optional=True),
        tenant=row.name("tenant", optional=True),
        guaranteed=row.choice("guaranteed", ("0", "1"), default="0") == "1",
        deadline_s=_deadline_s(row, timed.submit_s),
        submitted_plan=plan,
        labels={PLAN_LABEL: plan} if plan else {},
        after=timed.after,
    )


def _deadline_s(row: CsvRow, submit_s: float) -> float:
    """Return the seconds from submission to the deadline, or inf if the field is empty."""
    if not row.get("deadline_s"):
        return math.inf
    after_s = row.decimal("deadline_s", -MAX_TIME_S, MAX_TIME_S) - submit_s
    if row.ok and after_s <= 0:
        row.wrong("deadline_s", "must be later than submit_time_s, or empty")
    return after_s
