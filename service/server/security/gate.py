"""The gate that every call passes: identity, rule, admission, audit, and an end if it is revoked."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import grpc.aio
from google.protobuf.message import Message

from tessera.formulation.base.access import AUDITED, IDENTITY, AuditedCall, Identity, Role
from tessera.formulation.base.errors import PermissionDenied, TesseraError, Unavailable
from tessera.formulation.base.logs import add_ids
from tessera.formulation.base.secrets import hide_secrets
from tessera.service.server.convert.names import find_cluster
from tessera.service.server.security.admission import Admission
from tessera.service.server.security.auditing import AUDITED_CODES, RefusalRecorder
from tessera.service.server.security.authenticator import Authenticator
from tessera.service.server.security.roles import RULES, Rule, find_target, short_method
from tessera.service.server.security.sessions import Sessions
from tessera.service.server.tasks.lanes import CALLER, Share, client_of

log = logging.getLogger(__name__)

MAX_TEXT: Final = 300
"""Largest number of characters of a text of a request that logs and the audit log repeat."""

RETRY_S: Final = 1.0
"""Seconds after which a lookup of revocations is tried again."""

_NOBODY = Identity(subject="", role=Role.VIEWER, key="", clusters=frozenset(), tenants=frozenset())
"""The caller of an open method, or one whose identity is not known yet. It sees nothing."""


def _shown(text: str) -> str:
    """Return a text that a caller chose as logs may repeat it: short, and without secrets."""
    return hide_secrets(text[:MAX_TEXT])


@dataclass(slots=True)
class Visit:
    """A call that passes the gate."""

    gate: Gate
    method: str
    rule: Rule
    peer: str
    identity: Identity
    request: Message | None = None

    async def admit(self, request: Message | None) -> None:
        """Check that the call may begin, and set what the task of the call is known by.

        ``request`` is None for a stream of requests. Raises what ``Admission.admit`` raises.
        """
        self.request = request
        cluster = find_cluster(request) if request is not None else ""
        known = self.identity.is_verified and self.identity is not _NOBODY
        client = self.identity.subject if known else client_of(self.peer)
        if cluster:
            add_ids(cluster=cluster)
        CALLER.set(Share(client=client, cluster=cluster))
        IDENTITY.set(self.identity)
        await self.gate.admission.admit(self.identity, self.method, self.rule, request)
        if self.rule.changes:
            AUDITED.set(self.audited())

    def audited(self) -> AuditedCall:
        """Return the call as the audit log describes it."""
        return AuditedCall(
            subject=self.identity.subject,
            role="" if self.identity is _NOBODY else self.identity.role,
            proof=self.identity.key,
            method=short_method(self.method),
            target=_shown(find_target(self.request)),
            peer=self.peer,
            request_id=_shown(getattr(self.request, "request_id", "")),
        )


class Gate:
    """The gate of a server. It belongs to the event loop's thread."""

    def __init__(
        self,
        authenticator: Authenticator,
        admission: Admission,
        sessions: Sessions,
        refusals: RefusalRecorder,
        code_of: Callable[[TesseraError], grpc.StatusCode],
    ) -> None:
        self.admission = admission
        self._authenticator, self._sessions = authenticator, sessions
        self._refusals, self._code_of = refusals, code_of
        self._heeding: set[asyncio.Task[None]] = set()

    def start(self) -> Self:
        """Begin to store refusals, on the running event loop."""
        self._refusals.start()
        return self

    async def stop(self) -> None:
        """Store the refusals that wait, and end."""
        for task in self._heeding:
            task.cancel()
        await self._refusals.stop()

    @contextlib.asynccontextmanager
    async def enter(
        self, method: str, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Visit]:
        """Find out who calls, run the block, and record a refusal.

        Raises what ``Authenticator.identify`` and ``Sessions.open`` raise.
        """
        rule, peer = RULES.get(method), context.peer()
        visit = Visit(self, method, rule or Rule(roles=frozenset()), peer, _NOBODY)
        try:
            if rule is None:
                raise PermissionDenied(
                    f"{short_method(method)} has no rule that says who may call it"
                )
            if not rule.is_open:
                visit.identity = await self._authenticator.identify(context)
            async with self._sessions.open(visit.identity):
                yield visit
        except TesseraError as error:
            if (code := self._code_of(error)) in AUDITED_CODES:
                self._refusals.note(visit.audited(), code, str(error))
            raise

    def note_revocation(self, key: str) -> None:
        """End the calls that ``key`` proved, since it was revoked.

        If ``key`` is "", notices may have been lost, so everything that is open is looked up again.
        """
        self._authenticator.forget(key)
        if key:
            self._end([key])
            return
        task = asyncio.get_running_loop().create_task(self._look_again())
        self._heeding.add(task)
        task.add_done_callback(self._heeding.discard)

    async def _look_again(self) -> None:
        """Look up what all open calls were proved by, and end those that are revoked."""
        while True:
            try:
                self._end(await self._authenticator.revoked(self._sessions.keys()))
            except Unavailable as error:
                log.warning(
                    "cannot look for revoked tokens and certificates yet",
                    extra={"event": "revocations_unknown", "error": error},
                )
                await asyncio.sleep(RETRY_S)
            else:
                return

    def _end(self, keys: Sequence[str]) -> None:
        for revoked in keys:
            if ended := self._sessions.end(revoked):
                log.warning(
                    "ended calls whose proof was revoked",
                    extra={"event": "identity_revoked", "proof": revoked, "calls": ended},
                )
