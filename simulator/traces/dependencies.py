"""Dependencies between the jobs of a trace: read, written, and kept right when jobs are left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, Self, TypeVar

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.dependencies import (
    CONDITIONS,
    MAX_DEPENDENCIES,
    Condition,
    Dependency,
    find_circle,
)
from tessera.formulation.records.jobs import JobSpec
from tessera.simulator.traces.csvfile import NAME, CsvRow

AFTER_COLUMN = "after"
"""A column with the jobs that a job waits for, e.g. ``prepare clean:ended``."""


class _TracedJob(Protocol):
    """A job of a trace: an ``Arrival`` or a ``DurationJob``."""

    @property
    def spec(self) -> JobSpec: ...

    def _replace(self, *, spec: JobSpec) -> Self: ...


_T = TypeVar("_T", bound=_TracedJob)


def read_dependencies(row: CsvRow) -> tuple[Dependency, ...]:
    """Return the dependencies of a row's job. A mistake is recorded in the row."""
    found: dict[str, Dependency] = {}
    texts = row.get(AFTER_COLUMN).split()
    for text in texts:
        job, has_condition, condition = text.partition(":")
        if not NAME.fullmatch(job) or (has_condition and condition not in CONDITIONS):
            row.wrong(
                AFTER_COLUMN,
                f"must be jobs with blanks between them, each JOB or JOB:{', JOB:'.join(CONDITIONS)}",
            )
            return ()
        found[job] = Dependency(job=job, condition=Condition(condition or "succeeded"))
    if not len(found) == len(texts) <= MAX_DEPENDENCIES:
        row.wrong(AFTER_COLUMN, f"must name at most {MAX_DEPENDENCIES} jobs, each only once")
    return tuple(found.values())


def write_dependencies(spec: JobSpec) -> str:
    """Return the text that ``read_dependencies`` reads."""
    return " ".join(
        d.job if d.condition is Condition.SUCCEEDED else f"{d.job}:{d.condition}"
        for d in spec.after
    )


def require_no_circle(file: str, jobs: Sequence[_TracedJob]) -> None:
    """Refuse jobs that wait for each other. Raises InvalidInput."""
    if circle := find_circle((job.spec for job in jobs if job.spec.after), {}):
        raise InvalidInput("", f"{file}: jobs wait for each other: {', '.join(circle)}")


def drop_absent_dependencies(jobs: Sequence[_T]) -> list[_T]:
    """Return the jobs without their dependencies on jobs that are not among them.

    These were left out of the trace, so nothing could ever meet the dependencies.
    """
    names = {job.spec.name for job in jobs}
    kept = []
    for job in jobs:
        after = tuple(d for d in job.spec.after if d.job in names)
        same = len(after) == len(job.spec.after)
        kept.append(job if same else job._replace(spec=replace(job.spec, after=after)))
    return kept


def order_by_dependencies(jobs: Sequence[_T]) -> list[_T]:
    """Return the jobs in their order, but each behind those that it waits for.

    They must have distinct names, no circle, and no dependencies on other jobs.
    """
    by_name = {job.spec.name: job for job in jobs}
    placed: dict[str, _T] = {}
    for first in jobs:
        pending = [first]
        while pending:
            job = pending[-1]
            before = [by_name[d.job] for d in job.spec.after if d.job not in placed]
            pending.extend(before)
            if not before:
                placed[pending.pop().spec.name] = job
    return list(placed.values())
