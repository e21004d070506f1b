"""Deadlines over several rounds: slots of time, options of jobs, and a checker of schedules.

Equations (22) to (29) of ``formulation/README.md``. Slots are a grid of absolute time. It is fine
near now and doubles with the distance. A later grid contains every boundary that an earlier one had
beyond it, so a promised schedule can always be expressed in the slots of a later round.
"""

from tessera.formulation.lookahead.check import MILLIONTH, schedule_violations
from tessera.formulation.lookahead.grid import boundaries, spacing
from tessera.formulation.lookahead.kept import reserved, spare_gpus, staying
from tessera.formulation.lookahead.plan import (
    NEED,
    Lookahead,
    Picks,
    joined,
    legs_of,
    picks_of,
    samples,
    usage,
    usage_of,
)
from tessera.formulation.lookahead.statement import look_ahead, scattered, without_reserve

__all__ = [
    "MILLIONTH",
    "NEED",
    "Lookahead",
    "Picks",
    "boundaries",
    "joined",
    "legs_of",
    "look_ahead",
    "picks_of",
    "reserved",
    "samples",
    "scattered",
    "schedule_violations",
    "spacing",
    "spare_gpus",
    "staying",
    "usage",
    "usage_of",
    "without_reserve",
]
