"""tessera.v1.Networks: the networks of clusters, and the decisions about them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import grpc.aio
from google.protobuf.empty_pb2 import Empty

from tessera.db.clusters import network
from tessera.db.store.reads import list_nodes
from tessera.db.store.store import Connection, Store
from tessera.formulation.answer.network.running import running_now
from tessera.formulation.base.access import IDENTITY
from tessera.formulation.base.clock import Clock
from tessera.formulation.base.errors import NotFound
from tessera.formulation.records.clusters import TopologyRecord
from tessera.formulation.state.topologies.described import decode_topology
from tessera.service import fields
from tessera.service.server.convert import names
from tessera.service.server.convert import networks as convert
from tessera.service.server.rounds.network_planner import NetworkPlanner
from tessera.service.server.rpc.paging import page_of
from tessera.service.server.rpc.visibility import find_tenants, hide_in_plan
from tessera.service.server.tasks.lanes import CALLER, Lane, SizedCalls
from tessera.v1 import networks_pb2 as pb
from tessera.v1 import networks_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]
_PAGE: Final = 10_000


class NetworksServicer(networks_pb2_grpc.NetworksServicer):
    """The servicer of topologies and network plans. It also makes plans on request."""

    def __init__(
        self,
        store: Store,
        calls: SizedCalls,
        commits: Lane,
        trials: Lane,
        clock: Clock,
        replanning: NetworkPlanner,
    ) -> None:
        """Remember the parts.

        ``commits`` is the lane of plans that are put in force, ``trials`` that of previews.
        """
        self._store, self._calls, self._commits, self._trials = store, calls, commits, trials
        self._clock, self._replanning = clock, replanning

    async def GetTopology(self, request: pb.GetTopologyRequest, context: _Context) -> pb.Topology:
        """Return the cluster's network."""
        return await self._calls.run_cancellable(self._get, request)

    async def UpdateTopology(
        self, request: pb.UpdateTopologyRequest, context: _Context
    ) -> pb.Topology:
        """Describe the cluster's network, or replace its description."""
        return await self._calls.run_cancellable(self._update, request)

    async def DeleteTopology(self, request: pb.DeleteTopologyRequest, context: _Context) -> Empty:
        """Delete the network and its plans."""
        return await self._calls.run(self._delete, request)

    async def GetNetworkPlan(
        self, request: pb.GetNetworkPlanRequest, context: _Context
    ) -> pb.NetworkPlan:
        """Return the plan in force."""
        return await self._calls.run(self._get_plan, request)

    async def ListNetworkPlans(
        self, request: pb.ListNetworkPlansRequest, context: _Context
    ) -> pb.ListNetworkPlansResponse:
        """Return a page of plans, newest first, without decisions."""
        return await self._calls.run(self._list, request)

    async def PlanNetwork(
        self, request: pb.PlanNetworkRequest, context: _Context
    ) -> pb.NetworkPlan:
        """Plan the network for the jobs that run now."""
        cluster = names.parse_cluster("parent", request.parent)
        lane = self._trials if request.dry_run else self._commits
        return await lane.run(
            CALLER.get(),
            f"PlanNetwork of {cluster}",
            lambda turn: self._plan(request, turn.is_over),
        )

    def _get(self, request: pb.GetTopologyRequest, cancelled: Callable[[], bool]) -> pb.Topology:
        cluster = names.parse_topology("name", request.name)
        document, version = self._store.read(network.load_topology, cluster)
        record = TopologyRecord(described=decode_topology(document, cancelled), version=version)
        return convert.of_topology(cluster, record, self._nodes(cluster))

    def _nodes(self, cluster: str) -> set[str]:
        node_names, after = set[str](), ""
        while page := self._store.read(list_nodes, cluster, after, _PAGE):
            node_names |= {node.spec.name for node in page}
            after = page[-1].spec.name
        return node_names

    def _update(
        self, request: pb.UpdateTopologyRequest, cancelled: Callable[[], bool]
    ) -> pb.Topology:
        cluster = names.parse_topology("topology.name", request.topology.name)
        described = convert.to_topology("topology.document", request.topology.document, cancelled)
        version, key = (
            fields.version_of(request.topology.etag),
            fields.request_key(request, request.request_id),
        )
        nodes = self._nodes(cluster)

        def work(connection: Connection) -> bytes:
            record = network.set_topology(connection, cluster, described, version)
            return convert.of_topology(cluster, record, nodes).SerializeToString()

        kept = self._store.write(key, work, validate_only=request.validate_only)
        return pb.Topology.FromString(kept)

    def _delete(self, request: pb.DeleteTopologyRequest) -> Empty:
        cluster = names.parse_topology("name", request.name)

        version = fields.version_of(request.etag)
        key = fields.request_key(request, request.request_id)

        def work(connection: Connection) -> bytes:
            network.drop_topology(connection, cluster, version, allow_missing=request.allow_missing)
            return b""

        self._store.write(key, work, validate_only=request.validate_only)
        return Empty()

    def _get_plan(self, request: pb.GetNetworkPlanRequest) -> pb.NetworkPlan:
        cluster = names.parse_network_plan("name", request.name)
        job = ""
        if request.job:
            parent, job = names.parse_job("job", request.job)
            names.require_parent("job", parent, cluster)
        message = convert.of_plan(cluster, self._store.read(network.plan_in_force, cluster, job))
        hide_in_plan(IDENTITY.get(), cluster, message, find_tenants(self._store))
        return message

    def _list(self, request: pb.ListNetworkPlansRequest) -> pb.ListNetworkPlansResponse:
        cluster = names.parse_cluster("parent", request.parent)
        page = page_of(request, request.page_size, request.page_token, most=1000, counts=True)
        plans = self._store.read(network.list_plans, cluster, page.number, page.size + 1)
        last = plans[page.size - 1].number if len(plans) > page.size else 0
        messages = [convert.of_plan(cluster, plan) for plan in plans[: page.size]]
        for message in messages:
            hide_in_plan(IDENTITY.get(), cluster, message, find_tenants(self._store))
        return pb.ListNetworkPlansResponse(plans=messages, next_page_token=page.token(last))

    def _plan(
        self, request: pb.PlanNetworkRequest, cancelled: Callable[[], bool]
    ) -> pb.NetworkPlan:
        cluster = names.parse_cluster("parent", request.parent)
        if not self._store.read(network.has_topology, cluster):
            raise NotFound(names.topology_name(cluster))
        snapshot = self._store.snapshot(cluster)
        if snapshot.topology is None:  # it was deleted since
            raise NotFound(names.topology_name(cluster))
        if request.dry_run:
            began_s = self._clock.monotonic_s()
            outcome = self._replanning.preview(snapshot, cancelled)
            return convert.of_outcome(cluster, outcome, self._clock.monotonic_s() - began_s)
        self._replanning.plan(snapshot, running_now(snapshot), "call", cancelled)
        try:
            return convert.of_plan(cluster, self._store.read(network.plan_in_force, cluster))
        except NotFound:  # no job runs, and none has run since the network was described
            return pb.NetworkPlan(name=names.network_plan_name(cluster, "-"), cause="call")
