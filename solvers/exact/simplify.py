"""The same round in its simplest numbers, from which every bound is tighter.

Columns that use more of a row than there is cannot be chosen, so they are left out. What a row's
columns use is always a multiple of the greatest common divisor of their amounts, so the capacity is
rounded down to one. Every objective is a multiple of the greatest common divisor of the values, so
the values are divided by it, and a bound that is rounded down to an integer is a multiple of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tessera.formulation.answer.certificates import Branch, Certificate, CertificateNode
from tessera.formulation.answer.solution import RecordedAnswer, Solution, SolveStatus
from tessera.formulation.base.tables import Ints
from tessera.formulation.round.problem import Problem, restrict_problem
from tessera.solvers.exact.answers import fits_alone, is_answer

_PROBE: Final = 1_000
"""Numbers that are looked at first: real rounds have no common divisor, which these show."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimpleRound:
    """A problem in its simplest numbers. ``columns`` (int64) are those of the original that are left.

    It is None if all are. Values are those of the original divided by ``divisor``.
    """

    problem: Problem
    original: Problem
    columns: Ints | None
    divisor: int

    @property
    def is_original(self) -> bool:
        """Return whether nothing could be simplified."""
        return self.problem is self.original

    def read_hint(self, hint: Solution | None) -> Solution | None:
        """Return ``hint``, which is of the original, as a hint for the simple problem."""
        if hint is None or self.is_original:
            return hint
        prices = hint.prices / self.divisor
        if not hint.has_answer or not is_answer(self.original, hint.choice):
            return replace(
                hint,
                status=SolveStatus.UNKNOWN,
                choice=np.full_like(hint.choice, -1),
                objective=0,
                prices=prices,
            )
        choice = hint.choice
        if self.columns is not None:
            choice = np.where(choice >= 0, np.searchsorted(self.columns, choice), -1)
        return replace(
            hint,
            choice=choice,
            prices=prices,
            objective=hint.objective // self.divisor,
            bound=float(np.floor(hint.bound / self.divisor)),
        )

    def read_record(self, recorded: tuple[RecordedAnswer, ...]) -> tuple[RecordedAnswer, ...]:
        """Return answers that were recorded in terms of the original in terms of the simple problem."""
        return tuple(self._renumbered(answer, back=False) for answer in recorded)

    def lift(self, solution: Solution) -> Solution:
        """Return ``solution`` of the simple problem in terms of the original."""
        if self.is_original:
            return solution
        certificate = solution.certificate
        return replace(
            solution,
            choice=self._column(solution.choice),
            objective=solution.objective * self.divisor,
            bound=solution.bound * self.divisor,
            prices=solution.prices * self.divisor,
            recorded=tuple(self._renumbered(answer, back=True) for answer in solution.recorded),
            certificate=None if certificate is None else self._lifted(certificate),
        )

    def _column(self, choice: Ints) -> Ints:
        if self.columns is None or not len(self.columns):
            return choice
        return np.where(choice >= 0, self.columns[choice], -1)

    def _renumbered(self, answer: RecordedAnswer, *, back: bool) -> RecordedAnswer:
        changes = answer.changes
        if self.columns is not None and changes:
            job, column = np.array(changes, dtype=np.int64).T
            if back:
                column = self._column(column)
            else:
                column = np.where(column >= 0, np.searchsorted(self.columns, column), -1)
            changes = tuple(zip(job.tolist(), column.tolist(), strict=True))
        bound = answer.bound * self.divisor if back else answer.bound / self.divisor
        return replace(answer, changes=changes, bound=bound)

    def _lifted(self, certificate: Certificate) -> Certificate:
        """Return a certificate of the simple problem as one of the original.

        Prices grow with the values; the denominator stays, if the divisor does not divide it.
        """
        root = _scaled(certificate.root, self.divisor, self.columns)
        return replace(certificate, bound=certificate.bound * self.divisor, root=root)


def simplify(problem: Problem) -> SimpleRound:
    """Return ``problem`` in its simplest numbers. Waiting must not use any row."""
    simple, columns = problem, None
    fits = fits_alone(problem)
    if not fits.all():
        columns = np.flatnonzero(fits)
        simple = restrict_problem(problem, np.arange(len(problem.jobs)), columns)
    divisor = _common_divisor(simple.value)
    if divisor > 1:
        simple = replace(
            simple,
            value=simple.value // divisor,
            restart_price=simple.restart_price // divisor,
            scale=simple.scale / divisor,
        )
    step = _steps(simple)
    loose = np.flatnonzero((step > 1) & (simple.capacity % np.maximum(step, 1) > 0))
    if len(loose):
        rows = list(simple.rows)
        for r in loose.tolist():
            rest = rows[r].capacity % int(step[r])
            rows[r] = replace(rows[r], capacity=rows[r].capacity - rest)
        simple = replace(simple, rows=tuple(rows))
    return SimpleRound(problem=simple, original=problem, columns=columns, divisor=divisor)


def _steps(problem: Problem) -> Ints:
    """Return the greatest common divisor of the amounts of each row, int64[rows]; 0 if it has none."""
    step = np.zeros(len(problem.rows), dtype=np.int64)
    np.gcd.at(step, problem.row[:_PROBE], problem.amount[:_PROBE])
    if np.any(step != 1):
        np.gcd.at(step, problem.row[_PROBE:], problem.amount[_PROBE:])
    return step


def _common_divisor(values: Ints) -> int:
    """Return the greatest common divisor of ``values``, at least 1."""
    probe = int(np.gcd.reduce(values[:_PROBE])) if len(values) else 1
    if probe > 1 and len(values) > _PROBE:
        probe = int(np.gcd.reduce(values))
    return max(probe, 1)


def _scaled(node: CertificateNode, factor: int, columns: Ints | None) -> CertificateNode:
    if isinstance(node, Branch):
        own = node.columns if columns is None else tuple(columns[list(node.columns)].tolist())
        return replace(
            node,
            columns=own,
            below=_scaled(node.below, factor, columns),
            above=_scaled(node.above, factor, columns),
        )
    return replace(
        node,
        prices=tuple((row, factor * price) for row, price in node.prices),
        branch_prices=tuple(factor * price for price in node.branch_prices),
        job_prices=tuple((job, factor * price) for job, price in node.job_prices),
    )
