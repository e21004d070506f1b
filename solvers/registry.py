"""Solvers by the name that policies, the command line and benchmarks use."""

from __future__ import annotations

import importlib
from typing import Final, cast

from formulation.errors import InvalidInput
from solvers.base import Solver
from solvers.waiting import SpelledOut

DEFAULT: Final = "portfolio"

_CLASSES: Final = {  # imported when asked for: CVXPY alone takes a second
    "portfolio": ("solvers.portfolio", "Portfolio"),
    "greedy": ("solvers.greedy", "Greedy"),
    "lp": ("solvers.relaxation", "Relaxation"),
    "cp-sat": ("solvers.cpsat", "CpSat"),
    "cbc": ("solvers.cbc", "Cbc"),
    "cvxpy": ("solvers.convex", "Convex"),
}


def names() -> tuple[str, ...]:
    """Return the known names, the default first."""
    return tuple(_CLASSES)


def solver(name: str = DEFAULT) -> Solver:
    """Return a new solver of that name.

    Raises:
        InvalidInput: no solver has that name; the message lists those that there are.
    """
    if name not in _CLASSES:
        raise InvalidInput("solver", f"unknown {name!r}; choose one of {', '.join(names())}")
    module, cls = _CLASSES[name]
    return SpelledOut(cast(Solver, getattr(importlib.import_module(module), cls)()))
