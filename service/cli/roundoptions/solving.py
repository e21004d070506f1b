"""The options on how a round is solved."""

from __future__ import annotations

from typing import Annotated, Final

from tessera.formulation import limits
from tessera.service.cli.roundoptions.values import (
    Real,
    Text,
    Whole,
    panel_option,
    read_duration,
)
from tessera.v1 import scheduler_pb2

_SOLVING: Final = "Solving"


def solving_options(
    *,
    solver: Annotated[
        Text,
        panel_option(
            _SOLVING, "portfolio, pricing, greedy, cp-sat, lp, cbc or cvxpy. Default: portfolio."
        ),
    ] = None,
    gap: Annotated[
        Real,
        panel_option(_SOLVING, "Relative gap to the bound at which solving stops. Default: 1e-4."),
    ] = None,
    seed: Annotated[
        Whole,
        panel_option(
            _SOLVING, "Seed of all random choices. Default: 0.", min=0, max=limits.MAX_SEED
        ),
    ] = None,
    solve_limit: Annotated[
        Text,
        panel_option(
            _SOLVING, "Longest solving time, e.g. 5s. Default: the time that the call leaves."
        ),
    ] = None,
) -> scheduler_pb2.RoundOptions:
    """Return the options on how a round is solved."""
    chosen = scheduler_pb2.RoundOptions(solver=solver, gap=gap, seed=seed)
    read_duration(chosen.solve_limit, "--solve-limit", solve_limit)
    return chosen
