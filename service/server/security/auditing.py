"""The audit of refused calls. Changes are recorded by the store, in their own transactions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

import grpc

from tessera.formulation.base.access import AuditedCall
from tessera.formulation.base.errors import TesseraError
from tessera.formulation.base.secrets import hide_secrets
from tessera.formulation.records.access import Refusal

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


@dataclass(slots=True)
class _Alike:
    """The refusals that are alike and wait: the first request's id, and their number."""

    request_id: str
    count: int = 0


class RefusalRecorder:
    """A task that stores refused calls together. It belongs to the event loop's thread.

    Refusals that are alike make one entry, so that a flood of them fills neither memory nor the
    database.
    """

    def __init__(self, store: Callable[[Sequence[Refusal]], Awaitable[None]]) -> None:
        self._store = store
        # By what makes them alike: all but the request's id and the caller's port.
        self._waiting: dict[Refusal, _Alike] = {}
        self._lost = 0
        self._notice = asyncio.Event()
        self._writing = asyncio.Lock()  # held from taking what waits until it is stored
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, on the running event loop."""
        self._task = asyncio.create_task(self._repeat())

    async def stop(self) -> None:
        """Store what waits, and end."""
        if self._task is not None:
            async with self._writing:
                self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self._flush()

    def note(self, call: AuditedCall, code: grpc.StatusCode, detail: str) -> None:
        """Note a refused call."""
        peer = call.peer.rpartition(":")[0] or call.peer
        kind = Refusal(
            **asdict(replace(call, request_id="", peer=peer)),
            outcome=code.name,
            detail=hide_secrets(detail)[:MAX_DETAIL],
            count=0,
        )
        is_new = kind not in self._waiting
        if not self._add(kind, call.request_id, 1):
            return
        if is_new:  # else the same line was logged within the last second
            log.warning(
                "refused a caller",
                extra={
                    "event": "call_refused",
                    "code": kind.outcome,
                    "method": call.method,
                    "caller": call.subject,
                    "peer": call.peer,
                    "target": call.target,
                    "error": kind.detail,
                },
            )
        self._notice.set()

    def _add(self, kind: Refusal, request_id: str, count: int) -> bool:
        """Let refusals wait if there is room for them; return whether there is."""
        if kind not in self._waiting and len(self._waiting) >= MAX_WAITING:
            self._lost += count
            return False
        self._waiting.setdefault(kind, _Alike(request_id)).count += count
        return True

    async def _repeat(self) -> None:
        while True:
            await self._notice.wait()
            self._notice.clear()
            await asyncio.sleep(GAP_S)
            await self._flush()

    async def _flush(self) -> None:
        """Store what waits. After a failure it goes on waiting, up to the limit."""
        async with self._writing:
            await self._store_waiting()

    async def _store_waiting(self) -> None:
        waiting, lost = self._waiting, self._lost
        self._waiting, self._lost = {}, 0
        if lost:
            log.error(
                "refused calls are missing in the audit log: too many different ones at once",
                extra={"event": "audit_lost", "calls": lost},
            )
        if not waiting:
            return
        refusals = [
            replace(kind, request_id=alike.request_id, count=alike.count)
            for kind, alike in waiting.items()
        ]
        try:
            await self._store(refusals)
        except TesseraError as error:
            log.error(
                "refused calls are not in the audit log yet",
                extra={
                    "event": "audit_failed",
                    "calls": sum(alike.count for alike in waiting.values()),
                    "error": error,
                },
            )
            for kind, alike in waiting.items():
                self._add(kind, alike.request_id, alike.count)
            self._notice.set()
