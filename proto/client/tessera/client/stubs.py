"""The generated stubs of all services that users call."""

from __future__ import annotations

import grpc
import grpc.aio

from tessera.v1 import (
    access_pb2_grpc,
    clusters_pb2_grpc,
    estimates_pb2_grpc,
    jobs_pb2_grpc,
    networks_pb2_grpc,
    scheduler_pb2_grpc,
    tenants_pb2_grpc,
    webhooks_pb2_grpc,
)


class Stubs:
    """The services of a server, over one channel."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.access = access_pb2_grpc.AccessStub(channel)
        self.clusters = clusters_pb2_grpc.ClustersStub(channel)
        self.estimates = estimates_pb2_grpc.EstimatesStub(channel)
        self.jobs = jobs_pb2_grpc.JobsStub(channel)
        self.networks = networks_pb2_grpc.NetworksStub(channel)
        self.scheduler = scheduler_pb2_grpc.SchedulerStub(channel)
        self.tenants = tenants_pb2_grpc.TenantsStub(channel)
        self.webhooks = webhooks_pb2_grpc.WebhooksStub(channel)


class AsyncStubs:
    """The services of a server, over one channel of grpc.aio."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.access = access_pb2_grpc.AccessStub(channel)
        self.clusters = clusters_pb2_grpc.ClustersStub(channel)
        self.estimates = estimates_pb2_grpc.EstimatesStub(channel)
        self.jobs = jobs_pb2_grpc.JobsStub(channel)
        self.networks = networks_pb2_grpc.NetworksStub(channel)
        self.scheduler = scheduler_pb2_grpc.SchedulerStub(channel)
        self.tenants = tenants_pb2_grpc.TenantsStub(channel)
        self.webhooks = webhooks_pb2_grpc.WebhooksStub(channel)
