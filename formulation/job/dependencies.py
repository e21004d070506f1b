"""Dependencies: the jobs that must end before another job may start.

Agents import this module with the records of jobs, so it needs only the standard library.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from tessera.formulation.base.texts import Name, Text, fill, join
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.job.reasons import Reason, ReasonCode

MAX_DEPENDENCIES: Final = 100
"""The largest number of jobs and arrays that a job may name."""

MAX_NAMED: Final = 5
"""The number of jobs that a reason names. It counts all of them."""


class Condition(StrEnum):
    """The way in which a job must end. An array has succeeded if all of its members have."""

    SUCCEEDED = "succeeded"
    ENDED = "ended"
    FAILED = "failed"  # it ended without success: it failed, or it was cancelled or rejected

    def is_met(self, *, succeeded: bool) -> bool:
        """Return whether an end, with success or without, meets the condition."""
        return self is Condition.ENDED or (self is Condition.SUCCEEDED) == succeeded


CONDITIONS: Final[tuple[Condition, ...]] = tuple(Condition)
"""The condition of each code in a snapshot's table of dependencies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependency:
    """A job, or all members of an array, that must end before another job may start."""

    job: str  # the id of the job or of the array
    condition: Condition = Condition.SUCCEEDED


@dataclass(frozen=True, slots=True, kw_only=True)
class DependencyRecord:
    """A dependency as stored. A met one stays met, even if its job is deleted later."""

    job: str
    condition: Condition
    tenant: str  # of the job that is named
    met: bool
    state: str = ""
    """The state of the job, or how many members of the array have ended. "" if it was deleted."""

    @property
    def job_name(self) -> Name:
        """Return the name of the job or array, for callers that see its tenant."""
        return Name(self.job, self.tenant)


class _DependentJob(Protocol):
    """A job with its dependencies."""

    @property
    def name(self) -> str: ...
    @property
    def after(self) -> tuple[Dependency, ...]: ...


def find_circle(jobs: Iterable[_DependentJob], arrays: Mapping[str, str]) -> tuple[str, ...]:
    """Return the ids of jobs of which each waits for the next, and the last for the first.

    Return () if there is no such circle. ``arrays`` has the array of each member among ``jobs``. A
    circle names an array in place of its members. Dependencies on other jobs are ignored.
    """
    waits: dict[str, list[str]] = {}
    for job in jobs:
        node = arrays.get(job.name, job.name)
        waits.setdefault(node, []).extend(arrays.get(d.job, d.job) for d in job.after)
    state: dict[str, bool] = {}  # False while it is on the path, True when it is done
    for root in waits:
        path, pending = [root], [iter(dict.fromkeys(waits[root]))]
        if root in state:
            continue
        state[root] = False
        while path:
            following = next(pending[-1], None)
            if following is None:
                state[path.pop()] = True
                pending.pop()
            elif state.get(following) is False:
                return tuple(path[path.index(following) :])
            elif following in waits and following not in state:
                state[following] = False
                path.append(following)
                pending.append(iter(dict.fromkeys(waits[following])))
    return ()


def waiting_reason(unmet: Sequence[DependencyRecord], count: int = 0) -> Reason:
    """Return the reason for a job that waits for others.

    ``unmet`` are its dependencies that are not met yet, and ``count`` is how many there are if not
    all of them are given.
    """
    total = max(count, len(unmet))
    named = [
        fill("{job} ({state})" if d.state else "{job}", job=d.job_name, state=d.state)
        for d in unmet[:MAX_NAMED]
    ]
    if total > len(named):
        named.append(f"{total - len(named):,} more" if named else f"{total:,} other jobs")
    held = [d.job_name for d in unmet if d.state in (JobState.HELD, JobState.HOLDING)]
    step: Text = "wait until they have ended, or cancel the job and submit it without them"
    if held:
        step = fill("release the job that it waits for: `tessera release {job}`", job=held[0])
    return Reason(
        code=ReasonCode.WAITS_FOR_JOBS,
        message=fill("the job waits for {names}", names=join(", ", named)),
        next_step=step,
        evidence=tuple(
            (d.job_name, f"{d.state or 'unknown'}, must have {d.condition}") for d in unmet
        ),
    )


def broken_reason(job: str, tenant: str, condition: Condition) -> Reason:
    """Return the reason for a job that never starts, because ``job`` did not end as it must."""
    name = Name(job, tenant)
    ended = "succeeded" if condition is Condition.FAILED else "ended without success"
    return Reason(
        code=ReasonCode.DEPENDENCY_BROKEN,
        message=fill(
            "the job was to start after {job} had {condition}, but {job} {ended}",
            job=name,
            condition=condition,
            ended=ended,
        ),
        next_step=fill("see why with `tessera job {job}`, then submit both again", job=name),
        evidence=((name, ended),),
    )
