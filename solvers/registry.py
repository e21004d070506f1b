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
    "pricing": ("solvers.pricing", "Pricing"),
    "lp": ("solvers.relaxation", "Relaxation"),
    "cp-sat": ("solvers.cpsat", "CpSat"),
    "cbc": ("solvers.cbc", "Cbc"),
    "cvxpy": ("solvers.convex", "Convex"),
}

_RIVALS: Final = {  # to compare with: no round is decided by them
    "stock-cp-sat": ("solvers.rivals.stock", "StockCpSat"),
    "highs": ("solvers.rivals.highs", "Highs"),
    "pop-8": ("solvers.rivals.pop", "Pop"),
    "sia": ("solvers.rivals.sia", "SiaProgram"),
    "gavel": ("solvers.rivals.gavel", "GavelProgram"),
}


def names() -> tuple[str, ...]:
    """Return the known names, the default first."""
    return tuple(_CLASSES)


def rivals() -> tuple[str, ...]:
    """Return the names of solvers that are there to compare with; policies cannot name them."""
    return tuple(_RIVALS)


def solver(name: str = DEFAULT) -> Solver:
    """Return a new solver of that name.

    Raises:
        InvalidInput: no solver has that name; the message lists those that there are.
    """
    known = _CLASSES | _RIVALS
    if name not in known:
        raise InvalidInput("solver", f"unknown {name!r}; choose one of {', '.join(known)}")
    module, cls = known[name]
    return SpelledOut(cast(Solver, getattr(importlib.import_module(module), cls)()))
