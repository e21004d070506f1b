"""The gate: who calls, for which share, what is recorded, and what a revocation ends."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

import pytest
from google.protobuf.message import Message

from tessera.formulation.base.access import AUDITED, IDENTITY, Identity, Role
from tessera.formulation.base.errors import (
    NotAuthenticated,
    PermissionDenied,
    TesseraError,
    Unavailable,
)
from tessera.formulation.base.secrets import USER_PREFIX
from tessera.formulation.records.access import Refusal
from tessera.service.server.rpc.serving.errors import code_of
from tessera.service.server.security import gate as module
from tessera.service.server.security.admission import Admission
from tessera.service.server.security.auditing import RefusalRecorder
from tessera.service.server.security.gate import MAX_TEXT, Gate
from tessera.service.server.security.sessions import Sessions
from tessera.service.server.tasks.lanes import CALLER
from tessera.v1 import access_pb2, agents_pb2, jobs_pb2
from tests.support.logged import logged_lines

ANA = Identity(subject="ana", role=Role.USER, key="token/a", tenants=frozenset({"blue"}))


class Authenticator:
    """An authenticator that knows everybody as ``identity``."""

    def __init__(self, identity: Identity = ANA) -> None:
        self.identity = identity
        self.forgotten: list[str] = []
        self.gone: list[str] = []
        self.failures = 0

    async def identify(self, context: Any) -> Identity:
        if not self.identity.subject:
            raise NotAuthenticated("the call has no token")
        return self.identity

    def forget(self, key: str) -> None:
        self.forgotten.append(key)

    async def revoked(self, keys: Sequence[str]) -> list[str]:
        if self.failures:
            self.failures -= 1
            raise Unavailable("the database is gone")
        return [key for key in keys if key in self.gone]


class Context:
    """A call from an address."""

    def __init__(self, peer: str = "ipv4:10.0.0.1:5000") -> None:
        self._peer = peer

    def peer(self) -> str:
        return self._peer


class World:
    """A gate, and what it recorded."""

    def __init__(self, identity: Identity = ANA) -> None:
        self.refused: list[Refusal] = []
        self.authenticator = Authenticator(identity)
        self.sessions = Sessions(lambda: 0.0)
        self.recorder = RefusalRecorder(self._store)
        self.gate = Gate(
            self.authenticator,  # type: ignore[arg-type] # three methods of it
            Admission(self._tenants, calls_per_minute=0, job_bytes=1000),
            self.sessions,
            self.recorder,
            code_of,
        )

    async def _store(self, refusals: Sequence[Refusal]) -> None:
        self.refused += refusals

    async def _tenants(self, cluster: str, jobs: Collection[str]) -> dict[str, str]:
        return dict.fromkeys(jobs, "blue")

    async def call(
        self, method: str, request: Message | None, peer: str = "ipv4:10.0.0.1:5"
    ) -> Any:
        """Make a call, and return the share that it runs for, its identity, and its audit."""
        path = f"/tessera.v1.{method}"
        async with self.gate.enter(path, Context(peer)) as visit:  # type: ignore[arg-type] # one method
            await visit.admit(request)
            return CALLER.get(), IDENTITY.get(), AUDITED.get()

    async def refusals(self) -> list[Refusal]:
        self.recorder.start()
        await self.recorder.stop()
        return self.refused


async def test_a_call_runs_as_its_caller_for_the_callers_share_and_is_audited_if_it_changes_something() -> (
    None
):
    request = jobs_pb2.CancelJobRequest(name="clusters/c/jobs/j", request_id="r")
    share, identity, audited = await World().call("Jobs/CancelJob", request)
    assert (share.client, share.cluster, identity) == ("ana", "c", ANA)
    assert (audited.subject, audited.role, audited.proof) == ("ana", "user", "token/a")
    assert (audited.method, audited.target, audited.request_id) == (
        "Jobs.CancelJob",
        "clusters/c/jobs/j",
        "r",
    )
    AUDITED.set(None)
    _, _, audited = await World().call(
        "Jobs/GetJob", jobs_pb2.GetJobRequest(name="clusters/c/jobs/j")
    )
    assert audited is None


async def test_callers_of_open_methods_have_the_least_role_and_are_told_apart_by_their_hosts() -> (
    None
):
    _, identity, audited = await World().call("Agents/Enrol", agents_pb2.EnrolRequest())
    assert (identity.subject, identity.key, identity.role) == ("", "", Role.VIEWER)
    assert (audited.subject, audited.role, audited.proof) == ("", "", "")
    # Otherwise one host could use up the enrolments of all.
    request = agents_pb2.EnrolRequest(parent="clusters/c")
    found = {
        (await World().call("Agents/Enrol", request, f"ipv4:10.0.0.{k}:5"))[0].client
        for k in range(3)
    }
    assert found == {"10.0.0.0", "10.0.0.1", "10.0.0.2"}


async def test_a_method_without_a_rule_cannot_be_called() -> None:
    for identity in (ANA, Identity(subject="root", role=Role.ADMIN, key="token/r")):
        world = World(identity)
        with pytest.raises(PermissionDenied, match=r"Jobs\.NewMethod has no rule"):
            await world.call("Jobs/NewMethod", None)
        assert [r.method for r in await world.refusals()] == ["Jobs.NewMethod"]


async def test_refusals_and_no_other_errors_are_recorded_with_who_what_and_why() -> None:
    world = World(Identity(subject="vi", role=Role.VIEWER, key="token/v"))
    with pytest.raises(PermissionDenied):
        await world.call(
            "Jobs/CancelJob", jobs_pb2.CancelJobRequest(name="clusters/c/jobs/j", request_id="r")
        )
    (refusal,) = await world.refusals()
    assert (refusal.subject, refusal.role, refusal.proof) == ("vi", "viewer", "token/v")
    assert (refusal.method, refusal.target) == ("Jobs.CancelJob", "clusters/c/jobs/j")
    assert (refusal.outcome, refusal.request_id, refusal.peer) == (
        "PERMISSION_DENIED",
        "r",
        "ipv4:10.0.0.1",
    )
    nobody = World(Identity(subject="", role=Role.VIEWER, key=""))
    with pytest.raises(NotAuthenticated):
        await nobody.call("Jobs/GetJob", None)
    (refusal,) = await nobody.refusals()
    assert (refusal.subject, refusal.role, refusal.outcome) == ("", "", "UNAUTHENTICATED")
    world = World()
    with pytest.raises(TesseraError):
        await world.call(
            "Jobs/SubmitJob",
            jobs_pb2.SubmitJobRequest(parent="clusters/c", job=jobs_pb2.Job(tenant="red")),
        )
    assert not await world.refusals()


async def test_what_is_recorded_of_a_request_is_short_and_holds_no_secret() -> None:
    token = f"{USER_PREFIX}_" + 12 * "a" + "_" + 43 * "b"
    world = World(Identity(subject="vi", role=Role.VIEWER, key="token/v"))
    for name in (token, "x" * 1_000_000):
        with pytest.raises(PermissionDenied):
            await world.call("Access/RevokeToken", access_pb2.RevokeTokenRequest(name=name))
    with pytest.raises(PermissionDenied):
        await world.call(
            "Jobs/CancelJob",
            jobs_pb2.CancelJobRequest(name="clusters/c/jobs/j", request_id="y" * 1_000_000),
        )
    assert {r.target for r in await world.refusals()} == {
        "***",
        "x" * MAX_TEXT,
        "clusters/c/jobs/j",
    }
    assert {len(r.request_id) for r in world.refused} == {0, MAX_TEXT}


async def stay(world: World) -> str:
    """Hold a call open until it ends."""
    try:
        async with world.gate.enter("/tessera.v1.Jobs/WatchJob", Context()):  # type: ignore[arg-type] # one method
            await asyncio.Event().wait()
    except NotAuthenticated as error:
        return str(error)
    raise AssertionError("unreachable")


async def test_a_revocation_ends_calls_and_is_recorded(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    call = asyncio.create_task(stay(world))
    await asyncio.sleep(0)
    world.gate.note_revocation("token/b")
    world.gate.note_revocation("token/a")
    assert "was revoked" in await call
    assert world.authenticator.forgotten == ["token/b", "token/a"]
    (line,) = logged_lines(caplog, "identity_revoked")
    assert line.endswith(" proof=token/a calls=1")
    assert [(r.subject, r.outcome) for r in await world.refusals()] == [("ana", "UNAUTHENTICATED")]


async def test_after_lost_notices_open_calls_are_looked_up_until_the_store_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    world = World()
    world.authenticator.failures, world.authenticator.gone = 3, ["token/a"]
    call = asyncio.create_task(stay(world))
    await asyncio.sleep(0)
    world.authenticator.identity = Identity(subject="eve", role=Role.USER, key="token/e")
    other = asyncio.create_task(stay(world))
    await asyncio.sleep(0)
    world.gate.note_revocation("")
    assert "was revoked" in await call
    assert not other.done()
    assert caplog.text.count("cannot look for revoked tokens and certificates yet") == 3
    assert world.authenticator.forgotten == [""]
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)
    await world.gate.stop()
