"""Contention for the job simulator: the slowdowns that ``World`` asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from tessera.formulation.answer.network.contention import Contention, demand_of, join_parts
from tessera.formulation.answer.network.plan import NetworkPlan
from tessera.formulation.answer.placement import Gang
from tessera.simulator.network.planning import PlanCounter
from tessera.simulator.network.rates import GroupRates
from tessera.simulator.store.gpus import AllocationChange

MAX_SLOWDOWN = 1e6
"""The slowdown of a job that never gets a link. The job still ends, far in the future."""


@dataclass(slots=True)
class ContentionRecord(PlanCounter):
    """The contention of a run. A job is contended if it shares a link, even if the link is not full."""

    contended: set[int] = field(default_factory=set)  # jobs that were contended at some time


def _stopped_clock() -> float:
    return 0.0


class ContentionSlowdowns:
    """The slowdowns of jobs that share links: the rate alone over that under the network plan.

    ``met`` returns one job's part of the network's contention, from its Cell and its GPUs, or None
    if its traffic is unknown. The links are the same for all jobs. A job counts as soon as it holds
    its GPUs, although it sends nothing while it is loaded. If the jobs with traffic are the same as
    before, nothing is planned. ``clock`` is read before and after planning, and influences no
    decision.
    """

    def __init__(
        self,
        met: Callable[[AllocationChange, Gang], Contention | None],
        plan: Callable[[Contention], NetworkPlan],
        rates: GroupRates | None = None,
        clock: Callable[[], float] = _stopped_clock,
    ) -> None:
        self.seen = ContentionRecord()
        self._met, self._plan, self._clock = met, plan, clock
        self._rates = GroupRates() if rates is None else rates
        self._parts: dict[int, tuple[AllocationChange, Contention | None]] = {}
        self._last: tuple[list[tuple[int, Contention]], dict[int, float]] = ([], {})

    def __call__(self, runs: Mapping[int, AllocationChange]) -> dict[int, float]:
        """Return the factor by which each job's iterations take longer, at least 1."""
        self._parts = {job: self._part(job, change) for job, change in runs.items()}
        parts = [(job, part) for job, (_, part) in self._parts.items() if part is not None]
        if not _same(parts, self._last[0]):
            self._last = parts, self._slowdowns(parts)
        return self._last[1]

    def _slowdowns(self, parts: list[tuple[int, Contention]]) -> dict[int, float]:
        if not parts:
            return {}
        contention = join_parts([part for _, part in parts])
        plan = self.seen.timed(self._plan, contention, self._clock)
        demand = demand_of(contention, plan.chosen)
        jobs = np.array([job for job, _ in parts])
        self.seen.contended.update(jobs[demand.contended()].tolist())
        rate = self._rates(contention.jobs, demand, plan.level, plan.offset_s)
        with np.errstate(divide="ignore"):
            slowdown = np.clip(1.0 / (rate * demand.alone_s), 1.0, MAX_SLOWDOWN)
        return dict(zip(jobs.tolist(), slowdown.tolist(), strict=True))

    def _part(
        self, job: int, change: AllocationChange
    ) -> tuple[AllocationChange, Contention | None]:
        known = self._parts.get(job)
        if known is not None and known[0] is change:
            return known
        return change, None if change.gang is None else self._met(change, change.gang)


def _same(parts: list[tuple[int, Contention]], last: list[tuple[int, Contention]]) -> bool:
    """Return whether the same jobs run on the same GPUs, in the same order."""
    return len(parts) == len(last) and all(
        a == b and one is other for (a, one), (b, other) in zip(parts, last, strict=True)
    )
