"""The goals of a round, in order: sums of values, and levels that compare the worst-off jobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from tessera.formulation.base.tables import Floats, Ints, freeze_array

WEIGHTED_SUM: Final = "weighted sum"
"""Unit of a sum of several objectives, whose units differ."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Linear:
    """A goal to maximize the sum of ``value`` over chosen columns. A job that waits adds 0 (Eq. 1).

    ``value`` and ``restart_price`` are int64[columns] in solver integers, ``scale`` of which are
    one unit of the objective. The restart cost is already subtracted from the value. Later goals
    may give away the share ``tolerance`` of the sum that was reached.
    """

    name: str
    unit: str
    value: Ints
    restart_price: Ints
    scale: float
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        """Freeze the arrays."""
        _freeze(self, value=np.int64, restart_price=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Levels:
    """A goal to minimize the largest level of any job, then the next largest, and so on.

    ``level`` is float64[columns]. ``waiting`` is float64[jobs], the level of a job that waits.
    Higher is worse. Users are shown ``sign * level``. Jobs without columns do not count, because
    nothing can be done for them. The first ``depth`` places of the sorted levels are settled before
    the next goal. Later goals may raise each of them by the share ``tolerance`` of its size.
    """

    name: str
    unit: str
    level: Floats
    waiting: Floats
    sign: int = 1
    depth: int = 4
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        """Freeze the arrays."""
        _freeze(self, level=np.float64, waiting=np.float64)


Goal = Linear | Levels


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalResult:
    """The result of a goal in its own unit. For levels, it is the level of the worst-off job.

    ``bound`` is the best that any answer could reach once the goals before this one are kept. It is
    above ``objective`` for sums, and below it for levels with ``sign`` 1. ``gap`` is relative; at 0
    the result is proven optimal. If ``bound_is_trivial`` is true, no solver looked for a bound. The
    bound then only says what every job would reach if it had the cluster to itself. It is valid,
    but the gap says nothing about the answer.

    ``proved_by`` names what proves the bound, as in ``Solution``, or is "levels" for a search over
    levels. ``certified`` says whether there is a certificate of it.
    """

    name: str
    unit: str
    objective: float
    bound: float
    gap: float
    bound_is_trivial: bool = False
    proved_by: str = ""
    certified: bool = False


def _freeze(goal: object, **dtypes: type[np.generic]) -> None:
    for name, dtype in dtypes.items():
        object.__setattr__(goal, name, freeze_array(getattr(goal, name), dtype))
