"""Slots of time, fine near now and doubling with the distance."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from tessera.formulation.base.moments import SAME_S
from tessera.formulation.base.tables import Floats

SLOTS_PER_DISTANCE: Final = 4
"""A slot is at most a quarter as long as the distance to its end, so whole slots waste little."""
MAX_DOUBLINGS: Final = 12
"""The horizon is 32,768 rounds: 113 days of 300 s, in 57 slots."""


def slot_spacing(distance: float) -> int:
    """Return the rounds between boundaries that are ``distance`` rounds away (Eq. 22)."""
    return (
        1
        if distance < 2 * SLOTS_PER_DISTANCE
        else 2 ** int(math.log2(distance / SLOTS_PER_DISTANCE))
    )


def slot_boundaries(now_s: float, until_s: float, round_s: float) -> Floats:
    """Return now and the slot boundaries after it, up to the first at or beyond ``until_s``.

    A multiple b of the round is a boundary if the spacing at its distance divides it. As b comes
    nearer, the spacing only shrinks, to divisors of itself, so b stays a boundary
    (``test_lookahead`` proves it by cases). There is at least one slot, and none ends beyond the
    horizon.
    """
    now = now_s / round_s
    b = math.floor(now) + 1
    if b * round_s - now_s < SAME_S:
        b += 1
    edges, horizon = [now_s, b * round_s], SLOTS_PER_DISTANCE * 2.0 ** (MAX_DOUBLINGS + 1)
    while edges[-1] < until_s:
        step = slot_spacing(b - now)
        b = (b // step + 1) * step
        while b % slot_spacing(b - now):
            b += step
        if b - now > horizon:
            break
        edges.append(b * round_s)
    return np.array(edges)
