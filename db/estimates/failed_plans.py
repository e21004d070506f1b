"""Failures of jobs: their reasons, and execution plans that ran out of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sqlalchemy as sa

from tessera.db.base.documents import dump_json
from tessera.db.estimates.derived_estimates import notify_estimators
from tessera.formulation.base.values import EstimateSource
from tessera.formulation.job.exit_reasons import ExitReason

# The Cell is kept by its names, because the job loses it. Another member of its gang may report
# only later that it ran out of memory.
_FAIL = sa.text("""
INSERT INTO trainings AS t (job_id, generation, exit_reason, remark, failed_cell)
SELECT j.id, j.generation, c.reason, c.remark, jsonb_build_object('generation', j.generation,
    'gpu_type', g.name, 'gpus', j.cell_gpus, 'pipeline_degree', j.cell_degree, 'plan', p.name,
    'nodes', l.nodes)
FROM json_to_recordset(CAST(:rows AS json)) AS
    c(id bigint, generation bigint, reason text, remark text)
JOIN jobs j ON j.id = c.id AND j.generation = c.generation
JOIN gpu_types g ON g.id = j.cell_type_id JOIN plans p ON p.id = j.cell_plan_id
CROSS JOIN LATERAL (SELECT count(DISTINCT a.node_id) AS nodes FROM allocations a
    WHERE a.job_id = j.id AND a.generation = j.generation AND a.hold = 'held') AS l
ORDER BY j.id
ON CONFLICT (job_id) DO UPDATE SET exit_reason = excluded.exit_reason,
    remark = coalesce(nullif(excluded.remark, ''), t.remark), failed_cell = excluded.failed_cell
""")

_LOCK_WORKLOADS = sa.text("""
SELECT w.id FROM workloads w WHERE w.id IN (SELECT j.workload_id FROM jobs j WHERE j.id = ANY(:ids))
ORDER BY w.id FOR NO KEY UPDATE
""")

_EXCLUDE = sa.text(f"""
WITH failed AS (
    UPDATE trainings t SET exit_reason = '{ExitReason.OUT_OF_MEMORY}'
    FROM json_to_recordset(CAST(:rows AS json)) AS c(id bigint, generation bigint, provenance text)
    WHERE t.job_id = c.id AND (t.failed_cell->>'generation')::bigint = c.generation
    RETURNING t.job_id, t.failed_cell AS cell, c.provenance
), shaped AS (
    SELECT DISTINCT ON (w, t, g, n, d, p) r.* FROM (
        SELECT j.workload_id AS w, g.id AS t, (f.cell->>'gpus')::bigint AS g,
            (f.cell->>'nodes')::bigint AS n, (f.cell->>'pipeline_degree')::bigint AS d, p.id AS p,
            f.provenance AS v
        FROM failed f JOIN jobs j ON j.id = f.job_id
        JOIN gpu_types g ON g.cluster_id = j.cluster_id AND g.name = f.cell->>'gpu_type'
        JOIN plans p ON p.cluster_id = j.cluster_id AND p.name = f.cell->>'plan'
        WHERE p.document <> '') AS r
    WHERE r.n > 0 ORDER BY w, t, g, n, d, p
)
INSERT INTO estimates AS e (workload_id, gpu_type_id, gpus, nodes, pipeline_degree, plan_id,
    iter_time_s, source, provenance, derived)
SELECT w, t, g, n, d, p, 'Infinity'::float8, {int(EstimateSource.MEASURED)}, v, true FROM shaped
ON CONFLICT ON CONSTRAINT uq_estimates_shape DO UPDATE SET
    iter_time_s = excluded.iter_time_s, source = excluded.source, provenance = excluded.provenance,
    sd = NULL
WHERE e.iter_time_s < 'Infinity' OR e.source > {int(EstimateSource.MEASURED)}
""")  # noqa: S608 - constants of formulation


def keep_failures(connection: sa.Connection, rows: Sequence[Mapping[str, object]]) -> None:
    """Store why jobs fail, before they lose their Cells.

    A row has the job's key and generation, the reason ("" if it is not known) and the remark.
    """
    if rows:
        connection.execute(_FAIL, {"rows": dump_json(rows)})


def exclude_plans(
    connection: sa.Connection, cluster: str, rows: Sequence[Mapping[str, object]]
) -> None:
    """Make the execution plans of jobs that ran out of memory infeasible, and let others be derived.

    Only the plan itself is infeasible, on the GPUs and nodes of that start. A plan that was not
    recorded is not excluded, because nobody knows what it was. A row has the job's key and
    generation, and the estimate's provenance.
    """
    if not rows:
        return
    connection.execute(_LOCK_WORKLOADS, {"ids": [row["id"] for row in rows]})
    if connection.execute(_EXCLUDE, {"rows": dump_json(rows)}).rowcount:
        notify_estimators(connection, cluster)
