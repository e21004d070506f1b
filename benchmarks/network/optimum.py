"""An exhaustive search for the best paths and levels of a few jobs on the fluid engine.

Jobs that share no links, directly or through other jobs, are simulated separately. A group of jobs
on the same links is simulated once, whichever choice of paths it belongs to. Five jobs with two
paths each therefore take about a thousand runs instead of 32 paths times 541 orders.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod
from typing import Final

import numpy as np

from tessera.formulation.answer.network.contention import Contention, LinkDemand, demand_of
from tessera.formulation.answer.network.plan import NetworkPlan
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.solvers.network.fluid import contending_groups, flop_under_levels
from tessera.solvers.network.swaps import compact_demand

MAX_JOBS: Final = 6
MAX_CHOICES: Final = 4_096
TOLERANCE: Final = 2e-3
"""The relative change in work that is tolerated when the window is doubled.

It must hold for a share of ``SETTLED_SHARE`` of all entries.
"""
SETTLED_SHARE: Final = 0.99
PERIODS: Final = 100
"""Iterations of the slowest job in the shortest window. A fifth as many precede it uncounted."""
MAX_DOUBLINGS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedSpan:
    """The time over which assignments are judged, after a warm-up."""

    horizon_s: float
    warm_s: float

    def doubled(self) -> JudgedSpan:
        """Return a span that is twice as long."""
        return JudgedSpan(horizon_s=2 * self.horizon_s, warm_s=2 * self.warm_s)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanSpace:
    """Every network plan of a few jobs, with the work done under each."""

    contention: Contention
    chosen: Ints  # (V, B) every choice of paths
    level: Ints  # (A, J) every way to order jobs, equals allowed; levels used are 0 to highest
    work: Floats  # (V, A) flop a second
    span: JudgedSpan
    drift: float  # the share by which work changed since a window half as long: SETTLED_SHARE's quantile

    def within(self, levels: int) -> Bools:
        """Return which assignments need at most ``levels`` levels, (A,)."""
        result: Bools = self.level.max(axis=1) < levels
        return result

    def strict(self) -> Bools:
        """Return which assignments give each job its own level, (A,)."""
        result: Bools = self.level.max(axis=1) == self.level.shape[1] - 1
        return result

    def best(self, allowed: Bools) -> tuple[int, int]:
        """Return the choice of paths and the allowed assignment, (A,), with the most work."""
        work = np.where(allowed, self.work, -np.inf)
        at = int(np.argmax(work))
        return at // work.shape[1], at % work.shape[1]

    def path(self, chosen: Ints) -> int:
        """Return the number of a choice of paths.

        Raises:
            InvalidInput: the choice is not in the space.
        """
        return _row(self.chosen, chosen, "chosen")

    def assignment(self, level: Ints) -> int:
        """Return the number of the assignment that orders jobs in the same way as these levels."""
        return _row(self.level, dense_levels(level[None])[0], "level")

    def of(self, plan: NetworkPlan) -> float:
        """Return the work of a plan in flop per second, ignoring its time shifts."""
        return float(self.work[self.path(plan.chosen), self.assignment(plan.level)])


def space_of(contention: Contention, *, tolerance: float = TOLERANCE) -> PlanSpace:
    """Return all choices of paths with all assignments of levels.

    The window is doubled until ``SETTLED_SHARE`` of all entries change by at most ``tolerance``, but at
    most ``MAX_DOUBLINGS`` times. ``drift`` is the change at the last doubling.

    Raises:
        InvalidInput: there are too many to be tried.
    """
    c = contention
    most = np.diff(c.candidate_start).tolist()
    if len(c.jobs) > MAX_JOBS or prod(most) > MAX_CHOICES:
        raise InvalidInput(
            "contention",
            f"has {len(c.jobs)} jobs and {prod(most)} choices of paths; at most"
            f" {MAX_JOBS} and {MAX_CHOICES} can be tried",
        )
    chosen = np.array(list(product(*map(range, most))), np.int64).reshape(-1, len(most))
    demands = [demand_of(c, row) for row in chosen]
    slowest_s = max(float(demand.alone_s.max()) for demand in demands)
    span = JudgedSpan(horizon_s=PERIODS * slowest_s, warm_s=PERIODS / 5 * slowest_s)
    work, drift = _works(demands, span), np.inf
    for _ in range(MAX_DOUBLINGS):
        span, before = span.doubled(), work
        work = _works(demands, span)
        drift = float(np.quantile(np.abs(work / before - 1), SETTLED_SHARE))
        if drift <= tolerance:
            break
    return PlanSpace(
        contention=c,
        chosen=chosen,
        level=weak_orders(len(c.jobs)),
        work=work,
        span=span,
        drift=drift,
    )


def works_of(demand: LinkDemand, span: JudgedSpan) -> Floats:
    """Return the work of all assignments on given paths in flop per second, (A,)."""
    result: Floats = _works([demand], span)[0]
    return result


def without_inversion(demand: LinkDemand, order: Ints, level: Ints) -> Bools:
    """Return for which levels, (A, J), no link serves the less urgent of two jobs first, (A,)."""
    uses = np.zeros((demand.jobs, demand.links), np.bool_)
    uses[demand.job, demand.link] = True
    result = np.ones(len(level), np.bool_)
    for place, job in enumerate(order.tolist()):
        for other in order[place + 1 :].tolist():
            if (uses[job] & uses[other]).any():
                result &= level[:, job] >= level[:, other]
    return result


@cache
def weak_orders(jobs: int) -> Ints:
    """Return every order of jobs, ties included, as levels without gaps from 0 on, (A, J)."""
    every = np.array(list(product(range(jobs), repeat=jobs)), np.int64).reshape(-1, jobs)
    result: Ints = every[(dense_levels(every) == every).all(axis=1)]
    return result


def dense_levels(level: Ints) -> Ints:
    """Return levels with the same order in each row, numbered from 0 without gaps, (A, J)."""
    values = np.sort(level, axis=1)
    rises = np.zeros_like(values)
    rises[:, 1:] = np.cumsum(np.diff(values, axis=1) > 0, axis=1)
    place = (level[:, :, None] > values[:, None, :]).sum(axis=2)
    result: Ints = np.take_along_axis(rises, place, axis=1)
    return result


def _works(demands: list[LinkDemand], span: JudgedSpan) -> Floats:
    """Return the work of all assignments under each demand of the same jobs, (D, A)."""
    jobs = demands[0].jobs
    known: dict[tuple[object, ...], Floats] = {}
    result = np.zeros((len(demands), len(weak_orders(jobs))))
    for row, demand in zip(result, demands, strict=True):
        # Jobs of different groups share no link, so the work of the groups adds up.
        met = contending_groups(demand)
        lone = np.setdiff1d(np.arange(jobs), np.concatenate([*met, np.zeros(0, np.int64)]))
        for group in [*met, *lone.reshape(-1, 1)]:
            part = compact_demand(demand, group)
            links = (part.link_start, part.link, part.busy_s, part.delay_s)
            key = (*group.tolist(), *(each.tobytes() for each in links))
            if key not in known:
                known[key] = flop_under_levels(
                    part, weak_orders(len(group)), horizon_s=span.horizon_s, warm_s=span.warm_s
                )
            row += known[key][_among(jobs, tuple(group.tolist()))]
    return result


@cache
def _among(jobs: int, group: tuple[int, ...]) -> Ints:
    """Return the group's assignment that each assignment of all jobs implies, (A,)."""
    rows = dense_levels(weak_orders(jobs)[:, group])
    key = len(group) ** np.arange(len(group))
    at = np.zeros(len(group) ** len(group), np.int64)
    at[weak_orders(len(group)) @ key] = np.arange(len(weak_orders(len(group))))
    result: Ints = at[rows @ key]
    return result


def _row(rows: Ints, wanted: Ints, what: str) -> int:
    fits = len(wanted) == rows.shape[1] and (rows == wanted).all(axis=1)
    if not np.any(fits):
        raise InvalidInput(what, "is not among those that were tried")
    return int(np.argmax(fits))
