"""The step from the solver's answer to the one that foresight takes, among those that are permitted."""

from __future__ import annotations

from dataclasses import replace

from tessera.formulation.foresight import OWN_ANSWER, Foresight
from tessera.formulation.solution import SolveStatus
from tessera.formulation.tables import Floats, Ints
from tessera.solvers.answers import objective_of
from tessera.solvers.foresight import look_forward
from tessera.solvers.goals import SolvedGoals
from tessera.solvers.rounds.work import RoundWork


def foresee(
    work: RoundWork, solved: SolvedGoals, known: Floats | None
) -> tuple[RoundWork, SolvedGoals, Foresight | None]:
    """Return the round with the answer that is best when rolled forward, and what was compared.

    Every answer keeps the rows and the marks of the round's statement, so promises and limits hold.
    Goals before the last one stay as good as the solver made them. The bound stays that of the
    round's own objective. If another answer than the solver's is taken, it takes the place of
    greedy's, too, so that placement does not go back to an answer of more value.
    """
    own = solved.solution
    if not own.has_answer:
        return work, solved, None
    statement, problem = work.statement, work.statement.problem
    least = solved.standing(statement, own.choice)[:-1]
    answers = [(OWN_ANSWER, own.choice)]
    if work.greedy.has_answer:
        answers.append((work.greedy.solver, work.greedy.choice))

    def allowed(choice: Ints) -> bool:
        return solved.standing(statement, choice)[:-1] >= least

    foreseen = look_forward(
        work.snapshot, work.policy, problem, answers, allowed, known, work.budget
    )
    if foreseen is None:
        return work, solved, None
    if foreseen.record.chosen == OWN_ANSWER:
        return work, solved, foreseen.record
    objective = objective_of(problem, foreseen.choice)
    proven = own.bound <= objective
    solution = replace(
        own,
        choice=foreseen.choice,
        objective=objective,
        status=SolveStatus.OPTIMAL if proven else SolveStatus.FEASIBLE,
    )
    stands_in = replace(
        work.greedy,
        choice=foreseen.choice,
        objective=objective_of(work.surrogate, foreseen.choice),
        status=SolveStatus.FEASIBLE,
    )
    return (
        replace(work, hint=stands_in),
        solved.measured_on(statement, solution),
        foreseen.record,
    )
