"""Mechanisms that decide paths, priority levels and time shifts, by name; benchmarks use them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Final, Protocol, cast

from tessera.formulation.answer.network.contention import Contention
from tessera.formulation.answer.network.plan import NetworkPlan
from tessera.formulation.base.errors import InvalidInput


class Planner(Protocol):
    """A function that plans for all jobs together.

    The same arguments give the same network plan.
    """

    def __call__(self, contention: Contention, *, levels: int, seed: int = 0) -> NetworkPlan:
        """Return a network plan with levels in [0, levels).

        ``seed`` determines the switches' hash and all randomness.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Mechanism:
    """A planner and its name."""

    name: str
    plan: Planner


_BASELINES: Final = {  # module and function; imported on demand
    "ecmp": ("tessera.solvers.network.baselines.ecmp", "plan"),
    "sincronia": ("tessera.solvers.network.baselines.sincronia", "plan"),
    "varys": ("tessera.solvers.network.baselines.varys", "plan"),
    "taccl*": ("tessera.solvers.network.baselines.taccl", "plan"),
    "cassini": ("tessera.solvers.network.baselines.cassini", "plan"),
}

_OURS: Final = {
    "crux-pa": ("tessera.solvers.network.variants", "pa"),
    "crux-ps-pa": ("tessera.solvers.network.variants", "ps_pa"),
    "crux-full": ("tessera.solvers.network.variants", "full"),
    "crux-paper": ("tessera.solvers.network.variants", "paper"),
}

_KNOWN: Final = _BASELINES | _OURS


def baseline_mechanisms() -> tuple[str, ...]:
    """Return the names of the methods that Crux is compared with."""
    return tuple(_BASELINES)


def mechanism_names() -> tuple[str, ...]:
    """Return all known names, the baselines first."""
    return tuple(_KNOWN)


def make_mechanism(name: str) -> Mechanism:
    """Return the mechanism of that name.

    Raises:
        InvalidInput: no mechanism has that name; the message lists the known ones.
    """
    if name not in _KNOWN:
        raise InvalidInput("mechanism", f"unknown {name!r}; choose one of {', '.join(_KNOWN)}")
    module, function = _KNOWN[name]
    planner = cast(Planner, getattr(importlib.import_module(module), function))
    return Mechanism(name=name, plan=planner)
