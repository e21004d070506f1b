"""tessera.v1.Clusters: clusters, their GPU types, their nodes and reservations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc.aio
from google.protobuf.empty_pb2 import Empty

from tessera.db.clusters.deletion import delete_cluster, delete_nodes
from tessera.db.clusters.drains import drain_nodes
from tessera.db.store.cluster_changes import delete_gpu_types, upsert_cluster, upsert_nodes
from tessera.db.store.reads import get_cluster, get_node, list_clusters, list_nodes
from tessera.db.store.store import Connection, Store
from tessera.formulation.base import limits
from tessera.formulation.base.access import IDENTITY
from tessera.formulation.base.errors import NotFound
from tessera.formulation.records.clusters import ClusterRecord, NodeRecord, NodeSpec
from tessera.formulation.records.store import Request
from tessera.service import fields
from tessera.service.server.convert import clusters as convert
from tessera.service.server.convert import names
from tessera.service.server.convert.tenants import to_tenants
from tessera.service.server.rpc.paging import page_of
from tessera.service.server.rpc.reservations import ReservationCalls
from tessera.service.server.rpc.visibility import find_tenants, hide_in_nodes
from tessera.service.server.tasks.lanes import SizedCalls
from tessera.v1 import clusters_pb2 as pb
from tessera.v1 import clusters_pb2_grpc, reservations_pb2

MAX_REASON: Final = 300
MAX_DRAINED_BY: Final = 100
"""Largest numbers of characters in the reason for a drain and in the name of its author."""
_Context = grpc.aio.ServicerContext[Any, Any]
_Deletion = pb.DeleteClusterRequest | pb.DeleteNodeRequest | pb.DeleteNodesRequest


def next_round_s(record: ClusterRecord, period_s: float, now_s: float) -> float:
    """Return the latest time at which the cluster's next round begins, in seconds since 1970.

    It is the same on every replica: one period after the last round, or now if that time has
    passed.
    """
    if record.last_round_s is None:
        return now_s
    return max(now_s, record.last_round_s + period_s)


class ClustersServicer(clusters_pb2_grpc.ClustersServicer):
    """The servicer of clusters and nodes, from the store."""

    def __init__(
        self,
        store: Store,
        calls: SizedCalls,
        lease_s: float,
        *,
        period_s: float,
        wall_s: Callable[[], float],
    ) -> None:
        """Remember the parts.

        Rounds begin every ``period_s`` seconds, or only on request if it is 0.
        """
        self._store, self._calls, self._lease_s = store, calls, lease_s
        self._period_s, self._wall_s = period_s, wall_s
        self._reservations = ReservationCalls(store, wall_s)

    async def UpsertCluster(
        self, request: pb.UpsertClusterRequest, context: _Context
    ) -> pb.Cluster:
        """Create a cluster, or replace its GPU types, with nodes and tenants, all or none."""
        return await self._calls.run_by_size(self._upsert_cluster, request)

    async def GetCluster(self, request: pb.GetClusterRequest, context: _Context) -> pb.Cluster:
        """Return a cluster."""
        return await self._calls.run(self._get_cluster, request)

    async def ListClusters(
        self, request: pb.ListClustersRequest, context: _Context
    ) -> pb.ListClustersResponse:
        """Return a page of clusters, by name."""
        return await self._calls.run_by_size(self._list_clusters, request)

    async def UpsertNodes(
        self, request: pb.UpsertNodesRequest, context: _Context
    ) -> pb.UpsertNodesResponse:
        """Create or change nodes, all or none."""
        return await self._calls.run_by_size(self._upsert_nodes, request)

    async def GetNode(self, request: pb.GetNodeRequest, context: _Context) -> pb.Node:
        """Return a node."""
        return await self._calls.run(self._get_node, request)

    async def ListNodes(
        self, request: pb.ListNodesRequest, context: _Context
    ) -> pb.ListNodesResponse:
        """Return a page of nodes, by name."""
        return await self._calls.run_by_size(self._list_nodes, request)

    async def DrainNodes(
        self, request: pb.DrainNodesRequest, context: _Context
    ) -> pb.DrainNodesResponse:
        """Drain nodes, so that the next round moves their jobs away."""
        key = fields.request_key(request, request.request_id)
        kept = await self._calls.run(self._drain, request, key, draining=True)
        return pb.DrainNodesResponse.FromString(kept)

    async def UndrainNodes(
        self, request: pb.UndrainNodesRequest, context: _Context
    ) -> pb.UndrainNodesResponse:
        """Let rounds use nodes again."""
        key = fields.request_key(request, request.request_id)
        kept = await self._calls.run(self._drain, request, key, draining=False)
        return pb.UndrainNodesResponse.FromString(kept)

    async def DeleteCluster(self, request: pb.DeleteClusterRequest, context: _Context) -> Empty:
        """Delete a cluster and everything in it."""
        return await self._calls.run(self._delete_cluster, request)

    async def DeleteGpuTypes(
        self, request: pb.DeleteGpuTypesRequest, context: _Context
    ) -> pb.Cluster:
        """Delete GPU types that nothing uses, all or none."""
        return await self._calls.run(self._delete_gpu_types, request)

    async def DeleteNode(self, request: pb.DeleteNodeRequest, context: _Context) -> Empty:
        """Delete a node that no job uses."""
        return await self._calls.run(self._delete_node, request)

    async def DeleteNodes(self, request: pb.DeleteNodesRequest, context: _Context) -> Empty:
        """Delete nodes that no job uses, all or none."""
        return await self._calls.run_by_size(self._delete_nodes, request)

    async def CreateReservation(
        self, request: reservations_pb2.CreateReservationRequest, context: _Context
    ) -> reservations_pb2.Reservation:
        """Reserve GPUs or nodes for a time."""
        return await self._calls.run(self._reservations.create, request)

    async def GetReservation(
        self, request: reservations_pb2.GetReservationRequest, context: _Context
    ) -> reservations_pb2.Reservation:
        """Return a reservation."""
        return await self._calls.run(self._reservations.get, request)

    async def ListReservations(
        self, request: reservations_pb2.ListReservationsRequest, context: _Context
    ) -> reservations_pb2.ListReservationsResponse:
        """Return a page of reservations, by id."""
        return await self._calls.run_by_size(self._reservations.list, request)

    async def UpdateReservation(
        self, request: reservations_pb2.UpdateReservationRequest, context: _Context
    ) -> reservations_pb2.Reservation:
        """Change the times of a reservation."""
        return await self._calls.run(self._reservations.update, request)

    async def DeleteReservations(
        self, request: reservations_pb2.DeleteReservationsRequest, context: _Context
    ) -> Empty:
        """Delete reservations, all or none."""
        return await self._calls.run(self._reservations.delete, request)

    def _upsert_cluster(self, request: pb.UpsertClusterRequest) -> pb.Cluster:
        cluster = names.parse_cluster("cluster.name", request.cluster.name)
        fields.mask_paths("update_mask", request.update_mask, ["gpu_types"])
        gpu_types = convert.to_gpu_types("cluster.gpu_types", request.cluster.gpu_types)
        version = fields.version_of(request.cluster.etag)
        nodes = _node_specs(cluster, request.nodes) if request.nodes else []
        tenants = to_tenants(cluster, request.tenants) if request.tenants else []
        key = fields.request_key(request, request.request_id)

        def work(connection: Connection) -> bytes:
            record = upsert_cluster(connection, cluster, gpu_types, version, nodes, tenants)
            return convert.of_cluster(record).SerializeToString()

        kept = self._store.write(key, work, validate_only=request.validate_only)
        return pb.Cluster.FromString(kept)

    def _get_cluster(self, request: pb.GetClusterRequest) -> pb.Cluster:
        cluster = names.parse_cluster("name", request.name)
        record = self._store.read(get_cluster, cluster)
        found = convert.of_cluster(record)
        found.round_period.CopyFrom(fields.duration_of(self._period_s))
        if self._period_s:
            time_s = next_round_s(record, self._period_s, self._wall_s())
            found.next_round_time.CopyFrom(fields.timestamp_of(time_s))
        return found

    def _list_clusters(self, request: pb.ListClustersRequest) -> pb.ListClustersResponse:
        page = page_of(request, request.page_size, request.page_token, most=1000)
        seen, found, after = IDENTITY.get().sees_cluster, list[ClusterRecord](), page.cursor
        # A page is full, and its token names a cluster that the caller sees.
        while len(found) <= page.size:
            batch = self._store.read(list_clusters, after, page.size + 1)
            found += [cluster for cluster in batch if seen(cluster.name)]
            if len(batch) <= page.size:
                break
            after = batch[-1].name
        last = found[page.size - 1].name if len(found) > page.size else ""
        return pb.ListClustersResponse(
            clusters=map(convert.of_cluster, found[: page.size]), next_page_token=page.token(last)
        )

    def _upsert_nodes(self, request: pb.UpsertNodesRequest) -> pb.UpsertNodesResponse:
        cluster = names.parse_cluster("parent", request.parent)
        specs = _node_specs(cluster, request.nodes)
        key = fields.request_key(request, request.request_id)

        def work(connection: Connection) -> bytes:
            nodes = self._messages(cluster, upsert_nodes(connection, cluster, specs))
            return pb.UpsertNodesResponse(nodes=nodes).SerializeToString()

        kept = self._store.write(key, work, validate_only=request.validate_only)
        return pb.UpsertNodesResponse.FromString(kept)

    def _get_node(self, request: pb.GetNodeRequest) -> pb.Node:
        cluster, node = names.parse_node("name", request.name)
        message = convert.of_node(cluster, self._store.read(get_node, cluster, node), self._lease_s)
        hide_in_nodes(IDENTITY.get(), cluster, [message], find_tenants(self._store))
        return message

    def _list_nodes(self, request: pb.ListNodesRequest) -> pb.ListNodesResponse:
        cluster = names.parse_cluster("parent", request.parent)
        page = page_of(request, request.page_size, request.page_token, most=10_000)
        records = self._store.read(list_nodes, cluster, page.cursor, page.size + 1)
        last = records[page.size - 1].spec.name if len(records) > page.size else ""
        messages = list(self._messages(cluster, records[: page.size]))
        hide_in_nodes(IDENTITY.get(), cluster, messages, find_tenants(self._store))
        return pb.ListNodesResponse(nodes=messages, next_page_token=page.token(last))

    def _drain(
        self,
        request: pb.DrainNodesRequest | pb.UndrainNodesRequest,
        key: Request | None,
        *,
        draining: bool,
    ) -> bytes:
        cluster = names.parse_cluster("parent", request.parent)
        fields.require_batch_size("names", len(request.names), limits.MAX_NODES)
        nodes = [
            convert.to_node_id(f"names[{i}]", cluster, name) for i, name in enumerate(request.names)
        ]
        fields.require_distinct((f"names[{i}]", node) for i, node in enumerate(nodes))
        facts: dict[str, str] = {}
        if isinstance(request, pb.DrainNodesRequest):
            facts = {
                "reason": fields.require_text("reason", request.reason, MAX_REASON),
                "drained_by": fields.require_text(
                    "drained_by",
                    request.drained_by or IDENTITY.get().known_subject(MAX_DRAINED_BY),
                    MAX_DRAINED_BY,
                ),
            }

        def work(connection: Connection) -> bytes:
            records = drain_nodes(connection, cluster, nodes, draining=draining, **facts)
            messages = self._messages(cluster, records)
            if draining:
                return pb.DrainNodesResponse(nodes=messages).SerializeToString()
            return pb.UndrainNodesResponse(nodes=messages).SerializeToString()

        return self._store.write(key, work, validate_only=request.validate_only)

    def _delete_cluster(self, request: pb.DeleteClusterRequest) -> Empty:
        cluster = names.parse_cluster("name", request.name)
        version = fields.version_of(request.etag)

        def work(connection: Connection) -> bytes:
            try:
                delete_cluster(
                    connection, cluster, version, self._store.silence_s, force=request.force
                )
            except NotFound:
                if not request.allow_missing:
                    raise
            return b""

        return self._write_empty(request, work)

    def _delete_gpu_types(self, request: pb.DeleteGpuTypesRequest) -> pb.Cluster:
        cluster = names.parse_cluster("parent", request.parent)
        fields.require_batch_size("gpu_types", len(request.gpu_types), convert.MAX_GPU_TYPES)
        types = [
            names.require_gpu_type(f"gpu_types[{i}]", name)
            for i, name in enumerate(request.gpu_types)
        ]
        fields.require_distinct((f"gpu_types[{i}]", name) for i, name in enumerate(types))
        version = fields.version_of(request.etag)
        key = fields.request_key(request, request.request_id)

        def work(connection: Connection) -> bytes:
            record = delete_gpu_types(
                connection, cluster, types, version, allow_missing=request.allow_missing
            )
            return convert.of_cluster(record).SerializeToString()

        kept = self._store.write(key, work, validate_only=request.validate_only)
        return pb.Cluster.FromString(kept)

    def _delete_node(self, request: pb.DeleteNodeRequest) -> Empty:
        cluster, node = names.parse_node("name", request.name)
        version = fields.version_of(request.etag)
        versions = {} if version is None else {node: version}

        def work(connection: Connection) -> bytes:
            delete_nodes(connection, cluster, [node], versions, allow_missing=request.allow_missing)
            return b""

        return self._write_empty(request, work)

    def _delete_nodes(self, request: pb.DeleteNodesRequest) -> Empty:
        cluster = names.parse_cluster("parent", request.parent)
        fields.require_batch_size("names", len(request.names), limits.MAX_NODES)
        nodes = [
            convert.to_node_id(f"names[{i}]", cluster, name) for i, name in enumerate(request.names)
        ]
        fields.require_distinct((f"names[{i}]", node) for i, node in enumerate(nodes))

        def work(connection: Connection) -> bytes:
            delete_nodes(connection, cluster, nodes, {}, allow_missing=request.allow_missing)
            return b""

        return self._write_empty(request, work)

    def _write_empty(self, request: _Deletion, work: Callable[[Connection], bytes]) -> Empty:
        key = fields.request_key(request, request.request_id)
        self._store.write(key, work, validate_only=request.validate_only)
        return Empty()

    def _messages(self, cluster: str, records: Sequence[NodeRecord]) -> list[pb.Node]:
        return [convert.of_node(cluster, record, self._lease_s) for record in records]


def _node_specs(cluster: str, nodes: Sequence[pb.Node]) -> list[NodeSpec]:
    """Return the nodes of a request, each name once."""
    fields.require_batch_size("nodes", len(nodes), limits.MAX_NODES)
    specs = [convert.to_node_spec(f"nodes[{i}]", cluster, node) for i, node in enumerate(nodes)]
    fields.require_distinct((f"nodes[{i}].name", spec.name) for i, spec in enumerate(specs))
    return specs
