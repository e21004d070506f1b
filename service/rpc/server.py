"""The gRPC server: all servicers on one port, with health, reflection, limits and a graceful end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from formulation.errors import InvalidInput
from service.config import Config
from service.loop import RoundLoop
from service.ports import Clock, Store
from service.replanning import Replanning
from service.rpc.agents import AgentsServicer
from service.rpc.calls import Calls, Wakeups
from service.rpc.clusters import ClustersServicer
from service.rpc.errors import Guard
from service.rpc.estimates import EstimatesServicer
from service.rpc.health import Health
from service.rpc.jobs import JobsServicer
from service.rpc.networks import NetworksServicer
from service.rpc.scheduler import SchedulerServicer
from service.rpc.tenants import TenantsServicer
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

ESTIMATE_THREADS: Final = 2
"""A caller need not wait for what is estimated by itself; all of it is arithmetic, so more would not help."""

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
    ("grpc.so_reuseport", 0),  # a second server on the port is an error, not a partner
    ("grpc.keepalive_time_ms", 20_000),  # finds agents whose machine is gone
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
)


class Server:
    """Serves every API of Tessera on ``config.listen``. Make, start and stop it on one event loop.

    ``wakeups``, ``replanning`` and the pools of threads (``calls``, ``round_calls``, ``estimate_calls``) are
    for others to share.
    """

    def __init__(
        self, config: Config, store: Store, rounds: RoundLoop, clock: Clock, *,
        new_id: Callable[[], str], wall_s: Callable[[], float],
    ) -> None:  # fmt: skip
        self.wakeups = Wakeups()
        self._config = config
        self.calls = Calls(config.store_threads, "store")
        self.round_calls = Calls(config.round_threads, "round")
        self.estimate_calls = Calls(ESTIMATE_THREADS, "estimate")
        self._health = Health(store, SERVICES, config.health_period_s)
        self._grpc = grpc.aio.server(interceptors=[Guard()], options=_OPTIONS)
        calls, wakeups, timing = self.calls, self.wakeups, config.agent_timing()
        jobs = JobsServicer(
            store, calls, wakeups, new_id=new_id, wall_s=wall_s, poll_s=config.poll_s
        )
        scheduler = SchedulerServicer(
            store, rounds, clock, calls=calls, round_calls=self.round_calls,
            default_deadline_s=config.default_deadline_s, standing=config.round_options(),
        )  # fmt: skip
        agents = AgentsServicer(store, calls, wakeups, clock, timing)
        clusters = ClustersServicer(store, calls, config.lease_s)
        agents_pb2_grpc.add_AgentsServicer_to_server(agents, self._grpc)
        clusters_pb2_grpc.add_ClustersServicer_to_server(clusters, self._grpc)
        estimates_pb2_grpc.add_EstimatesServicer_to_server(
            EstimatesServicer(
                store,
                calls,
                self.estimate_calls,
                config.catalogue(),
                learns=config.learn,
                profiling=config.profiling(),
            ),
            self._grpc,
        )
        jobs_pb2_grpc.add_JobsServicer_to_server(jobs, self._grpc)
        self.replanning = Replanning(store, clock, config.round_options())
        networks = NetworksServicer(store, calls, self.round_calls, clock, self.replanning)
        networks_pb2_grpc.add_NetworksServicer_to_server(networks, self._grpc)
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(scheduler, self._grpc)
        tenants_pb2_grpc.add_TenantsServicer_to_server(TenantsServicer(store, calls), self._grpc)
        health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, self._grpc)
        shown = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(shown, self._grpc)

    async def start(self) -> int:
        """Listen; return the port (of a Unix socket: 1).

        Raises:
            InvalidInput: the address cannot be bound.
        """
        listen = self._config.listen
        try:
            port = self._grpc.add_insecure_port(listen)
        except RuntimeError as error:
            raise InvalidInput("listen", f"cannot bind {listen}: is it in use?") from error
        await self._health.start()
        await self._grpc.start()
        log.info("listening on %s", listen, extra={"action": "listening", "port": port})
        return port

    async def stop(self) -> None:
        """Take no more calls, end streams, let calls finish for the grace period, then cancel them."""
        log.info("stopping", extra={"action": "stopping"})
        await self._health.stop()
        self.wakeups.close()
        await self._grpc.stop(self._config.grace_s)
        pools = (self.calls, self.round_calls, self.estimate_calls, self._health)
        await asyncio.gather(*(pool.close() for pool in pools))
