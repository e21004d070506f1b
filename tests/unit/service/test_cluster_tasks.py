"""Cluster tasks: they stop even if woken at that moment, and deleted clusters leave nothing."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tessera.formulation.errors import Unavailable
from tessera.service.cluster_task import ClusterTask
from tessera.service.purger import ClusterPurger
from tessera.service.rpc.calls import Calls
from tests.support.patience import PATIENCE_S
from tests.support.worlds import StoppedClock


class EmptyStore:
    """A store without clusters."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def list_clusters(self, after: str, limit: int) -> list[Any]:
        self.asked.set()
        return []

    def acquire_lease(self, cluster: str, holder: str, ttl_s: float) -> bool:
        return False


@pytest.mark.parametrize("steps", range(5))
async def test_a_wake_up_during_the_end_does_not_outlive_the_task(steps: int) -> None:
    calls = Calls(1, "test")
    store: Any = EmptyStore()
    watching = ClusterTask(
        store,
        StoppedClock(),
        lambda *_: None,
        calls=calls,
        work=calls,
        holder="me",
        period_s=60.0,
        fails="nothing",
        event="test",
    )
    watching.start()
    assert await asyncio.to_thread(store.asked.wait, PATIENCE_S)
    for _ in range(20):  # it has looked once and then waits
        await asyncio.sleep(0)
    watching.wake("c")
    for _ in range(steps):
        await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE_S):
        await watching.stop()
    await calls.close()


async def test_state_of_a_deleted_cluster_is_dropped() -> None:
    calls, dropped = Calls(1, "test"), list[str]()
    store: Any = EmptyStore()
    watching = ClusterTask(
        store,
        StoppedClock(),
        lambda *_: None,
        calls=calls,
        work=calls,
        holder="me",
        period_s=60.0,
        fails="nothing",
        event="test",
        forget=dropped.append,
    )
    await watching.look({"gone"})
    assert dropped == ["gone"]
    await calls.close()


async def test_deleted_clusters_are_purged_batch_by_batch_until_nothing_is_left() -> None:
    calls = Calls(1, "test")

    class Store:
        left = 3
        failed = False

        def purge(self) -> bool:
            if not self.failed:
                self.failed = True
                raise Unavailable("the database is away")
            self.left = max(0, self.left - 1)  # a late wake-up purges once more
            return self.left > 0

    store: Any = Store()
    purger = ClusterPurger(store, calls)
    purger.start()
    async with asyncio.timeout(PATIENCE_S):
        while not store.failed:
            await asyncio.sleep(0.001)
        while store.left > 0:  # a failed purge is repeated
            purger.wake("c")
            await asyncio.sleep(0.001)
    await purger.stop()
    await calls.close()
    assert store.left == 0
