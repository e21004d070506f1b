"""The planned and promised starts of waiting jobs, as their reasons tell them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from tessera.formulation.base.moments import format_rfc3339
from tessera.formulation.base.texts import Text, fill
from tessera.formulation.job.reasons import Reason
from tessera.formulation.state.last_round import StartPlan


def tell_starts(reasons: Mapping[int, Reason], plan: StartPlan | None) -> dict[int, Reason]:
    """Return the reasons of waiting jobs with the times at which these start, as far as they are known."""
    if plan is None:
        return dict(reasons)
    planned_s = dict(zip(plan.starts.job.tolist(), plan.starts.start_s.tolist(), strict=True))
    return {
        job: _with_starts(
            reason, planned_s.get(job), float(plan.start_by_s[job]), plan.moves.get(job, "")
        )
        for job, reason in reasons.items()
    }


def _with_starts(reason: Reason, planned_s: float | None, by_s: float, move_cause: str) -> Reason:
    if math.isinf(by_s):
        return reason
    start_by = format_rfc3339(math.ceil(by_s))
    evidence: list[tuple[Text, Text]] = [("promised start", start_by)]
    if planned_s is not None:
        evidence.insert(0, ("planned start", format_rfc3339(math.ceil(planned_s))))
    if move_cause:
        evidence.append(("promise moved", move_cause))
    return replace(
        reason,
        message=fill(
            "{message}; it is promised to start by {time}", message=reason.message, time=start_by
        ),
        evidence=(*reason.evidence, *evidence),
    )
