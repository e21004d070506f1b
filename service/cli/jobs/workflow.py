"""Options and views for jobs that wait for others, and for arrays of jobs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import typer

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.arrays import ArrayRange
from tessera.service.cli.names import full_name, short_name
from tessera.v1 import jobs_pb2

_ARRAY: Final = re.compile(r"(\d{1,10})-(\d{1,10})(?::(\d{1,10}))?(?:%(\d{1,9}))?")
_CONDITIONS: Final = {
    "succeeded": jobs_pb2.Dependency.SUCCEEDED,
    "ended": jobs_pb2.Dependency.ENDED,
    "failed": jobs_pb2.Dependency.FAILED,
}
_CONDITION_WORDS: Final = {number: word for word, number in _CONDITIONS.items()}

After = Annotated[
    list[str] | None,
    typer.Option(
        metavar="JOB[:ended|:failed]",
        help="Job or array that must have succeeded, ended or failed before this job starts. If it ends"
        " otherwise, this job is rejected. Default: succeeded. Repeatable.",
    ),
]
Array = Annotated[
    str,
    typer.Option(
        metavar="FIRST-LAST[:STEP][%LIMIT]",
        help="Submit one job for each index, e.g. 0-99:2%8 for 50 jobs of which at most 8 run at the same"
        " time. Each job finds its index in TESSERA_ARRAY_INDEX.",
    ),
]


def parse_after(option: str, texts: Sequence[str], cluster: str) -> list[jobs_pb2.Dependency]:
    """Return the dependencies that texts like ``JOB:ended`` name. Raises InvalidInput."""
    found = []
    for text in texts:
        job, has_condition, condition = text.partition(":")
        if has_condition and condition not in _CONDITIONS:
            raise InvalidInput(
                option, f"{text!r} must be a job, or JOB:{', JOB:'.join(_CONDITIONS)}"
            )
        found.append(
            jobs_pb2.Dependency(
                job=full_name(cluster, "jobs", job),
                condition=_CONDITIONS[condition or "succeeded"],
            )
        )
    return found


def parse_array(option: str, text: str) -> jobs_pb2.ArrayIndices:
    """Return the indices in a text like ``0-99:2%8``. Raises InvalidInput."""
    match = _ARRAY.fullmatch(text)
    if match is None:
        raise InvalidInput(option, f"{text[:80]!r} must be FIRST-LAST[:STEP][%LIMIT], e.g. 0-99%8")
    first, last, step, limit = (None if part is None else int(part) for part in match.groups())
    if step == 0 or limit == 0:
        raise InvalidInput(option, "a step and a limit must be at least 1; leave it out for none")
    try:
        found = ArrayRange(first=first or 0, last=last or 0, step=step or 1, max_running=limit or 0)
    except InvalidInput as wrong:
        raise InvalidInput(option, wrong.problem) from wrong
    return jobs_pb2.ArrayIndices(
        first=found.first, last=found.last, step=found.step, max_running=found.max_running
    )


def after_text(job: jobs_pb2.Job) -> str:
    """Return the jobs that a job waits for or waited for, in words."""
    return "; ".join(
        f"{short_name(d.job)} must have {_CONDITION_WORDS[d.condition]}"
        f" ({'met' if d.met else d.state})"
        for d in job.after
    )


def array_text(job: jobs_pb2.Job) -> str:
    """Return the place of a job in its array, in words, or "" for a single job."""
    if not job.HasField("array"):
        return ""
    limit = f", at most {job.array.max_running} run" if job.array.max_running else ""
    return f"index {job.array.index} of {short_name(job.array.array)}, {job.array.size} jobs{limit}"


@dataclass(frozen=True, slots=True)
class FoldedJobs:
    """A list of jobs in which each array is one line.

    ``states`` has the numbers of an array's jobs by state in words, by the name of the line's job.
    """

    jobs: list[jobs_pb2.Job]
    states: dict[str, str]


def fold_arrays(jobs: Sequence[jobs_pb2.Job]) -> FoldedJobs:
    """Return a list of jobs in which one line stands for the jobs of an array that it has.

    The line has what they share, the iterations of all, and the age of the first.
    """
    members: dict[str, list[jobs_pb2.Job]] = {}
    for job in jobs:
        members.setdefault(job.array.array or job.name, []).append(job)
    states = {}
    lines = []
    for name, own in members.items():
        if name != own[0].name:
            counts = Counter(jobs_pb2.JobState.Name(job.state) for job in own)
            states[name] = ", ".join(f"{count} {state}" for state, count in counts.items())
        lines.append(own[0] if name == own[0].name else _folded(name, own))
    return FoldedJobs(lines, states)


def _folded(name: str, members: Sequence[jobs_pb2.Job]) -> jobs_pb2.Job:
    line = jobs_pb2.Job()
    line.CopyFrom(members[0])
    for part in ("allocation", "forecast", "reason", "training"):
        line.ClearField(part)
    line.name = name
    line.iterations = sum(job.iterations for job in members)
    line.iterations_done = sum(job.iterations_done for job in members)
    return line
