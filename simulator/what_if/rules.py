"""The price of rules: the next round without a rule, compared with the round with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tessera.formulation.grammar import Stage
from tessera.formulation.last_round import NO_SEGMENTS
from tessera.formulation.snapshot import Snapshot
from tessera.formulation.what_if.records import Rule, RulePrice
from tessera.simulator.what_if.rounds import DecidedRound, compare_rounds
from tessera.solvers.rounds.options import RoundOptions

FAIR: Final = frozenset({"max-min", "finish-time-fairness"})
"""The objectives whose purpose is fairness."""

WITHOUT_FAIRNESS: Final = "throughput"
"""The objective that is left if all goals are fair ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleTrial:
    """A round without a rule: its snapshot and options. ``why_free`` says why nothing is to try.

    It is "" if the rule is in force.
    """

    rule: Rule
    snapshot: Snapshot
    options: RoundOptions
    why_free: str = ""


def without_rule(rule: Rule, snapshot: Snapshot, options: RoundOptions) -> RuleTrial:
    """Return the round without ``rule``."""
    if options.scheduler and rule is not Rule.FAIRNESS:
        why = f"the published scheduler {options.scheduler!r} decides, which no rule binds"
        return RuleTrial(rule=rule, snapshot=snapshot, options=options, why_free=why)
    why, changed, free = _WITHOUT[rule](snapshot, options)
    return RuleTrial(rule=rule, snapshot=changed, options=free, why_free=why)


def _without_requests(
    snapshot: Snapshot, options: RoundOptions
) -> tuple[str, Snapshot, RoundOptions]:
    reason = (
        "" if options.keep_requests else "rounds may suspend running jobs (keep_requests is false)"
    )
    return reason, snapshot, replace(options, keep_requests=False)


def _without_starts(
    snapshot: Snapshot, options: RoundOptions
) -> tuple[str, Snapshot, RoundOptions]:
    reason = (
        ""
        if options.promise_starts
        else "the objective chooses who starts (promise_starts is false)"
    )
    return reason, snapshot, replace(options, promise_starts=False)


def _without_spacing(
    snapshot: Snapshot, options: RoundOptions
) -> tuple[str, Snapshot, RoundOptions]:
    reason = (
        "" if options.change_spacing else "rounds may change jobs at any time (change_spacing is 0)"
    )
    return reason, snapshot, replace(options, change_spacing=0.0)


def _without_guarantees(
    snapshot: Snapshot, options: RoundOptions
) -> tuple[str, Snapshot, RoundOptions]:
    jobs = snapshot.jobs
    why = "" if jobs.guaranteed.any() else "no job is guaranteed"
    free = replace(jobs, guaranteed=np.zeros(len(jobs), dtype=np.bool_))
    return why, replace(snapshot, jobs=free), options


def _without_deadlines(
    snapshot: Snapshot, options: RoundOptions
) -> tuple[str, Snapshot, RoundOptions]:
    jobs = snapshot.jobs
    why = "" if np.isfinite(jobs.deadline_s).any() else "no job has a deadline"
    free = replace(
        jobs,
        deadline_s=np.full(len(jobs), np.inf),
        admitted=np.zeros(len(jobs), dtype=np.bool_),
    )
    return why, replace(snapshot, jobs=free, schedule_segments=NO_SEGMENTS), options


def _without_fairness(
    snapshot: Snapshot, options: RoundOptions
) -> tuple[str, Snapshot, RoundOptions]:
    if options.scheduler:
        why = f"the published scheduler {options.scheduler!r} decides, and no objective"
        return why, snapshot, options
    left = [stage for stage in options.stages if not _is_fair(stage)]
    if len(left) == len(options.stages):
        return f"the objective {options.objective!r} has no fair goal", snapshot, options
    objective = " then ".join(map(_written, left)) or WITHOUT_FAIRNESS
    return "", snapshot, replace(options, objective=objective)


def _is_fair(stage: Stage) -> bool:
    return any(term.objective in FAIR for term in stage.terms)


def _written(stage: Stage) -> str:
    return f"{stage.name} within {100 * stage.tolerance:g}%" if stage.tolerance else stage.name


_WITHOUT: Final[
    dict[Rule, Callable[[Snapshot, RoundOptions], tuple[str, Snapshot, RoundOptions]]]
] = {
    Rule.KEPT_REQUESTS: _without_requests,
    Rule.PROMISED_STARTS: _without_starts,
    Rule.CHANGE_SPACING: _without_spacing,
    Rule.GUARANTEES: _without_guarantees,
    Rule.DEADLINES: _without_deadlines,
    Rule.FAIRNESS: _without_fairness,
}


def price_rule(rule: Rule, with_rule: DecidedRound, without: DecidedRound) -> RulePrice:
    """Return the cost of a rule: the round without it, less the round with it."""
    found = compare_rounds(with_rule, without)
    return RulePrice(
        rule=rule,
        objective=found.after.objective - found.before.objective
        if found.same_objective
        else math.nan,
        unit=found.before.unit,
        effective_gpus=found.after.effective_gpus - found.before.effective_gpus,
        samples_per_s=found.after.samples_per_s - found.before.samples_per_s,
        jobs_changed=len(found.jobs),
    )
