"""The streams of agents and of those who watch jobs, and the clocks of both."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.formulation.base.errors import InvalidInput
from tessera.service.server.settings.values import (
    Factor,
    InstanceName,
    LargeCount,
    LogFormat,
    PositiveSeconds,
    Seconds,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTiming:
    """The intervals of an agent's stream, in seconds."""

    lease_s: float = 30.0
    """Time without contact after which an agent stops its gangs. The stream of an agent that is
    silent for this long is closed.
    """
    margin_s: float = 15.0
    """Time after the lease for which the store waits before it frees the agent's GPUs."""
    heartbeat_s: float = 5.0
    inspect_s: float = 20.0
    retry_s: float = 1.0
    """Time between attempts while the store is unavailable."""

    def __post_init__(self) -> None:
        """Refuse settings with which leases would expire between heartbeats."""
        if not 0 < self.heartbeat_s < self.lease_s / 3:
            raise InvalidInput("heartbeat_s", "must be positive and less than a third of lease_s")
        if not 0 < self.margin_s <= self.lease_s:
            raise InvalidInput("margin_s", "must be positive and at most lease_s")
        if not (self.inspect_s > 0 and self.retry_s > 0):
            raise InvalidInput("inspect_s", "inspect_s and retry_s must be positive")


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    """The form of the log, limits of streams, leases of agents, health and the clock factor."""

    log_format: LogFormat = "text"
    """Form of log records: "text", or "json" for one object on each line."""
    health_period_s: PositiveSeconds = 5.0
    """Time between checks that the database is ready."""
    agent_streams: LargeCount = 10_000
    """Largest number of agents' streams at the same time."""
    agent_streams_per_client: LargeCount = 5_000
    """Largest number of these streams of one client: an identity, or else a host."""
    watches: LargeCount = 2_000
    """Largest number of streams that watch jobs at the same time."""
    watches_per_client: LargeCount = 200
    """Largest number of these streams of one client: an identity, or else a host."""
    unread_s: PositiveSeconds = 60.0
    """Time after which a stream ends if its client has not taken a message."""
    poll_s: PositiveSeconds = 1.0
    """Time after which a watched job is read again. Only changes of the desired state are notified,
    so the rest must be polled.
    """
    clock_factor: Factor = 1.0
    """Seconds of training that agents replay in one second (their ``--clock-factor``). Rounds take
    jobs to be faster than their estimates by this factor. Periods, deadlines and waiting times are
    real time.
    """
    instance: InstanceName = ""
    """The name of this server, which health checks report as ``tessera-instance`` in their initial
    metadata. A process that starts a server recognises it by this name. If it is empty, none is
    reported.
    """
    lease_s: float = 30.0
    margin_s: float = 15.0
    heartbeat_s: float = 5.0
    inspect_s: float = 20.0
    """``AgentTiming`` explains these four settings."""
    probation_s: Seconds = 600.0
    """Time for which a node that a fault has drained must be healthy before it is undrained
    automatically.
    """

    def agent_timing(self) -> AgentTiming:
        """Return the timing of agents' streams."""
        return AgentTiming(
            lease_s=self.lease_s,
            margin_s=self.margin_s,
            heartbeat_s=self.heartbeat_s,
            inspect_s=self.inspect_s,
        )
