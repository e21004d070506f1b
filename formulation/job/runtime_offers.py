"""The runtimes that agents can start on their nodes, and those that some nodes lack."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from tessera.formulation.job.runtimes import COMMAND, RUNTIMES

OWN_PYTHON_VARIABLES: Final = ("PATH", "PYTHONPATH")
"""Variables with which a job brings Python packages of its own, which no agent has looked at."""

MAX_NODES_NAMED: Final = 3

UNKNOWN_RUNTIME: Final = "its agent does not have it; upgrade tessera there"


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeOffer:
    """A runtime of an agent. ``version`` names its framework, and ``problem`` says why it cannot start.

    Either is "" if there is nothing to say.
    """

    runtime: str
    version: str = ""
    problem: str = ""

    def __str__(self) -> str:
        """Return the runtime as it is shown, e.g. ``torchrun (torch 2.9.1)``."""
        detail = self.problem or self.version
        return f"{self.runtime} ({detail})" if detail else self.runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOffers:
    """The runtimes and tools of an agent. One that lists no runtime may be able to start all."""

    runtimes: tuple[RuntimeOffer, ...] = ()
    tools: tuple[str, ...] = ()


NO_OFFERS: Final = AgentOffers()


class NodeOffers(NamedTuple):
    """The runtimes of nodes with one agent: those that it can start, and the problems of the others."""

    nodes: tuple[str, ...]
    versions: Mapping[str, str]  # by runtime
    problems: Mapping[str, str]  # by runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeLack:
    """A runtime that some nodes do not offer.

    ``cause`` says why, with the nodes. ``alternatives`` are the runtimes for programs that nodes
    offer, or "".
    """

    runtime: str
    cause: str
    alternatives: str = ""

    @property
    def message(self) -> str:
        """Return the sentence for a job that no node can start."""
        return f"no node offers the runtime {self.runtime}: {self.cause}"

    @property
    def next_step(self) -> str:
        """Return the changes that would do."""
        step = f"install on these nodes the framework of {self.runtime}"
        if not self.alternatives:
            return step
        return f"{step}, or submit the job with a runtime that nodes offer: {self.alternatives}"


def needed_runtime(runtime: str, variables: Collection[str]) -> str:
    """Return the runtime that a node must offer for a job with these environment variables.

    A job that brings its own Python packages needs only an agent that runs programs.
    """
    has_own = not set(OWN_PYTHON_VARIABLES).isdisjoint(variables)
    return COMMAND if has_own and RUNTIMES[runtime].trains else runtime


def describe_lack(runtime: str, offers: Iterable[NodeOffers]) -> RuntimeLack:
    """Return the causes for which some of these nodes lack a runtime, and the alternatives."""
    nodes_of: dict[str, list[str]] = {}
    alternatives = set[str]()
    for nodes, versions, problems in offers:
        alternatives |= {
            str(RuntimeOffer(runtime=name, version=version))
            for name, version in versions.items()
            if name in RUNTIMES and RUNTIMES[name].trains
        }
        if runtime not in versions:
            nodes_of.setdefault(problems.get(runtime, UNKNOWN_RUNTIME), []).extend(nodes)
    causes = (f"{problem} ({_name_some(nodes)})" for problem, nodes in nodes_of.items())
    return RuntimeLack(
        runtime=runtime, cause="; ".join(causes), alternatives=", ".join(sorted(alternatives))
    )


def _name_some(nodes: Collection[str]) -> str:
    names = sorted(nodes)
    text, unnamed_nodes = ", ".join(names[:MAX_NODES_NAMED]), len(names) - MAX_NODES_NAMED
    return f"{text} and {unnamed_nodes} more" if unnamed_nodes > 0 else text
