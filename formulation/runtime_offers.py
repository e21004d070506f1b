"""The runtimes that agents can start on their nodes, and those that some nodes lack."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from tessera.formulation.runtimes import COMMAND, RUNTIMES

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
    """The runtimes of an agent, and its tools. Without runtimes, the agent does not say what it has."""

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
    """A runtime that some nodes do not offer: why not, and what other runtimes nodes offer."""

    runtime: str
    why: str
    others: str = ""  # "" if nodes offer none that trains

    @property
    def message(self) -> str:
        """Return the sentence for a job that no node can start."""
        return f"no node offers the runtime {self.runtime}: {self.why}"

    @property
    def next_step(self) -> str:
        """Return what would do."""
        other = f", or submit the job with a runtime that nodes offer: {self.others}"
        return f"install what {self.runtime} needs there{other if self.others else ''}"


def needed_runtime(runtime: str, variables: Collection[str]) -> str:
    """Return the runtime that a node must offer for a job with these environment variables.

    A job that brings its own Python packages needs only an agent that runs programs.
    """
    brings = RUNTIMES[runtime].trains and not set(OWN_PYTHON_VARIABLES).isdisjoint(variables)
    return COMMAND if brings else runtime


def describe_lack(runtime: str, offers: Iterable[NodeOffers]) -> RuntimeLack:
    """Return what is known of a runtime that some of these nodes lack."""
    nodes_of: dict[str, list[str]] = {}
    others: dict[str, None] = {}
    for nodes, versions, problems in offers:
        for name in versions:
            if name in RUNTIMES and RUNTIMES[name].trains:
                others[str(RuntimeOffer(runtime=name, version=versions[name]))] = None
        if runtime not in versions:
            nodes_of.setdefault(problems.get(runtime, UNKNOWN_RUNTIME), []).extend(nodes)
    why = "; ".join(f"{problem} ({_name_some(nodes)})" for problem, nodes in nodes_of.items())
    return RuntimeLack(runtime=runtime, why=why, others=", ".join(sorted(others)))


def _name_some(nodes: Collection[str]) -> str:
    names = sorted(nodes)
    more = len(names) - MAX_NODES_NAMED
    if more <= 0:
        return ", ".join(names)
    return f"{', '.join(names[:MAX_NODES_NAMED])} and {more} more"
