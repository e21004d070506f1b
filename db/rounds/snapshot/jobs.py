"""The jobs that have not ended, with what they hold, are promised and wait for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import sqlalchemy as sa

from tessera.db.base.copy import read_columns, wire_types
from tessera.db.base.rows import RUN_S, SERVICE_GPU_S, json_rows
from tessera.db.estimates.runnable_plans import TECHNIQUES_MASK
from tessera.db.rounds.snapshot.cluster import ClusterFacts
from tessera.db.rounds.snapshot.keys import KeyIndex, Keys, split_rows
from tessera.db.schema.job_columns import UNTIL_EXIT
from tessera.db.schema.tables import LIVE
from tessera.formulation.base.resources import GIVEN_PREFIX, HOST_NAMES, NOT_STATED
from tessera.formulation.base.tables import Ints
from tessera.formulation.base.values import Hold
from tessera.formulation.job.dependencies import CONDITIONS, Condition
from tessera.formulation.job.runtimes import RESTRICTED_RUNTIMES
from tessera.formulation.state.last_round import PlannedNodes, PlannedStarts, ScheduleSegments
from tessera.formulation.state.snapshot import STATES, Allocations, Dependencies, Jobs

TABLES: Final = {
    "job_names": json_rows(
        "j.name, j.tenant", f"jobs j WHERE j.cluster_id = c.id AND j.{LIVE}", "j.id"
    ),
    "dependencies": json_rows(
        "d.job_id, d.on_job_id, d.condition",
        "jobs j JOIN job_dependencies d ON d.job_id = j.id"
        f" WHERE j.cluster_id = c.id AND j.{LIVE} AND j.unmet > 0 AND NOT d.met"
        " AND d.on_job_id IS NOT NULL",
        "j.id, d.position",
    ),
    "planned_starts": json_rows(
        "j.id, j.planned_start",
        "jobs j WHERE j.cluster_id = c.id AND j.planned_start IS NOT NULL",
        "j.id",
    ),
}
"""Subqueries for the tables of a cluster (c)."""


def _case(column: str, codes: Mapping[str, int]) -> str:
    """Return SQL for the code of a column's text."""
    cases = " ".join(f"WHEN '{name}' THEN {code}" for name, code in codes.items())
    return f"CASE {column} {cases} END::int8"


_JOB_EXPRESSIONS = {
    "state": _case("j.state", {s.value: i for i, s in enumerate(STATES)}),
    "workload": "j.workload_id",
    "iterations": "j.iterations::float8",
    # A program that decides its end always has an iteration left.
    "iterations_left": f"""greatest(j.iterations - j.iterations_done,
        CASE WHEN {UNTIL_EXIT} THEN 1 ELSE 0 END)::float8""",
    "requested_gpu_type": "coalesce(t.id, 0)",
    "submit_s": "date_part('epoch', j.created_at)",
    "queued_s": "date_part('epoch', j.queued_at)",
    "since_s": "coalesce(date_part('epoch', j.since_at), 0)",
    # Without a report, it has trained since it runs. A job that does not run yet has not.
    "progress_s": "CASE WHEN j.ran_at IS NULL THEN 0"
    " ELSE date_part('epoch', greatest(j.progress_at, j.ran_at)) END",
    "service_gpu_s": SERVICE_GPU_S,
    "run_left_s": f"greatest(j.longest_run_s - ({RUN_S}), 0)",
    "current_type": "coalesce(j.cell_type_id, 0)",
    "current_gpus": "coalesce(j.cell_gpus, 0)",
    "current_degree": "coalesce(j.cell_degree, 0)",
    "current_plan": "coalesce(j.cell_plan_id, 0)",
    **{
        GIVEN_PREFIX
        + name: f"CASE WHEN j.cell_gpus IS NULL THEN {NOT_STATED} ELSE j.cell_{name} END"
        for name in HOST_NAMES
    },
    "plan": "coalesce(j.plan_id, 0)",
    "submitted_plan": "coalesce(j.submitted_plan_id, 0)",
    "techniques": TECHNIQUES_MASK,
    "runtime": "coalesce("
    + _case("j.runtime", {name: code for code, name in enumerate(RESTRICTED_RUNTIMES)})
    + ", -1)",
    "array": "CASE WHEN g.max_running > 0 THEN g.id ELSE -1 END",
    "array_limit": "coalesce(g.max_running, 0)",
    "start_by_s": "coalesce(j.start_by_s, 'Infinity')",
    "retry_s": "coalesce(date_part('epoch', j.retry_at), 0)",
    "restart_s": "coalesce(tr.restart_s, j.restart_s)",  # measured, or else as stated
    "unsaved_since_s": "CASE WHEN (tr.start_times->>'stop_s')::float8 > 0"
    " AND (tr.start_times->>'checkpoint_s')::float8 = 0 AND tr.checkpoint_at IS NOT NULL"
    " THEN date_part('epoch', greatest(tr.checkpoint_at, j.since_at)) ELSE 0 END",
}
"""Expressions for columns of ``Jobs`` that are not simply the column of the same name. References
to other tables are their keys.
"""

_NOT_STORED = frozenset(
    {"unestimated", "assumed_efficiency", "required_selector", "preferred_selector"}
)
"""Columns of ``Jobs`` that follow from other tables, or that only rounds fill."""

_JOB_COLUMNS = {"id": "int8", "techniques": "int8"} | {
    name: kind for name, kind in wire_types(Jobs).items() if name not in _NOT_STORED
}

_JOBS = f"""
SELECT {", ".join(_JOB_EXPRESSIONS.get(name, f"j.{name}") for name in _JOB_COLUMNS)}
FROM jobs j LEFT JOIN gpu_types t ON t.cluster_id = j.cluster_id AND t.name = j.requested_gpu_type
LEFT JOIN trainings tr ON tr.job_id = j.id LEFT JOIN job_arrays g ON g.id = j.array_id
WHERE j.cluster_id = {{cluster}} AND j.{LIVE} ORDER BY j.id
"""  # noqa: S608 - constants only

_ALLOCATIONS = f"""
SELECT l.job_id, l.node_id, l.gpu, {_case("l.hold", {h.name.lower(): int(h) for h in Hold})},
    l.generation
FROM allocations l JOIN nodes n ON n.id = l.node_id
WHERE n.cluster_id = {{cluster}} ORDER BY n.name, l.gpu, 4, l.job_id, l.generation
"""  # noqa: S608 - constants only


_SEGMENTS = f"""
SELECT j.id, (l.segment->>'start_s')::float8, (l.segment->>'end_s')::float8, t.id,
    (l.segment->>'gpus')::int8, (l.segment->>'pipeline_degree')::int8, p.id
FROM jobs j CROSS JOIN LATERAL jsonb_array_elements(j.schedule) WITH ORDINALITY AS l(segment, place)
JOIN gpu_types t ON t.cluster_id = j.cluster_id AND t.name = l.segment->>'gpu_type'
JOIN plans p ON p.cluster_id = j.cluster_id AND p.name = l.segment->>'plan'
WHERE j.cluster_id = {{cluster}} AND j.{LIVE} AND j.admitted ORDER BY j.id, l.place
"""  # noqa: S608 - constants only


def read_jobs(
    connection: sa.Connection, row: sa.Row[Any], keys: Keys
) -> tuple[Jobs, Ints, KeyIndex]:
    """Return the jobs, their techniques as ``TECHNIQUES_MASK`` has them, and their positions.

    ``row`` has the subqueries of ``TABLES``.
    """
    names, tenants = split_rows(row.job_names, 2)
    j = read_columns(connection, _JOBS.format(cluster=row.id), _JOB_COLUMNS)
    own, techniques = KeyIndex(j.pop("id")), j.pop("techniques")
    for kind in ("requested_gpu_type", "current_type"):
        j[kind] = keys.types.of(j[kind])
    j["workload"] = keys.workloads.of(j["workload"])
    j["current_plan"] = keys.plans.of(j["current_plan"], absent=0)
    for kind in ("plan", "submitted_plan"):
        j[kind] = keys.plans.of(j[kind])
    limited = j["array"] >= 0
    j["array"][limited] = np.unique(j["array"][limited], return_inverse=True)[1]
    return Jobs(name=names, tenant=tenants, **j), techniques, own


def read_allocations(connection: sa.Connection, cluster: int, keys: Keys) -> Allocations:
    """Return who holds which GPUs of a cluster."""
    a = read_columns(connection, _ALLOCATIONS.format(cluster=cluster), wire_types(Allocations))
    return Allocations(**a | {"job": keys.jobs.of(a["job"]), "node": keys.nodes.of(a["node"])})


def read_segments(connection: sa.Connection, cluster: int, keys: Keys) -> ScheduleSegments:
    """Return what the admitted jobs of a cluster are promised."""
    segments = read_columns(
        connection, _SEGMENTS.format(cluster=cluster), wire_types(ScheduleSegments)
    )
    positions = {
        "job": keys.jobs.of(segments["job"]),
        "gpu_type": keys.types.of(segments["gpu_type"]),
        "plan": keys.plans.of(segments["plan"]),
    }
    return ScheduleSegments(**segments | positions)


def read_planned_starts(
    row: sa.Row[Any], keys: Keys, facts: ClusterFacts
) -> tuple[PlannedStarts, PlannedNodes]:
    """Return the planned starts in a row that has the subqueries of ``TABLES``, and their nodes.

    A start of which the cluster no longer has the GPU type, the plan or a node is left out.
    """
    types = {kind.name: i for i, kind in enumerate(facts["gpu_types"])}
    plans = {name: i for i, name in enumerate(facts["plans"])}
    places = {name: i for i, name in enumerate(facts["nodes"].name)}
    ids, documents = split_rows(row.planned_starts, 2)
    starts: list[dict[str, float]] = []
    nodes: list[dict[str, int]] = []
    for job, plain in zip(keys.jobs.of(np.array(ids, np.int64)).tolist(), documents, strict=True):
        kind, plan, gpus = plain["gpu_type"], plain["plan"], plain["nodes"]
        if kind not in types or plan not in plans or not gpus.keys() <= places.keys():
            continue
        shares = sorted((places[name], count) for name, count in gpus.items())
        nodes += [{"start": len(starts), "node": node, "gpus": count} for node, count in shares]
        starts.append(
            {
                "job": job,
                "start_s": float(plain["start_s"]),
                "end_s": float(plain["end_s"]),
                "gpu_type": types[kind],
                "gpus": plain["gpus"],
                "pipeline_degree": plain["pipeline_degree"],
                "plan": plans[plan],
            }
        )
    return PlannedStarts.from_rows(starts), PlannedNodes.from_rows(nodes)


def read_dependencies(row: sa.Row[Any], keys: Keys) -> Dependencies:
    """Return the dependencies in a row that has the subqueries of ``TABLES``."""
    jobs, others, conditions = split_rows(row.dependencies, 3)
    codes = [CONDITIONS.index(Condition(condition)) for condition in conditions]
    return Dependencies(
        job=keys.jobs.of(np.array(jobs, np.int64)),
        on=keys.jobs.of(np.array(others, np.int64)),
        condition=np.array(codes, np.int64),
    )
