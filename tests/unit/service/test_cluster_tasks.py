"""Cluster tasks: visits by the lease's holder, wake-ups, errors, ends, and deleted clusters."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tessera.formulation.errors import Unavailable
from tessera.service.cluster_task import ClusterTask
from tessera.service.purger import ClusterPurger
from tessera.service.rpc.calls import Calls
from tests.support.hand_clock import HandClock
from tests.support.logged import logged_lines
from tests.support.patience import PATIENCE_S


class LeaseStore:
    """A store of clusters and their leases, which the first holder keeps."""

    def __init__(self, *clusters: str) -> None:
        self.clusters, self.holders = clusters, dict[str, str]()
        self.asked = threading.Event()

    def list_clusters(self, after: str, limit: int) -> list[Any]:
        self.asked.set()
        return [SimpleNamespace(name=n, idle=False) for n in self.clusters if n > after]

    def acquire_lease(self, cluster: str, holder: str, ttl_s: float) -> bool:
        return cluster in self.clusters and self.holders.setdefault(cluster, holder) == holder


class Visits:
    """The visited clusters, and a way to wait for more of them."""

    def __init__(self, error: Exception | None = None) -> None:
        self.clusters: list[str] = []
        self._error = error

    def __call__(self, cluster: str, *_: Any) -> None:
        self.clusters.append(cluster)
        if self._error is not None:
            raise self._error

    async def reach(self, number: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.clusters) < number:
                await asyncio.sleep(0.001)


@asynccontextmanager
async def a_task(
    store: Any, attend: Callable[..., Any], holder: str = "me", **more: Any
) -> AsyncIterator[ClusterTask]:
    calls = Calls(1, "test")
    task = ClusterTask(
        store,
        HandClock(),
        attend,
        calls=calls,
        work=calls,
        holder=holder,
        period_s=60.0,
        fails="nothing",
        event="visit_failed",
        **more,
    )
    yield task
    async with asyncio.timeout(PATIENCE_S):
        await task.stop()
    await calls.close()


async def test_only_the_replica_with_the_lease_visits_a_cluster() -> None:
    store, holding, idle = LeaseStore("c"), Visits(), Visits()
    async with a_task(store, holding, "one") as first, a_task(store, idle, "other") as second:
        for task, woken in ((first, None), (second, None), (second, {"c"}), (first, {"c"})):
            await task.look(woken)
    assert (holding.clusters, idle.clusters) == (["c", "c"], [])


async def test_a_wake_up_visits_only_the_cluster_that_was_woken() -> None:
    visits = Visits()
    async with a_task(LeaseStore("c", "quiet"), visits) as task:
        task.start()
        await visits.reach(2)
        task.wake("c")
        await visits.reach(3)
    assert visits.clusters == ["c", "quiet", "c"]


async def test_an_error_does_not_end_the_task(caplog: pytest.LogCaptureFixture) -> None:
    visits = Visits(RuntimeError("a mistake"))
    async with a_task(LeaseStore("c"), visits) as task:
        task.start()
        await visits.reach(1)
        task.wake("nowhere")
        task.wake("")
        await visits.reach(2)
    assert visits.clusters == ["c", "c"]
    assert ["cluster=c" in line for line in logged_lines(caplog, "visit_failed")] == [True] * 2


@pytest.mark.parametrize("steps", range(5))
async def test_a_wake_up_during_the_end_does_not_outlive_the_task(steps: int) -> None:
    store = LeaseStore()
    async with a_task(store, Visits()) as task:
        task.start()
        assert await asyncio.to_thread(store.asked.wait, PATIENCE_S)
        for _ in range(20):  # it has looked once and then waits
            await asyncio.sleep(0)
        task.wake("c")
        for _ in range(steps):
            await asyncio.sleep(0)


async def test_state_of_a_deleted_cluster_is_dropped() -> None:
    dropped = list[str]()
    async with a_task(LeaseStore(), Visits(), forget=dropped.append) as task:
        await task.look({"gone"})
    assert dropped == ["gone"]


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
