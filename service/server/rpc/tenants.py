"""tessera.v1.Tenants: the shares and quotas of tenants, and what they have used."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc.aio

from tessera.db.clusters.tenants import delete_tenants, list_tenants, upsert_tenants
from tessera.db.clusters.usage import sum_usage
from tessera.db.store.store import Connection, Store
from tessera.formulation.base.access import IDENTITY
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.records.usage import GROUPS, LABEL, UsageQuery
from tessera.service import fields
from tessera.service.server.convert import names
from tessera.service.server.convert import tenants as convert
from tessera.service.server.convert.usage import of_usage
from tessera.service.server.rpc.paging import page_of
from tessera.service.server.tasks.lanes import SizedCalls
from tessera.v1 import tenants_pb2 as pb
from tessera.v1 import tenants_pb2_grpc

MAX_USAGE_TENANTS: Final = 1000
MAX_TENANT: Final = 200
MAX_GROUPS: Final = 5
MAX_LABEL_KEY: Final = 200
DEFAULT_USAGE_S: Final = 7 * 86_400.0
_Context = grpc.aio.ServicerContext[Any, Any]


class TenantsServicer(tenants_pb2_grpc.TenantsServicer):
    """The servicer of tenants' settings and of what they use, from the store.

    ``wall_s`` returns seconds since 1970.
    """

    def __init__(self, store: Store, calls: SizedCalls, wall_s: Callable[[], float]) -> None:
        self._store, self._calls, self._wall_s = store, calls, wall_s

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

    async def GetUsage(self, request: pb.GetUsageRequest, context: _Context) -> pb.GetUsageResponse:
        """Return what the jobs of tenants have used."""
        return await self._calls.run_heavy(self._get_usage, request)

    def _upsert(self, request: pb.UpsertTenantsRequest) -> pb.UpsertTenantsResponse:
        cluster = names.parse_cluster("parent", request.parent)
        specs = convert.to_tenants(cluster, request.tenants)
        key = fields.request_key(request, request.request_id)

        def work(connection: Connection) -> bytes:
            stored = upsert_tenants(connection, cluster, specs)
            tenants = [convert.of_tenant(cluster, spec) for spec in stored]
            return pb.UpsertTenantsResponse(tenants=tenants).SerializeToString()

        kept = self._store.write(key, work, validate_only=request.validate_only)
        return pb.UpsertTenantsResponse.FromString(kept)

    def _list(self, request: pb.ListTenantsRequest) -> pb.ListTenantsResponse:
        cluster = names.parse_cluster("parent", request.parent)
        page = page_of(request, request.page_size, request.page_token, most=10_000)
        stored = self._store.read(list_tenants, cluster)
        own = [spec for spec in stored if IDENTITY.get().sees_tenant(spec.name)]
        specs = sorted(own, key=lambda spec: spec.name)
        start = bisect_right(specs, page.cursor, key=lambda spec: spec.name)
        shown, more = specs[start : start + page.size], len(specs) > start + page.size
        return pb.ListTenantsResponse(
            tenants=[convert.of_tenant(cluster, spec) for spec in shown],
            next_page_token=page.token(shown[-1].name if more else ""),
        )

    def _get_usage(self, request: pb.GetUsageRequest) -> pb.GetUsageResponse:
        cluster = names.parse_cluster("parent", request.parent)
        query = self._usage_query(request)
        return of_usage(query, self._store.read(sum_usage, cluster, query))

    def _usage_query(self, request: pb.GetUsageRequest) -> UsageQuery:
        """Return the query of a request, for the tenants that its caller sees."""
        if len(request.tenants) > MAX_USAGE_TENANTS:
            raise InvalidInput("tenants", f"must be at most {MAX_USAGE_TENANTS:,}")
        asked = {
            fields.require_text(f"tenants[{i}]", tenant, MAX_TENANT)
            for i, tenant in enumerate(request.tenants)
        }
        own = IDENTITY.get().tenants
        chosen = asked or (None if own is None else set(own))
        to_s = self._wall_s()
        if request.HasField("end_time"):
            to_s = fields.seconds_since_1970("end_time", request.end_time)
        from_s = to_s - DEFAULT_USAGE_S
        if request.HasField("start_time"):
            from_s = fields.seconds_since_1970("start_time", request.start_time)
        if not from_s < to_s:
            raise InvalidInput("start_time", "must be earlier than end_time")
        return UsageQuery(
            from_s=from_s, to_s=to_s, groups=_groups(request.group_by), tenants=chosen
        )

    def _delete(self, request: pb.DeleteTenantsRequest) -> pb.DeleteTenantsResponse:
        cluster = names.parse_cluster("parent", request.parent)
        fields.require_batch_size("names", len(request.names), convert.MAX_TENANTS)
        tenants = [
            convert.to_tenant_id(f"names[{i}]", cluster, name)
            for i, name in enumerate(request.names)
        ]
        fields.require_distinct((f"names[{i}]", tenant) for i, tenant in enumerate(tenants))
        key = fields.request_key(request, request.request_id)

        def work(connection: Connection) -> bytes:
            delete_tenants(connection, cluster, tenants, allow_missing=request.allow_missing)
            return pb.DeleteTenantsResponse().SerializeToString()

        kept = self._store.write(key, work, validate_only=request.validate_only)
        return pb.DeleteTenantsResponse.FromString(kept)


def _groups(group_by: Sequence[str]) -> tuple[str, ...]:
    """Return the ways to group use that a request names."""
    if len(group_by) > MAX_GROUPS:
        raise InvalidInput("group_by", f"must be at most {MAX_GROUPS} ways to group")
    fields.require_distinct((f"group_by[{i}]", group) for i, group in enumerate(group_by))
    for i, group in enumerate(group_by):
        label = group.removeprefix(LABEL) if group.startswith(LABEL) else ""
        if group not in GROUPS and not label:
            raise InvalidInput(
                f"group_by[{i}]",
                f"must be one of {', '.join(GROUPS)} and label:KEY, e.g. label:team",
            )
        fields.require_text(f"group_by[{i}]", label, MAX_LABEL_KEY)
    return tuple(group_by)
