"""The check of a stored round's proof, on the problem that its snapshot states again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.formulation.certificate_check import check_certificate
from tessera.formulation.certificate_document import certificate_document
from tessera.formulation.certificates import Certificate
from tessera.formulation.errors import InvalidCertificate
from tessera.formulation.goals import GoalResult
from tessera.formulation.problem import Problem
from tessera.formulation.proofs import RoundProof
from tessera.formulation.records.rounds import RoundRecord
from tessera.formulation.snapshot import Snapshot
from tessera.formulation.tables import Ints
from tessera.formulation.values import CellKey
from tessera.solvers.answers import is_answer, objective_of
from tessera.solvers.base import Budget
from tessera.solvers.goals import state_goals
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import restate_round


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalCheck:
    """The check of the proof of a goal of a round, in the goal's unit.

    ``bound`` is the stored one, and ``proven`` what the certificate proves, or None if there is
    none. ``problem`` says why the proof is not one of the stored bound; "" if it is. ``note`` says
    why the placed answer is outside of the proof; "" if it is one of the problem's answers.
    ``document`` is the certificate's document, or None if there is no proof or such a note.
    """

    result: GoalResult
    proven: float | None = None
    problem: str = ""
    note: str = ""
    document: Mapping[str, Any] | None = None


def check_round(
    record: RoundRecord,
    options: RoundOptions,
    snapshot: Snapshot,
    proof: RoundProof,
    budget: Budget,
) -> tuple[GoalCheck, ...]:
    """Return the check of each goal of a stored round that was decided on ``snapshot``.

    ``options`` are the recorded ones. ``budget`` has the recorded work, and no limit of time.

    Raises:
        DeadlineTooShort: the budget was cancelled.
    """
    results = record.summary.goals
    if not proof.has_certificate:
        return tuple(GoalCheck(result=result) for result in results)
    work = restate_round(snapshot, options, budget)
    problems = state_goals(work.statement, [goal.floor for goal in proof.goals])
    choice = _decided_choice(record, work.snapshot, work.statement.problem)
    checks = []
    for result, goal, problem in zip(results, proof.goals, problems, strict=True):
        budget.check()
        if goal.certificate is None or problem is None:
            checks.append(GoalCheck(result=result))
        else:
            checks.append(_check(result, problem, goal.certificate, choice))
    return tuple(checks)


def _check(
    result: GoalResult, problem: Problem, certificate: Certificate, choice: Ints | None
) -> GoalCheck:
    bound = round(result.bound * problem.scale)
    try:
        proven = check_certificate(problem, certificate)
    except InvalidCertificate as wrong:
        return GoalCheck(result=result, problem=wrong.problem)
    value = proven / problem.scale
    if proven > bound:
        return GoalCheck(
            result=result, proven=value, problem=f"it proves {value:.12g}, which is not the bound"
        )
    if choice is None or not is_answer(problem, choice):
        note = (
            "the placed answer is not one of the problem that was solved, e.g. because a job with a"
            " promise found no nodes or a limit was raised for it"
        )
        return GoalCheck(result=result, proven=value, note=note)
    if objective_of(problem, choice) > proven:
        return GoalCheck(
            result=result, proven=value, problem="the round's answer is worth more than is proven"
        )
    document = certificate_document(problem, certificate, choice, name=result.name, bound=bound)
    return GoalCheck(result=result, proven=value, document=document)


def _decided_choice(record: RoundRecord, snapshot: Snapshot, problem: Problem) -> Ints | None:
    """Return the columns that the round decided, int64[jobs].

    It is None if the round was refused, or if a job runs on a Cell that is not a column of it.
    """
    if len(record.decisions) != len(problem.jobs):
        return None
    type_of = {kind.name: place for place, kind in enumerate(snapshot.gpu_types)}
    plan_of = {name: place for place, name in enumerate(snapshot.plans)}
    job_of = {name: job for job, name in enumerate(problem.jobs)}
    choice = np.full(len(problem.jobs), -1, dtype=np.int64)
    for decision in record.decisions:
        if decision.allocation is None:
            continue
        cell, job = decision.allocation.cell, job_of[decision.job]
        key = CellKey(
            gpu_type=type_of[cell.gpu_type],
            gpus=cell.gpus,
            pipeline_degree=cell.pipeline_degree,
            plan=plan_of.get(cell.plan, -1),
        )
        columns = problem.columns_of(job)
        cells = problem.cell[columns.start : columns.stop]
        same = [c for c, its in zip(columns, problem.cells.keys(cells), strict=True) if its == key]
        if len(same) != 1:
            return None
        choice[job] = same[0]
    return choice
