"""Deadlines over several rounds: slots of time, options of jobs, and a checker of schedules.

Equations (22) to (29) of ``docs/mathematics.md``. Slots are a grid of absolute time. It is fine
near now and doubles with the distance. A later grid contains every boundary that an earlier one had
beyond it, so a promised schedule can always be expressed in the slots of a later round.
"""

from tessera.formulation.lookahead.check import MILLIONTH, schedule_violations
from tessera.formulation.lookahead.grid import boundaries, spacing
from tessera.formulation.lookahead.kept import reserve_columns, spare_gpus, staying
from tessera.formulation.lookahead.plan import (
    NEED,
    Lookahead,
    Picks,
    join_legs,
    legs_of,
    picks_of,
    samples,
    usage,
    usage_of,
)
from tessera.formulation.lookahead.statement import look_ahead, may_be_scattered, without_reserve

__all__ = [
    "MILLIONTH",
    "NEED",
    "Lookahead",
    "Picks",
    "boundaries",
    "join_legs",
    "legs_of",
    "look_ahead",
    "may_be_scattered",
    "picks_of",
    "reserve_columns",
    "samples",
    "schedule_violations",
    "spacing",
    "spare_gpus",
    "staying",
    "usage",
    "usage_of",
    "without_reserve",
]
