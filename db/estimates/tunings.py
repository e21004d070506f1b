"""Tuning at launch: the plans that programs may try, and the plans that they then run by."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import sqlalchemy as sa

from tessera.db.base.cells import stored_plan
from tessera.db.base.documents import dump_json
from tessera.db.estimates.plans import ensure_documents
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.values import EstimateSource, Workload
from tessera.formulation.job.execution_plan import ExecutionPlan, check_fits, read_execution_plan
from tessera.formulation.job.runtimes import RUNTIMES
from tessera.formulation.job.techniques import PlanLimits, Technique
from tessera.formulation.records.agents import ObservedGang
from tessera.formulation.records.estimates import TuningRecord

log = logging.getLogger(__name__)

MIN_ITER_TIME_S, MAX_ITER_TIME_S = 1e-6, 1e7
"""Range of iteration times in seconds. Values outside it are not measurements."""

MAX_REFUSALS: Final = 10_000
"""Number of refused reports that are remembered, because agents repeat their reports."""

_REFUSED: Final[dict[tuple[int, int, str], None]] = {}
"""Refused reports that were logged: a job's key, its generation and the plan's digest."""

_PUT = sa.text("""
INSERT INTO tunings AS t (workload_id, gpu_type_id, plan_id, runtime, space, plans, space_plans,
    whole_plans)
SELECT r.w, r.t, r.p, r.runtime, r.space, ARRAY(SELECT json_array_elements_text(r.plans)),
    r.space_plans, r.whole_plans
FROM json_to_recordset(CAST(:rows AS json)) AS r(w bigint, t bigint, p bigint, runtime text,
    space text, plans json, space_plans bigint, whole_plans bigint)
ON CONFLICT ON CONSTRAINT uq_tunings_plan DO UPDATE SET plans = excluded.plans,
    space_plans = excluded.space_plans, whole_plans = excluded.whole_plans
""")

# The program reads its plans when it starts. A Cell whose plan was tuned in this space, or in all
# of them, needs no other tuning.
_TO_TRY = sa.text("""
SELECT j.id, j.runtime, j.techniques, t.plans FROM jobs j JOIN tunings t ON t.workload_id = j.workload_id
    AND t.gpu_type_id = j.cell_type_id AND t.plan_id = j.cell_plan_id AND t.runtime = j.runtime
    AND t.space = j.launch->>'tuning_space'
WHERE j.id = ANY(:ids) AND j.state = 'starting' AND NOT EXISTS (
    SELECT FROM estimates e WHERE e.workload_id = j.workload_id AND e.gpu_type_id = j.cell_type_id
        AND e.gpus = j.cell_gpus AND e.pipeline_degree = j.cell_degree
        AND e.plan_id = j.cell_plan_id AND e.tuned IN (t.space, 'full'))
""")

_RUNNING = sa.text("""
SELECT j.id, j.name, j.generation, j.runtime, j.techniques, n.name AS leader, j.cell_gpus, j.cell_degree,
    coalesce(j.launch->>'tuning_space', '') AS space, w.model, w.params, w.global_batch,
    p.name AS plan, p.document, coalesce(tr.tuned_generation, 0) AS tuned_generation
FROM jobs j JOIN nodes n ON n.id = j.leader_id AND n.agent_id = :agent
JOIN workloads w ON w.id = j.workload_id JOIN plans p ON p.id = j.cell_plan_id
LEFT JOIN trainings tr ON tr.job_id = j.id
WHERE j.cluster_id = :cluster AND j.name = ANY(:names) AND j.state IN ('starting', 'running')
ORDER BY j.id
""")

_LOCK_WORKLOADS = sa.text("""
SELECT w.id FROM workloads w WHERE w.id IN (SELECT j.workload_id FROM jobs j WHERE j.id = ANY(:ids))
ORDER BY w.id FOR NO KEY UPDATE
""")

# Times that runs have measured stay, and so do users' rows and what is known not to run.
_MEASURED = sa.text(f"""
INSERT INTO estimates AS e (workload_id, gpu_type_id, gpus, nodes, pipeline_degree, plan_id,
    iter_time_s, source, provenance, derived, tuned)
SELECT j.workload_id, j.cell_type_id, j.cell_gpus, l.nodes, j.cell_degree, p.id, c.iter_time_s,
    {int(EstimateSource.MEASURED)}, c.provenance, true, c.space
FROM json_to_recordset(CAST(:rows AS json)) AS c(id bigint, generation bigint, plan text,
    iter_time_s float8, provenance text, space text)
JOIN jobs j ON j.id = c.id AND j.generation = c.generation
JOIN plans p ON p.cluster_id = j.cluster_id AND p.name = c.plan
CROSS JOIN LATERAL (SELECT count(DISTINCT a.node_id) AS nodes FROM allocations a
    WHERE a.job_id = j.id AND a.generation = j.generation AND a.hold = 'held') AS l
WHERE l.nodes > 0 ORDER BY j.id, p.id
ON CONFLICT ON CONSTRAINT uq_estimates_shape DO UPDATE SET tuned = excluded.tuned,
    (iter_time_s, source, provenance, sd) = (SELECT i, s, v, d FROM (VALUES
        (true, excluded.iter_time_s, excluded.source, excluded.provenance, NULL::float8),
        (false, e.iter_time_s, e.source, e.provenance, e.sd)) AS x(news, i, s, v, d)
        WHERE news = (e.derived AND e.source > {int(EstimateSource.MEASURED)}))
""")  # noqa: S608 - constants of formulation

_NOTE_GENERATION = sa.text("""
INSERT INTO trainings AS t (job_id, generation, tuned_generation)
SELECT c.id, c.generation, c.generation
FROM json_to_recordset(CAST(:rows AS json)) AS c(id bigint, generation bigint) ORDER BY c.id
ON CONFLICT (job_id) DO UPDATE SET tuned_generation = excluded.tuned_generation
""")

# Times that this start has reported before are of no one plan.
_RESTART_MEASUREMENTS = sa.text("""
UPDATE measurements m SET plan_id = p.id, samples = '{}', skipped = 0, iter_time_s = NULL,
    changed_at = now()
FROM json_to_recordset(CAST(:rows AS json)) AS c(id bigint, generation bigint, plan text)
JOIN jobs j ON j.id = c.id JOIN plans p ON p.cluster_id = j.cluster_id AND p.name = c.plan
WHERE m.job_id = c.id AND m.generation = c.generation AND m.plan_id <> p.id
""")


def put_tunings(
    connection: sa.Connection,
    cluster: int,
    records: Sequence[TuningRecord],
    workloads: Mapping[Workload, int],
    types: Mapping[str, int],
) -> None:
    """Store plans to try, in place of those that were stored for the same Cells and spaces."""
    if not records:
        return
    documents = {r.plan.digest: r.plan.to_json() for r in records}
    plans = ensure_documents(connection, cluster, documents)
    rows = [
        {
            "w": workloads[r.workload],
            "t": types[r.gpu_type],
            "p": plans[r.plan.digest],
            "runtime": r.runtime,
            "space": r.space,
            "plans": [plan.to_json() for plan in r.plans],
            "space_plans": r.space_plans,
            "whole_plans": r.whole_plans,
        }
        for r in records
    ]
    by_key = {tuple(row[name] for name in ("w", "t", "p", "runtime", "space")): row for row in rows}
    ordered = [row for _, row in sorted(by_key.items())]
    connection.execute(_PUT, {"rows": dump_json(ordered)})


def load_plans_to_try(connection: sa.Connection, jobs: Sequence[int]) -> dict[int, tuple[str, ...]]:
    """Return the canonical JSON of the plans that starting jobs should try, by job (keys).

    Jobs that should not tune at this start are absent. So are plans that need techniques which
    their job does not name.
    """
    if not jobs:
        return {}
    rows = connection.execute(_TO_TRY, {"ids": list(jobs)})
    allowed = {row.id: _allowed_plans(row.plans, _limits(row)) for row in rows}
    return {job: plans for job, plans in allowed.items() if plans}


def _allowed_plans(plans: Sequence[str], limits: PlanLimits) -> tuple[str, ...]:
    if not limits.techniques:  # the plans are those of the runtime
        return tuple(plans)
    return tuple(text for text in plans if limits.allow(read_execution_plan("plans", text)))


def _limits(row: sa.Row[Any]) -> PlanLimits:
    return PlanLimits(runtime=row.runtime, techniques=tuple(map(Technique, row.techniques)))


def find_tuned_plans(
    connection: sa.Connection, cluster: int, agent: int, gangs: Iterable[ObservedGang]
) -> list[dict[str, Any]]:
    """Return what tunings found that is not stored yet, one row for each job.

    A report that does not fit its job is logged once and left out. ``cluster`` and ``agent`` are
    keys.
    """
    reports = {(gang.job, gang.node): gang for gang in gangs if gang.executed_plan is not None}
    if not reports:
        return []
    names = sorted({job for job, _ in reports})
    values = {"cluster": cluster, "agent": agent, "names": names}
    found = []
    for row in connection.execute(_RUNNING, values):
        gang = reports.get((row.name, row.leader))
        if gang is None or gang.executed_plan is None or gang.generation != row.generation:
            continue
        digest = gang.executed_plan.digest
        if row.tuned_generation == row.generation and digest == row.plan:
            continue
        if problem := _find_problem(row, gang, gang.executed_plan):
            _log_refusal(row, digest, problem)
            continue
        found.append(_finding(row, gang, gang.executed_plan))
    return found


def _find_problem(row: sa.Row[Any], gang: ObservedGang, plan: ExecutionPlan) -> str:
    """Return why a job cannot run by the plan that its program reports, or ""."""
    runtime, planned = RUNTIMES.get(row.runtime), stored_plan(row.document)
    if not row.space or runtime is None or not runtime.tunes or planned is None:
        return "the job does not tune"
    if row.tuned_generation == row.generation:
        return "it has reported another plan before, since it started"
    if not MIN_ITER_TIME_S <= gang.executed_iter_time_s <= MAX_ITER_TIME_S:
        return f"{gang.executed_iter_time_s:g} s is no time of an iteration"
    workload = Workload(model=row.model, params=row.params, global_batch=row.global_batch)
    try:
        check_fits(plan, "executed_plan", workload, row.cell_gpus, planned.layers)
    except InvalidInput as wrong:
        return str(wrong)
    if plan.pipeline_degree != row.cell_degree:
        return f"it has {plan.pipeline_degree} pipeline stages, but the Cell has {row.cell_degree}"
    if plan.precision is not planned.precision or plan.shape not in ((), planned.shape):
        return "its precision or its nodes are not those of the job's plan"
    return _limits(row).refuse(plan)


def _log_refusal(row: sa.Row[Any], digest: str, problem: str) -> None:
    key = row.id, row.generation, digest
    if key in _REFUSED:
        return
    if len(_REFUSED) >= MAX_REFUSALS:
        _REFUSED.clear()
    _REFUSED[key] = None
    log.warning(
        "ignored the plan by which a job reports to run",
        extra={"event": "tuning_refused", "job": row.name, "plan": digest, "error": problem},
    )


def _finding(row: sa.Row[Any], gang: ObservedGang, plan: ExecutionPlan) -> dict[str, Any]:
    planned_s = gang.planned_iter_time_s if plan.digest != row.plan else 0.0
    return {
        "id": row.id,
        "generation": row.generation,
        "plan": plan.digest,
        "document": plan.to_json(),
        "planned": row.plan,
        "planned_s": planned_s,
        "iter_time_s": gang.executed_iter_time_s,
        "rate": row.global_batch / gang.executed_iter_time_s,
        "space": row.space,
        "provenance": f"tuned at start {row.generation} of job {row.name}",
    }


def keep_tuned_plans(
    connection: sa.Connection, cluster: int, found: Sequence[Mapping[str, Any]]
) -> None:
    """Store the plans that tunings found as measured estimates of their Cells.

    The plan that the job was given is measured, too, or does not run. ``Turn.change_plans`` gives
    the jobs their plans.
    """
    connection.execute(_LOCK_WORKLOADS, {"ids": [row["id"] for row in found]})
    ensure_documents(connection, cluster, {row["plan"]: row["document"] for row in found})
    measured = [{k: row[k] for k in _MEASURED_KEYS} for row in found]
    for row in found:
        if MIN_ITER_TIME_S <= row["planned_s"] <= MAX_ITER_TIME_S or math.isinf(row["planned_s"]):
            given = {"plan": row["planned"], "iter_time_s": str(row["planned_s"])}
            measured.append({k: row[k] for k in _MEASURED_KEYS} | given)
    connection.execute(_MEASURED, {"rows": dump_json(measured)})
    rows = {"rows": dump_json([{k: row[k] for k in ("id", "generation", "plan")} for row in found])}
    connection.execute(_NOTE_GENERATION, rows)
    connection.execute(_RESTART_MEASUREMENTS, rows)


_MEASURED_KEYS: Final = ("id", "generation", "plan", "iter_time_s", "provenance", "space")
