"""Mean periods of jobs that are served last, in seconds."""

from __future__ import annotations

import numpy as np

from tessera.formulation.base.tables import Floats
from tessera.solvers.network import factors
from tessera.solvers.network.factors import AloneTimes


def low_periods_s(
    high: AloneTimes, low: AloneTimes, speed: Floats, *, phase_s: Floats | float = 0.0
) -> tuple[Floats, Floats]:
    """Return the mean period of ``low`` when ``high`` is served first, and its error; seconds.

    The period is inf if ``low`` starves. ``phase_s`` is when its first iteration begins after
    ``high`` begins to send; the period does not depend on it. Times are rounded to a tick, a ninth
    of a nanosecond. If ``speed`` is 0 and a phase recurs within ``MOST_STEPS`` iterations, there is
    no other error.
    """
    size = factors._tick_s(high, low)
    values = [
        *factors._parts(high),
        *factors._parts(low),
        np.broadcast_to(phase_s, high.comm_s.shape),
    ]
    ticks = [np.rint(each / size) for each in values]
    period, slack = factors._low(ticks[:3], ticks[3:6], speed, ticks[6])
    return period * size, slack * size
