"""Replicas that decide rounds on a clock that only the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tessera.db.store.reads import get_cluster
from tessera.db.store.store import Store
from tessera.service.server.rounds.loop import RoundLoop
from tessera.service.server.rounds.periodic import PeriodicRounds
from tessera.service.server.tasks.calls import Calls
from tests.support.hand_clock import HandClock

HOUR_S = 3600.0


class Replica:
    """A replica whose clock only the test moves, and whose loop does not run."""

    def __init__(self, store: Store, rounds: PeriodicRounds, clock: HandClock) -> None:
        self.store, self.rounds, self.clock = store, rounds, clock

    async def rounds_after(self, seconds: float, cluster: str = "lab") -> int:
        """Let time pass, and return how many rounds were committed until then."""
        self.clock.now_s += seconds
        await self.rounds.begin_due()
        await asyncio.gather(*self.rounds.begun())
        return self.store.read(get_cluster, cluster).last_round

    async def tick_after(self, seconds: float, cluster: str = "lab") -> int:
        """Let time pass until a tick, and return how many rounds were committed until then."""
        self.clock.now_s += seconds
        await self.rounds.tick()
        await asyncio.gather(*self.rounds.begun())
        return self.store.read(get_cluster, cluster).last_round


@asynccontextmanager
async def a_replica(
    store: Store, clock: HandClock | None = None, **settings: Any
) -> AsyncIterator[Replica]:
    """Yield a replica with a period of an hour and rounds that are 3 s apart."""
    clock = clock or HandClock()
    calls, round_calls = Calls(1, "store"), Calls(1, "round")
    usual: dict[str, Any] = {
        "holder": "me",
        "spacing_s": 3.0,
        "period_s": HOUR_S,
        "deadline_s": 60.0,
    }
    rounds = PeriodicRounds(
        store,
        RoundLoop(store, clock),
        clock,
        calls=calls,
        round_calls=round_calls,
        **usual | settings,
    )
    yield Replica(store, rounds, clock)
    await rounds.stop()
    await asyncio.gather(calls.close(), round_calls.close())
