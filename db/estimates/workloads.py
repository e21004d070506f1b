"""The creation of workloads and estimates, and the check whether a job can ever run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import sqlalchemy as sa

from tessera.db.base.cells import estimate_rows
from tessera.db.base.documents import dump_json
from tessera.db.base.limits import require_few_estimates
from tessera.db.base.rows import enter_cluster
from tessera.db.base.turn import request_round
from tessera.db.estimates.plans import ensure_plans
from tessera.db.schema.host import list_host
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.values import Cell, EstimateSource, Workload
from tessera.formulation.records.estimates import BEST_PLAN_NOTE, EstimateRecord
from tessera.formulation.records.jobs import JobSpec

_TYPES = sa.text("""
SELECT t.id, t.name, coalesce(max(n.gpus), 0) AS node_gpus,
    coalesce(sum(n.gpus), 0)::bigint AS gpus
FROM gpu_types t LEFT JOIN nodes n ON n.gpu_type_id = t.id
WHERE t.cluster_id = :cluster GROUP BY t.id, t.name ORDER BY t.name
""")

_ADD_WORKLOADS = sa.text("""
INSERT INTO workloads (cluster_id, model, params, global_batch)
SELECT :cluster, r.* FROM json_to_recordset(CAST(:rows AS json)) AS
    r(model text, params text, global_batch bigint)
ON CONFLICT DO NOTHING
""")

_WORKLOADS = sa.text("""
SELECT w.id, w.model, w.params, w.global_batch FROM workloads w
JOIN json_to_recordset(CAST(:rows AS json)) AS r(model text, params text, global_batch bigint)
    ON w.model = r.model AND w.params = r.params AND w.global_batch = r.global_batch
WHERE w.cluster_id = :cluster
FOR KEY SHARE OF w
""")
"""A query with a lock, so that retention does not delete a workload that a job is about to use."""

_UPSERT = sa.text(f"""
INSERT INTO estimates
    (workload_id, gpu_type_id, gpus, nodes, pipeline_degree, plan_id, iter_time_s, source, provenance,
     sd, complete, {list_host("@")}, traffic)
SELECT r.* FROM json_to_recordset(CAST(:rows AS json)) AS r(
    w bigint, t bigint, g bigint, n bigint, d bigint, p bigint, s float8, k bigint, v text, u float8,
    c boolean, {list_host("@ bigint")}, x text)
ON CONFLICT ON CONSTRAINT uq_estimates_shape DO UPDATE SET
    iter_time_s = excluded.iter_time_s, source = excluded.source, provenance = excluded.provenance,
    sd = excluded.sd, complete = excluded.complete, derived = false, stated_degree = NULL,
    {list_host("@ = excluded.@")},
    traffic = coalesce(nullif(excluded.traffic, ''), estimates.traffic)
""")  # noqa: S608 - a constant of tessera.db.schema.host

# An estimate without a plan replaces the one that was imported for the same Cell before, if that got
# its plan here. The plan stays, unless the Cell does not run now.
_REPLACE_PLANNED = sa.text(f"""
WITH news AS (
    SELECT r.* FROM json_to_recordset(CAST(:rows AS json)) AS r(
        w bigint, t bigint, g bigint, n bigint, d bigint, p bigint, s float8, k bigint, v text, u float8,
        c boolean, {list_host("@ bigint")}) JOIN plans p ON p.id = r.p AND p.name = ''
), planned AS (
    SELECT e.id AS planned_id, n.* FROM estimates e JOIN news n ON e.workload_id = n.w
        AND e.gpu_type_id = n.t AND e.gpus = n.g AND e.nodes = n.n AND e.stated_degree = n.d
    WHERE NOT e.derived
), removed AS (
    DELETE FROM estimates e USING planned o
    WHERE CASE WHEN o.s = 'Infinity' THEN e.id = o.planned_id ELSE e.workload_id = o.w
        AND e.gpu_type_id = o.t AND e.gpus = o.g AND e.nodes = o.n AND e.pipeline_degree = o.d
        AND e.plan_id = o.p END
)
UPDATE estimates e SET iter_time_s = o.s, source = o.k, sd = o.u, complete = o.c,
    {list_host("@ = o.@")}, provenance = left(concat_ws('; ', nullif(o.v, ''), '{BEST_PLAN_NOTE}'), 1000)
FROM planned o WHERE e.id = o.planned_id AND o.s < 'Infinity'
""")  # noqa: S608 - a constant of formulation

_WAIT_NO_MORE = sa.text("""
UPDATE workloads SET waits_for = NULL WHERE id = ANY(:ids) AND waits_for IS NOT NULL
""")

_DERIVED = sa.text("""
SELECT EXISTS (SELECT FROM estimates WHERE workload_id = ANY(:ids) AND derived)
""")

_LOCK = sa.text("""
SELECT id FROM workloads WHERE id = ANY(:ids) ORDER BY id FOR NO KEY UPDATE
""")

_GIVE_WAY = sa.text(f"""
DELETE FROM estimates e
USING json_to_recordset(CAST(:rows AS json)) AS r(w bigint, t bigint, g bigint)
WHERE e.derived AND e.source > {int(EstimateSource.MEASURED)}
    AND e.workload_id = r.w AND e.gpu_type_id = r.t AND e.gpus = r.g
    AND NOT EXISTS (SELECT FROM jobs j WHERE j.workload_id = e.workload_id AND j.cell_type_id = r.t
        AND j.cell_gpus = r.g AND j.cell_degree = e.pipeline_degree AND j.cell_plan_id = e.plan_id)
    AND NOT EXISTS (SELECT FROM jobs j
        WHERE j.workload_id = e.workload_id
            AND e.plan_id IN (j.plan_id, j.submitted_plan_id))
""")  # noqa: S608 - a constant of formulation

_SMALLEST = sa.text("""
SELECT e.workload_id, t.name, min(e.gpus) AS needs
FROM estimates e JOIN gpu_types t ON t.id = e.gpu_type_id
WHERE e.workload_id = ANY(:workloads) AND e.iter_time_s < 'Infinity'
GROUP BY e.workload_id, t.name ORDER BY e.workload_id, t.name
""")


def ensure_workloads(
    connection: sa.Connection, cluster: int, workloads: Collection[Workload]
) -> dict[Workload, int]:
    """Return the keys of workloads, creating missing ones.

    They exist until the transaction ends.
    """
    ordered = sorted(workloads, key=lambda w: w.key)  # the same everywhere: no deadlock
    plain = [
        {"model": w.model, "params": w.params, "global_batch": w.global_batch} for w in ordered
    ]
    values = {"cluster": cluster, "rows": dump_json(plain)}
    while True:  # again if retention deletes a workload between the two statements
        connection.execute(_ADD_WORKLOADS, values)
        keys = {
            Workload(model=model, params=params, global_batch=batch): key
            for key, model, params, batch in connection.execute(_WORKLOADS, values)
        }
        if keys.keys() >= set(ordered):
            return keys


def lock_workloads(connection: sa.Connection, workload_ids: Collection[int]) -> None:
    """Exclude other writers of these workloads' estimates until this transaction ends.

    The estimates that the service derives depend on those of users, and vice versa. Neither may
    miss the other's rows because they are not committed yet.
    """
    connection.execute(_LOCK, {"ids": sorted(workload_ids)})


def require_types(
    connection: sa.Connection, cluster: int, names: Collection[str]
) -> dict[str, sa.Row[tuple[int, str, int, int]]]:
    """Return (key, name, GPUs of its largest node, all its GPUs) of each GPU type of the cluster.

    Raises:
        InvalidInput: one of ``names`` is not among them.
    """
    types = {row.name: row for row in connection.execute(_TYPES, {"cluster": cluster})}
    if unknown := set(names) - types.keys():
        known = ", ".join(types) or "none"
        raise InvalidInput(
            "gpu_type", f"the cluster has no GPU type {min(unknown)!r}; it has: {known}"
        )
    return types


def require_fit(
    connection: sa.Connection,
    cluster: int,
    jobs: Sequence[JobSpec],
    workload_ids: Mapping[Workload, int],
) -> bool:
    """Check that each job could run if the cluster were empty.

    All nodes count, including drained ones. A cluster without nodes accepts every job. Return
    whether a workload has no Cells yet.

    Raises:
        InvalidInput: an unknown type; a pinned type or allowed types without Cells; allowed types or
            a bound on GPUs that contradict the request; more GPUs requested than there are; or every
            Cell is too large.
    """
    named = {kind for job in jobs for kind in (job.requested_gpu_type, *job.allowed_gpu_types)}
    types = require_types(connection, cluster, named - {""})
    total = sum(row.gpus for row in types.values())
    # Find the smallest Cell of each workload on each GPU type.
    needs: dict[int, dict[str, int]] = {}
    keys = sorted(set(workload_ids.values()))
    for workload, gpu_type, least in connection.execute(_SMALLEST, {"workloads": keys}):
        needs.setdefault(workload, {})[gpu_type] = least
    for job in jobs:
        if contradiction := job.contradicted_bound() or job.contradicted_type():
            raise InvalidInput(f"jobs/{job.name}.{contradiction[0]}", contradiction[1])
        smallest = _on_allowed_types(job, needs.get(workload_ids[job.workload], {}))
        smallest = _on_pinned_type(job, smallest)
        if total == 0:
            continue
        if job.requested_gpus > total:
            raise InvalidInput(
                f"jobs/{job.name}.requested_gpus",
                f"asks for {job.requested_gpus} GPUs, but the whole cluster has {total}; request fewer",
            )
        if smallest and all(least > types[name].gpus for name, least in smallest.items()):
            text = " or ".join(
                f"{gpus} x {name} (there are {types[name].gpus})" for name, gpus in smallest.items()
            )
            raise InvalidInput(
                f"jobs/{job.name}.workload",
                f"even its smallest Cells exceed the cluster: it needs {text}; add Cells with fewer GPUs",
            )
    return any(key not in needs for key in keys)


def _on_allowed_types(job: JobSpec, smallest: dict[str, int]) -> dict[str, int]:
    """Return the GPUs of the smallest Cell by type, only on the types that the job may run on.

    A workload without any Cells may get them later.
    """
    if not job.allowed_gpu_types or not smallest:
        return smallest
    kept = {name: least for name, least in smallest.items() if name in job.allowed_gpu_types}
    if not kept:
        raise InvalidInput(
            f"jobs/{job.name}.allowed_gpu_types",
            f"are {', '.join(job.allowed_gpu_types)}, and {job.workload.model} has no Cells on them; it has"
            f" some on {', '.join(smallest)}: allow one of these, or add Cells",
        )
    return kept


def _on_pinned_type(job: JobSpec, smallest: dict[str, int]) -> dict[str, int]:
    """Return the GPUs of the smallest Cell by type, only on the pinned type if the job pins one.

    A workload without any Cells may get them later.
    """
    if not job.pinned_gpu_type:
        return smallest
    if not job.requested_gpu_type:
        raise InvalidInput(
            f"jobs/{job.name}.pinned_gpu_type",
            "needs a GPU type to pin; set requested_gpu_type, too",
        )
    if smallest and job.requested_gpu_type not in smallest:
        raise InvalidInput(
            f"jobs/{job.name}.requested_gpu_type",
            f"{job.requested_gpu_type} is pinned, and {job.workload.model} has no Cells on it; it has some"
            f" on {', '.join(smallest)}: pin one of these, or add Cells",
        )
    return {name: least for name, least in smallest.items() if name == job.requested_gpu_type}


def upsert_estimates(
    connection: sa.Connection, cluster: str, estimates: Sequence[EstimateRecord]
) -> int:
    """Create or replace estimates; return how many.

    Of two with the same Cell and shape, the later one is kept. Computed estimates of the service
    for the same GPUs are deleted, except those that jobs run on. If live jobs have one of the
    workloads, a round is requested.

    Raises:
        NotFound: the cluster.
        InvalidInput: unknown GPU type; a plan of which only the name is known; or ``nodes`` is 0 and
            no node of the type is known yet.
        LimitReached: a workload would have too many estimates.
    """
    key = enter_cluster(connection, cluster)
    types = require_types(connection, key, {e.cell.gpu_type for e in estimates})
    workload_ids = ensure_workloads(connection, key, {e.workload for e in estimates})
    lock_workloads(connection, workload_ids.values())
    plan_ids = ensure_plans(connection, key, estimates)
    shaped = [replace(e, cell=_shaped(e.cell, types[e.cell.gpu_type].node_gpus)) for e in estimates]
    type_ids = {name: t.id for name, t in types.items()}
    rows = estimate_rows(shaped, workload_ids, type_ids, plan_ids)
    if rows:
        values = {"rows": dump_json(rows)}
        connection.execute(_UPSERT, values)
        connection.execute(_REPLACE_PLANNED, values)
        connection.execute(_WAIT_NO_MORE, {"ids": sorted(workload_ids.values())})
        if connection.execute(_DERIVED, {"ids": list(workload_ids.values())}).scalar():
            connection.execute(_GIVE_WAY, values)
        require_few_estimates(connection, workload_ids)
        request_round(connection, key, workload_ids.values())
    return len(rows)


def _shaped(cell: Cell, node_gpus: int) -> Cell:
    """Return the Cell with its number of nodes, which is the smallest possible if none is given.

    ``node_gpus`` is the number of GPUs of the largest node.
    """
    if cell.nodes:
        return cell
    if not node_gpus:
        raise InvalidInput(
            "nodes",
            f"the cluster has no node of type {cell.gpu_type}: state a number of nodes, or add nodes first",
        )
    return cell.on(-(-cell.gpus // node_gpus))
