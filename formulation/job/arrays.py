"""Arrays: jobs that differ only in an index, submitted and changed together.

Agents import this module with the records of jobs, so it needs only the standard library.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.lifecycle import TERMINAL, JobState

MAX_MEMBERS: Final = 10_000
"""The largest number of members of an array."""

MAX_INDEX: Final = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayMember:
    """The place of a job in its array."""

    array: str  # its id
    index: int
    size: int  # the number of members that were submitted
    max_running: int = 0  # the most members that may run at the same time; 0 without a limit

    @property
    def name(self) -> str:
        """Return the id of the member's job."""
        return f"{self.array}.{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayRange:
    """The indices of an array: ``first``, ``first + step``, ... up to ``last``."""

    first: int
    last: int
    step: int = 1
    max_running: int = 0  # the most members that may run at the same time; 0 without a limit

    def __post_init__(self) -> None:
        """Check the numbers, without expanding them. Raises InvalidInput."""
        if not 0 <= self.first <= self.last <= MAX_INDEX:
            raise InvalidInput(
                "array", f"must be FIRST-LAST with 0 <= FIRST <= LAST <= {MAX_INDEX:,}"
            )
        if self.step < 1:
            raise InvalidInput("array", "must have a step of at least 1")
        if self.max_running < 0:
            raise InvalidInput("array", "must have a limit of at least 1, or 0 for none")
        if self.size > MAX_MEMBERS:
            raise InvalidInput(
                "array",
                f"has {self.size:,} members, but an array may have at most {MAX_MEMBERS:,};"
                " submit several arrays",
            )

    @property
    def size(self) -> int:
        """Return the number of members."""
        return (self.last - self.first) // self.step + 1

    def members(self, array: str) -> list[ArrayMember]:
        """Return the members of the array with this id, in order of their indices."""
        return [
            ArrayMember(array=array, index=index, size=self.size, max_running=self.max_running)
            for index in range(self.first, self.last + 1, self.step)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayRecord:
    """An array as stored."""

    cluster: str
    name: str
    tenant: str
    size: int
    max_running: int
    states: Mapping[JobState, int] = field(default_factory=Counter)
    """The number of its jobs in each state. Jobs that were deleted after their end are left out."""

    @property
    def live(self) -> int:
        """Return how many of its jobs have not ended."""
        return sum(count for state, count in self.states.items() if state not in TERMINAL)
