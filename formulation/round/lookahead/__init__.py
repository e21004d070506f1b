"""Deadlines over several rounds: slots of time, options of jobs, and their schedules.

Equations (22) to (29) of ``docs/mathematics.md``. Slots are a grid of absolute time. It is fine
near now and doubles with the distance. A later grid contains every boundary that an earlier one had
beyond it, so a promised schedule can always be expressed in the slots of a later round.
"""

from tessera.formulation.round.lookahead.grid import slot_boundaries, slot_spacing
from tessera.formulation.round.lookahead.plan import (
    WORK_TOLERANCE,
    WORK_UNITS,
    Lookahead,
    Picks,
    all_trained_samples,
    are_allowed,
    picks_of,
    resource_usage,
    segments_of,
)
from tessera.formulation.round.lookahead.reservations import rates_if_kept, reserve_columns
from tessera.formulation.round.lookahead.statement import (
    look_ahead,
    may_be_scattered,
    without_reserve,
)

__all__ = [
    "WORK_TOLERANCE",
    "WORK_UNITS",
    "Lookahead",
    "Picks",
    "all_trained_samples",
    "are_allowed",
    "look_ahead",
    "may_be_scattered",
    "picks_of",
    "rates_if_kept",
    "reserve_columns",
    "resource_usage",
    "segments_of",
    "slot_boundaries",
    "slot_spacing",
    "without_reserve",
]
