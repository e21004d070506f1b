"""Profiling tasks, and layers measured on one device, whose rows are never changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa

from tessera.db.base.documents import dump_json
from tessera.db.base.rows import SERVICE_GPU_S, enter_cluster
from tessera.db.estimates.workloads import ensure_workloads, require_types
from tessera.db.schema.tables import LIVE
from tessera.formulation.base.values import PROFILING, RUN_LABEL, Workload
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.records.estimates import (
    HostProfile,
    HostRates,
    ProfileGap,
    ProfileRow,
    ProfilingJob,
)

_ADD = sa.text("""
INSERT INTO profiles (workload_id, gpu_type_id, task, source, kind, layers, samples, tp, dtype, forward_s,
    backward_s, method, repeats, device_s, device, versions, date)
SELECT r.* FROM json_to_recordset(CAST(:rows AS json)) AS r(
    workload_id bigint, gpu_type_id bigint, task text, source text, kind text, layers bigint,
    samples float8, tp bigint, dtype text, forward_s float8, backward_s float8, method text,
    repeats bigint, device_s float8, device text, versions jsonb, date text)
ON CONFLICT ON CONSTRAINT uq_profiles_layer DO NOTHING
""")

_PROFILES = sa.text(f"""
SELECT w.model, w.params, w.global_batch, t.name AS gpu_type, p.task, p.source, p.kind, p.layers, p.samples,
    p.tp, p.dtype, p.forward_s, p.backward_s, p.method, p.repeats, p.device_s, p.device, p.versions, p.date
FROM profiles p JOIN workloads w ON w.id = p.workload_id JOIN gpu_types t ON t.id = p.gpu_type_id
WHERE w.cluster_id = :cluster
    AND EXISTS (SELECT FROM workloads o JOIN jobs j ON j.workload_id = o.id
        WHERE o.cluster_id = w.cluster_id AND o.model = w.model AND o.params = w.params AND j.{LIVE})
ORDER BY p.id
""")  # noqa: S608 - a constant of tessera.db.schema.tables

_PUT_GAP = sa.text("""
INSERT INTO profile_gaps (workload_id, gpu_type_id, task, source, left_out, reason)
VALUES (:workload, :gpu_type, :task, :source, CAST(:left_out AS jsonb), :reason)
ON CONFLICT ON CONSTRAINT uq_profile_gaps_task DO UPDATE SET
    left_out = excluded.left_out, reason = excluded.reason, added_at = now()
""")

_DROP_GAPS = sa.text("""
DELETE FROM profile_gaps g USING workloads w, gpu_types t
WHERE w.id = g.workload_id AND t.id = g.gpu_type_id AND w.cluster_id = :cluster
    AND w.model = :model AND w.params = :params AND t.name = :gpu_type
    AND g.task = :task AND g.source = :source
""")

_GAPS = sa.text(f"""
SELECT w.model, w.params, w.global_batch, t.name AS gpu_type, g.task, g.source, g.left_out, g.reason
FROM profile_gaps g JOIN workloads w ON w.id = g.workload_id JOIN gpu_types t ON t.id = g.gpu_type_id
WHERE w.cluster_id = :cluster
    AND EXISTS (SELECT FROM workloads o JOIN jobs j ON j.workload_id = o.id
        WHERE o.cluster_id = w.cluster_id AND o.model = w.model AND o.params = w.params AND j.{LIVE})
ORDER BY g.added_at, g.id
""")  # noqa: S608 - a constant of tessera.db.schema.tables

_PUT_HOST = sa.text("""
INSERT INTO host_profiles (gpu_type_id, task, rates)
VALUES (:gpu_type, :task, CAST(:rates AS jsonb))
ON CONFLICT ON CONSTRAINT uq_host_profiles_task DO UPDATE SET
    rates = excluded.rates, added_at = now()
""")

_HOSTS = sa.text("""
SELECT DISTINCT ON (t.ordinal) t.name AS gpu_type, h.task, h.rates
FROM host_profiles h JOIN gpu_types t ON t.id = h.gpu_type_id
WHERE t.cluster_id = :cluster ORDER BY t.ordinal, h.added_at DESC, h.id DESC
""")

_JOB = f"""
    j.name, j.requested_gpu_type, j.state, j.last_error, {SERVICE_GPU_S} AS held_gpu_s,
    greatest(extract(epoch FROM now() - j.created_at)::float8, 0) AS age_s,
    greatest(extract(epoch FROM now() - j.started_at)::float8, 0) AS started_ago_s
"""

_RUNS = sa.text(f"""
SELECT {_JOB}, NULL AS task, NOT EXISTS (SELECT FROM jobs o
    WHERE o.cluster_id = j.cluster_id AND o.name = j.labels->>'{RUN_LABEL}' AND o.{LIVE}) AS is_orphan
FROM jobs j WHERE j.cluster_id = :cluster AND j.labels ? '{RUN_LABEL}' ORDER BY j.id
""")  # noqa: S608 - constants of formulation and tessera.db

_TASKS = sa.text(f"""
SELECT {_JOB}, j.command->>0 AS task, false AS is_orphan
FROM workloads w JOIN jobs j ON j.workload_id = w.id
WHERE w.cluster_id = :cluster AND w.model = :model ORDER BY j.id
""")  # noqa: S608 - a constant of tessera.db.base.rows


def put_layers(connection: sa.Connection, cluster: str, rows: Sequence[ProfileRow]) -> int:
    """Store measured layers; return how many were new.

    Stored layers of a task are never changed.

    Raises:
        NotFound: the cluster. InvalidInput: unknown GPU type.
    """
    key = enter_cluster(connection, cluster)
    types = require_types(connection, key, {r.gpu_type for r in rows})
    ids = ensure_workloads(connection, key, {r.workload for r in rows})
    plain = [
        {
            "workload_id": ids[r.workload],
            "gpu_type_id": types[r.gpu_type].id,
            "task": r.task,
            "source": r.source,
            "kind": r.kind,
            "layers": r.layers,
            "samples": r.samples,
            "tp": r.tp,
            "dtype": r.dtype,
            "forward_s": r.forward_s,
            "backward_s": r.backward_s,
            "method": r.method,
            "repeats": r.repeats,
            "device_s": r.device_s,
            "device": r.device,
            "versions": dict(r.versions),
            "date": r.date,
        }
        for r in rows
    ]
    return connection.execute(_ADD, {"rows": dump_json(plain)}).rowcount if plain else 0


def load_profiles(connection: sa.Connection, cluster: int) -> tuple[ProfileRow, ...]:
    """Return the measured layers of models with live jobs, oldest first."""
    return tuple(
        ProfileRow(
            workload=_workload(r),
            gpu_type=r.gpu_type,
            task=r.task,
            source=r.source,
            kind=r.kind,
            layers=r.layers,
            samples=r.samples,
            tp=r.tp,
            dtype=r.dtype,
            forward_s=r.forward_s,
            backward_s=r.backward_s,
            method=r.method,
            repeats=r.repeats,
            device_s=r.device_s,
            device=r.device,
            versions=tuple(sorted(r.versions.items())),
            date=r.date,
        )
        for r in connection.execute(_PROFILES, {"cluster": cluster})
    )


def put_gap(connection: sa.Connection, cluster: str, gap: ProfileGap) -> None:
    """Store what a task left out, in place of what it left out before.

    Raises:
        NotFound: the cluster. InvalidInput: unknown GPU type.
    """
    key = enter_cluster(connection, cluster)
    gpu_type = require_types(connection, key, {gap.gpu_type})[gap.gpu_type]
    workload = ensure_workloads(connection, key, {gap.workload})[gap.workload]
    values = {
        "workload": workload,
        "gpu_type": gpu_type.id,
        "task": gap.task,
        "source": gap.source,
        "left_out": dump_json(gap.left_out),
        "reason": gap.reason,
    }
    connection.execute(_PUT_GAP, values)


def drop_gaps(connection: sa.Connection, cluster: str, rows: Sequence[ProfileRow]) -> None:
    """Delete what the tasks of ``rows`` left out, because they have measured everything now."""
    key = enter_cluster(connection, cluster)
    for model, params, gpu_type, task, source in sorted(
        {(r.workload.model, r.workload.params, r.gpu_type, r.task, r.source) for r in rows}
    ):
        values = {"model": model, "params": params, "gpu_type": gpu_type}
        named = {"cluster": key, "task": task, "source": source}
        connection.execute(_DROP_GAPS, values | named)


def load_gaps(connection: sa.Connection, cluster: int) -> tuple[ProfileGap, ...]:
    """Return what tasks left out of models with live jobs, oldest first."""
    return tuple(
        ProfileGap(
            workload=_workload(r),
            gpu_type=r.gpu_type,
            task=r.task,
            source=r.source,
            left_out=tuple((float(samples), tp) for samples, tp in r.left_out),
            reason=r.reason,
        )
        for r in connection.execute(_GAPS, {"cluster": cluster})
    )


def put_host(connection: sa.Connection, cluster: str, host: HostProfile) -> None:
    """Store the rates of a host, in place of what the same task measured before.

    Raises:
        NotFound: the cluster. InvalidInput: unknown GPU type.
    """
    key = enter_cluster(connection, cluster)
    gpu_type = require_types(connection, key, {host.gpu_type})[host.gpu_type]
    values = {"gpu_type": gpu_type.id, "task": host.task, "rates": dump_json(asdict(host.rates))}
    connection.execute(_PUT_HOST, values)


def load_hosts(connection: sa.Connection, cluster: int) -> tuple[HostProfile, ...]:
    """Return the latest rates of hosts of each GPU type."""
    return tuple(
        HostProfile(
            gpu_type=r.gpu_type,
            task=r.task,
            rates=HostRates(**{**r.rates, "updates": tuple(map(tuple, r.rates["updates"]))}),
        )
        for r in connection.execute(_HOSTS, {"cluster": cluster})
    )


def list_tasks(connection: sa.Connection, cluster: int) -> tuple[ProfilingJob, ...]:
    """Return the profiling tasks, including those that have ended, in order of submission."""
    rows = connection.execute(_TASKS, {"cluster": cluster, "model": PROFILING})
    return tuple(map(_profiling_job, rows))


def list_runs(connection: sa.Connection, cluster: int) -> tuple[ProfilingJob, ...]:
    """Return the runs of jobs' programs that measure plans, in order of submission."""
    return tuple(map(_profiling_job, connection.execute(_RUNS, {"cluster": cluster})))


def _profiling_job(row: sa.Row[Any]) -> ProfilingJob:
    return ProfilingJob(
        name=row.name,
        gpu_type=row.requested_gpu_type,
        state=JobState(row.state),
        last_error=row.last_error,
        service_gpu_s=row.held_gpu_s,
        age_s=row.age_s,
        started_ago_s=row.started_ago_s,
        task=row.task or "",
        is_orphan=row.is_orphan,
    )


def _workload(row: sa.Row[tuple[object, ...]]) -> Workload:
    return Workload(model=row.model, params=row.params, global_batch=row.global_batch)
