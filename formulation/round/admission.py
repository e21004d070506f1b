"""The result of admission by look-ahead, which runs before a round is stated.

See ``tessera.formulation.round.lookahead``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from tessera.formulation.base.tables import Bools, Floats
from tessera.formulation.state.last_round import ScheduleSegments


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Admission:
    """Deadlines that are promised, the schedule that proves them, and advice for other jobs.

    ``admitted`` is bool[jobs]: jobs whose deadline was promised now or earlier, and still is.
    ``segments`` is the certificate: a schedule that meets all of those deadlines together.

    ``least_work`` is float64[jobs]: the samples that each job needs by ``until_s`` for the segments
    after it to suffice, whatever Cell trained them. A round that trains at least these may forget
    the segments until then.

    ``earliest_s`` is float64[jobs]: for a refused job the earliest deadline that would have been
    met, in seconds since 1970. It is inf if that is not known, and NaN if the job was not refused.
    ``given_up`` are jobs that were promised their deadline and can no longer be served, because
    nodes were lost.

    ``bound`` is an upper bound on the weight of the new jobs that schedules can admit while they keep
    the promises that are kept here; it is inf if nothing is known. ``proven`` is true if no schedule
    on these slots admits more weight, of promises and then of new jobs. ``work`` is the limit in
    deterministic seconds that the search ran under. If it is 0, the search did not run, or a clock
    cut it short and its answer was dropped.

    ``reserve_s`` is float64[jobs]: the part of each job's time that certificates keep for a move
    that may become necessary. ``bare_work`` is ``least_work`` without this reserve, as such a move
    may spend it. If it is None, nothing is kept.

    If ``binding`` is true, the jobs that are new in ``admitted`` are promised their deadline. If it
    is false, they are only planned for in this round. The segments of such jobs then go from one job's
    end to another's start, not from slot to slot, and ``least_work`` only says that a job runs now.
    """

    admitted: Bools
    schedule_segments: ScheduleSegments
    least_work: Floats
    until_s: float
    earliest_s: Floats
    given_up: frozenset[int] = frozenset()
    proven: bool = False
    bound: float = math.inf
    work: float = 0.0
    reserve_s: Floats | None = None
    bare_work: Floats | None = None
    binding: bool = True

    def __post_init__(self) -> None:
        """Freeze the arrays."""
        for name, dtype in (
            ("admitted", np.bool_),
            ("least_work", np.float64),
            ("earliest_s", np.float64),
        ):
            array = np.array(getattr(self, name), dtype=dtype, copy=None, ndmin=1).view()
            array.flags.writeable = False
            object.__setattr__(self, name, array)

    def as_seen_by_jobs(self, promised: Bools) -> Admission:
        """Return the admission in the form that jobs see.

        If it does not bind, only jobs in ``promised`` (bool[jobs]) stay admitted. The segments stay,
        because they say when the plan needs the next round.
        """
        return self if self.binding else replace(self, admitted=self.admitted & promised)

    def without(self, jobs: frozenset[int]) -> Admission:
        """Return the admission in which ``jobs`` are promised nothing."""
        if not jobs:
            return self
        admitted = np.array(self.admitted)
        admitted[list(jobs)] = False
        return replace(
            self,
            admitted=admitted,
            schedule_segments=self.schedule_segments.at(admitted[self.schedule_segments.job]),
        )
