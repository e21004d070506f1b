"""What admission by look-ahead decided before a round was stated (``tessera.formulation.lookahead``)."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from tessera.formulation.snapshot import Legs
from tessera.formulation.tables import Bools, Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Admission:
    """Whose deadlines are promised, by which schedule, and what is left to say to the others.

    ``admitted`` is bool[jobs]: promised now or earlier, and still promised. ``legs`` is the certificate: a
    schedule that meets all of those deadlines together. ``least_work`` is float64[jobs], the samples by
    ``until_s`` with which the legs after it still suffice, whatever Cell trained them: a round that trains
    as many may forget the legs until then. ``earliest_s`` is float64[jobs]: for a refused job the earliest
    deadline that would have been met, seconds since 1970; inf: not known; NaN: not refused. ``given_up`` are
    jobs that were promised and cannot be served any more, because nodes were lost. ``proven``: no schedule
    on these slots admits more weight. ``work`` is the limit of deterministic seconds that the search ran
    under; 0: it did not run, or a clock cut it short and its answer was dropped. ``reserve_s`` is
    float64[jobs]: what certificates keep of each job's time for a move that may become necessary; and
    ``bare_work`` is ``least_work`` without it, as such a move may spend it (None: nothing is kept).
    ``binding``: who is new in ``admitted`` is promised its deadline; False: planned for, this round. The legs
    of such jobs go from one's end to another's start, not from slot to slot, and ``least_work`` only says
    that a job runs now.
    """

    admitted: Bools
    legs: Legs
    least_work: Floats
    until_s: float
    earliest_s: Floats
    given_up: frozenset[int] = frozenset()
    proven: bool = False
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

    def told(self, promised: Bools) -> Admission:
        """Return what jobs are told: one that does not bind leaves ``promised`` (bool[jobs]).

        The legs stay: they say when the plan needs the next round.
        """
        return self if self.binding else replace(self, admitted=self.admitted & promised)

    def without(self, jobs: frozenset[int]) -> Admission:
        """Return the admission in which ``jobs`` are promised nothing."""
        if not jobs:
            return self
        admitted = np.array(self.admitted)
        admitted[list(jobs)] = False
        keep = admitted[self.legs.job]
        legs = Legs(**{f.name: getattr(self.legs, f.name)[keep] for f in fields(self.legs)})
        return replace(self, admitted=admitted, legs=legs)
