"""The decision variables: x[c] is true if column c's job runs on column c."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ortools.sat.python import cp_model

from tessera.formulation.base.tables import Ints
from tessera.formulation.round.problem import Problem

CHECK_EVERY: Final = 1024
"""Columns between two checks whether anybody still waits for the answer."""


def add_columns(model: cp_model.CpModel, problem: Problem) -> list[cp_model.IntVar]:
    """Add x[c] in {0, 1} for each column (4)."""
    return [model.new_bool_var("") for _ in range(len(problem.cell))]


def hint_choice(
    model: cp_model.CpModel,
    x: list[cp_model.IntVar],
    choice: Ints,
    check: Callable[[], None],
) -> None:
    """Suggest ``choice`` (int64[jobs]) as a complete first answer; call ``check`` now and then."""
    chosen = set(choice[choice >= 0].tolist())
    for column, variable in enumerate(x):
        if column % CHECK_EVERY == 0:
            check()
        model.add_hint(variable, column in chosen)
