"""The record of a round's foresight: answers that were rolled forward, and the one that was taken."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

OWN_ANSWER: Final = "objective"
"""Name of the answer that is best by the round's own objective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledAnswer:
    """An answer of a round, with what became of it when it was rolled forward.

    ``name`` says where the answer comes from, e.g. ``jct``. Several names may lead to the same
    answer, which then has the first. ``completion_s`` is the weighted mean time from now to the end
    of the jobs that are here, with each restart of a running job counted three times (Eq. 60).
    ``objective`` is the answer's value by the round's last goal, in its unit.
    """

    name: str
    completion_s: float
    objective: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Foresight:
    """The answers that a round compared, the round's own first.

    ``chosen`` is the name of the one that was taken. ``rollouts`` is the number of answers that were
    rolled forward, changes of the best one included. ``sacrifice`` is the value that the round gave
    up by its own objective, in its unit; it is 0 if the round's own answer was taken.
    """

    answers: tuple[RolledAnswer, ...]
    chosen: str
    rollouts: int
    sacrifice: float = 0.0

    @property
    def gain(self) -> float:
        """Return the share of the completion time of the round's own answer that was saved."""
        own_s = self.answers[0].completion_s
        best_s = min(one.completion_s for one in self.answers)
        return 1.0 - best_s / own_s if own_s > 0 and math.isfinite(own_s) else 0.0
