"""The number of network plans and the time spent on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tessera.formulation.answer.network.contention import Contention
from tessera.formulation.answer.network.plan import NetworkPlan


@dataclass(slots=True)
class PlanCounter:
    """A counter of network plans that also sums the seconds of planning, by a given clock."""

    plans: int = 0
    plan_s: float = 0.0
    slowest_plan_s: float = 0.0

    def timed(
        self,
        plan: Callable[[Contention], NetworkPlan],
        contention: Contention,
        clock: Callable[[], float],
    ) -> NetworkPlan:
        """Return the network plan. ``clock`` is read before and after, and influences no decision."""
        before_s = clock()
        result = plan(contention)
        took_s = clock() - before_s
        self.plans += 1
        self.plan_s += took_s
        self.slowest_plan_s = max(self.slowest_plan_s, took_s)
        return result
