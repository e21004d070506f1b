"""The loops behind correction factors: pairs of jobs, played out under both orders."""

from __future__ import annotations

import math

from tessera.formulation.base.tables import Floats, Ints
from tessera.solvers.kernels.jit import compile_lazily

CLOSE = 1e-7
"""Bounds of a period that differ by no more than this share of it are close enough."""

SLIGHT = 1e-12
"""A share of a link, or of a speed, that is no larger than this counts as 0."""

MOST_TURNS = 1e9
"""A job starves if one iteration needs more than this many periods of the urgent job.

Up to this number, floats count precisely enough."""


@compile_lazily
def pair_speeds(
    first: Ints,
    second: Ints,
    link_start: Ints,
    link: Ints,
    share: Floats,
    duty: Floats,
    speed: Floats,
    weight: Floats,
) -> None:
    """Fill in how two jobs slow each other down on the links that they share, pair by pair.

    ``share`` is what an entry (job, link) takes of the link while its job sends at full speed, and
    ``duty`` what it takes on average. ``speed`` (pairs, 2) is the speed of the first (second) job
    while the other one sends and is served before it; it is 1 if the pair can fill no link.
    ``weight`` (pairs,) is the largest product of duties.
    """
    for at in range(first.size):
        a, b = link_start[first[at]], link_start[second[at]]
        end_a, end_b = link_start[first[at] + 1], link_start[second[at] + 1]
        speed[at, 0], speed[at, 1], weight[at] = 1.0, 1.0, 0.0
        while a < end_a and b < end_b:
            if link[a] < link[b]:
                a += 1
            elif link[b] < link[a]:
                b += 1
            else:
                if share[a] + share[b] > 1.0 + SLIGHT:
                    speed[at, 0] = min(speed[at, 0], max(1.0 - share[b], 0.0) / share[a])
                    speed[at, 1] = min(speed[at, 1], max(1.0 - share[a], 0.0) / share[b])
                    weight[at] = max(weight[at], duty[a] * duty[b])
                a += 1
                b += 1


@compile_lazily
def busiest_neighbors(
    link_start: Ints, link: Ints, user_start: Ints, user: Ints, traffic: Floats, found: Ints
) -> None:
    """Fill row j of ``found`` (J, R) with the jobs of most traffic on the links of job j.

    Those with most traffic come first; unused places are -1. The users of link e are
    ``user[user_start[e] : user_start[e + 1]]``, those with most traffic first.
    """
    most = found.shape[1]
    for job in range(link_start.size - 1):
        row = found[job]
        row[:] = -1
        for k in range(link_start[job], link_start[job + 1]):
            begin = user_start[link[k]]
            for u in range(begin, min(user_start[link[k] + 1], begin + most + 1)):
                other, place = user[u], most
                if other == job or (row == other).any():
                    continue
                while place > 0 and (
                    row[place - 1] < 0 or traffic[row[place - 1]] < traffic[other]
                ):
                    place -= 1
                if place < most:
                    row[place + 1 :] = row[place : most - 1].copy()
                    row[place] = other


@compile_lazily
def _sent_at(phase: float, need: float, period: float, busy: float, speed: float) -> float:
    """Return the first moment by which ``need`` is sent, from ``phase`` on. It is Z of the notes.

    The urgent job sends from 0 to ``busy`` in each ``period``; meanwhile the other job sends at
    ``speed``.
    """
    if need <= 0.0:  # there is only a delay
        return phase
    each = (period - busy) + speed * busy
    if each <= 0.0:
        return math.inf
    # Skip whole periods, then send the rest part by part.
    whole = max(math.ceil(need / each) - 1.0, 0.0)
    while whole > 0 and need - whole * each <= 0.0:
        whole -= 1.0
    while need - whole * each > each:
        whole += 1.0
    need -= whole * each
    at = phase
    start = whole * period
    while True:
        inside = at < busy
        length = (busy if inside else period) - at
        rate = speed if inside else 1.0
        if need <= rate * length:
            return start + at + need / rate
        need -= rate * length
        at += length
        if not inside:
            start += period
            at = 0.0
            if need <= SLIGHT * period:  # the rounding rest of a fractional speed
                return start


@compile_lazily
def low_periods(
    period: Floats,
    busy: Floats,
    compute: Floats,
    start: Floats,
    send: Floats,
    speed: Floats,
    phase: Floats,
    most: int,
    low: Floats,
    slack: Floats,
) -> None:
    """Fill in the mean period ``low`` of the job served last, and its largest error ``slack``.

    All times are whole numbers of ticks, as floats. The urgent job sends for ``busy`` in each
    ``period``. An iteration of the other job that begins at x ends at Phi(x) = max(x + compute, Z(x
    + start)), the lift of a monotone map of a circle of one ``period``. When a phase recurs, the
    mean is known exactly. Until then, m iterations that last between p and q periods bound it by p
    / m and q / m of a period.
    """
    for pair in range(period.size):
        turn = period[pair]
        at = phase[pair] % turn
        anchor, since, steps, power = at, 0.0, 0, 1
        least, largest = 0.0, math.inf
        low[pair], slack[pair] = math.inf, 0.0
        each = (turn - busy[pair]) + speed[pair] * busy[pair]
        if each <= 0.0 or send[pair] > MOST_TURNS * each:
            continue
        # Follow iterations until a phase recurs, or the bounds are close enough.
        for _ in range(most):
            begin = at + start[pair]
            skipped = math.floor(begin / turn) * turn
            sent = _sent_at(begin - skipped, send[pair], turn, busy[pair], speed[pair]) + skipped
            end = max(at + compute[pair], math.ceil(sent - SLIGHT * sent))
            turns = math.floor(end / turn)
            at = end - turns * turn
            since += turns
            steps += 1
            if at == anchor:
                least = since * turn / steps
                largest = least
                break
            ahead = since if at > anchor else since - 1.0
            least = max(least, ahead * turn / steps)
            largest = min(largest, (ahead + 1.0) * turn / steps)
            if largest - least <= CLOSE * least:
                break
            if steps == power:
                anchor, since, steps, power = at, 0.0, 0, 2 * power
        low[pair] = (least + largest) / 2
        slack[pair] = (largest - least) / 2
