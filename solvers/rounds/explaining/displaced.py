"""The jobs that displaced a job: those that took its GPUs, or those that a step would take from."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tessera.formulation.answer.decisions import DecisionKind
from tessera.formulation.answer.explanations.records import DisplacedBy, Displacement, Effect
from tessera.formulation.answer.placement import Gang, current_gangs
from tessera.formulation.base.texts import Name
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.rounds.explaining.changed import cell_in_words
from tessera.solvers.rounds.explaining.trials import RATE_TOLERANCE, Trial
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import RoundOutcome


def find_takers(snapshot: Snapshot, outcome: RoundOutcome, job: int) -> dict[int, int]:
    """Return how many of the GPUs that ``job`` owned before the round other jobs own after it."""
    before = current_gangs(snapshot).get(job)
    if before is None:
        return {}
    owned = _gpus_of(before)
    taken = {
        d.job: len(owned & _gpus_of(d.gang))
        for d in outcome.decisions
        if d.job != job and d.gang is not None
    }
    return {other: count for other, count in taken.items() if count}


def _gpus_of(gang: Gang) -> set[tuple[int, int]]:
    return {(node, gpu) for node, gpus in gang.members for gpu in gpus}


def find_effects(snapshot: Snapshot, outcome: RoundOutcome, trial: Trial) -> tuple[Effect, ...]:
    """Return what other jobs would lose by a step, those that would stop first."""
    ended = {change.subject for change in trial.changes}
    effects, jobs = [], snapshot.jobs
    for was, then in zip(outcome.decisions, trial.outcome.decisions, strict=True):
        name = Name(jobs.name[was.job], jobs.tenant[was.job])
        if was.gang is None or was.job == trial.decision.job or name.text in ended:
            continue
        if then.gang is not None and then.rate >= was.rate * (1 - RATE_TOLERANCE):
            continue
        cell = "" if then.gang is None else cell_in_words(snapshot, then.cell)
        effects.append(
            (then.gang is not None, was.job, Effect(job=name, kind=then.kind, cell=cell))
        )
    return tuple(effect for _, _, effect in sorted(effects, key=lambda e: e[:2]))


def describe_displacers(
    snapshot: Snapshot,
    options: RoundOptions,
    outcome: RoundOutcome,
    others: Mapping[int, int],
) -> tuple[Displacement, ...]:
    """Return the displacers ``others``: job -> how many GPUs it took, in that order."""
    displacements = []
    for other, taken in others.items():
        decision = outcome.decisions[other]
        if decision.gang is None:
            continue
        displacements.append(
            Displacement(
                job=Name(snapshot.jobs.name[other], snapshot.jobs.tenant[other]),
                gpu_type=snapshot.gpu_types[decision.cell.gpu_type].name,
                gpus=decision.gang.gpus,
                by=_rule(snapshot, options, outcome, other),
                taken=taken,
                value_per_gpu=value_per_gpu(options, outcome, other),
            )
        )
    return tuple(displacements)


def _rule(
    snapshot: Snapshot, options: RoundOptions, outcome: RoundOutcome, other: int
) -> DisplacedBy:
    decision = outcome.decisions[other]
    if options.scheduler:
        return DisplacedBy.SCHEDULER
    if outcome.problem.must_run[other]:
        if snapshot.jobs.guaranteed[other]:
            return DisplacedBy.GUARANTEE
        if decision.admitted:
            return DisplacedBy.DEADLINE
        return DisplacedBy.PLAN if decision.kind is DecisionKind.START else DisplacedBy.LIMIT
    return DisplacedBy.VALUE


def value_per_gpu(options: RoundOptions, outcome: RoundOutcome, job: int) -> float:
    """Return the value of a job's chosen column for each GPU, or that of its best one if it waits.

    It is in units of the round's goal. It is NaN without a column, and if not a single sum decided.
    """
    problem, columns = outcome.problem, list(outcome.problem.columns_of(job))
    if options.scheduler or len(outcome.goals) != 1 or not columns:
        return math.nan
    gpus = problem.cells.gpus[problem.cell]
    chosen = int(outcome.solution.choice[job])
    shown = [chosen] if chosen >= 0 else columns
    return max(float(problem.value[c]) / problem.scale / int(gpus[c]) for c in shown)
