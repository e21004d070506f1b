"""The check of a stored round's proof, on the problem that its snapshot states again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.formulation.answer.certificate_check import check_certificate
from tessera.formulation.answer.certificate_document import certificate_document
from tessera.formulation.answer.certificates import Certificate
from tessera.formulation.answer.decisions import DecisionKind
from tessera.formulation.answer.proofs import RoundProof
from tessera.formulation.base.errors import InvalidCertificate
from tessera.formulation.base.tables import Ints
from tessera.formulation.base.values import CellKey
from tessera.formulation.records.rounds import RoundRecord
from tessera.formulation.round.goals import GoalResult
from tessera.formulation.round.problem import Problem
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.base import Budget
from tessera.solvers.exact.answers import is_answer, objective_of
from tessera.solvers.goals import state_goals
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import restate_round
from tessera.solvers.rounds.widened import restate_packing


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalCheck:
    """The check of the proof of a goal of a round, in the goal's unit.

    ``bound`` is the stored one, and ``proven`` what the certificate proves, or None if there is
    none. It is larger than a bound that is a stage's word. ``problem`` says why the proof is not one
    of the stored bound; "" if it is. ``note`` says why the placed answer is outside of the proof; ""
    if it is one of the problem's answers. ``document`` is the certificate's document, or None if
    there is no proof or such a note.
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
    try:
        work = restate_packing(restate_round(snapshot, options, budget), proof)
    except InvalidCertificate as wrong:
        return tuple(
            GoalCheck(result=result, problem=wrong.problem if goal.certificate else "")
            for result, goal in zip(results, proof.goals, strict=True)
        )
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
    if proven > bound and result.certified:
        return GoalCheck(
            result=result, proven=value, problem=f"it proves {value:.12g}, which is not the bound"
        )
    if choice is None or not is_answer(problem, choice):
        note = (
            "the placed answer is not one of the problem that was solved, e.g. because a job with a"
            " promise found no nodes, a limit was raised for it, or placement gave away more of an"
            " earlier goal than its tolerance"
        )
        return GoalCheck(result=result, proven=value, note=note)
    if objective_of(problem, choice) > proven:
        return GoalCheck(
            result=result, proven=value, problem="the round's answer is worth more than is proven"
        )
    document = certificate_document(
        problem, certificate, choice, name=result.name, bound=max(bound, proven)
    )
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
        keeps = decision.kind is DecisionKind.KEEP
        column = _column_of(problem, job, key, len(decision.allocation.shares), keeps=keeps)
        if column is None:
            return None
        choice[job] = column
    return choice


def _column_of(problem: Problem, job: int, key: CellKey, nodes: int, *, keeps: bool) -> int | None:
    """Return the column of ``job`` that runs ``key`` on ``nodes`` nodes, or None if no column does.

    With wider shapes as columns, a Cell may be a column on several numbers of nodes. Placement may
    use yet another number, and the job then has the Cell that is fastest there. So a column on as
    many nodes comes first, then the Cell on the nearest number. A job that ``keeps`` all that it has
    has its present column.
    """
    columns = problem.columns_of(job)
    rows = problem.cell[columns.start : columns.stop]
    alike: list[tuple[int, bool, int, int]] = []
    for column, row, its in zip(columns, rows.tolist(), problem.cells.keys(rows), strict=True):
        if keeps and its == key and column == problem.current[job]:
            return column
        apart = abs(int(problem.cells.nodes[row]) - nodes)
        if its == key or (apart == 0 and its[:2] == key[:2]):
            alike.append((-apart, its == key, int(problem.value[column]), column))
    return max(alike)[-1] if alike else None
