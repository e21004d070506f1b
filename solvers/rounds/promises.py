"""The promises that a round can keep, and those that it could not keep in the end."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from tessera.formulation.answer.solution import Solution, SolveStatus
from tessera.formulation.base.tables import Bools, Ints
from tessera.formulation.round.problem import Problem, RowKind
from tessera.formulation.round.promises.launched import is_launched
from tessera.formulation.round.statement import Statement, state_round
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.exact.answers import objective_of
from tessera.solvers.exact.greedy import Greedy
from tessera.solvers.rounds.work import RoundWork


def keep_promises(work: RoundWork) -> RoundWork:
    """Return the round with the promises that can be kept, and with greedy's solution as its hint.

    If the must-run jobs no longer fit together (nodes were lost), greedy finds promises of great
    total weight that can be kept. The round is then stated again without the others.
    """
    solver, problem, budget = Greedy(), work.surrogate, work.budget
    greedy = solver.solve(problem, budget, witness_of(work.statement, problem))
    if greedy.has_answer:
        return replace(work, hint=greedy)
    heaviest = problem.weight.max(initial=1.0)
    value = np.rint(problem.weight / heaviest * 1e6).astype(np.int64) + 1
    columns = problem.column_job
    promises = replace(
        problem,
        value=np.where(problem.must_run[columns], value[columns], 0),
        must_run=np.zeros_like(problem.must_run),
    )
    kept = solver.solve(promises, budget)
    must_run = problem.must_run & (kept.choice >= 0)
    waived = frozenset(np.flatnonzero(problem.must_run & ~must_run).tolist())
    statement = state_round(
        work.snapshot,
        work.policy,
        work.admission,
        waived=waived,
        plan=work.statement.plan,
        check=budget.check,
    )
    work = replace(work, statement=statement, waived=waived)
    relaxed = work.surrogate
    hint = witness_of(statement, relaxed)
    if hint is None:
        others = kept.choice if len(problem.idle_row) else -1  # waiting may use a row that is short
        choice = _carried(problem, relaxed, np.where(must_run, kept.choice, others))
        hint = replace(kept, choice=choice, objective=objective_of(relaxed, choice), bound=math.inf)
    return replace(work, hint=solver.solve(relaxed, budget, hint))


def release_lost_promises(problem: Problem, solution: Solution) -> tuple[Problem, frozenset[int]]:
    """Return the problem in which jobs that found no blocks need not run, and these jobs.

    Placement displaces all jobs that it may before it leaves such a job without GPUs.
    """
    lost = problem.must_run & (solution.choice < 0)
    problem = _with_room_for(problem, solution)
    if not lost.any():
        return problem, frozenset()
    return replace(problem, must_run=problem.must_run & ~lost), frozenset(
        np.flatnonzero(lost).tolist()
    )


def _with_room_for(problem: Problem, solution: Solution) -> Problem:
    """Return the problem whose rows of planned starts have room for the solution as it was placed.

    Placement may take GPUs from other jobs than the solver did, to start a job that is promised to start
    now. The next round then plans the starts again that this delays.
    """
    amounts = problem.used(solution.choice).tolist()
    rows = [
        replace(row, capacity=max(row.capacity, amount)) if row.kind is RowKind.RESERVED else row
        for row, amount in zip(problem.rows, amounts, strict=True)
    ]
    return replace(problem, rows=tuple(rows))


def had_promise(snapshot: Snapshot) -> Bools:
    """Return the jobs that may have had a promise before the round, bool[jobs].

    They are launched or admitted. A job that would only start, by its queue, its quota or an
    admission of this round, has nothing to lose.
    """
    return is_launched(snapshot) | snapshot.jobs.admitted


def witness_of(statement: Statement, problem: Problem) -> Solution | None:
    """Return the choice that the rules packed for the must-run jobs as a solution, or None."""
    if statement.witness is None:
        return None
    return Solution(
        status=SolveStatus.FEASIBLE,
        choice=statement.witness,
        solver="packing",
        bound=math.inf,
        objective=objective_of(problem, statement.witness),
    )


def _carried(before: Problem, after: Problem, choice: Ints) -> Ints:
    """Return ``choice`` in the columns of ``after``, which states the same Cells.

    A job that has no such column gets -1.
    """
    carried = np.full(len(choice), -1, dtype=np.int64)
    for job in np.flatnonzero(choice >= 0).tolist():
        columns = after.columns_of(job)
        same = np.flatnonzero(after.cell[columns.start : columns.stop] == before.cell[choice[job]])
        if len(same):
            carried[job] = columns.start + int(same[0])
    return carried
