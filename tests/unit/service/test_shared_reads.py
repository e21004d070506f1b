"""Reads that are shared by all callers who ask at the same time."""

from __future__ import annotations

import asyncio

import pytest

from tessera.formulation.errors import NotFound
from tessera.service.rpc.sharing import SharedReads


class VersionedShelf:
    """A value with a version, which is read when the gate opens. It counts the reads."""

    def __init__(self) -> None:
        self.version, self.reads, self.gate = 1, 0, asyncio.Event()

    async def read(self, key: str) -> int:
        self.reads += 1
        version = self.version
        await self.gate.wait()
        if key == "absent":
            raise NotFound(key)
        return version


async def test_a_hundred_callers_share_a_read() -> None:
    shelf = VersionedShelf()
    shared = SharedReads(shelf.read)
    callers = [asyncio.create_task(shared.get("a")) for _ in range(100)]
    shelf.gate.set()
    assert await asyncio.gather(*callers) == [1] * 100
    assert shelf.reads == 1


async def test_a_caller_during_a_read_shares_the_next_read_and_sees_the_change() -> None:
    shelf = VersionedShelf()
    shared = SharedReads(shelf.read)
    early = asyncio.create_task(shared.get("a"))
    while not shelf.reads:
        await asyncio.sleep(0)
    shelf.version = 2
    late = [asyncio.create_task(shared.get("a")) for _ in range(10)]
    await asyncio.sleep(0)
    shelf.gate.set()
    assert await early == 1
    assert await asyncio.gather(*late) == [2] * 10
    assert shelf.reads == 2


async def test_keys_are_read_separately_and_errors_reach_all_callers() -> None:
    shelf = VersionedShelf()
    shared = SharedReads(shelf.read)
    shelf.gate.set()
    assert list(await asyncio.gather(shared.get("a"), shared.get("b"))) == [1, 1]
    failed = await asyncio.gather(
        shared.get("absent"), shared.get("absent"), return_exceptions=True
    )
    assert [type(error) for error in failed] == [NotFound, NotFound]
    assert shelf.reads == 3


async def test_a_disconnecting_caller_does_not_affect_the_others() -> None:
    shelf = VersionedShelf()
    shared = SharedReads(shelf.read)
    first, second = (asyncio.create_task(shared.get("a")) for _ in range(2))
    while not shelf.reads:
        await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    shelf.gate.set()
    assert await second == 1
