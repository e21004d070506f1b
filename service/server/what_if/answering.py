"""The answers to questions about what would happen: rounds and futures, without any effect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from tessera.formulation.answer.explanations.changes import ChangeKind
from tessera.formulation.answer.hypotheses import apply_hypotheses, without_last_jobs
from tessera.formulation.answer.pace import to_real_pace
from tessera.formulation.base.clock import SystemClock
from tessera.formulation.base.errors import NotAllowed
from tessera.formulation.records.what_if import HoursDifference, WhatIfAnswer
from tessera.formulation.state.snapshot import Snapshot
from tessera.service.server.rounds.forecaster import forecast_options
from tessera.service.server.what_if.orders import HypothesisQuestion, WhatIfOrder
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
from tessera.solvers.plugins import load_named
from tessera.solvers.registry import make_solver
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
    for options in (order.options, order.question.options):
        load_named(options.scheduler, options.objective)  # the server allowed them
    return _answer_hypothesis(_Rounds(order), order.question)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Followed:
    """The sides of futures that were followed, the one without the change first."""

    sides: tuple[Side, Side]
    found: tuple[FollowedSide, FollowedSide]


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
        self, before: Snapshot, changed: Snapshot, options: RoundOptions
    ) -> _Followed | None:
        """Follow futures of both sides, or return None if none are asked for."""
        futures = self.order.futures
        if futures is None:
            return None
        without, with_change = (
            Side(snapshot=to_real_pace(snapshot), decide=Decider(forecast_options(own)))
            for snapshot, own in ((before, self.order.options), (changed, options))
        )
        one, other = follow_pairs(
            without,
            [with_change],
            History.of(futures.history.submissions, without.snapshot),
            futures=futures.futures,
            seed=futures.seed,
            rhythm=futures.rhythm,
            wanted=lambda: self.left_s() > 0,
        )
        return _Followed(sides=(without, with_change), found=(one, other))

    def hours(
        self, followed: _Followed | None, *, removed: Sequence[str], shown: Sequence[str]
    ) -> HoursDifference | None:
        """Return what the change does, or None without enough futures."""
        futures = self.order.futures
        if followed is None or futures is None:
            return None
        return compare_hours(
            followed.sides,
            followed.found,
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
    followed = rounds.follow(before, changed, changed_options)
    named = [*question.added, *(one.job for one in question.hypotheses if one.job), *removed]
    shown = list(dict.fromkeys([*named, *(one.job for one in difference.jobs)]))
    return WhatIfAnswer(
        created_s=whole.now_s,
        now=difference,
        hours=rounds.hours(followed, removed=removed, shown=shown[:MAX_JOBS_SHOWN]),
        offers=tuple(describe_offer(second, job, difference) for job in question.added),
        notes=rounds.notes(followed),
    )
