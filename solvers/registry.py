"""Solvers by the name that rounds, the command line and benchmarks use."""

from __future__ import annotations

import importlib
from typing import Final, cast

from tessera.formulation.base.errors import InvalidInput
from tessera.solvers.base import Solver
from tessera.solvers.exact.waiting_columns import WaitingAsColumns

DEFAULT: Final = "portfolio"

_CLASSES: Final = {  # imported on demand: CVXPY alone takes a second
    "portfolio": ("tessera.solvers.exact.portfolio", "Portfolio"),
    "greedy": ("tessera.solvers.exact.greedy", "Greedy"),
    "pricing": ("tessera.solvers.exact.pricing", "Pricing"),
    "lp": ("tessera.solvers.exact.relaxation", "Relaxation"),
    "cp-sat": ("tessera.solvers.exact.cpsat", "CpSat"),
    "cbc": ("tessera.solvers.exact.cbc", "Cbc"),
    "cvxpy": ("tessera.solvers.exact.convex", "Convex"),
}

_BASELINES: Final = {  # for comparison only: no round is committed with their decisions
    "stock-cp-sat": ("tessera.solvers.exact.baselines.stock", "StockCpSat"),
    "highs": ("tessera.solvers.exact.baselines.highs", "Highs"),
    "pop-8": ("tessera.solvers.exact.baselines.pop", "Pop"),
}

_UNINTERRUPTIBLE: Final = frozenset({"cbc", "cvxpy", "highs", "pop-8"})
"""Solvers that spend their time in one library call, which only a time limit ends."""


def solver_names() -> tuple[str, ...]:
    """Return the known names, the default first."""
    return tuple(_CLASSES)


def baseline_names() -> tuple[str, ...]:
    """Return the names of the solvers for comparison, which no committed round may use."""
    return tuple(_BASELINES)


def is_interruptible(name: str) -> bool:
    """Return whether the solver soon notices that its budget is cancelled."""
    return name not in _UNINTERRUPTIBLE


def require_product(name: str) -> None:
    """Refuse baselines, since no committed round may be decided by one.

    Raises:
        InvalidInput: the solver is a baseline, or no solver has that name.
    """
    if name not in _CLASSES:
        baseline = f"{name!r} is only for comparison" if name in _BASELINES else f"unknown {name!r}"
        raise InvalidInput(
            "solver",
            f"{baseline}; choose one of {', '.join(_CLASSES)}"
            + ("; a dry run or a replay may use it" if name in _BASELINES else ""),
        )


def make_solver(name: str = DEFAULT) -> Solver:
    """Return a new solver of that name.

    Raises:
        InvalidInput: no solver has that name; the message lists the known ones.
    """
    known = _CLASSES | _BASELINES
    if name not in known:
        raise InvalidInput("solver", f"unknown {name!r}; choose one of {', '.join(known)}")
    module, cls = known[name]
    return WaitingAsColumns(cast(Solver, getattr(importlib.import_module(module), cls)()))
