"""The gRPC server: all servicers on one port, with health, reflection, limits and graceful stop."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from typing import Final

import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tessera.db.access import audit_log
from tessera.db.clusters import tenants
from tessera.db.store.store import Store
from tessera.formulation.base.clock import Clock
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.records.access import Refusal
from tessera.service.server.rounds.loop import RoundLoop
from tessera.service.server.rounds.network_planner import NetworkPlanner
from tessera.service.server.rounds.standing_policy import StandingPolicies
from tessera.service.server.rpc.serving.answers import (
    AnswerRoom,
    BoundedAnswers,
    shorten_left_clients,
)
from tessera.service.server.rpc.serving.errors import code_of
from tessera.service.server.rpc.serving.health import HealthChecker
from tessera.service.server.rpc.serving.interceptor import CallInterceptor
from tessera.service.server.rpc.serving.listening import listening_addresses
from tessera.service.server.rpc.serving.servicers import SERVICES, ServicerParts, add_servicers
from tessera.service.server.rpc.serving.threads import ServerThreads
from tessera.service.server.rpc.webhooks import WebhookParts
from tessera.service.server.security.admission import Admission
from tessera.service.server.security.auditing import RefusalRecorder
from tessera.service.server.security.authenticator import Authenticator, Verifier
from tessera.service.server.security.gate import Gate
from tessera.service.server.security.sessions import Sessions
from tessera.service.server.settings.config import Config
from tessera.service.server.tasks.calls import Calls, StreamPlaces, Wakeups

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES: Final = 64 * 2**20

AFTER_GRACE_S: Final = 0.3
"""Seconds that calls have to end after they were cancelled, before they are abandoned."""

_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # a second server on the port is an error, not a peer
    ("grpc.keepalive_time_ms", 20_000),  # detects agents whose machine is gone
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
)


class Server:
    """The server of every API of Tessera, on ``config.listen``.

    Create, start and stop it on one event loop. Others may share ``wakeups``, ``watches``,
    ``policies`` and ``planner``, and the ``threads`` of the server's own tasks.
    """

    def __init__(
        self,
        config: Config,
        store: Store,
        rounds: RoundLoop,
        clock: Clock,
        *,
        new_id: Callable[[], str],
        wall_s: Callable[[], float],
        access: Store | None = None,
        verifier: Verifier | None = None,
        schema: str = "",
        webhooks: WebhookParts | None = None,
    ) -> None:
        """Assemble the server.

        ``access`` keeps tokens, certificates and the audit log: a server that asks callers who they
        are needs it. ``verifier`` checks the tokens of an identity provider. ``schema`` is the
        revision of the database's schema, or "" if the store has none. ``webhooks`` are needed for
        webhooks.

        Raises:
            InvalidInput: a file of TLS is wrong.
        """
        self._config = config
        self._addresses = listening_addresses(config, wall_s)
        self.mutual_port = 0
        self.threads = ServerThreads(config)
        self.wakeups = Wakeups()
        self.watches = StreamPlaces(
            config.watches, config.watches_per_client, "streams that watch jobs"
        )
        self.policies = StandingPolicies(store, config.round_options(), config.usual_options())
        self.planner = NetworkPlanner(store, clock, self.policies)
        self.gate = _make_gate(config, store, access, verifier, self.threads.identity, wall_s)
        self._health = HealthChecker(
            store, self.threads.health, SERVICES, config.health_period_s, config.instance
        )
        shorten_left_clients()
        self._grpc = grpc.aio.server(
            interceptors=[
                CallInterceptor(self.gate, config.unread_s),
                BoundedAnswers(AnswerRoom()),
            ],
            options=_OPTIONS,
        )
        parts = ServicerParts(
            config=config,
            store=store,
            rounds=rounds,
            clock=clock,
            new_id=new_id,
            wall_s=wall_s,
            access=access,
            schema=schema,
            webhooks=webhooks,
            threads=self.threads,
            wakeups=self.wakeups,
            watches=self.watches,
            policies=self.policies,
            planner=self.planner,
            mutual_port=lambda: self.mutual_port,
        )
        add_servicers(parts, self._grpc)
        health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, self._grpc)
        shown = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(shown, self._grpc)

    async def start(self) -> int:
        """Listen; return the port of ``config.listen``, which is 1 for a Unix socket.

        Raises:
            InvalidInput: an address cannot be bound.
        """
        bound = {one.setting: one.bind(self._grpc) for one in self._addresses}
        self.mutual_port = bound.get("mutual_listen", 0)
        self.gate.start()
        await self._health.start()
        await self._grpc.start()
        if self._config.socket:
            os.chmod(self._config.socket, 0o600)
        for one in self._addresses:
            log.info(
                "listening for calls",
                extra={
                    "event": "listening",
                    "address": one.address,
                    "port": bound[one.setting],
                    "tls": bool(one.credentials),
                },
            )
        if not self._config.asks_callers():
            log.warning(
                "callers need no token: everyone who reaches the port may do everything"
                if self._config.insecure
                else "callers need no token: everyone on this machine may do everything",
                extra={"event": "callers_not_asked"},
            )
        return bound["listen"]

    async def stop(self) -> list[str]:
        """Refuse new calls, end streams, let calls finish for the grace period, then cancel them.

        Return the names of the calls that did not end. Their threads are still running.
        """
        log.info("stopping", extra={"event": "stopping", "grace_s": self._config.grace_s})
        end_s = time.monotonic() + self._config.grace_s + AFTER_GRACE_S
        await self._health.stop()
        self.wakeups.close()
        await self._grpc.stop(self._config.grace_s)
        await self.gate.stop()
        return await self.threads.close(max(AFTER_GRACE_S, end_s - time.monotonic()))


def _make_gate(
    config: Config,
    store: Store,
    access: Store | None,
    verifier: Verifier | None,
    calls: Calls,
    wall_s: Callable[[], float],
) -> Gate:
    """Return the gate that every call passes. It reads the store in ``calls``. Raises InvalidInput."""
    run = calls.run
    if config.asks_callers() and access is None:
        raise InvalidInput("authenticate", "needs a store that keeps tokens")

    async def tenants_of_jobs(cluster: str, jobs: Collection[str]) -> dict[str, str]:
        return await run(store.read, tenants.tenants_of_jobs, cluster, jobs)

    async def add_refusals(refusals: Sequence[Refusal]) -> None:
        if access is not None:
            await run(access.update, audit_log.add_refusals, refusals)

    asked = access if config.asks_callers() else None
    admission = Admission(
        tenants_of_jobs,
        calls_per_minute=config.calls_per_minute,
        job_bytes=config.max_job_bytes,
    )
    return Gate(
        Authenticator(
            asked,
            run,
            verifier=verifier,
            trusts_sockets=bool(config.socket) and not config.listen.startswith("unix"),
            wall_s=wall_s,
        ),
        admission,
        Sessions(wall_s),
        RefusalRecorder(add_refusals),
        code_of,
    )
