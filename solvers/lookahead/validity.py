"""The check of schedules in slots, in NumPy, apart from the loops that make them."""

from __future__ import annotations

import numpy as np

from tessera.formulation.base.tables import Bools
from tessera.formulation.round.lookahead import (
    WORK_TOLERANCE,
    Lookahead,
    Picks,
    all_trained_samples,
    are_allowed,
    resource_usage,
)
from tessera.solvers.base import SolverFailed


def is_valid(ahead: Lookahead, picks: Picks, admitted: Bools) -> bool:
    """Return whether the schedules of ``admitted`` (bool[jobs]) meet their deadlines and fit.

    Others must have no schedule. Where steady jobs hold more than is left after a loss, nothing in
    addition may be used.
    """
    if (picks[~admitted] >= 0).any():
        return False
    short = ahead.work - all_trained_samples(ahead, picks)
    late = short > WORK_TOLERANCE * ahead.total_work
    if (admitted & (late | ~are_allowed(ahead, picks))).any():
        return False
    idle = resource_usage(ahead, np.full_like(picks, -1))
    return bool((resource_usage(ahead, picks) <= np.maximum(ahead.capacity, idle)).all())


def require_valid(ahead: Lookahead, picks: Picks, admitted: Bools) -> None:
    """Raise SolverFailed if the schedules are not valid."""
    if not is_valid(ahead, picks, admitted):
        raise SolverFailed("admission", "a schedule that it made breaks a rule")
