"""tessera.v1.Tenants: the shares and quotas of tenants."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, Final

import grpc.aio

from tessera.formulation.access import IDENTITY
from tessera.service.ports import Store, Writer
from tessera.service.rpc import fields, names
from tessera.service.rpc.convert import tenants as convert
from tessera.service.rpc.lanes import SizedCalls
from tessera.service.rpc.paging import page_of
from tessera.v1 import tenants_pb2 as pb
from tessera.v1 import tenants_pb2_grpc

MAX_TENANTS: Final = 10_000
"""Largest number of tenants in one call."""
_Context = grpc.aio.ServicerContext[Any, Any]


class TenantsServicer(tenants_pb2_grpc.TenantsServicer):
    """The servicer of tenants' settings, from the store."""

    def __init__(self, store: Store, calls: SizedCalls) -> None:
        self._store, self._calls = store, calls

    async def UpsertTenants(
        self, request: pb.UpsertTenantsRequest, context: _Context
    ) -> pb.UpsertTenantsResponse:
        """Create tenants or replace their settings, all or none."""
        return await self._calls.run_by_size(self._upsert, request)

    async def ListTenants(
        self, request: pb.ListTenantsRequest, context: _Context
    ) -> pb.ListTenantsResponse:
        """Return a page of the tenants that have settings, by name."""
        return await self._calls.run_by_size(self._list, request)

    async def DeleteTenants(
        self, request: pb.DeleteTenantsRequest, context: _Context
    ) -> pb.DeleteTenantsResponse:
        """Delete the settings of tenants."""
        return await self._calls.run_by_size(self._delete, request)

    def _upsert(self, request: pb.UpsertTenantsRequest) -> pb.UpsertTenantsResponse:
        cluster = names.parse_cluster("parent", request.parent)
        fields.require_batch_size("tenants", len(request.tenants), MAX_TENANTS)
        specs = [
            convert.to_tenant(f"tenants[{i}]", cluster, tenant)
            for i, tenant in enumerate(request.tenants)
        ]
        fields.require_distinct((f"tenants[{i}].name", spec.name) for i, spec in enumerate(specs))
        key = fields.request_key(request, request.request_id)

        def work(writer: Writer) -> bytes:
            stored = writer.upsert_tenants(cluster, specs)
            tenants = [convert.of_tenant(cluster, spec) for spec in stored]
            return pb.UpsertTenantsResponse(tenants=tenants).SerializeToString()

        kept = self._store.write(key, work, validate_only=request.validate_only)
        return pb.UpsertTenantsResponse.FromString(kept)

    def _list(self, request: pb.ListTenantsRequest) -> pb.ListTenantsResponse:
        cluster = names.parse_cluster("parent", request.parent)
        page = page_of(request, request.page_size, request.page_token, most=10_000)
        stored = self._store.list_tenants(cluster)
        own = [spec for spec in stored if IDENTITY.get().sees_tenant(spec.name)]
        specs = sorted(own, key=lambda spec: spec.name)
        start = bisect_right(specs, page.cursor, key=lambda spec: spec.name)
        shown, more = specs[start : start + page.size], len(specs) > start + page.size
        return pb.ListTenantsResponse(
            tenants=[convert.of_tenant(cluster, spec) for spec in shown],
            next_page_token=page.token(shown[-1].name if more else ""),
        )

    def _delete(self, request: pb.DeleteTenantsRequest) -> pb.DeleteTenantsResponse:
        cluster = names.parse_cluster("parent", request.parent)
        fields.require_batch_size("names", len(request.names), MAX_TENANTS)
        tenants = [
            convert.to_tenant_id(f"names[{i}]", cluster, name)
            for i, name in enumerate(request.names)
        ]
        fields.require_distinct((f"names[{i}]", tenant) for i, tenant in enumerate(tenants))
        key = fields.request_key(request, request.request_id)

        def work(writer: Writer) -> bytes:
            writer.delete_tenants(cluster, tenants, allow_missing=request.allow_missing)
            return pb.DeleteTenantsResponse().SerializeToString()

        kept = self._store.write(key, work, validate_only=request.validate_only)
        return pb.DeleteTenantsResponse.FromString(kept)
