"""A solution to a problem: at most one column for each job, with objective and proven bound."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from tessera.formulation.answer.certificates import Certificate
from tessera.formulation.base.tables import Floats, Ints, freeze_array


class SolveStatus(StrEnum):
    """The state of a solver's answer. INFEASIBLE and UNKNOWN never mean "run no job"."""

    OPTIMAL = "optimal"  # the answer is proven best
    FEASIBLE = "feasible"  # there is an answer, not proven best
    INFEASIBLE = "infeasible"  # proven: the must-run jobs do not fit together
    UNKNOWN = "unknown"  # there is no answer within the budget


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAnswer:
    """The answer of a stage that a clock ended, so that only a record can repeat it.

    ``changes`` has (job, column) where it differs from the best answer before the stage; -1 is
    waiting. ``bound`` is what the stage proved.
    """

    stage: str
    changes: tuple[tuple[int, int], ...]
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solution:
    """A choice of at most one column for each job.

    ``objective`` and ``bound`` are in the problem's integers. ``bound`` is never below the optimum.
    ``choice`` is int64[jobs], a column or -1. It is -1 everywhere if ``status`` is INFEASIBLE or
    UNKNOWN.

    ``prices`` is float64[rows], the shadow price of one unit of each row in problem integers (LP
    duals). It is empty if they are not known. ``work`` is solver name -> deterministic work at
    which the solver stopped, so that the run can be repeated. ``recorded`` has the answers of stages
    that a clock ended; a repetition uses them instead of running these stages.

    ``proved_by`` names what proves ``bound``: "prices", "branching" or "knapsacks" with a
    certificate; "cp-sat", where it is the word of that stage; "" for a trivial bound. The
    certificate of a bound that is a stage's word proves a larger one: as much as can be checked.

    ``failures`` says which stages failed, and why. Their answers and bounds do not count.
    """

    status: SolveStatus
    choice: Ints
    objective: int
    bound: float
    solver: str
    prices: Floats = field(default_factory=lambda: np.zeros(0))
    seed: int = 0
    work: tuple[tuple[str, float], ...] = ()
    recorded: tuple[RecordedAnswer, ...] = ()
    proved_by: str = ""
    certificate: Certificate | None = None
    failures: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Freeze the arrays."""
        for name, dtype in (("choice", np.int64), ("prices", np.float64)):
            object.__setattr__(self, name, freeze_array(getattr(self, name), dtype))

    @property
    def has_answer(self) -> bool:
        """Return whether ``choice`` is an answer at all."""
        return self.status in (SolveStatus.OPTIMAL, SolveStatus.FEASIBLE)

    @property
    def is_certified(self) -> bool:
        """Return whether the certificate proves ``bound``, and not only a larger one."""
        return self.certificate is not None and self.certificate.bound <= self.bound

    @property
    def gap(self) -> float:
        """Return (bound - objective) / |bound|. 0 means proven optimal, inf that there is no answer."""
        if not self.has_answer:
            return float("inf")
        return max(0.0, self.bound - self.objective) / max(abs(self.bound), 1.0)
