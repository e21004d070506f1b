"""The messages of an agent that are not recorded yet."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from tessera.formulation.base.clock import Clock
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.records.agents import NodeHealth, ObservedGang
from tessera.service.server.convert import agents as convert
from tessera.service.server.rpc.agents.agentlogs import AgentLogs
from tessera.service.server.tasks.calls import Subscription
from tessera.v1 import agents_pb2 as pb

log = logging.getLogger(__name__)

_Messages = AsyncIterator[pb.AgentMessage]

MAX_REMARKS: Final = 32
MAX_REMARK_CHARS: Final = 300
"""Largest number of an agent's remarks about its nodes' network that are kept, and the length of
each in characters.
"""


@dataclass(frozen=True, slots=True)
class Observation:
    """The gangs that ran on the agent's nodes under a revision of the desired state.

    ``health`` is that of the nodes that are watched.
    """

    revision: int
    gangs: tuple[ObservedGang, ...]
    health: tuple[NodeHealth, ...] = ()

    def covers(self, older: Observation) -> bool:
        """Return whether ``older`` can be dropped: every ended gang in it is also reported here."""
        reported = {(g.job, g.generation, g.node) for g in self.gangs}
        return all(
            (g.job, g.generation, g.node) in reported
            for g in older.gangs
            if g.phase in convert.ENDED_PHASES
        )


@dataclass(slots=True)
class AgentInbox:
    """The reports of an agent that are not recorded yet, usually only the newest observation."""

    spoke_s: float  # when the agent was last heard
    sent_at_s: float = 0.0  # the same by the agent's clock
    spoke: bool = False  # whether it was heard since the last record
    observed: list[Observation] = field(default_factory=list)  # oldest first
    agent: str = ""
    network: tuple[str, ...] = ()  # reasons why the network plan has no effect on its nodes
    own: frozenset[str] = frozenset()  # its nodes
    logs: AgentLogs | None = None

    async def fill(self, messages: _Messages, stream: Subscription, clock: Clock) -> None:
        """Receive messages until the agent closes its side."""
        try:
            async for message in messages:
                if message.WhichOneof("body") == "hello":
                    raise InvalidInput("hello", "only the first message may be a hello")
                if message.WhichOneof("body") == "log_answer" and self.logs is not None:
                    self.logs.receive(message.log_answer)
                    stream.wake()
                    continue  # it renews no lease, so that reading output is not work for the store
                if message.WhichOneof("body") == "observed":
                    gangs = convert.to_observed("observed", message.observed)
                    health = convert.to_health(message.observed, self.own)
                    self._observe(Observation(message.observed.revision, gangs, health))
                    self._heed(message.observed.network_remarks)
                self.spoke, self.spoke_s = True, clock.monotonic_s()
                self.sent_at_s = message.sent_at_s
                stream.wake()
        finally:
            stream.wake()

    def _observe(self, newest: Observation) -> None:
        if self.observed and newest.covers(self.observed[-1]):
            self.observed.pop()
        self.observed.append(newest)

    def _heed(self, remarks: Iterable[str]) -> None:
        """Keep the agent's remarks about its nodes' network, and log each new one."""
        cleaned = tuple(
            "".join(c if c.isprintable() else " " for c in text[:MAX_REMARK_CHARS])
            for text in islice(remarks, MAX_REMARKS)
        )
        for text in cleaned:
            if text not in self.network:
                log.warning(
                    "an agent reports on its network interfaces",
                    extra={"event": "agent_network", "agent": self.agent, "remark": text},
                )
        self.network = cleaned
