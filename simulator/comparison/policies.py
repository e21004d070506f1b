"""Names of policies in simulations and benchmarks, and the information that each policy sees."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.plugins import is_reference
from tessera.formulation.round.parameters import PARAMETERS_FIELD
from tessera.formulation.round.policy import DEFAULT_OBJECTIVE
from tessera.formulation.state.information import (
    Information,
    all_estimates,
    data_parallel,
    searched_optimum,
    single_gpu,
)
from tessera.simulator.comparison.information import DP_MEMORY, read_dp_memory
from tessera.simulator.data import require_data_file
from tessera.solvers.plugins import load_objectives, load_scheduler, module_files
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.schedulers import registry

ILP: Final = "ilp:"
GREEDY: Final = "greedy:"

OUR_DEFAULT_POLICIES: Final = (
    "ilp:throughput",
    "ilp:jct",
    "ilp:balanced",
    "ilp:balanced:0.25",
    "ilp:jct + throughput",
    "ilp:0.5*throughput + jct",
    "ilp:jct within 5% then throughput",
    "ilp:finish-time-fairness",
    "ilp:max-min",
    "ilp:makespan",
    "greedy:throughput",
    "greedy:jct",
)
"""Our policies that are compared by default: each objective alone, and even mixtures, which were
not tuned on any data."""

DEFAULT_POLICY: Final = f"{ILP}{DEFAULT_OBJECTIVE}"
"""The policy whose figures are reported as ours: the objective that users get by default."""
SECOND_POLICY: Final = f"{ILP}throughput"
"""The policy of ours for clusters that are judged by throughput alone."""

DEADLINE_POLICIES: Final = ("arena-deadline", "edf")
"""Policies that are left out of comparisons without deadlines. Without deadlines, the first is
the same as Arena's policy, and the second has no meaning."""

INFORMATION: Final = ("estimates", "optimum", "data-parallel", "single-gpu")


def all_policies() -> tuple[str, ...]:
    """Return all policies that have a name of their own, with published schedulers first."""
    return (*registry.scheduler_names(), *OUR_DEFAULT_POLICIES)


def compared_policies() -> tuple[str, ...]:
    """Return the policies that are compared by default."""
    return tuple(name for name in all_policies() if name not in DEADLINE_POLICIES)


def is_ilp(policy: str) -> bool:
    """Return whether a policy is one of our integer programs."""
    return policy.startswith(ILP)


def is_ours(policy: str) -> bool:
    """Return whether a policy is our own: an integer program or greedy on the same statement."""
    return policy.startswith((ILP, GREEDY))


def options_of(policy: str, seed: int = 0) -> RoundOptions:
    """Return the options with which rounds are decided under a policy.

    A published scheduler has its own name, and one of the user's own its reference, e.g.
    ``my_lab.queues:SmallestFirst``, which is imported. ``ilp:OBJECTIVE`` and ``greedy:OBJECTIVE`` are our own
    policies with any objective of the grammar. ``@`` adds options of a round, e.g.
    ``ilp:jct@restart_horizon_s=7200``, and parameters of the scheduler, e.g. ``arena@depth=5``.

    Raises:
        InvalidInput: there is no such policy, or it has no such option or parameter.
    """
    name, *settings = (part.strip() for part in policy.split("@"))
    if is_plugin := is_reference(name) and not is_ours(name):
        load_scheduler(name)
    if is_plugin or name in registry.scheduler_names():
        known = [parameter.name for parameter in registry.parameters_of(name)]
        own = [part for part in settings if part.partition("=")[0].strip() in known]
        given = dict(_setting(part, known) for part in settings if part not in own)
        parameters = ",".join(filter(None, (given.pop(PARAMETERS_FIELD, ""), *own)))
        # The objective only measures what a scheduler has decided, and placement follows it.
        options = RoundOptions(
            **{"objective": "throughput"}
            | given
            | {"seed": seed, "scheduler": name, PARAMETERS_FIELD: parameters}
        )
        registry.make_scheduler(name, parameters)  # so that wrong parameters fail before any round
        return options
    given = dict(_setting(part) for part in settings)
    for prefix, solver in ((ILP, "portfolio"), (GREEDY, "greedy")):
        if name.startswith(prefix):
            objective = name.removeprefix(prefix).strip()
            load_objectives(objective)
            return RoundOptions(**given | {"seed": seed, "objective": objective, "solver": solver})
    raise InvalidInput(
        "policies",
        f"unknown policy {name!r}; use one of {', '.join(registry.scheduler_names())}, or ilp:OBJECTIVE"
        " or greedy:OBJECTIVE, e.g. ilp:jct, or MODULE:CLASS, a scheduler of your own",
    )


def plugin_files(policy: str) -> tuple[Path, ...]:
    """Return the files of the modules that a policy names, if it names any. Raises InvalidInput."""
    options_of(policy)  # imports them
    name = policy.partition("@")[0].strip()
    return module_files(name.removeprefix(ILP).removeprefix(GREEDY))


def _setting(text: str, parameters: Collection[str] = ()) -> tuple[str, Any]:
    """Return the name of a round's option and its value, converted to the option's type.

    ``parameters`` are those that the policy's scheduler has, for the error.
    """
    name, equals, value = text.partition("=")
    kinds = {f.name: str(f.type) for f in fields(RoundOptions)}
    kind = kinds.get(name)
    try:
        if equals and kind == "bool" and value in ("true", "false"):
            return name, value == "true"
        if equals and kind == "int":
            return name, int(value)
        if equals and kind == "float":
            return name, float(value)
        if equals and kind in ("str", "DeadlineMode"):
            return name, value
    except ValueError:
        pass  # the error is raised below
    also = f", and no parameter of the scheduler ({', '.join(parameters)})" if parameters else ""
    raise InvalidInput(
        "policies",
        f"{text!r} is not an option of a round{also}; write NAME=VALUE, e.g. max_changes=3",
    )


def information_of(name: str) -> Information:
    """Return the information with the given name.

    Raises:
        InvalidInput: there is no such information.
        MissingData: the data folder does not have the file that "data-parallel" needs.
    """
    if name == "estimates":
        return all_estimates
    if name == "optimum":
        return searched_optimum
    if name == "single-gpu":
        return single_gpu()
    if name == "data-parallel":
        return data_parallel(read_dp_memory(require_data_file(*DP_MEMORY)))
    raise InvalidInput("information", f"unknown {name!r}; use one of {', '.join(INFORMATION)}")


def split_list(text: str, known: tuple[str, ...] = ()) -> list[str]:
    """Return the distinct parts of a comma-separated list.

    Raises:
        InvalidInput: the list is empty, or ``known`` is not empty and a part is not in it.
    """
    parts = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not parts:
        raise InvalidInput("list", "must name at least one item")
    if known and (unknown := [part for part in parts if part not in known]):
        raise InvalidInput("list", f"unknown {', '.join(unknown)}; use {', '.join(known)}")
    return parts
