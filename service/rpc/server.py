"""The gRPC server: all servicers on one port, with health, reflection, limits and graceful stop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tessera.formulation.clock import Clock
from tessera.formulation.errors import InvalidInput
from tessera.service.config import (
    ESTIMATE_THREADS,
    HEAVY_THREADS,
    LEASE_THREADS,
    Config,
)
from tessera.service.loop import RoundLoop
from tessera.service.network_planner import NetworkPlanner
from tessera.service.ports import Store
from tessera.service.rpc.agents import AgentCalls, AgentsServicer
from tessera.service.rpc.answers import AnswerRoom, BoundedAnswers, shorten_left_clients
from tessera.service.rpc.calls import Calls, StreamPlaces, Wakeups
from tessera.service.rpc.clusters import ClustersServicer
from tessera.service.rpc.errors import ErrorInterceptor
from tessera.service.rpc.estimates import EstimatesServicer
from tessera.service.rpc.health import HealthChecker
from tessera.service.rpc.heartbeats import HeartbeatRecorder
from tessera.service.rpc.jobs import JobsServicer
from tessera.service.rpc.lanes import FairCalls, Lane, LaneLimits, SizedCalls
from tessera.service.rpc.networks import NetworksServicer
from tessera.service.rpc.scheduler import SchedulerServicer
from tessera.service.rpc.tenants import TenantsServicer
from tessera.v1 import (
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
)

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES: Final = 64 * 2**20

MAX_WAITING_CALLS: Final = 4_000
"""Largest number of calls that wait for threads of one kind. At most half of them are from one
client, and a quarter from one client on one cluster.
"""

AFTER_GRACE_S: Final = 0.3
"""Seconds that calls have to end after they were cancelled, before they are abandoned."""

SERVICES: Final = tuple(
    service.full_name
    for module in (
        agents_pb2,
        clusters_pb2,
        estimates_pb2,
        jobs_pb2,
        networks_pb2,
        scheduler_pb2,
        tenants_pb2,
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

    Create, start and stop it on one event loop. Others may share ``wakeups``, ``watches`` and
    ``replanning``, and the threads that callers do not use. ``lease_calls`` is for leases and short
    reads of the server's own tasks, and ``round_calls`` for periodic rounds. ``network_calls``,
    ``estimate_calls`` and ``cleaning_calls`` are for the work between rounds.
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
    ) -> None:
        self.wakeups = Wakeups()
        self._config = config
        self.lease_calls = Calls(LEASE_THREADS, "lease")
        self.round_calls = Calls(config.round_threads, "periodic round")
        self.network_calls, self.estimate_calls = Calls(1, "network"), Calls(1, "estimate")
        self.cleaning_calls = Calls(1, "cleaning")
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
        self._health = HealthChecker(store, SERVICES, config.health_period_s, config.instance)
        shorten_left_clients()
        # The server, and the servicers that are added to it.
        self._grpc = grpc.aio.server(
            interceptors=[ErrorInterceptor(config.unread_s), BoundedAnswers(AnswerRoom())],
            options=_OPTIONS,
        )
        wakeups, timing = self.wakeups, config.agent_timing()
        self.watches = StreamPlaces(
            config.watches, config.watches_per_client, "streams that watch jobs"
        )
        jobs = JobsServicer(
            store,
            calls,
            wakeups,
            watches=self.watches,
            new_id=new_id,
            wall_s=wall_s,
            poll_s=config.poll_s,
            standing=config.round_options(),
        )
        scheduler = SchedulerServicer(
            store,
            rounds,
            clock,
            calls=calls,
            commits=self._commits,
            trials=self._trials,
            default_deadline_s=config.default_deadline_s,
            max_deadline_s=config.max_deadline_s,
            standing=config.round_options(),
        )
        places = StreamPlaces(
            config.agent_streams, config.agent_streams_per_client, "streams of agents"
        )
        self._agent_calls = _agent_calls(config, store, self._heartbeat_calls)
        agents = AgentsServicer(self._agent_calls, wakeups, clock, timing, places)
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
        self.replanning = NetworkPlanner(store, clock, config.round_options())
        networks = NetworksServicer(
            store, calls, self._commits, self._trials, clock, self.replanning
        )
        networks_pb2_grpc.add_NetworksServicer_to_server(networks, self._grpc)
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(scheduler, self._grpc)
        tenants_pb2_grpc.add_TenantsServicer_to_server(TenantsServicer(store, calls), self._grpc)
        health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, self._grpc)
        shown = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(shown, self._grpc)

    async def start(self) -> int:
        """Listen; return the port, which is 1 for a Unix socket.

        Raises:
            InvalidInput: the address cannot be bound.
        """
        listen = self._config.listen
        try:
            port = self._grpc.add_insecure_port(listen)
        except RuntimeError as error:
            raise InvalidInput(
                "listen",
                f"cannot bind {listen}; another program may use it: stop that one, or listen on"
                " another address",
            ) from error
        await self._health.start()
        await self._grpc.start()
        log.info("listening on %s", listen, extra={"action": "listening", "port": port})
        return port

    async def stop(self) -> list[str]:
        """Refuse new calls, end streams, let calls finish for the grace period, then cancel them.

        Return the names of the calls that did not end. Their threads are still running.
        """
        log.info("stopping", extra={"action": "stopping"})
        end_s = time.monotonic() + self._config.grace_s + AFTER_GRACE_S
        await self._health.stop()
        self.wakeups.close()
        await self._grpc.stop(self._config.grace_s)
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
            self._agent_calls.turns,
            self._agent_calls.reads,
            self.lease_calls,
            self.round_calls,
            self.network_calls,
            self.estimate_calls,
            self.cleaning_calls,
            self._commits,
            self._trials,
            self._estimates,
            self._health,
        )


def _fair_calls(threads: int, name: str) -> FairCalls:
    """Return threads of which one client holds all but one at most, and one cluster's callers half.

    A write waits for its cluster's row. With these limits, callers that crowd one cluster leave
    threads to the others.
    """
    half = max(1, threads // 2)
    limits = LaneLimits(client=max(1, threads - 1), cluster=half, share=half)
    return FairCalls(Lane(threads, name, limits, most_waiting=MAX_WAITING_CALLS))


def _agent_calls(config: Config, store: Store, heartbeats: Calls) -> AgentCalls:
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
    )
