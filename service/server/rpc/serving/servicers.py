"""The servicers of Tessera's API: their assembly from the parts of a server."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import grpc.aio

from tessera.db.store.store import Store
from tessera.formulation.base.clock import Clock
from tessera.service.server.rounds.explaining import JobExplainer
from tessera.service.server.rounds.loop import RoundLoop
from tessera.service.server.rounds.network_planner import NetworkPlanner
from tessera.service.server.rounds.standing_policy import StandingPolicies
from tessera.service.server.rpc.access import AccessServicer
from tessera.service.server.rpc.agents.agents import AgentsServicer
from tessera.service.server.rpc.agents.agentsession import AgentCalls
from tessera.service.server.rpc.agents.enrolment import Enrolment, EnrolmentSettings
from tessera.service.server.rpc.agents.heartbeats import HeartbeatRecorder
from tessera.service.server.rpc.clusters import ClustersServicer
from tessera.service.server.rpc.curves import CurveReader
from tessera.service.server.rpc.deadlines import CallDeadlines
from tessera.service.server.rpc.estimates import EstimatesServicer
from tessera.service.server.rpc.explanations import ExplanationCalls
from tessera.service.server.rpc.jobs import JobsServicer
from tessera.service.server.rpc.logs import LogTiming, OutputReader
from tessera.service.server.rpc.networks import NetworksServicer
from tessera.service.server.rpc.scheduler import SchedulerServicer
from tessera.service.server.rpc.serving.threads import ServerThreads
from tessera.service.server.rpc.tenants import TenantsServicer
from tessera.service.server.rpc.webhooks import WebhookParts, WebhooksServicer
from tessera.service.server.rpc.what_if import WhatIfCalls
from tessera.service.server.settings.config import Config
from tessera.service.server.tasks.calls import StreamPlaces, Wakeups
from tessera.service.server.tasks.lanes import FairCalls
from tessera.service.server.what_if.asking import make_asker
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

LOG_STREAMS: Final = 256
LOG_STREAMS_PER_CLIENT: Final = 32
"""Largest numbers of streams of the output of jobs, in all and of one client."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicerParts:
    """The parts of a server that its servicers share.

    ``mutual_port`` returns the port for agents with certificates, once the server listens. The
    parts that may be None are explained by ``Server``.
    """

    config: Config
    store: Store
    rounds: RoundLoop
    clock: Clock
    new_id: Callable[[], str]
    wall_s: Callable[[], float]
    access: Store | None
    schema: str
    webhooks: WebhookParts | None
    threads: ServerThreads
    wakeups: Wakeups
    watches: StreamPlaces
    policies: StandingPolicies
    planner: NetworkPlanner
    mutual_port: Callable[[], int]


def add_servicers(parts: ServicerParts, server: grpc.aio.Server) -> None:
    """Let ``server`` answer all calls of the API, those of webhooks only if there are webhooks.

    Raises:
        InvalidInput: a file that the settings name is wrong.
    """
    access_pb2_grpc.add_AccessServicer_to_server(_access(parts), server)
    agents_pb2_grpc.add_AgentsServicer_to_server(_agents(parts), server)
    clusters_pb2_grpc.add_ClustersServicer_to_server(_clusters(parts), server)
    estimates_pb2_grpc.add_EstimatesServicer_to_server(_estimates(parts), server)
    jobs_pb2_grpc.add_JobsServicer_to_server(_jobs(parts), server)
    networks_pb2_grpc.add_NetworksServicer_to_server(_networks(parts), server)
    scheduler_pb2_grpc.add_SchedulerServicer_to_server(_scheduler(parts), server)
    tenants_pb2_grpc.add_TenantsServicer_to_server(_tenants(parts), server)
    if parts.webhooks is not None:
        webhooks_pb2_grpc.add_WebhooksServicer_to_server(_webhooks(parts, parts.webhooks), server)


def _access(parts: ServicerParts) -> AccessServicer:
    config = parts.config
    login = access_pb2.Login(
        issuer=config.oidc_issuer,
        audience=config.oidc_audience,
        client_id=config.oidc_client_id,
        scopes=config.oidc_scopes if config.oidc_issuer else "",
    )
    return AccessServicer(parts.access, parts.threads.calls, login, parts.wall_s, parts.schema)


def _agents(parts: ServicerParts) -> AgentsServicer:
    config, threads = parts.config, parts.threads
    calls = AgentCalls(
        store=parts.store,
        heartbeats=HeartbeatRecorder(parts.store, threads.heartbeats),
        turns=threads.agent_turns,
        reads=threads.agent_reads,
        log_calls=threads.logs,
    )
    places = StreamPlaces(
        config.agent_streams, config.agent_streams_per_client, "streams of agents"
    )
    enrolment = Enrolment(parts.access, _enrolment(parts), threads.identity, parts.wall_s)
    return AgentsServicer(
        calls, parts.wakeups, parts.clock, config.agent_timing(), places, enrolment
    )


def _enrolment(parts: ServicerParts) -> EnrolmentSettings | None:
    tls = parts.config.tls_files()
    if tls is None or tls.ca_certificate is None or tls.ca_key is None:
        return None
    return EnrolmentSettings(
        ca_certificate=tls.ca_certificate,
        ca_key=tls.ca_key,
        hours=parts.config.agent_certificate_hours,
        port=parts.mutual_port,
    )


def _clusters(parts: ServicerParts) -> ClustersServicer:
    return ClustersServicer(
        parts.store,
        parts.threads.calls,
        parts.config.lease_s,
        period_s=parts.config.period_s,
        wall_s=parts.wall_s,
    )


def _estimates(parts: ServicerParts) -> EstimatesServicer:
    return EstimatesServicer(
        parts.store,
        parts.threads.calls,
        parts.threads.long,
        parts.config.catalogue(),
        learns=parts.config.learn,
        profiling=parts.config.profiling(),
    )


def _jobs(parts: ServicerParts) -> JobsServicer:
    store, config, threads = parts.store, parts.config, parts.threads
    output = OutputReader(
        store,
        threads.logs,
        parts.wakeups,
        places=StreamPlaces(LOG_STREAMS, LOG_STREAMS_PER_CLIENT, "streams of output"),
        clock=parts.clock,
        new_id=lambda: uuid.uuid4().hex,
        timing=LogTiming(poll_s=config.poll_s),
    )
    explainer = JobExplainer(store, parts.rounds, parts.policies)
    return JobsServicer(
        store,
        threads.calls,
        parts.wakeups,
        watches=parts.watches,
        output=output,
        curves=CurveReader(store, config.catalogue(), parts.policies),
        estimates=threads.long,
        explanations=ExplanationCalls(explainer, threads.calls, threads.trials, _deadlines(parts)),
        new_id=parts.new_id,
        wall_s=parts.wall_s,
        poll_s=config.poll_s,
        policies=parts.policies,
    )


def _networks(parts: ServicerParts) -> NetworksServicer:
    threads = parts.threads
    return NetworksServicer(
        parts.store, threads.calls, threads.commits, threads.trials, parts.clock, parts.planner
    )


def _scheduler(parts: ServicerParts) -> SchedulerServicer:
    threads, deadlines = parts.threads, _deadlines(parts)
    return SchedulerServicer(
        parts.store,
        parts.rounds,
        calls=threads.calls,
        commits=threads.commits,
        trials=threads.trials,
        deadlines=deadlines,
        policies=parts.policies,
        what_if=WhatIfCalls(
            parts.store,
            make_asker(parts.config, parts.store, parts.clock),
            threads.trials,
            deadlines,
            policies=parts.policies,
            new_id=parts.new_id,
            wall_s=parts.wall_s,
        ),
    )


def _deadlines(parts: ServicerParts) -> CallDeadlines:
    return CallDeadlines(
        clock=parts.clock,
        default_s=parts.config.default_deadline_s,
        longest_s=parts.config.max_deadline_s,
    )


def _tenants(parts: ServicerParts) -> TenantsServicer:
    return TenantsServicer(parts.store, parts.threads.calls, parts.wall_s)


def _webhooks(parts: ServicerParts, webhooks: WebhookParts) -> WebhooksServicer:
    threads = parts.threads
    return WebhooksServicer(parts.store, webhooks, threads.calls, FairCalls(threads.long))
