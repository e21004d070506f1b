"""The threads of a server: those of callers in lanes, and those of its own tasks."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Final

from tessera.service.config import Config
from tessera.service.rpc.calls import Calls
from tessera.service.rpc.lanes import FairCalls, Lane, LaneLimits, SizedCalls
from tessera.service.settings.capacity import (
    ESTIMATE_THREADS,
    HEAVY_THREADS,
    IDENTITY_THREADS,
    LEASE_THREADS,
    LOG_THREADS,
)
from tessera.service.webhooks.deliverer import THREADS as WEBHOOK_THREADS

MAX_WAITING_CALLS: Final = 4_000
"""Largest number of calls that wait for threads of one kind. At most half of them are from one
client, and a quarter from one client on one cluster.
"""

TEST_THREADS: Final = 2
MAX_WAITING_TESTS: Final = 64
"""Number of tests of webhooks that run at the same time, and that wait. Each waits for another server."""


class ServerThreads:
    """The threads of a server, by what they are for.

    Create and close them on one event loop.
    """

    def __init__(self, config: Config) -> None:
        # Calls of callers: short ones, heavy ones, rounds, trials, estimates and tests of webhooks.
        self._quick, self._heavy = _quick_calls(config.store_threads), _heavy_calls()
        self.calls = SizedCalls(self._quick, self._heavy)
        queue = config.round_queue
        one_of_each = LaneLimits(client=config.round_threads, cluster=1, share=1)
        self.commits = Lane(config.round_threads, "round", one_of_each, most_waiting=queue)
        trials = config.trial_threads
        self.trials = Lane(trials, "trial", LaneLimits.leaving_room(trials), most_waiting=queue)
        several = LaneLimits(client=1, cluster=ESTIMATE_THREADS, share=1)
        self.estimates = Lane(ESTIMATE_THREADS, "estimate", several, most_waiting=queue)
        one_test = LaneLimits(client=1, cluster=TEST_THREADS, share=1)
        self.webhook_tests = FairCalls(
            Lane(TEST_THREADS, "webhook test", one_test, most_waiting=MAX_WAITING_TESTS)
        )
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
        self.networks, self.cells = Calls(1, "network"), Calls(1, "estimate")
        self.cleaning = Calls(1, "cleaning")
        self.forecasts = Calls(1, "forecast")
        self.webhooks = Calls(WEBHOOK_THREADS, "webhook")

    def is_busy(self) -> bool:
        """Return whether a call is running that takes much time or memory."""
        lanes = (self._heavy, self.commits, self.trials, self.estimates)
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
            self.networks,
            self.cells,
            self.cleaning,
            self.webhooks,
            self.webhook_tests,
            self.forecasts,
            self.commits,
            self.trials,
            self.estimates,
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
