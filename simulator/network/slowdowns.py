"""The job simulator with contention on: what ``World`` asks for when other jobs run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from formulation.network.contention import Contention, demand_of, joined
from formulation.network.plan import NetworkPlan
from formulation.placement import Gang
from simulator.network.rates import Rates
from simulator.store import Change

MOST = 1e6
"""A job that never gets a link counts as slowed so many times, so that it still ends, far off."""


class Contended:
    """Slowdowns of jobs that meet: rate alone over the rate that they have under the network plan.

    ``met`` makes one job's part of the network's contention from what it runs as and its GPUs, the same links
    for all; None: it has no traffic that is known. A job counts from the moment it holds its GPUs, though
    it sends nothing before it is loaded.
    """

    def __init__(
        self, met: Callable[[Change, Gang], Contention | None],
        plan: Callable[[Contention], NetworkPlan], rates: Rates | None = None,
    ) -> None:  # fmt: skip
        self._met, self._plan = met, plan
        self._rates = Rates() if rates is None else rates
        self._parts: dict[int, tuple[Change, Contention | None]] = {}

    def __call__(self, runs: Mapping[int, Change]) -> dict[int, float]:
        """Return how many times as long iterations of each job take, at least 1."""
        self._parts = {job: self._part(job, change) for job, change in runs.items()}
        parts = {job: part for job, (_, part) in self._parts.items() if part is not None}
        if not parts:
            return {}
        contention = joined(list(parts.values()))
        plan = self._plan(contention)
        demand = demand_of(contention, plan.chosen)
        rate = self._rates(contention.jobs, demand, plan.level, plan.offset_s)
        with np.errstate(divide="ignore"):
            slowdown = np.clip(1.0 / (rate * demand.alone_s), 1.0, MOST)
        return dict(zip(parts, slowdown.tolist(), strict=True))

    def _part(self, job: int, change: Change) -> tuple[Change, Contention | None]:
        known = self._parts.get(job)
        if known is not None and known[0] is change:
            return known
        return change, None if change.gang is None else self._met(change, change.gang)
