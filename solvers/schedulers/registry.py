"""Published schedulers by the name that rounds, the command line and benchmarks use."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Final, cast

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.plugins import find_plugin, is_reference
from tessera.solvers.schedulers.base import PublishedScheduler, Scheduler
from tessera.solvers.schedulers.parameters import (
    SchedulerParameter,
    declared_parameters,
    read_parameters,
)

_CLASSES: Final[Mapping[str, tuple[str, str, Mapping[str, Any]]]] = {  # imported on demand
    "fcfs": ("tessera.solvers.schedulers.fcfs", "Fcfs", {}),
    "easy": ("tessera.solvers.schedulers.easy", "Easy", {}),
    "conservative": ("tessera.solvers.schedulers.conservative", "Conservative", {}),
    "srt": ("tessera.solvers.schedulers.srt", "Srt", {}),
    "gandiva": ("tessera.solvers.schedulers.gandiva", "Gandiva", {}),
    "gavel": ("tessera.solvers.schedulers.gavel", "Gavel", {}),
    "gavel-las": ("tessera.solvers.schedulers.gavel", "GavelLas", {}),
    "elasticflow": ("tessera.solvers.schedulers.elasticflow", "ElasticFlow", {}),
    "elasticflow-ls": ("tessera.solvers.schedulers.elasticflow", "ElasticFlow", {"loosened": True}),
    "sia": ("tessera.solvers.schedulers.sia", "Sia", {}),
    "sia-arena": ("tessera.solvers.schedulers.sia", "Sia", {"name": "sia-arena", "fairness": 0.5}),
    "arena": ("tessera.solvers.schedulers.arena", "Arena", {}),
    "arena-no-elasticity": (
        "tessera.solvers.schedulers.arena",
        "Arena",
        {"name": "arena-no-elasticity", "elasticity": False},
    ),
    "arena-no-heterogeneity": (
        "tessera.solvers.schedulers.arena",
        "Arena",
        {"name": "arena-no-heterogeneity", "heterogeneity": False},
    ),
    "arena-no-opportunism": (
        "tessera.solvers.schedulers.arena",
        "Arena",
        {"name": "arena-no-opportunism", "opportunism": False},
    ),
    "arena-deadline": ("tessera.solvers.schedulers.arena_deadline", "ArenaDeadline", {}),
    "edf": ("tessera.solvers.schedulers.edf", "Edf", {}),
    "morphling": ("tessera.solvers.schedulers.morphling", "Morphling", {}),
    "morphling-r": (
        "tessera.solvers.schedulers.morphling",
        "Morphling",
        {"name": "morphling-r", "plans": False},
    ),
    "morphling-e": (
        "tessera.solvers.schedulers.morphling",
        "Morphling",
        {"name": "morphling-e", "resources": False},
    ),
    "morphling-n": (
        "tessera.solvers.schedulers.morphling",
        "Morphling",
        {"name": "morphling-n", "plans": False, "resources": False},
    ),
    "synergy": ("tessera.solvers.schedulers.synergy", "Synergy", {}),
    "antman": ("tessera.solvers.schedulers.antman", "AntMan", {}),
}
"""A map from a name to the module, the class, and the arguments of the class."""

_UNINTERRUPTIBLE: Final = frozenset({"gavel-las"})
"""Schedulers that spend their time in one library call: half a minute with 10,000 jobs."""


def scheduler_names() -> tuple[str, ...]:
    """Return the known names."""
    return tuple(_CLASSES)


def is_interruptible(name: str) -> bool:
    """Return whether the scheduler soon notices a cancelled round.

    The empty name is interruptible. A plug-in need not be.
    """
    return name not in _UNINTERRUPTIBLE and not is_reference(name)


def parameters_of(name: str) -> tuple[SchedulerParameter, ...]:
    """Return the parameters of the scheduler of that name, with its own defaults.

    Raises:
        InvalidInput: no scheduler has that name; the message lists the known ones.
    """
    scheduler, arguments = _find(name)
    return declared_parameters(scheduler, arguments)


def make_scheduler(name: str, parameters: str = "") -> PublishedScheduler:
    """Return the published scheduler of that name with ``parameters``, e.g. ``depth=5,breadth=8``.

    Raises:
        InvalidInput: no scheduler has that name, or it does not accept the parameters. The message
            lists what there is.
    """
    scheduler, arguments = _find(name)
    known = declared_parameters(scheduler, arguments)
    chosen = read_parameters(name, known, parameters)
    return cast(PublishedScheduler, scheduler(**{**arguments, **chosen}))


def scheduler_of(name: str, parameters: str = "") -> Scheduler | None:
    """Return the scheduler of that name, which sees all estimates, or None for the empty name.

    Raises:
        InvalidInput: as in ``make_scheduler``.
    """
    if not name:
        return None
    return Scheduler(published=make_scheduler(name, parameters), parameters=parameters)


def _find(name: str) -> tuple[type, Mapping[str, Any]]:
    """Return the class of the scheduler of that name, and the arguments of the class.

    A plug-in is only looked up: it must be loaded already (``tessera.solvers.plugins``).
    """
    if is_reference(name):
        if (plugin := find_plugin(name)) is None:
            raise InvalidInput(
                "scheduler", f"{name!r} is not among the plug-ins that may be used here"
            )
        return cast(type, plugin), {}
    if name not in _CLASSES:
        raise InvalidInput(
            "scheduler", f"unknown {name!r}; choose one of {', '.join(scheduler_names())}"
        )
    module, cls, arguments = _CLASSES[name]
    return cast(type, getattr(importlib.import_module(module), cls)), arguments
