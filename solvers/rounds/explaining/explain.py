"""The explanation of a round's decision on one job: reason, displacers, and steps that were tried."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from tessera.formulation.answer.explanations.changes import Actor, Change, ChangeKind
from tessera.formulation.answer.explanations.records import Claim, Explanation, Step
from tessera.formulation.answer.explanations.words import describe_step
from tessera.formulation.base.errors import DeadlineTooShort
from tessera.formulation.job.reasons import ReasonCode
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.rounds.explaining.changed import (
    cell_in_words,
    explain_running,
    is_slower,
    rate_before,
)
from tessera.solvers.rounds.explaining.displaced import (
    describe_displacers,
    find_effects,
    find_takers,
    value_per_gpu,
)
from tessera.solvers.rounds.explaining.ladders import LADDERS, Situation
from tessera.solvers.rounds.explaining.trials import PlanRound, Trial, Trials, Wish
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import RoundOutcome

MOST_STEPS: Final = {Actor.USER: 3, Actor.OPERATOR: 2, Actor.TIME: 1}
"""The largest number of steps of each actor in an explanation."""

_K, _R = ChangeKind, ReasonCode

_COMPETITION: Final = (
    _K.WEIGHT,
    _K.PRIORITY,
    _K.ANY_TYPE,
    _K.ANY_NODE,
    _K.ANY_LABELS,
    _K.ALLOW_TYPE,
    _K.MIN_GPUS,
    _K.MAX_GPUS,
    _K.DEADLINE,
    _K.REQUEST,
    _K.BEST_EFFORT,
    _K.ANY_PLAN,
    _K.QUOTA,
    _K.BORROW,
    _K.LEND,
    _K.UNDRAIN,
    _K.ADD_CPUS,
    _K.ADD_HOST_MEMORY,
    _K.ADD_GPUS,
    _K.POLICY,
    _K.END,
    _K.WAIT,
)
"""Kinds of changes that help a job in the competition for GPUs, those of its user first."""

_FIRST: Final[dict[ReasonCode, tuple[ChangeKind, ...]]] = {
    _R.HELD: (_K.RELEASE,),
    _R.ESTIMATING: (_K.REQUEST_TYPE, _K.ADD_CELL),
    _R.NO_ESTIMATE: (_K.REQUEST_TYPE, _K.ADD_CELL),
    _R.NO_RUNNABLE_PLAN: (_K.ADD_CELL,),
    _R.NO_FEASIBLE_CELL: (_K.ADD_CELL,),
    _R.FITS_NOWHERE: (
        *(_K.ANY_TYPE, _K.ALLOW_TYPE, _K.MIN_GPUS),
        *(_K.ADD_CPUS, _K.ADD_HOST_MEMORY, _K.ADD_GPUS, _K.ADD_CELL),
    ),
    _R.NODES_AWAY: (_K.UNDRAIN, _K.ANY_TYPE, _K.ALLOW_TYPE),
    _R.BACK_OFF: (_K.RETRY, _K.WAIT),
    _R.PLAN_UNUSABLE: (_K.ANY_PLAN,),
    _R.PINS_CONTRADICT: (
        *(_K.ANY_TYPE, _K.ALLOW_TYPE, _K.ANY_NODE, _K.ANY_LABELS, _K.MIN_GPUS, _K.MAX_GPUS),
        *(_K.UNDRAIN, _K.ADD_GPUS),
    ),
    _R.RUNTIME_MISSING: (_K.UNDRAIN, _K.MIN_GPUS),
    _R.GUARANTEE_UNMET: (_K.REQUEST, _K.BEST_EFFORT),
    _R.DEADLINE_PAST: (_K.DEADLINE,),
    _R.DEADLINE_UNREACHABLE: (_K.DEADLINE,),
    _R.DEADLINE_REFUSED: (_K.DEADLINE,),
    _R.DEADLINE_PLANNED: (_K.WAIT,),
    _R.RESERVED: (_K.PRIORITY,),
    _R.HELD_FOR_RESERVATION: (_K.WAIT,),
    _R.QUOTA_SPENT: (_K.BEST_EFFORT, _K.QUOTA, _K.BORROW, _K.LEND),
    _R.NO_WEIGHT: (_K.WEIGHT, _K.TENANT_WEIGHT, _K.PRIORITY),
    _R.FRAGMENTED: (_K.MIN_GPUS, _K.ADD_CPUS, _K.ADD_HOST_MEMORY, _K.ADD_GPUS, _K.END),
    _R.NODES_TAKEN: (
        *(_K.ANY_LABELS, _K.MIN_GPUS, _K.ADD_CPUS, _K.ADD_HOST_MEMORY, _K.ADD_GPUS, _K.END),
    ),
    _R.BUDGET_SPENT: (_K.POLICY,),
    _R.GAVE_WAY: (_K.WEIGHT, _K.STAY),
    _R.MADE_ROOM: (_K.STAY,),
    _R.NODE_LEFT: (_K.UNDRAIN,),
    _R.CELL_EXCLUDED: (_K.ANY_TYPE, _K.ALLOW_TYPE, _K.MIN_GPUS, _K.MAX_GPUS, _K.ANY_PLAN),
    _R.NOT_CHOSEN: (_K.POLICY,),
}
"""Kinds of changes to try first for a reason. They may also lead to another reason."""

_ONLY_FIRST: Final = frozenset(
    {
        *(_R.HELD, _R.ESTIMATING, _R.NO_ESTIMATE, _R.NO_RUNNABLE_PLAN, _R.NO_FEASIBLE_CELL),
        *(_R.FITS_NOWHERE, _R.BACK_OFF, _R.MADE_ROOM, _R.RUNTIME_MISSING),
    }
)
"""Reasons for which no other changes are tried: they would not lead the job into the competition."""

_COMPETES: Final = frozenset(
    {
        *(_R.OUTPRICED, _R.NO_CAPACITY, _R.FRAGMENTED, _R.NODES_TAKEN),
        *(_R.QUOTA_SPENT, _R.NOT_CHOSEN),
        *(_R.RESERVED, _R.PROMISE_GIVEN_UP, _R.DEADLINE_REFUSED),
        *(_R.DEADLINE_PLANNED, _R.BUDGET_SPENT, _R.GAVE_WAY, _R.HELD_FOR_RESERVATION),
    }
)
"""Reasons of jobs that others have displaced."""

_NO_STEPS: Final = frozenset(
    {
        *(_R.STARTED, _R.UNCHANGED, _R.GAINED, _R.LEAVING),
        *(
            _R.WAITS_FOR_JOBS,
            _R.ARRAY_LIMIT,
        ),  # only the ends of the jobs that the reason names help
    }
)
"""Reasons of jobs that no change helps, or that need no help."""


def explain_job(
    snapshot: Snapshot, options: RoundOptions, job: int, outcome: RoundOutcome, plan: PlanRound
) -> Explanation:
    """Return the explanation of what ``outcome`` decides on ``job`` (an index into the snapshot).

    ``outcome`` is that of a round on ``snapshot`` with ``options``, which broke no rule. ``plan``
    decides further rounds. Once it raises DeadlineTooShort, the explanation is incomplete.
    """
    decision, takers = outcome.decisions[job], find_takers(snapshot, outcome, job)
    displaced_by = describe_displacers(snapshot, options, outcome, takers)
    reason = decision.reason or explain_running(
        snapshot, outcome, decision, displaced_by, by_scheduler=bool(options.scheduler)
    )
    unit = value_per_gpu(options, outcome, job)
    first = Explanation(
        kind=decision.kind,
        reason=reason,
        displaced_by=displaced_by,
        value_per_gpu=unit,
        unit="" if math.isnan(unit) else outcome.problem.unit,
    )
    if reason.code in _NO_STEPS:
        return first
    search = _StepSearch(
        Trials(snapshot=snapshot, options=options, job=job, plan=plan), outcome, first
    )
    return search.run(takers)


class _StepSearch:
    """The search for steps that help a job."""

    def __init__(self, trials: Trials, outcome: RoundOutcome, first: Explanation) -> None:
        self._trials, self._outcome, self._first = trials, outcome, first
        self._snapshot, self._job = trials.snapshot, trials.job
        self._wish = _wish(self._snapshot, outcome, self._job)
        self._runs = outcome.decisions[self._job].gang is not None
        self._rivals: list[int] = []
        self._steps: list[tuple[Trial, Step]] = []

    def run(self, takers: dict[int, int]) -> Explanation:
        """Return the explanation with the steps that help, and with who displaced the job."""
        self._rivals, is_complete = self._rank_rivals(takers), True
        try:
            for kind in _kinds_for(self._first.reason.code, competes=self._competes()):
                self._try_kind(kind)
        except DeadlineTooShort:
            is_complete = False
        displaced_by = self._first.displaced_by
        if not displaced_by and self._first.reason.code in _COMPETES:
            options, outcome = self._trials.options, self._outcome
            displaced_by = describe_displacers(
                self._snapshot, options, outcome, dict.fromkeys(self._losers(), 0)
            )
        steps, reason = tuple(step for _, step in self._steps), self._first.reason
        return replace(
            self._first,
            reason=replace(reason, next_step=steps[0].message) if steps else reason,
            displaced_by=displaced_by,
            steps=steps,
            is_complete=is_complete,
            rounds_tried=len(self._trials.made),
        )

    def _competes(self) -> bool:
        """Return whether the job would have more if it were stronger in the competition for GPUs."""
        return not self._runs or self._wish.claim is Claim.KEEPS_RATE

    def _try_kind(self, kind: ChangeKind) -> None:
        """Add a step of this kind, unless none helps, or the actor has enough of them."""
        actor = Change(kind=kind).actor
        if sum(step.actor is actor for _, step in self._steps) >= MOST_STEPS[actor]:
            return
        situation = Situation(
            snapshot=self._snapshot,
            options=self._trials.options,
            job=self._job,
            outcome=self._outcome,
            rivals=self._rivals,
        )
        for wished in (True, False):
            if not wished and (self._runs or kind not in _FIRST.get(self._first.reason.code, ())):
                return
            for ladder in LADDERS[kind](situation):
                trial = self._trials.find_least(
                    ladder, self._is_met if wished else self._has_other_reason
                )
                if trial is not None:
                    self._add(trial, self._wish.claim if wished else Claim.OTHER_REASON)
                    return

    def _is_met(self, trial: Trial) -> bool:
        return self._wish.is_met(trial.decision)

    def _has_other_reason(self, trial: Trial) -> bool:
        return trial.code not in (None, self._first.reason.code, ReasonCode.LEAVING)

    def _add(self, trial: Trial, claim: Claim) -> None:
        step = _make_step(self._snapshot, self._outcome, trial, claim)
        self._steps.append((trial, step))
        if step.actor is Actor.USER:
            losers = self._losers()
            self._rivals = losers + [j for j in self._rivals if j not in losers]

    def _losers(self) -> list[int]:
        """Return the jobs that the first step of the user takes from, or that must end for it."""
        names = {name: j for j, name in enumerate(self._snapshot.jobs.name)}
        for _, step in self._steps:
            if step.actor is Actor.USER and step.effects:
                return [names[effect.job.text] for effect in step.effects]
        for _, step in self._steps:
            if step.changes[0].kind is ChangeKind.END:
                return [names[change.subject] for change in step.changes]
        return []

    def _rank_rivals(self, takers: dict[int, int]) -> list[int]:
        """Return the jobs that run on GPU types of this job: takers, then those of least value."""
        e, jobs = self._snapshot.estimates, self._snapshot.jobs
        kinds = set(e.gpu_type[e.workload == jobs.workload[self._job]].tolist())
        options, outcome = self._trials.options, self._outcome
        others = [
            (d.job not in takers, value_per_gpu(options, outcome, d.job), d.job)
            for d in outcome.decisions
            if d.gang is not None and d.job != self._job and d.cell.gpu_type in kinds
        ]
        return [j for _, _, j in sorted(others, key=lambda o: (o[0], _rank(o[1]), o[2]))]


def _make_step(snapshot: Snapshot, outcome: RoundOutcome, trial: Trial, claim: Claim) -> Step:
    """Return a step that was tried, with what it does to the job and to others."""
    effects, decision = find_effects(snapshot, outcome, trial), trial.decision
    cell = "" if decision.gang is None else cell_in_words(snapshot, decision.cell)
    then, name = trial.code, snapshot.jobs.name[decision.job]
    return Step(
        changes=trial.changes,
        claim=claim,
        message=describe_step(trial.changes, name, claim, cell, then, effects),
        then=then,
        effects=effects,
    )


def _rank(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _kinds_for(code: ReasonCode, *, competes: bool) -> Iterator[ChangeKind]:
    first = _FIRST.get(code, ())
    yield from first
    if competes and code not in _ONLY_FIRST:
        yield from (kind for kind in _COMPETITION if kind not in first)


def _wish(snapshot: Snapshot, outcome: RoundOutcome, job: int) -> Wish:
    """Return what a step shall lead to, for the decision that is explained."""
    if outcome.decisions[job].gang is None:
        return Wish(claim=Claim.RUNS)
    if not is_slower(snapshot, outcome, outcome.decisions[job]):
        return Wish(claim=Claim.STAYS)
    return Wish(claim=Claim.KEEPS_RATE, rate=rate_before(snapshot, outcome, job))
