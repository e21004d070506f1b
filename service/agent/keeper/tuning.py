"""The report of a program on its tuning: how long it takes, and the plan that it then runs by.

Tuning is neither a hang nor a part of the price of a restart. It is bounded by the job's budget.
"""

from __future__ import annotations

import json
import math

from tessera.service.agent.keeper.measures import MIN_STALL_S, read_number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from tessera.service.agent.keeper.measures import ProgressMeter

MAX_PLAN_CHARS = 32_768
"""The largest number of characters of a plan that is passed on."""


class TuningWatch:
    """The tuning of a job in one generation. Times are monotonic seconds."""

    def __init__(self, budget_s: float) -> None:
        """Expect at most ``budget_s`` of tuning. 0: the job does not tune, and claims do not count."""
        self._budget_s = budget_s
        self._began_s: float | None = None
        self._ended_s: float | None = None
        self.plan = ""  # the plan that the program runs by, in JSON; "" before it is reported
        self.iteration_s = 0.0
        self.planned_s = (
            0.0  # of the plan that was sent; 0 if it is not known, inf if it does not run
        )

    @property
    def tuned_s(self) -> float:
        """Return the seconds of a tuning that has ended, or 0."""
        if not self._budget_s or self._began_s is None or self._ended_s is None:
            return 0.0
        return self._ended_s - self._began_s

    def feed(self, now_s: float, reported: object) -> str:
        """Take a report in; return why a part of it was ignored, or ""."""
        if not isinstance(reported, dict):
            return ""
        began_s, ended_s = (read_number(reported.get(name)) for name in ("began_s", "ended_s"))
        if began_s is not None:
            self._began_s = min(began_s, now_s)
            self._ended_s = None if ended_s is None else min(max(ended_s, self._began_s), now_s)
        return self._feed_plan(reported) if "plan" in reported else ""

    def stalls_at_s(self, meter: ProgressMeter, limit_s: float, began_s: float) -> float:
        """Return when the program counts as hanging, as ``ProgressMeter.stalls_at_s``.

        A program that tunes has its budget first. One plan may exceed it by the limit.
        """
        at_s = meter.stalls_at_s(limit_s, began_s)
        if not self._budget_s or self._began_s is None:
            return at_s
        if self._ended_s is None:
            return self._began_s + self._budget_s + (limit_s or MIN_STALL_S)
        is_later = meter.advanced_s is not None and meter.advanced_s > self._ended_s
        return at_s if is_later else at_s + self.tuned_s

    def to_plain(self) -> dict[str, Any]:
        """Return the report for the agent, or {} before a plan is reported.

        ``planned_iter_time_s`` is None if the plan that was sent was tried and does not run.
        """
        if not self.plan:
            return {}
        return {
            "executed_plan": self.plan,
            "executed_iter_time_s": self.iteration_s,
            "planned_iter_time_s": self.planned_s if self.planned_s < math.inf else None,
        }

    def _feed_plan(self, reported: dict[str, Any]) -> str:
        plan, seconds = reported["plan"], read_number(reported.get("iteration_s"))
        if not isinstance(plan, dict) or seconds is None or seconds <= 0:
            return "the program reported a plan without the seconds of its iteration"
        text = json.dumps(plan, sort_keys=True, separators=(",", ":"))
        if len(text) > MAX_PLAN_CHARS:
            return f"the program reported a plan of more than {MAX_PLAN_CHARS} characters"
        self.plan, self.iteration_s = text, seconds
        planned_s = read_number(reported.get("planned_s", 0.0))
        self.planned_s = math.inf if planned_s is None else max(planned_s, 0.0)
        return ""
