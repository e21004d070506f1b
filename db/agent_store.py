"""PostgreSQL's store of agents: their nodes, and what runs and should run there."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from tessera.db import agents, audit_log, health
from tessera.db.limits import require_few
from tessera.db.observe import record_observation
from tessera.db.store_part import StorePart
from tessera.formulation.records.agents import DesiredState, Heartbeat, NodeHealth, ObservedGang
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.runtime_offers import NO_OFFERS, AgentOffers


class AgentStore(StorePart):
    """The agents of ``tessera.service.ports``."""

    def hello(
        self,
        cluster: str,
        agent: str,
        incarnation: str,
        nodes: Sequence[NodeSpec],
        offers: AgentOffers = NO_OFFERS,
    ) -> None:
        """Register an agent and its nodes."""

        def register(connection: sa.Connection) -> None:
            silence_s = self._silence.read(connection)
            agents.register_agent(connection, cluster, agent, incarnation, nodes, offers, silence_s)
            for kind in ("nodes", "agents"):
                require_few(connection, cluster, kind, self._limits)
            audit_log.record_change(connection)

        self._database.write(register)

    def heartbeats(self, beats: Sequence[Heartbeat]) -> set[int]:
        """Renew the leases of agents' nodes."""
        return self._database.write(lambda c: agents.record_heartbeats(c, beats))

    def require_agent(self, cluster: str, agent: str, incarnation: str) -> None:
        """Check that the agent is known."""
        with self._database.read() as connection:
            agents.require_agent(connection, cluster, agent, incarnation)

    def observe(
        self,
        cluster: str,
        agent: str,
        incarnation: str,
        gangs: Sequence[ObservedGang],
        revision: int,
    ) -> bool:
        """Record what runs on the agent's nodes."""
        return self._database.write(
            lambda c: record_observation(c, cluster, agent, incarnation, gangs, revision)
        )

    def record_health(
        self, cluster: str, agent: str, incarnation: str, reported: Sequence[NodeHealth]
    ) -> float:
        """Record the faults of the agent's nodes."""
        outcome = self._database.write(
            lambda c: health.record_health(
                c, cluster, agent, incarnation, reported, self._probation_s
            )
        )
        for change in outcome.changes:
            health.log_health(cluster, change.name, change.event, change.reason or "")
        return outcome.again_in_s

    def desired(self, cluster: str, agent: str) -> DesiredState:
        """Return the gangs that should run on the agent's nodes."""
        with self._database.read() as connection:
            return agents.load_desired_gangs(connection, cluster, agent)
