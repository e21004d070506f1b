"""Refused calls, collected and stored together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from tessera.formulation.base.access import AuditedCall
from tessera.formulation.base.errors import Unavailable
from tessera.formulation.base.secrets import USER_PREFIX
from tessera.formulation.records.access import Refusal
from tessera.service.server.security import auditing as module
from tessera.service.server.security.auditing import MAX_DETAIL, RefusalRecorder
from tests.support.logged import logged_lines
from tests.support.patience import PATIENCE_S

DENIED = grpc.StatusCode.PERMISSION_DENIED


class AuditStore:
    """A store of refusals, which may fail."""

    def __init__(self) -> None:
        self.stored: list[Refusal] = []
        self.failures = 0
        self.notice = asyncio.Event()

    async def add(self, refusals: Sequence[Refusal]) -> None:
        if self.failures:
            self.failures -= 1
            raise Unavailable("the database is gone")
        self.stored += refusals
        self.notice.set()


@pytest.fixture
async def store() -> AuditStore:
    return AuditStore()


@pytest.fixture(autouse=True)
def no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GAP_S", 0.001)


def a_call(**changes: Any) -> AuditedCall:
    fields: dict[str, Any] = {
        "subject": "ana",
        "role": "viewer",
        "proof": "token/x",
        "method": "Jobs.CancelJob",
        "target": "clusters/c/jobs/j",
        "peer": "ipv4:10.0.0.1:5555",
        "request_id": "r-1",
    }
    return AuditedCall(**fields | changes)


async def test_refusals_that_are_alike_are_one_entry_and_one_line(
    store: AuditStore, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = RefusalRecorder(store.add)
    for number in range(1000):
        call = a_call(peer=f"ipv4:10.0.0.1:{number}", request_id=f"r-{number}")
        recorder.note(call, DENIED, "not yours")
    recorder.note(a_call(subject="", proof="", role=""), DENIED, "not yours")
    recorder.start()
    async with asyncio.timeout(PATIENCE_S):
        await store.notice.wait()
    await recorder.stop()
    assert [(r.subject, r.count, r.request_id, r.peer) for r in store.stored] == [
        ("ana", 1000, "r-0", "ipv4:10.0.0.1"),
        ("", 1, "r-1", "ipv4:10.0.0.1"),
    ]
    assert {(r.outcome, r.detail) for r in store.stored} == {("PERMISSION_DENIED", "not yours")}
    facts = "code=PERMISSION_DENIED method=Jobs.CancelJob"
    assert [
        line.partition("caller ")[2].partition(" target")[0] for line in logged_lines(caplog)
    ] == [f"{facts} caller=ana peer=ipv4:10.0.0.1:0", f'{facts} caller="" peer=ipv4:10.0.0.1:5555']


async def test_a_stop_waits_for_refusals_that_are_being_stored(store: AuditStore) -> None:
    began, may_end = asyncio.Event(), asyncio.Event()

    async def add_slowly(refusals: Sequence[Refusal]) -> None:
        began.set()
        await may_end.wait()
        await store.add(refusals)

    recorder = RefusalRecorder(add_slowly)
    recorder.start()
    recorder.note(a_call(), DENIED, "")
    async with asyncio.timeout(PATIENCE_S):
        await began.wait()
        stop = asyncio.create_task(recorder.stop())
        await asyncio.sleep(0)
        may_end.set()
        await stop
    assert len(store.stored) == 1


async def test_refusals_wait_for_a_store_that_is_down(
    store: AuditStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.failures = 3
    recorder = RefusalRecorder(store.add)
    recorder.start()
    recorder.note(a_call(), DENIED, "")
    recorder.note(a_call(), DENIED, "")
    async with asyncio.timeout(PATIENCE_S):
        await store.notice.wait()
    await recorder.stop()
    assert [r.count for r in store.stored] == [2]
    assert ["calls=2 " in line for line in logged_lines(caplog, "audit_failed")] == [True] * 3


async def test_a_flood_of_different_refusals_is_bounded_and_its_loss_is_logged(
    store: AuditStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 10)
    recorder = RefusalRecorder(store.add)
    for number in range(25):
        recorder.note(a_call(target=str(number)), DENIED, "")
    recorder.start()
    await recorder.stop()
    assert len(store.stored) == 10
    (line,) = logged_lines(caplog, "audit_lost")
    assert line.endswith(" calls=15")
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 10


async def test_no_secret_reaches_the_audit_log(
    store: AuditStore, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = RefusalRecorder(store.add)
    token = f"{USER_PREFIX}_" + 12 * "a" + "_" + 43 * "b"
    recorder.note(a_call(), DENIED, f"{token} is wrong" + "x" * 1_000_000)
    recorder.start()
    await recorder.stop()
    assert not any("bbb" in line for line in logged_lines(caplog))
    assert "bbb" not in repr(store.stored)
    assert len(store.stored[0].detail) == MAX_DETAIL
