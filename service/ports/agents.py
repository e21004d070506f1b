"""Agents: what they register and report, and what they are to run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from tessera.formulation.records.agents import DesiredState, Heartbeat, NodeHealth, ObservedGang
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.runtime_offers import NO_OFFERS, AgentOffers


class AgentStore(Protocol):
    """The part of a store that agents' streams use."""

    def hello(
        self,
        cluster: str,
        agent: str,
        incarnation: str,
        nodes: Sequence[NodeSpec],
        offers: AgentOffers = NO_OFFERS,
    ) -> None:
        """Register an agent, its nodes and its runtimes. A newer incarnation takes the nodes over.

        Raises:
            NotFound: the cluster. InvalidInput: unknown GPU type, or other GPUs than stored while
                held.
        """
        ...

    def heartbeats(self, beats: Sequence[Heartbeat]) -> Collection[int]:
        """Renew the leases of agents' nodes; return the positions of those whose agent is known.

        ``require_agent`` raises the reason why another one is not known.
        """
        ...

    def require_agent(self, cluster: str, agent: str, incarnation: str) -> None:
        """Check that the agent is known.

        Raises:
            NotFound: the cluster or the agent. NotAllowed: another incarnation took over.
        """
        ...

    def observe(
        self,
        cluster: str,
        agent: str,
        incarnation: str,
        gangs: Sequence[ObservedGang],
        revision: int,
    ) -> bool:
        """Record what runs on the agent's nodes; return whether this changed the desired state.

        A releasing GPU is free if its job and generation are absent from ``gangs`` and ``revision``
        is not older than its release. Reports of an older generation change nothing. Progress of a
        job that trains may fall, because it went on from a checkpoint. Raises NotAllowed.
        """
        ...

    def record_health(
        self, cluster: str, agent: str, incarnation: str, reported: Sequence[NodeHealth]
    ) -> float:
        """Record the present faults of the agent's nodes; drain nodes with new faults.

        A node that health has drained and that is healthy now goes on probation, and is undrained
        when that ends. A node that is not listed is not watched. Nodes of other agents are ignored.

        Return the seconds after which the same report should be recorded again, or inf.

        Raises:
            NotFound: the cluster or the agent. NotAllowed: another incarnation took over.
        """
        ...

    def desired(self, cluster: str, agent: str) -> DesiredState:
        """Return the gangs on the agent's nodes that hold all their GPUs, on every node."""
        ...
