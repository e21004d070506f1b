"""The objective of a round."""

from __future__ import annotations

from ortools.sat.python import cp_model

from tessera.formulation.round.problem import Problem


def maximize_value(
    model: cp_model.CpModel, x: list[cp_model.IntVar], problem: Problem, offset: int
) -> None:
    """Maximise the sum over columns of value[c] * x[c] (1), plus the value of what is decided.

    The offset changes no answer, but makes the solver's relative gap that of the whole problem.
    """
    model.maximize(cp_model.LinearExpr.weighted_sum(x, problem.value.tolist()) + offset)
