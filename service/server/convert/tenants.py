"""Tenants: weights, quotas, borrowing and lending."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from tessera.formulation.base import limits
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.records.clusters import TenantSpec
from tessera.service import fields
from tessera.service.server.convert import names
from tessera.service.server.convert.clusters import ANY_TYPE
from tessera.v1 import tenants_pb2 as pb

MAX_TENANTS: Final = 10_000
"""Largest number of tenants in one call."""
MAX_QUOTAS: Final = 257  # one for each possible GPU type, and one for any type


def to_tenants(cluster: str, messages: Sequence[pb.Tenant]) -> list[TenantSpec]:
    """Return the tenants of a request, each name once."""
    fields.require_batch_size("tenants", len(messages), MAX_TENANTS)
    specs = [to_tenant(f"tenants[{i}]", cluster, m) for i, m in enumerate(messages)]
    fields.require_distinct((f"tenants[{i}].name", spec.name) for i, spec in enumerate(specs))
    return specs


def to_tenant(field: str, cluster: str, message: pb.Tenant) -> TenantSpec:
    """Return the settings of a tenant, which must belong to ``cluster``."""
    m = message
    weight, borrow_gpus = 1.0, -1
    if m.HasField("weight"):
        weight = fields.require_real(f"{field}.weight", m.weight, 0.0, limits.MAX_TENANT_WEIGHT)
    if m.HasField("borrow_gpus"):
        borrow_gpus = fields.require_whole(
            f"{field}.borrow_gpus", m.borrow_gpus, 0, limits.MAX_QUOTA
        )
    if m.quotas:
        fields.require_batch_size(f"{field}.quotas", len(m.quotas), MAX_QUOTAS)
    return TenantSpec(
        name=to_tenant_id(f"{field}.name", cluster, m.name),
        weight=weight,
        borrow_gpus=borrow_gpus,
        keeps_idle_quota=m.keeps_idle_quota,
        quotas=to_quotas(f"{field}.quotas", m.quotas),
        parent=names.require_identifier(f"{field}.parent", m.parent) if m.parent else "",
    )


def to_quotas(field: str, quotas: Mapping[str, int]) -> dict[str, int]:
    """Return quotas by GPU type, with "" for any type. In messages ``ANY_TYPE`` means the same."""
    if ANY_TYPE in quotas and "" in quotas:
        raise InvalidInput(field, f'has both "" and {ANY_TYPE!r}, which mean any type; give one')
    return {
        "" if kind in ("", ANY_TYPE) else names.require_gpu_type(field, kind): fields.require_whole(
            f"{field}[{kind}]", gpus, 0, limits.MAX_QUOTA
        )
        for kind, gpus in sorted(quotas.items())
    }


def to_tenant_id(field: str, cluster: str, name: str) -> str:
    """Return the id of a tenant, which must belong to ``cluster``."""
    parent, tenant = names.parse_tenant(field, name)
    names.require_parent(field, parent, cluster)
    return tenant


def of_tenant(cluster: str, spec: TenantSpec) -> pb.Tenant:
    """Return the message of a tenant's settings."""
    return pb.Tenant(
        name=names.tenant_name(cluster, spec.name),
        weight=spec.weight,
        borrow_gpus=spec.borrow_gpus if spec.borrow_gpus >= 0 else None,
        keeps_idle_quota=spec.keeps_idle_quota,
        quotas=spec.quotas,
        parent=spec.parent,
    )
