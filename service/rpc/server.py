"""The gRPC server: all servicers on one port, with health, reflection, limits and graceful stop."""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tessera.formulation.clock import Clock
from tessera.formulation.errors import InvalidInput
from tessera.formulation.records.access import Refusal
from tessera.service.config import Config
from tessera.service.explaining import JobExplainer
from tessera.service.loop import RoundLoop
from tessera.service.network_planner import NetworkPlanner
from tessera.service.ports.logs import LogStore
from tessera.service.ports.store import Store
from tessera.service.rpc.access import AccessServicer
from tessera.service.rpc.agents import AgentCalls, AgentsServicer
from tessera.service.rpc.answers import AnswerRoom, BoundedAnswers, shorten_left_clients
from tessera.service.rpc.calls import Calls, StreamPlaces, Wakeups
from tessera.service.rpc.clusters import ClustersServicer
from tessera.service.rpc.curves import CurveReader
from tessera.service.rpc.deadlines import CallDeadlines
from tessera.service.rpc.enrolment import Enrolment, EnrolmentSettings
from tessera.service.rpc.errors import code_of
from tessera.service.rpc.estimates import EstimatesServicer
from tessera.service.rpc.explanations import ExplanationCalls
from tessera.service.rpc.health import HealthChecker
from tessera.service.rpc.heartbeats import HeartbeatRecorder
from tessera.service.rpc.interceptor import CallInterceptor
from tessera.service.rpc.jobs import JobsServicer
from tessera.service.rpc.lanes import FairCalls, Lane, LaneLimits, SizedCalls
from tessera.service.rpc.logs import LogTiming, OutputReader
from tessera.service.rpc.networks import NetworksServicer
from tessera.service.rpc.scheduler import SchedulerServicer
from tessera.service.rpc.tenants import TenantsServicer
from tessera.service.rpc.webhooks import WebhookParts, WebhooksServicer
from tessera.service.rpc.what_if import WhatIfCalls
from tessera.service.security.admission import Admission
from tessera.service.security.auditing import RefusalRecorder
from tessera.service.security.authenticator import Authenticator, Verifier
from tessera.service.security.gate import Gate
from tessera.service.security.ports import AccessStore
from tessera.service.security.serving import CertificateFiles, ServingCertificate
from tessera.service.security.sessions import Sessions
from tessera.service.settings.access import TlsFiles
from tessera.service.settings.capacity import (
    ESTIMATE_THREADS,
    HEAVY_THREADS,
    IDENTITY_THREADS,
    LEASE_THREADS,
    LOG_THREADS,
)
from tessera.service.standing_policy import StandingPolicies
from tessera.service.webhooks.deliverer import THREADS as WEBHOOK_THREADS
from tessera.service.what_if.asking import make_asker
from tessera.v1 import (
    access_pb2,
    access_pb2_grpc,
    agents_pb2,
    agents_pb2_grpc,
    clusters_pb2,
    clusters_pb2_grpc,
    estimates_pb2,
    estimates_pb2_grpc,
    jobs_pb2,
    jobs_pb2_grpc,
    networks_pb2,
    networks_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    tenants_pb2,
    tenants_pb2_grpc,
    webhooks_pb2,
    webhooks_pb2_grpc,
)

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES: Final = 64 * 2**20

MAX_WAITING_CALLS: Final = 4_000
"""Largest number of calls that wait for threads of one kind. At most half of them are from one
client, and a quarter from one client on one cluster.
"""

LOG_STREAMS: Final = 256
LOG_STREAMS_PER_CLIENT: Final = 32
"""Largest numbers of streams of the output of jobs, in all and of one client."""

TEST_THREADS: Final = 2
MAX_WAITING_TESTS: Final = 64
"""Number of tests of webhooks that run at the same time, and that wait. Each waits for another server."""

AFTER_GRACE_S: Final = 0.3
"""Seconds that calls have to end after they were cancelled, before they are abandoned."""

SERVICES: Final = tuple(
    service.full_name
    for module in (
        access_pb2,
        agents_pb2,
        clusters_pb2,
        estimates_pb2,
        jobs_pb2,
        networks_pb2,
        scheduler_pb2,
        tenants_pb2,
        webhooks_pb2,
    )
    for service in module.DESCRIPTOR.services_by_name.values()
)

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
    ``policies`` and ``replanning``, and the threads that callers do not use. ``lease_calls`` is for
    leases and short reads of the server's own tasks, and ``round_calls`` for periodic rounds.
    ``network_calls``, ``estimate_calls``, ``cleaning_calls`` and ``check_calls`` are for the work
    between rounds.
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
        access: AccessStore | None = None,
        verifier: Verifier | None = None,
        logs: LogStore | None = None,
        schema: str = "",
        webhooks: WebhookParts | None = None,
    ) -> None:
        """Assemble the server.

        ``access`` keeps tokens, certificates and the audit log: a server that asks callers who they
        are needs it. ``verifier`` checks the tokens of an identity provider. ``logs`` keeps requests
        for the output of jobs; without it, no output can be read. ``schema`` is the revision of the
        database's schema, or "" if the store has none. ``webhooks`` are needed for webhooks.

        Raises:
            InvalidInput: a file of TLS is wrong.
        """
        self.wakeups = Wakeups()
        self.policies = StandingPolicies(store, config.round_options(), config.usual_options())
        self._config = config
        self.mutual_port = 0
        tls = config.tls_files()
        self._ports = _ports(config, tls, wall_s)
        self.lease_calls = Calls(LEASE_THREADS, "lease")
        self.round_calls = Calls(config.round_threads, "periodic round")
        self.network_calls, self.estimate_calls = Calls(1, "network"), Calls(1, "estimate")
        self.cleaning_calls, self.check_calls = Calls(1, "cleaning"), Calls(1, "check")
        self.forecast_calls, self.shadow_calls = Calls(1, "forecast"), Calls(1, "shadow")
        self.webhook_calls = Calls(WEBHOOK_THREADS, "webhook")
        one_test = LaneLimits(client=1, cluster=TEST_THREADS, share=1)
        self._test_calls = FairCalls(
            Lane(TEST_THREADS, "webhook test", one_test, most_waiting=MAX_WAITING_TESTS)
        )
        self._heartbeat_calls = Calls(1, "heartbeat")
        # The threads of calls: short ones, heavy ones, rounds, trials and estimates.
        self._quick_calls = _fair_calls(config.store_threads, "store")
        others_have_one = LaneLimits(client=HEAVY_THREADS - 1, cluster=HEAVY_THREADS, share=1)
        heavy = Lane(HEAVY_THREADS, "heavy", others_have_one, most_waiting=MAX_WAITING_CALLS)
        self._heavy_calls = FairCalls(heavy)
        calls = SizedCalls(self._quick_calls, self._heavy_calls)
        one_of_each = LaneLimits(client=config.round_threads, cluster=1, share=1)
        queue, trials = config.round_queue, config.trial_threads
        self._commits = Lane(config.round_threads, "round", one_of_each, most_waiting=queue)
        self._trials = Lane(trials, "trial", LaneLimits.leaving_room(trials), most_waiting=queue)
        several = LaneLimits(client=1, cluster=ESTIMATE_THREADS, share=1)
        self._estimates = Lane(ESTIMATE_THREADS, "estimate", several, most_waiting=queue)
        self._identity_calls = Calls(IDENTITY_THREADS, "identity")
        self.gate = self._gate(store, access, verifier, wall_s)
        self._health = HealthChecker(store, SERVICES, config.health_period_s, config.instance)
        shorten_left_clients()
        # The server, and the servicers that are added to it.
        self._grpc = grpc.aio.server(
            interceptors=[
                CallInterceptor(self.gate, config.unread_s),
                BoundedAnswers(AnswerRoom()),
            ],
            options=_OPTIONS,
        )
        wakeups, timing = self.wakeups, config.agent_timing()
        self.watches = StreamPlaces(
            config.watches, config.watches_per_client, "streams that watch jobs"
        )
        one = LaneLimits(client=1, cluster=LOG_THREADS, share=1)
        self._log_calls = FairCalls(
            Lane(LOG_THREADS, "log", one, most_waiting=4 * config.agent_streams)
        )
        output = OutputReader(
            store,
            logs,
            self._log_calls,
            wakeups,
            places=StreamPlaces(LOG_STREAMS, LOG_STREAMS_PER_CLIENT, "streams of output"),
            clock=clock,
            new_id=lambda: uuid.uuid4().hex,
            timing=LogTiming(poll_s=config.poll_s),
        )
        deadlines = CallDeadlines(
            clock=clock, default_s=config.default_deadline_s, longest_s=config.max_deadline_s
        )
        explainer = JobExplainer(store, rounds, self.policies)
        jobs = JobsServicer(
            store,
            calls,
            wakeups,
            watches=self.watches,
            output=output,
            curves=CurveReader(store, config.catalogue(), self.policies),
            estimates=self._estimates,
            explanations=ExplanationCalls(store, explainer, calls, self._trials, deadlines),
            new_id=new_id,
            wall_s=wall_s,
            poll_s=config.poll_s,
            policies=self.policies,
        )
        scheduler = SchedulerServicer(
            store,
            rounds,
            calls=calls,
            commits=self._commits,
            trials=self._trials,
            deadlines=deadlines,
            policies=self.policies,
            what_if=WhatIfCalls(
                store,
                make_asker(config, store, clock),
                self._trials,
                deadlines,
                policies=self.policies,
                new_id=new_id,
                wall_s=wall_s,
            ),
        )
        places = StreamPlaces(
            config.agent_streams, config.agent_streams_per_client, "streams of agents"
        )
        self._agent_calls = _agent_calls(
            config, store, self._heartbeat_calls, logs, self._log_calls
        )
        enrolment = Enrolment(access, self._enrolment_settings(tls), self._identity_calls, wall_s)
        agents = AgentsServicer(self._agent_calls, wakeups, clock, timing, places, enrolment)
        login = access_pb2.Login(
            issuer=config.oidc_issuer,
            audience=config.oidc_audience,
            client_id=config.oidc_client_id,
            scopes=config.oidc_scopes if config.oidc_issuer else "",
        )
        access_pb2_grpc.add_AccessServicer_to_server(
            AccessServicer(access, calls, login, wall_s, schema), self._grpc
        )
        clusters = ClustersServicer(
            store,
            calls,
            config.lease_s,
            period_s=config.period_s,
            wall_s=wall_s,
        )
        agents_pb2_grpc.add_AgentsServicer_to_server(agents, self._grpc)
        clusters_pb2_grpc.add_ClustersServicer_to_server(clusters, self._grpc)
        estimates_pb2_grpc.add_EstimatesServicer_to_server(
            EstimatesServicer(
                store,
                calls,
                self._estimates,
                config.catalogue(),
                learns=config.learn,
                profiling=config.profiling(),
            ),
            self._grpc,
        )
        jobs_pb2_grpc.add_JobsServicer_to_server(jobs, self._grpc)
        self.replanning = NetworkPlanner(store, clock, self.policies)
        networks = NetworksServicer(
            store, calls, self._commits, self._trials, clock, self.replanning
        )
        networks_pb2_grpc.add_NetworksServicer_to_server(networks, self._grpc)
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(scheduler, self._grpc)
        tenants_pb2_grpc.add_TenantsServicer_to_server(
            TenantsServicer(store, calls, wall_s), self._grpc
        )
        if webhooks is not None:
            webhooks_pb2_grpc.add_WebhooksServicer_to_server(
                WebhooksServicer(store, webhooks, calls, self._test_calls), self._grpc
            )
        health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, self._grpc)
        shown = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(shown, self._grpc)

    async def start(self) -> int:
        """Listen; return the port of ``config.listen``, which is 1 for a Unix socket.

        Raises:
            InvalidInput: an address cannot be bound.
        """
        bound = {setting: self._bind(setting, *port) for setting, port in self._ports.items()}
        self.mutual_port = bound.get("mutual_listen", 0)
        self.gate.start()
        await self._health.start()
        await self._grpc.start()
        if self._config.socket:
            os.chmod(self._config.socket, 0o600)
        for setting, (address, credentials) in self._ports.items():
            log.info(
                "listening on %s%s",
                address,
                " with TLS" if credentials else "",
                extra={"action": "listening", "port": bound[setting]},
            )
        if not self._config.asks_callers():
            reach = "reaches this port" if self._config.insecure else "is on this machine"
            log.warning(
                "callers need no token: everyone who %s may do everything",
                reach,
                extra={"action": "callers_not_asked"},
            )
        return bound["listen"]

    def _bind(self, setting: str, address: str, credentials: grpc.ServerCredentials | None) -> int:
        try:
            if credentials is None:
                return self._grpc.add_insecure_port(address)
            return self._grpc.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise InvalidInput(
                setting,
                f"cannot bind {address}; another program may use it: stop that one, or listen on"
                " another address",
            ) from error

    def _gate(
        self,
        store: Store,
        access: AccessStore | None,
        verifier: Verifier | None,
        wall_s: Callable[[], float],
    ) -> Gate:
        """Return the gate that every call passes. Raises InvalidInput."""
        config, run = self._config, self._identity_calls.run
        if config.asks_callers() and access is None:
            raise InvalidInput("authenticate", "needs a store that keeps tokens")

        async def tenants_of_jobs(cluster: str, jobs: Collection[str]) -> dict[str, str]:
            return await run(store.tenants_of_jobs, cluster, jobs)

        async def add_refusals(refusals: Sequence[Refusal]) -> None:
            if access is not None:
                await run(access.add_refusals, refusals)

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

    def _enrolment_settings(self, tls: TlsFiles | None) -> EnrolmentSettings | None:
        if tls is None or tls.ca_certificate is None or tls.ca_key is None:
            return None
        return EnrolmentSettings(
            ca_certificate=tls.ca_certificate,
            ca_key=tls.ca_key,
            hours=self._config.agent_certificate_hours,
            port=lambda: self.mutual_port,
        )

    async def stop(self) -> list[str]:
        """Refuse new calls, end streams, let calls finish for the grace period, then cancel them.

        Return the names of the calls that did not end. Their threads are still running.
        """
        log.info("stopping", extra={"action": "stopping"})
        end_s = time.monotonic() + self._config.grace_s + AFTER_GRACE_S
        await self._health.stop()
        self.wakeups.close()
        await self._grpc.stop(self._config.grace_s)
        await self.gate.stop()
        left_s = max(AFTER_GRACE_S, end_s - time.monotonic())
        left = await asyncio.gather(*(pool.close(left_s) for pool in self._pools()))
        return [name for names in left for name in names]

    def is_busy(self) -> bool:
        """Return whether a call is running that takes much time or memory."""
        lanes = (self._heavy_calls, self._commits, self._trials, self._estimates)
        return any(lane.running() for lane in lanes)

    def running(self) -> list[str]:
        """Return the names of the calls that hold a thread."""
        return [name for pool in self._pools() for name in pool.running()]

    def _pools(self) -> Sequence[Calls | FairCalls | Lane | HealthChecker]:
        return (
            self._quick_calls,
            self._heavy_calls,
            self._heartbeat_calls,
            self._identity_calls,
            self._agent_calls.turns,
            self._agent_calls.reads,
            self._log_calls,
            self.lease_calls,
            self.round_calls,
            self.network_calls,
            self.estimate_calls,
            self.cleaning_calls,
            self.webhook_calls,
            self._test_calls,
            self.check_calls,
            self.forecast_calls,
            self.shadow_calls,
            self._commits,
            self._trials,
            self._estimates,
            self._health,
        )


def _ports(
    config: Config, tls: TlsFiles | None, wall_s: Callable[[], float]
) -> dict[str, tuple[str, grpc.ServerCredentials | None]]:
    """Return the address and the credentials of each port, by setting. Raises InvalidInput."""
    ports: dict[str, tuple[str, grpc.ServerCredentials | None]] = {"listen": (config.listen, None)}
    if tls is not None:
        own = ServingCertificate(
            CertificateFiles(certificate=tls.certificate, key=tls.key), wall_s, log
        )
        ports["listen"] = (config.listen, own.credentials())
        address = config.mutual_address()
        if tls.client_authorities is not None and address:
            files = CertificateFiles(
                certificate=tls.certificate,
                key=tls.key,
                client_authorities=tls.client_authorities,
            )
            mutual = ServingCertificate(files, wall_s, log)
            ports["mutual_listen"] = (address, mutual.credentials())
    if config.socket:
        make_private_directory(Path(config.socket).absolute().parent)
        ports["socket"] = (f"unix:{Path(config.socket).absolute()}", None)
    return ports


def make_private_directory(path: Path) -> None:
    """Make a directory that only this user can enter, or check that it is one. Raises InvalidInput."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise InvalidInput(
            "socket",
            f"other users can enter {path}, and whoever reaches the socket may do everything; run"
            f" chmod 700 {path}, or choose another directory",
        )


def _fair_calls(threads: int, name: str) -> FairCalls:
    """Return threads of which one client holds all but one at most, and one cluster's callers half.

    A write waits for its cluster's row. With these limits, callers that crowd one cluster leave
    threads to the others.
    """
    half = max(1, threads // 2)
    limits = LaneLimits(client=max(1, threads - 1), cluster=half, share=half)
    return FairCalls(Lane(threads, name, limits, most_waiting=MAX_WAITING_CALLS))


def _agent_calls(
    config: Config, store: Store, heartbeats: Calls, logs: LogStore | None, log_calls: FairCalls
) -> AgentCalls:
    most = 4 * config.agent_streams  # enough for one call of each stream, so that none is refused
    reading = max(1, config.agent_threads // 2)
    turning = max(1, config.agent_threads - reading)
    one = LaneLimits(client=max(1, turning - 1), cluster=1, share=1)
    turns = Lane(turning, "agent turn", one, most_waiting=most)
    any_share = LaneLimits(client=reading, cluster=reading, share=reading)
    reads = Lane(reading, "agent read", any_share, most_waiting=most)
    return AgentCalls(
        store=store,
        heartbeats=HeartbeatRecorder(store, heartbeats),
        turns=FairCalls(turns),
        reads=FairCalls(reads),
        logs=logs,
        log_calls=log_calls,
    )
