"""The audit of refused calls. Changes are recorded by the store, in their own transactions."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import grpc

from tessera.formulation.access import AuditedCall
from tessera.formulation.errors import TesseraError
from tessera.formulation.records.access import Refusal
from tessera.formulation.secrets import hide_secrets

log = logging.getLogger(__name__)

GAP_S: Final = 1.0
"""Seconds for which refusals are collected before they are stored together."""

MAX_WAITING: Final = 1_000
"""Largest number of different refusals that wait. Others are counted, and logged as lost."""

MAX_DETAIL: Final = 300
"""Largest number of characters of a refusal's text."""

AUDITED_CODES: Final = frozenset(
    {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
)


@dataclass(frozen=True, slots=True)
class _Kind:
    """The facts that make two refusals alike: all but the request's id and the caller's port."""

    call: AuditedCall
    outcome: str
    detail: str


class RefusalRecorder:
    """A task that stores refused calls together. It belongs to the event loop's thread.

    Refusals that are alike make one entry, so that a flood of them fills neither memory nor the
    database.
    """

    def __init__(self, store: Callable[[Sequence[Refusal]], Awaitable[None]]) -> None:
        self._store = store
        self._waiting: Counter[_Kind] = Counter()
        self._ids: dict[_Kind, str] = {}
        self._lost = 0
        self._notice = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, on the running event loop."""
        self._task = asyncio.create_task(self._repeat())

    async def stop(self) -> None:
        """Store what waits, and end."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self._flush()

    def note(self, call: AuditedCall, code: grpc.StatusCode, detail: str) -> None:
        """Note a refused call."""
        peer = call.peer.rpartition(":")[0] or call.peer
        kind = _Kind(
            replace(call, request_id="", peer=peer), code.name, hide_secrets(detail)[:MAX_DETAIL]
        )
        if kind not in self._waiting and len(self._waiting) >= MAX_WAITING:
            self._lost += 1
            return
        if kind not in self._waiting:  # else the same line was logged within the last second
            log.warning(
                "%s: %s of %s from %s: %s",
                kind.outcome,
                call.method,
                call.subject or "an unknown caller",
                call.peer,
                kind.detail,
                extra={"action": "call_refused"},
            )
        self._ids.setdefault(kind, call.request_id)
        self._waiting[kind] += 1
        self._notice.set()

    async def _repeat(self) -> None:
        while True:
            await self._notice.wait()
            self._notice.clear()
            await asyncio.sleep(GAP_S)
            await self._flush()

    async def _flush(self) -> None:
        """Store what waits. After a failure it goes on waiting, up to the limit."""
        waiting, ids, lost = self._waiting, self._ids, self._lost
        self._waiting, self._ids, self._lost = Counter(), {}, 0
        if lost:
            log.error(
                "%d refused calls are missing in the audit log: too many different ones at once",
                lost,
                extra={"action": "audit_lost"},
            )
        if not waiting:
            return
        refusals = [
            Refusal(
                subject=kind.call.subject,
                role=kind.call.role,
                key=kind.call.key,
                method=kind.call.method,
                target=kind.call.target,
                peer=kind.call.peer,
                request_id=ids.get(kind, ""),
                outcome=kind.outcome,
                detail=kind.detail,
                count=count,
            )
            for kind, count in waiting.items()
        ]
        try:
            await self._store(refusals)
        except TesseraError as error:
            log.error(
                "%d refused calls are not in the audit log yet: %s",
                waiting.total(),
                error,
                extra={"action": "audit_failed"},
            )
            for kind, count in waiting.items():
                if kind in self._waiting or len(self._waiting) < MAX_WAITING:
                    self._waiting[kind] += count
                    self._ids.setdefault(kind, ids.get(kind, ""))
                else:
                    self._lost += count
            self._notice.set()
