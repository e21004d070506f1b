"""The answers to questions about what would happen: rounds and futures, without any effect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from tessera.formulation.clock import SystemClock
from tessera.formulation.decisions import DecisionKind
from tessera.formulation.errors import NotAllowed
from tessera.formulation.explanations.changes import ChangeKind
from tessera.formulation.pace import to_real_pace
from tessera.formulation.snapshot import Snapshot
from tessera.formulation.what_if.hypotheses import (
    apply_hypotheses,
    without_last_jobs,
)
from tessera.formulation.what_if.records import (
    HoursDifference,
    NeededWeight,
    NodeWorth,
    RulePrice,
    WhatIfAnswer,
)
from tessera.service.forecaster import forecast_options
from tessera.service.what_if.orders import (
    HypothesisQuestion,
    NeededWeightQuestion,
    NodeWorthQuestion,
    RulePriceQuestion,
    WhatIfOrder,
)
from tessera.simulator.forecasts.calibration import learn_corrections
from tessera.simulator.forecasts.draws import History
from tessera.simulator.run import Decider
from tessera.simulator.what_if.hours import (
    COVERAGE,
    LEAST_PAIRS,
    FollowedSide,
    Side,
    compare_hours,
    follow_pairs,
)
from tessera.simulator.what_if.offers import describe_offer
from tessera.simulator.what_if.rounds import DecidedRound, compare_rounds
from tessera.simulator.what_if.rules import price_rule, without_rule
from tessera.simulator.what_if.worth import nodes_to_add, rank_nodes, value_node
from tessera.solvers.plugins import load_named
from tessera.solvers.registry import make_solver
from tessera.solvers.rounds.explaining.explain import find_needed_weight
from tessera.solvers.rounds.options import RoundOptions, make_budget
from tessera.solvers.rounds.plan import RoundOutcome, plan_round
from tessera.solvers.schedulers.registry import scheduler_of

ROUND_SHARE: Final = 0.2
"""The share of the remaining time that the solver of one round may take."""
MAX_JOBS_SHOWN: Final = 20
"""The jobs whose starts and finishes are stated at most."""

_CLOCK: Final = SystemClock()


def answer_question(order: WhatIfOrder) -> WhatIfAnswer:
    """Return the answer to a question.

    Raises:
        NotFound, InvalidInput: a change names what does not exist, or contradicts another one.
        NotAllowed: a round breaks a rule, so that nothing can be said.
        DeadlineTooShort: there is no time for the rounds.
    """
    asked = (
        order.question.options if isinstance(order.question, HypothesisQuestion) else order.options
    )
    for options in (order.options, asked):
        load_named(options.scheduler, options.objective)  # the server allowed them
    rounds = _Rounds(order)
    match order.question:
        case HypothesisQuestion():
            return _answer_hypothesis(rounds, order.question)
        case NodeWorthQuestion():
            return _answer_node_worth(rounds)
        case RulePriceQuestion():
            return _answer_rule_prices(rounds, order.question)
        case NeededWeightQuestion():
            return _answer_needed_weight(rounds, order.question)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Followed:
    """The sides of futures that were followed, the one without a change first."""

    sides: Sequence[Side]
    found: Sequence[FollowedSide]


class _Rounds:
    """The rounds and futures of an order."""

    def __init__(self, order: WhatIfOrder) -> None:
        self.order = order
        # The network decides no allocation, and added nodes have no place in it.
        self.snapshot = replace(order.snapshot, topology=None)

    def left_s(self) -> float:
        """Return the seconds until the answer must be ready."""
        return self.order.end_s - _CLOCK.monotonic_s()

    def plan(self, snapshot: Snapshot, options: RoundOptions) -> RoundOutcome:
        """Return the outcome of a round, of which nothing is stored. Raises DeadlineTooShort."""
        limit_s = min(ROUND_SHARE * self.left_s(), options.solve_limit_s)
        end_s = _CLOCK.monotonic_s() + limit_s
        budget = make_budget(
            options,
            lambda: end_s - _CLOCK.monotonic_s(),
            cancelled=lambda: self.left_s() <= 0,
            left_s=self.left_s,
        )
        scheduler = scheduler_of(options.scheduler, options.scheduler_parameters)
        solver = make_solver(options.solver)
        return plan_round(snapshot, options, solver, budget, scheduler=scheduler)

    def decide(self, snapshot: Snapshot, options: RoundOptions) -> DecidedRound:
        """Return a round that breaks no rule.

        Raises:
            NotAllowed: it breaks one. DeadlineTooShort.
        """
        outcome = self.plan(snapshot, options)
        if outcome.violations:
            broken = outcome.violations[0]
            raise NotAllowed(
                f"the round would be refused, so nothing would change: {broken.rule}: {broken.detail}"
            )
        return DecidedRound(snapshot=snapshot, options=options, outcome=outcome)

    def follow(
        self, before: Snapshot, changed: Sequence[tuple[Snapshot, RoundOptions]]
    ) -> _Followed | None:
        """Follow futures of both sides, or return None if none are asked for."""
        futures = self.order.futures
        if futures is None:
            return None
        sides = [
            Side(snapshot=to_real_pace(snapshot), decide=Decider(forecast_options(options)))
            for snapshot, options in ((before, self.order.options), *changed)
        ]
        found = follow_pairs(
            sides[0],
            sides[1:],
            History.of(futures.history.submissions, sides[0].snapshot),
            futures=futures.futures,
            seed=futures.seed,
            rhythm=futures.rhythm,
            wanted=lambda: self.left_s() > 0,
        )
        return _Followed(sides=sides, found=found)

    def hours(
        self,
        followed: _Followed | None,
        which: int = 1,
        *,
        removed: Sequence[str] = (),
        shown: Sequence[str] = (),
    ) -> HoursDifference | None:
        """Return what a side changes, or None without enough futures."""
        futures = self.order.futures
        if followed is None or futures is None:
            return None
        return compare_hours(
            (followed.sides[0], followed.sides[which]),
            (followed.found[0], followed.found[which]),
            futures.rhythm,
            learn_corrections(futures.history.past, COVERAGE),
            removed=removed,
            shown=shown,
        )

    def notes(self, followed: _Followed | None) -> tuple[str, ...]:
        """Return what the time of the call has left out."""
        futures = self.order.futures
        if followed is None or futures is None:
            return ()
        made = len(followed.found[0].work)
        if made >= futures.futures:
            return ()
        advice = "give the call more time, or ask for fewer hours"
        if made < LEAST_PAIRS:
            return (
                f"nothing is said about the next hours, because the call's time ended after {made} of"
                f" at least {LEAST_PAIRS} pairs of futures; {advice}",
            )
        return (f"{made} of {futures.futures} pairs of futures were followed in time; {advice}",)


def _answer_hypothesis(rounds: _Rounds, question: HypothesisQuestion) -> WhatIfAnswer:
    whole, options = rounds.snapshot, rounds.order.options
    before = without_last_jobs(whole, len(question.added))
    changed, changed_options = apply_hypotheses(whole, question.options, question.hypotheses)
    removed = [
        one.change.subject for one in question.hypotheses if one.change.kind is ChangeKind.END
    ]
    first, second = rounds.decide(before, options), rounds.decide(changed, changed_options)
    difference = compare_rounds(first, second, removed)
    followed = rounds.follow(before, [(changed, changed_options)])
    named = [*question.added, *(one.job for one in question.hypotheses if one.job), *removed]
    shown = list(dict.fromkeys([*named, *(one.job for one in difference.jobs)]))
    return WhatIfAnswer(
        created_s=whole.now_s,
        now=difference,
        hours=rounds.hours(followed, removed=removed, shown=shown[:MAX_JOBS_SHOWN]),
        offers=tuple(describe_offer(second, job, difference) for job in question.added),
        notes=rounds.notes(followed),
    )


def _answer_node_worth(rounds: _Rounds) -> WhatIfAnswer:
    snapshot, options = rounds.snapshot, rounds.order.options
    added = nodes_to_add(snapshot)
    if not added:
        raise NotAllowed("the cluster has no node that another one could be like; add nodes first")
    changed = {
        name: apply_hypotheses(snapshot, options, [addition])[0] for name, addition in added.items()
    }
    before = rounds.decide(snapshot, options)
    after = {name: rounds.decide(other, options) for name, other in changed.items()}
    followed = rounds.follow(snapshot, [(other, options) for other in changed.values()])
    worths: list[NodeWorth] = [
        value_node(before, after[name], added[name], rounds.hours(followed, which))
        for which, name in enumerate(added, start=1)
    ]
    return WhatIfAnswer(
        created_s=snapshot.now_s,
        node_worths=tuple(rank_nodes(worths)),
        notes=rounds.notes(followed),
    )


def _answer_rule_prices(rounds: _Rounds, question: RulePriceQuestion) -> WhatIfAnswer:
    snapshot, options = rounds.snapshot, rounds.order.options
    with_rules = rounds.decide(snapshot, options)
    prices = []
    for rule in question.rules:
        trial = without_rule(rule, snapshot, options)
        if trial.why_free:
            prices.append(RulePrice(rule=rule, why_free=trial.why_free))
        else:
            without = rounds.decide(trial.snapshot, trial.options)
            prices.append(price_rule(rule, with_rules, without))
    return WhatIfAnswer(created_s=snapshot.now_s, rule_prices=tuple(prices))


def _answer_needed_weight(rounds: _Rounds, question: NeededWeightQuestion) -> WhatIfAnswer:
    snapshot, options, name = rounds.snapshot, rounds.order.options, question.job
    decided = rounds.decide(snapshot, options)
    job = snapshot.jobs.name.index(name)
    decision, weight = decided.outcome.decisions[job], float(snapshot.jobs.weight[job])
    if decision.gang is not None:
        starts = decision.kind is DecisionKind.START
        why = f"the job {'starts in the next round' if starts else 'runs'} with its weight"
        needed = NeededWeight(job=name, weight=weight, why_none=why)
    elif (
        step := find_needed_weight(snapshot, options, job, decided.outcome, rounds.plan)
    ) is not None:
        needed = NeededWeight(job=name, weight=weight, step=step)
    else:
        reason = decision.reason
        why = "no weight lets it run now" + (
            f", because it waits for another reason, {reason.code}: {reason.message}; see"
            f" `tessera explain {name}`"
            if reason is not None
            else ""
        )
        needed = NeededWeight(job=name, weight=weight, why_none=why)
    return WhatIfAnswer(created_s=snapshot.now_s, needed_weight=needed)
