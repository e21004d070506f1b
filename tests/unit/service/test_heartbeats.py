"""Heartbeats of all agents are recorded together, and each stream receives its own result."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import cast

import pytest

from tessera.formulation.errors import Conflict, NotAllowed, Unavailable
from tessera.formulation.records.agents import Heartbeat
from tessera.service.ports.store import Store
from tessera.service.rpc.calls import Calls
from tessera.service.rpc.heartbeats import MAX_HEARTBEATS, HeartbeatRecorder
from tests.support.patience import PATIENCE_S


def heartbeat_of(agent: str) -> Heartbeat:
    return Heartbeat(cluster="c", agent=agent, incarnation="1")


class SlowStore:
    """Knows all agents except the ``unknown`` ones. Batches wait until ``go`` is set."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.unknown, self.replaced = set[str](), set[str]()
        self.failure: Exception | None = None
        self.go = threading.Event()

    def heartbeats(self, beats: Sequence[Heartbeat]) -> set[int]:
        self.batches.append([beat.agent for beat in beats])
        assert self.go.wait(PATIENCE_S)
        if self.failure:
            raise self.failure
        return {k for k, beat in enumerate(beats) if beat.agent not in self.unknown}

    def require_agent(self, _cluster: str, agent: str, _incarnation: str) -> None:
        if agent in self.replaced:
            raise NotAllowed("another process has taken over")


async def record_all(
    store: SlowStore, agents: Sequence[str]
) -> tuple[HeartbeatRecorder, list[BaseException | None]]:
    """Record a heartbeat of each agent; the others arrive while the first is recorded."""
    calls = Calls(1, "heartbeat")
    beats = HeartbeatRecorder(cast(Store, store), calls)
    tasks = [asyncio.create_task(beats.record(heartbeat_of(agents[0])))]
    while not store.batches:
        await asyncio.sleep(0.001)
    tasks += [asyncio.create_task(beats.record(heartbeat_of(agent))) for agent in agents[1:]]
    await asyncio.sleep(0)
    store.go.set()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    await calls.close()
    return beats, ended


async def test_heartbeats_received_during_a_write_are_recorded_together() -> None:
    store = SlowStore()
    agents = [f"a{k}" for k in range(MAX_HEARTBEATS + 2)]
    _, ended = await record_all(store, agents)
    assert ended == [None] * len(agents)
    assert store.batches == [
        agents[:1],
        agents[1 : MAX_HEARTBEATS + 1],
        agents[MAX_HEARTBEATS + 1 :],
    ]


async def test_an_unknown_agent_fails_without_affecting_others() -> None:
    store = SlowStore()
    store.unknown, store.replaced = {"b", "c"}, {"b"}
    _, ended = await record_all(store, ["a", "b", "c", "d"])
    assert [type(error) for error in ended] == [type(None), NotAllowed, Conflict, type(None)]


async def test_an_unavailable_store_fails_all_waiting_heartbeats_and_is_asked_again() -> None:
    store = SlowStore()
    store.failure = Unavailable("down")
    _, ended = await record_all(store, ["a", "b"])
    assert [str(error) for error in ended] == ["down", "down"]


async def test_an_error_in_the_store_leaves_no_stream_waiting() -> None:
    store = SlowStore()
    store.failure = ZeroDivisionError()
    _, ended = await record_all(store, ["a", "b"])
    assert [type(error) for error in ended] == [ZeroDivisionError] * 2


async def test_a_stream_that_left_does_not_affect_the_others() -> None:
    store, calls = SlowStore(), Calls(1, "heartbeat")
    beats = HeartbeatRecorder(cast(Store, store), calls)
    left, stays = (asyncio.create_task(beats.record(heartbeat_of(agent))) for agent in "ab")
    await asyncio.sleep(0)
    left.cancel()
    store.go.set()
    with pytest.raises(asyncio.CancelledError):
        await left
    await stays
    await calls.close()
