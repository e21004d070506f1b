"""The use of a cluster by its tenants."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from tessera.formulation.records.usage import ClusterUsage, UsageQuery, UsageRecord
from tessera.service import fields
from tessera.v1 import tenants_pb2 as pb

HOUR_S: Final = 3600.0
DAY_S: Final = 86_400.0


def of_usage(query: UsageQuery, found: ClusterUsage) -> pb.GetUsageResponse:
    """Return the message of the answer to ``query``."""
    return pb.GetUsageResponse(
        start_time=fields.timestamp_of(query.from_s),
        end_time=fields.timestamp_of(found.to_s),
        rows=[_of_row(query, found, row) for row in found.rows],
        capacity_gpus=found.capacity,
    )


def _of_row(query: UsageQuery, found: ClusterUsage, row: UsageRecord) -> pb.UsageRow:
    kind, tenant = row.group.get("type"), row.group.get("tenant")
    hours = _hours(query, found, row.group.get("day"))
    capacity = sum(found.capacity.values()) if kind is None else found.capacity.get(kind, 0)
    quotas = found.quotas.get(tenant, {}) if tenant is not None else {}
    quota = _quota_of(quotas, kind)
    return pb.UsageRow(
        group=row.group,
        gpu_hours=row.gpu_s / HOUR_S,
        effective_gpu_hours=row.effective_gpu_s / HOUR_S,
        cpu_hours=row.cpu_s / HOUR_S,
        lost_gpu_hours=row.lost_gpu_s / HOUR_S,
        preemptions=row.preemptions,
        jobs_ended=row.jobs_ended,
        jobs_finished=row.jobs_finished,
        mean_waiting_seconds=row.waited_s / row.jobs_ended if row.jobs_ended else None,
        capacity_share=row.gpu_s / HOUR_S / (capacity * hours) if capacity * hours > 0 else None,
        quota_gpu_hours=None if quota is None else quota * hours,
    )


def _hours(query: UsageQuery, found: ClusterUsage, day: str | None) -> float:
    """Return the hours that a row is about: those of the query, on its day if it has one."""
    low_s, high_s = query.from_s, found.to_s
    if day is not None:
        night_s = datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp()
        low_s, high_s = max(low_s, night_s), min(high_s, night_s + DAY_S)
    return max(high_s - low_s, 0.0) / HOUR_S


def _quota_of(quotas: Mapping[str, int], kind: str | None) -> int | None:
    """Return the GPUs of a tenant's quota, of one type or in all, or None if it has none."""
    if kind is not None:
        return quotas.get(kind)
    if not quotas:
        return None
    return max(quotas.get("", 0), sum(gpus for name, gpus in quotas.items() if name))
