"""Traces: jobs and when they arrive, from a CSV file (format: README.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from formulation.errors import InvalidInput
from formulation.resources import JobSpec
from formulation.snapshot import Workload
from service.importing.csvfile import Mistakes, Row, decoded, rows
from service.importing.profiles import MAX_COUNT

REQUIRED = (
    "job_id", "submit_time_s", "model", "params", "global_batch", "num_iterations", "num_gpus",
)  # fmt: skip
OPTIONAL = ("arena_round", "gpu_type", "deadline_s")
MAX_ITERATIONS = 10**12
MAX_TIME_S = 1e12


class Arrival(NamedTuple):
    """A job and when it arrives, in seconds since the trace began.

    The spec's ``deadline_s`` counts from the arrival: whoever submits it adds the time of submission.
    """

    arrival_s: float
    spec: JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """How a trace is read. Defaults follow the Arena artifact's simulator."""

    iteration_divisor: int = 5
    """The artifact divides the trace's iterations by 5 (its generator had multiplied them)."""
    round_s: float | None = 300.0
    """Jobs arrive at this many seconds times ``arena_round``, where that column is present. None: at
    ``submit_time_s``, less the least of all."""
    limit: int | None = None
    """Read only the first so many rows."""

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
    """Read a file; the options are those of ``TraceOptions``. Raises InvalidInput and OSError."""
    options = TraceOptions(iteration_divisor=iteration_divisor, round_s=round_s, limit=limit)
    return parse_trace(path.read_bytes(), path.name, options)


def parse_trace(data: bytes, file: str, options: TraceOptions | None = None) -> list[Arrival]:
    """Return the jobs by arrival; jobs that arrive together stay in the file's order.

    Raises:
        InvalidInput: the first 20 mistakes, one a line.
    """
    options = options or TraceOptions()
    mistakes = Mistakes(file)
    found: list[tuple[float, JobSpec]] = []
    lines: dict[str, int] = {}
    by_round = False
    every = rows(decoded(data, file), mistakes, REQUIRED, OPTIONAL)
    for row in islice(every, options.limit):
        submit_s = time_s = row.decimal("submit_time_s", -MAX_TIME_S, MAX_TIME_S)
        if options.round_s is not None and "arena_round" in row.fields:
            by_round, time_s = True, options.round_s * row.whole("arena_round", 0, MAX_COUNT)
        spec = _spec(row, submit_s, options.iteration_divisor)
        if not row.ok:
            continue
        if spec.name in lines:
            row.wrong("job_id", f"must be unique; line {lines[spec.name]} has it too")
        lines.setdefault(spec.name, row.line)
        found.append((time_s, spec))
    mistakes.check()
    first_s = 0.0 if by_round else min((time_s for time_s, _ in found), default=0.0)
    return sorted((Arrival(t - first_s, spec) for t, spec in found), key=lambda a: a.arrival_s)


def _spec(row: Row, submit_s: float, iteration_divisor: int) -> JobSpec:
    iterations = row.whole("num_iterations", 1, MAX_ITERATIONS)
    return JobSpec(
        name=row.name("job_id"),
        workload=Workload(
            model=row.name("model"), params=row.name("params"),
            global_batch=row.whole("global_batch", 1, MAX_COUNT),
        ),
        iterations=max(1, iterations // iteration_divisor),
        requested_gpus=row.whole("num_gpus", 1, 100_000),
        requested_type=row.gpu_type("gpu_type", optional=True),
        deadline_s=_deadline_s(row, submit_s),
    )  # fmt: skip


def _deadline_s(row: Row, submit_s: float) -> float:
    """Return seconds from submission to the deadline; inf where the field is empty."""
    if not row.get("deadline_s"):
        return math.inf
    after_s = row.decimal("deadline_s", -MAX_TIME_S, MAX_TIME_S) - submit_s
    if row.ok and after_s <= 0:
        row.wrong("deadline_s", "must be later than submit_time_s, or empty")
    return after_s
