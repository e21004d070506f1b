"""The threads of a server: those of callers in lanes, and those of its own tasks."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Final

from tessera.service.server.settings.capacity import (
    HEAVY_THREADS,
    IDENTITY_THREADS,
    LEASE_THREADS,
    LOG_THREADS,
    LONG_THREADS,
)
from tessera.service.server.settings.config import Config
from tessera.service.server.tasks.calls import Calls
from tessera.service.server.tasks.lanes import FairCalls, Lane, LaneLimits, SizedCalls
from tessera.service.server.webhooks.deliverer import THREADS as WEBHOOK_THREADS

MAX_WAITING_CALLS: Final = 4_000
"""Largest number of calls that wait for threads of one kind. At most half of them are from one
client, and a quarter from one client on one cluster.
"""

BACKGROUND_THREADS: Final = 5
"""Number of threads for the work between rounds: one each for estimates, network plans, forecasts, the
deletion of old rows, and the removal of deleted clusters. A task does one thing at a time, so none
waits for another.
"""


class ServerThreads:
    """The threads of a server, by what they are for.

    Create and close them on one event loop.
    """

    def __init__(self, config: Config) -> None:
        # Calls of callers: short ones, heavy ones, rounds, trials, and other long ones.
        self._quick, self._heavy = _quick_calls(config.store_threads), _heavy_calls()
        self.calls = SizedCalls(self._quick, self._heavy)
        queue = config.round_queue
        one_of_each = LaneLimits(client=config.round_threads, cluster=1, share=1)
        self.commits = Lane(config.round_threads, "round", one_of_each, most_waiting=queue)
        trials = config.trial_threads
        self.trials = Lane(trials, "trial", LaneLimits.leaving_room(trials), most_waiting=queue)
        several = LaneLimits(client=1, cluster=LONG_THREADS, share=1)
        self.long = Lane(LONG_THREADS, "long", several, most_waiting=queue)
        # Calls of agents. The lanes have room for one of each stream, so that none is refused.
        streams = 4 * config.agent_streams
        self.heartbeats = Calls(1, "heartbeat")
        self.agent_turns, self.agent_reads = _agent_calls(config.agent_threads, streams)
        one = LaneLimits(client=1, cluster=LOG_THREADS, share=1)
        self.logs = FairCalls(Lane(LOG_THREADS, "log", one, most_waiting=streams))
        # What every call needs first, and health, which a busy pool must not delay.
        self.identity, self.health = Calls(IDENTITY_THREADS, "identity"), Calls(1, "health")
        # The server's own tasks: leases and short reads, rounds, and the work between rounds.
        self.leases = Calls(LEASE_THREADS, "lease")
        self.rounds = Calls(config.round_threads, "periodic round")
        self.background = Calls(BACKGROUND_THREADS, "background")
        self.webhooks = Calls(WEBHOOK_THREADS, "webhook")  # which wait for other servers

    def is_busy(self) -> bool:
        """Return whether a call is running that takes much time or memory."""
        lanes = (self._heavy, self.commits, self.trials, self.long)
        return any(lane.running() for lane in lanes)

    def running(self) -> list[str]:
        """Return the names of the calls that hold a thread."""
        return [name for pool in self._pools() for name in pool.running()]

    async def close(self, wait_s: float = math.inf) -> list[str]:
        """Drop waiting calls, await running ones; return the names of the rest after ``wait_s``."""
        left = await asyncio.gather(*(pool.close(wait_s) for pool in self._pools()))
        return [name for names in left for name in names]

    def _pools(self) -> Sequence[Calls | FairCalls | Lane]:
        return (
            self._quick,
            self._heavy,
            self.heartbeats,
            self.identity,
            self.agent_turns,
            self.agent_reads,
            self.logs,
            self.leases,
            self.rounds,
            self.background,
            self.webhooks,
            self.commits,
            self.trials,
            self.long,
            self.health,
        )


def _quick_calls(threads: int) -> FairCalls:
    """Return threads of which one client holds all but one at most, and one cluster's callers half.

    A write waits for its cluster's row. With these limits, callers that crowd one cluster leave
    threads to the others.
    """
    half = max(1, threads // 2)
    limits = LaneLimits(client=max(1, threads - 1), cluster=half, share=half)
    return FairCalls(Lane(threads, "store", limits, most_waiting=MAX_WAITING_CALLS))


def _heavy_calls() -> FairCalls:
    others_have_one = LaneLimits(client=HEAVY_THREADS - 1, cluster=HEAVY_THREADS, share=1)
    return FairCalls(Lane(HEAVY_THREADS, "heavy", others_have_one, most_waiting=MAX_WAITING_CALLS))


def _agent_calls(threads: int, most_waiting: int) -> tuple[FairCalls, FairCalls]:
    """Return threads for calls of agents that wait for their cluster's row, and for their reads."""
    reading = max(1, threads // 2)
    turning = max(1, threads - reading)
    one = LaneLimits(client=max(1, turning - 1), cluster=1, share=1)
    any_share = LaneLimits(client=reading, cluster=reading, share=reading)
    return (
        FairCalls(Lane(turning, "agent turn", one, most_waiting=most_waiting)),
        FairCalls(Lane(reading, "agent read", any_share, most_waiting=most_waiting)),
    )
