"""Open calls, which end with what proved their caller's identity."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import pytest

from tessera.formulation.access import LOCAL, Identity, Role
from tessera.formulation.errors import NotAuthenticated
from tessera.service.security.sessions import Sessions

NOW_S = 1000.0


def an_identity(key: str = "token/a", expires_s: float = math.inf) -> Identity:
    return Identity(subject="ana", role=Role.USER, key=key, expires_s=expires_s)


@pytest.fixture
def sessions() -> Sessions:
    return Sessions(lambda: NOW_S)


async def stay(
    sessions: Sessions, identity: Identity, entered: Callable[[], None] = lambda: None
) -> str:
    """Hold a call open until it is ended, and return the reason."""
    try:
        async with sessions.open(identity):
            entered()
            await asyncio.Event().wait()
    except NotAuthenticated as error:
        return str(error)
    raise AssertionError("unreachable")


async def started(sessions: Sessions, *identities: Identity) -> list[asyncio.Task[str]]:
    tasks = [asyncio.create_task(stay(sessions, identity)) for identity in identities]
    await asyncio.sleep(0)
    return tasks


async def test_a_revocation_ends_all_calls_of_its_key_and_no_others(sessions: Sessions) -> None:
    first, second, other = await started(
        sessions, an_identity(), an_identity(), an_identity("token/b")
    )
    assert sorted(sessions.keys()) == ["token/a", "token/b"]
    assert sessions.end("token/a") == 2
    assert "the token with which this call began was revoked" in await first
    assert await second == await first
    assert sessions.keys() == ["token/b"]
    assert not other.done()
    sessions.end("token/b")
    await other


async def test_a_call_ends_when_its_proof_expires(sessions: Sessions) -> None:
    identity = an_identity("certificate/1f", NOW_S + 0.001)
    assert "the certificate with which this call began" in await stay(sessions, identity)
    assert sessions.keys() == []


async def test_a_call_with_a_proof_that_expired_meanwhile_ends_at_once(sessions: Sessions) -> None:
    assert "has expired" in await stay(sessions, an_identity(expires_s=NOW_S - 5))


async def test_a_call_that_is_ending_does_not_keep_others_open(sessions: Sessions) -> None:
    """A call may take a while to end, for example because its client reads nothing."""
    going, slow_is_ending = asyncio.Event(), asyncio.Event()

    async def end_slowly() -> str:
        try:
            async with sessions.open(an_identity()):
                try:
                    await asyncio.Event().wait()
                finally:
                    slow_is_ending.set()
                    await going.wait()
        except NotAuthenticated as error:
            return str(error)
        raise AssertionError("unreachable")

    slow = asyncio.create_task(end_slowly())
    await asyncio.sleep(0)
    assert sessions.end("token/a") == 1
    await slow_is_ending.wait()
    (late,) = await started(sessions, an_identity())
    assert sessions.end("token/a") == 1
    assert "revoked" in await late
    assert sessions.end("token/a") == 0
    going.set()
    assert "revoked" in await slow
    assert sessions.keys() == []


async def test_an_error_of_the_call_itself_is_left_as_it_is(sessions: Sessions) -> None:
    with pytest.raises(TimeoutError, match="its own"):
        async with sessions.open(an_identity()):
            raise TimeoutError("its own")
    assert sessions.keys() == []


async def test_callers_whom_nobody_asked_have_no_session(sessions: Sessions) -> None:
    async with sessions.open(LOCAL):
        assert sessions.keys() == []
