"""The snapshot of a cluster: everything that a round may look at, as arrays, read at one moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypedDict

import numpy as np
import sqlalchemy as sa

from tessera.db.copy import read_columns, wire_types
from tessera.db.decayed_use import load_uses
from tessera.db.rows import RUN_S, SERVICE_GPU_S, json_rows, named_subqueries
from tessera.db.runnable_plans import TECHNIQUES_MASK, load_refused_plans
from tessera.db.tables import LIVE
from tessera.formulation.decayed_use import NO_USES
from tessera.formulation.demand import NOT_STATED
from tessera.formulation.dependencies import CONDITIONS, Condition
from tessera.formulation.errors import NotFound
from tessera.formulation.network.facts import StandingNetworkPlan, TrafficMeasurements, Traffics
from tessera.formulation.network.traffic import intern_traffic
from tessera.formulation.permissions import (
    NO_SELECTORS,
    NO_UNMATCHED_NODES,
    AllowedTypes,
    Selectors,
    UnmatchedNodes,
    tabulate_selectors,
)
from tessera.formulation.reasons import ReasonCode
from tessera.formulation.reserved import Entitlements, Reservations, ReservedNodes
from tessera.formulation.runtimes import RESTRICTED_RUNTIMES
from tessera.formulation.snapshot import (
    STATES,
    Allocations,
    Avoids,
    Dependencies,
    Estimates,
    Jobs,
    Legs,
    Nodes,
    Prices,
    Quotas,
    Snapshot,
    Tenants,
)
from tessera.formulation.tables import Bools, Ints
from tessera.formulation.topologies.described import DescribedTopology, decode_topology
from tessera.formulation.values import GpuType, Hold, Workload

_SERVED = f"""
reservations r CROSS JOIN LATERAL (
    WITH RECURSIVE below AS (
        SELECT n.id, n.name FROM tenants n WHERE n.cluster_id = r.cluster_id AND n.name = r.tenant
        UNION SELECT n.id, n.name FROM tenants n JOIN below b ON n.parent_id = b.id
    ) SELECT array_agg(b.name) AS names FROM below b
) served JOIN jobs j ON j.cluster_id = r.cluster_id
WHERE r.cluster_id = c.id AND r.end_at > now() AND j.{LIVE} AND NOT r.maintenance
    AND CASE r.tenant WHEN '' THEN j.labels->>r.label_key = r.label_value
        ELSE j.tenant = r.tenant OR j.tenant = ANY(served.names) END
"""  # noqa: S608 - a constant of db
"""The jobs that reservations serve. Those of a tenant serve the tenants below it, too."""

_TABLES = {
    "gpu_types": json_rows(
        "t.id, t.name, t.memory_bytes, t.dollars_per_hour, t.watts",
        "gpu_types t WHERE t.cluster_id = c.id",
        "t.ordinal",
    ),
    "workloads": json_rows(
        "w.id, w.model, w.params, w.global_batch,"
        f" coalesce(w.waits_for->>'code' = '{ReasonCode.NO_ESTIMATE}', false)",
        "workloads w WHERE w.cluster_id = c.id",
        "w.model, w.params, w.global_batch",
    ),
    "plans": json_rows("p.id, p.name", "plans p WHERE p.cluster_id = c.id", "p.name"),
    "nodes": json_rows(
        "n.id, n.name, n.gpu_type_id, n.gpus, n.rack, n.version, NOT n.draining AND coalesce("
        "extract(epoch FROM now() - a.heard_at)::float8 <= :silence_s, false),"
        f" coalesce(n.cpus, n.found_cpus, {NOT_STATED}),"
        f" coalesce(n.host_bytes, n.found_host_bytes, {NOT_STATED}), n.agent_labels || n.labels",
        "nodes n LEFT JOIN agents a ON a.id = n.agent_id WHERE n.cluster_id = c.id",
        "n.name",
    ),
    "job_names": json_rows(
        "j.name, j.tenant", f"jobs j WHERE j.cluster_id = c.id AND j.{LIVE}", "j.id"
    ),
    "tenants": json_rows(
        "n.id, n.name, n.weight, n.borrow_gpus, n.lends, coalesce(n.parent_id, 0)",
        "tenants n WHERE n.cluster_id = c.id",
        "n.name",
    ),
    "quotas": json_rows(
        "q.tenant_id, coalesce(q.gpu_type_id, 0), q.gpus",
        "quotas q JOIN tenants n ON n.id = q.tenant_id"
        " LEFT JOIN gpu_types t ON t.id = q.gpu_type_id WHERE n.cluster_id = c.id",
        "n.name, t.ordinal NULLS FIRST",
    ),
    "avoids": json_rows(
        "v.job_id, v.node_id",
        "job_avoids v JOIN jobs j ON j.id = v.job_id JOIN nodes n ON n.id = v.node_id"
        f" WHERE j.cluster_id = c.id AND j.{LIVE}",
        "j.id, n.name",
    ),
    "dependencies": json_rows(
        "d.job_id, d.on_job_id, d.condition",
        "jobs j JOIN job_dependencies d ON d.job_id = j.id"
        f" WHERE j.cluster_id = c.id AND j.{LIVE} AND j.unmet > 0 AND NOT d.met"
        " AND d.on_job_id IS NOT NULL",
        "j.id, d.position",
    ),
    "allowed_types": json_rows(
        "j.id, t.id",
        "jobs j CROSS JOIN LATERAL jsonb_array_elements_text(j.allowed_types) AS a(name)"
        " JOIN gpu_types t ON t.cluster_id = j.cluster_id AND t.name = a.name"
        f" WHERE j.cluster_id = c.id AND j.{LIVE} AND j.allowed_types <> '[]'",
        "j.id, t.ordinal",
    ),
    "selections": json_rows(
        "j.id, j.node_selector, j.preferred_labels",
        f"jobs j WHERE j.cluster_id = c.id AND j.{LIVE}"
        " AND (j.node_selector <> '' OR j.preferred_labels <> '')",
        "j.id",
    ),
    "reservations": json_rows(
        "r.id, r.name, extract(epoch FROM r.start_at)::float8, extract(epoch FROM r.end_at)::float8,"
        " coalesce(r.gpu_type_id, 0), r.gpus, r.maintenance",
        "reservations r WHERE r.cluster_id = c.id AND r.end_at > now()",
        "r.start_at, r.name",
    ),
    "reserved_nodes": json_rows(
        "r.id, x.node_id",
        "reservations r JOIN reservation_nodes x ON x.reservation_id = r.id"
        " JOIN nodes n ON n.id = x.node_id WHERE r.cluster_id = c.id AND r.end_at > now()",
        "r.start_at, r.name, n.name",
    ),
    "entitlements": json_rows(
        "r.id, j.id",
        _SERVED,
        "r.start_at, r.name, j.id",
    ),
    "prices": json_rows(
        "p.key, greatest(p.value::float8, 0)",
        "rounds r CROSS JOIN LATERAL jsonb_each(r.summary->'prices') AS p"
        " WHERE r.cluster_id = c.id AND r.number = c.decided_round"
        " AND jsonb_typeof(p.value) = 'number'",
        'p.key COLLATE "C"',
    ),
}
"""The small tables of a cluster (c). One statement reads them, because each statement is a wait for
the database.
"""

_CLUSTER = sa.text(f"""
SELECT c.id, c.epoch, c.last_round, c.decided_round, extract(epoch FROM now())::float8 AS now_s,
    (SELECT n.topology FROM networks n WHERE n.cluster_id = c.id) AS topology,
    {named_subqueries(_TABLES)}
FROM clusters c WHERE c.name = :name
""")  # noqa: S608 - constants of db


def _case(column: str, codes: dict[str, int]) -> str:
    cases = " ".join(f"WHEN '{name}' THEN {code}" for name, code in codes.items())
    return f"CASE {column} {cases} END::int8"


_JOB_EXPRESSIONS = {
    "state": _case("j.state", {s.value: i for i, s in enumerate(STATES)}),
    "workload": "j.workload_id",
    "iterations": "j.iterations::float8",
    "iterations_left": "greatest(j.iterations - j.iterations_done, 0)::float8",
    "requested_type": "coalesce(t.id, 0)",
    "submit_s": "date_part('epoch', j.created_at)",
    "queued_s": "date_part('epoch', j.queued_at)",
    "since_s": "coalesce(date_part('epoch', j.since_at), 0)",
    "service_gpu_s": SERVICE_GPU_S,
    "run_left_s": f"greatest(j.longest_run_s - ({RUN_S}), 0)",
    "current_type": "coalesce(j.cell_type_id, 0)",
    "current_gpus": "coalesce(j.cell_gpus, 0)",
    "current_degree": "coalesce(j.cell_degree, 0)",
    "current_plan": "coalesce(j.cell_plan_id, 0)",
    "current_cpus": f"CASE WHEN j.cell_gpus IS NULL THEN {NOT_STATED} ELSE j.cell_cpus END",
    "current_host_bytes": f"CASE WHEN j.cell_gpus IS NULL THEN {NOT_STATED} ELSE j.cell_host_bytes END",
    "stated_plan": "coalesce(j.stated_plan_id, 0)",
    "submitted_plan": "coalesce(j.submitted_plan_id, 0)",
    "techniques": TECHNIQUES_MASK,
    "runtime": "coalesce("
    + _case("j.runtime", {name: code for code, name in enumerate(RESTRICTED_RUNTIMES)})
    + ", -1)",
    "array": "CASE WHEN g.running_limit > 0 THEN g.id ELSE -1 END",
    "array_limit": "coalesce(g.running_limit, 0)",
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
FROM jobs j LEFT JOIN gpu_types t ON t.cluster_id = j.cluster_id AND t.name = j.requested_type
LEFT JOIN trainings tr ON tr.job_id = j.id LEFT JOIN job_arrays g ON g.id = j.array_id
WHERE j.cluster_id = {{cluster}} AND j.{LIVE} ORDER BY j.id
"""  # noqa: S608 - constants only

_ESTIMATES = f"""
SELECT e.workload_id, e.gpu_type_id, e.gpus, e.nodes, e.pipeline_degree, e.plan_id, e.iter_time_s,
    e.source, coalesce(e.sd, 'NaN'), e.complete, e.cpus, e.host_bytes
FROM estimates e JOIN workloads w ON w.id = e.workload_id WHERE w.cluster_id = {{cluster}}
    AND EXISTS (SELECT FROM jobs j WHERE j.workload_id = w.id AND j.{LIVE})
"""  # noqa: S608 - constants only

_ALLOCATIONS = f"""
SELECT l.job_id, l.node_id, l.gpu, {_case("l.hold", {h.name.lower(): int(h) for h in Hold})},
    l.generation
FROM allocations l JOIN nodes n ON n.id = l.node_id
WHERE n.cluster_id = {{cluster}} ORDER BY n.name, l.gpu, 4, l.job_id, l.generation
"""  # noqa: S608 - constants only


_LEGS = f"""
SELECT j.id, (l.leg->>'start_s')::float8, (l.leg->>'end_s')::float8, t.id,
    (l.leg->>'gpus')::int8, (l.leg->>'pipeline_degree')::int8, p.id
FROM jobs j CROSS JOIN LATERAL jsonb_array_elements(j.certificate) WITH ORDINALITY AS l(leg, place)
JOIN gpu_types t ON t.cluster_id = j.cluster_id AND t.name = l.leg->>'gpu_type'
JOIN plans p ON p.cluster_id = j.cluster_id AND p.name = l.leg->>'plan'
WHERE j.cluster_id = {{cluster}} AND j.{LIVE} AND j.admitted ORDER BY j.id, l.place
"""  # noqa: S608 - constants only

_TRAFFIC = sa.text(f"""
SELECT e.workload_id AS workload, e.gpu_type_id AS gpu_type, e.gpus, e.nodes, e.pipeline_degree,
    e.plan_id AS plan, e.traffic AS document
FROM estimates e JOIN workloads w ON w.id = e.workload_id WHERE w.cluster_id = :cluster
    AND e.traffic <> '' AND EXISTS (SELECT FROM jobs j WHERE j.workload_id = w.id AND j.{LIVE})
""")  # noqa: S608 - constants only

_STANDING = """
SELECT s.job_id, s.generation, s.rank, s.level, s.tag
FROM standings s JOIN jobs j ON j.id = s.job_id
WHERE j.cluster_id = {cluster} ORDER BY j.id
"""

_MEASURED = f"""
SELECT m.job_id, m.generation, m.node_id, m.period_s, m.sent_bytes, m.unhindered
FROM measured_traffic m JOIN jobs j ON j.id = m.job_id AND j.generation = m.generation
JOIN nodes n ON n.id = m.node_id
WHERE j.cluster_id = {{cluster}} AND j.{LIVE} ORDER BY j.id, n.name
"""  # noqa: S608 - constants only


def load_snapshot(
    connection: sa.Connection, name: str, silence_s: float, use_half_life_s: float = 0.0
) -> Snapshot:
    """Return the cluster's snapshot.

    Nodes that were not heard for ``silence_s`` are not schedulable. The use of tenants decays by
    ``use_half_life_s``, and is not read if that is 0. The keys of rows never appear in it: the same
    content gives the same snapshot in any database.

    Raises:
        NotFound: the cluster.
    """
    values = {"name": name, "silence_s": silence_s}
    cluster = connection.execute(_CLUSTER, values).one_or_none()
    if cluster is None:
        raise NotFound(f"clusters/{name}")
    # Map the keys of rows to positions in the snapshot.
    type_at, workload_at, plan_at, node_at = (
        _Index([row[0] for row in rows])
        for rows in (cluster.gpu_types, cluster.workloads, cluster.plans, cluster.nodes)
    )
    jobs, techniques, job_at = _jobs(connection, cluster, type_at, workload_at, plan_at)
    estimates = _estimates(connection, cluster.id, type_at, workload_at, plan_at)
    plans = tuple(name for _, name in cluster.plans)
    if "" in plans:  # the plan by which jobs without estimates run
        jobs = replace(jobs, unestimated=_unestimated(cluster.workloads, jobs, estimates))
    jobs, runtimes, refused = load_refused_plans(
        connection, cluster.id, jobs, techniques, estimates, plans
    )
    a = read_columns(connection, _ALLOCATIONS.format(cluster=cluster.id), wire_types(Allocations))
    tenants, quotas = _tenants(cluster.tenants, cluster.quotas, type_at)
    avoiding, avoided = np.array(cluster.avoids, np.int64).reshape(-1, 2).T
    allowing, allowed = np.array(cluster.allowed_types, np.int64).reshape(-1, 2).T
    jobs, selectors, unmatched = _with_selectors(jobs, job_at, cluster)
    legs = read_columns(connection, _LEGS.format(cluster=cluster.id), wire_types(Legs))
    legs |= {
        "job": job_at.of(legs["job"]),
        "gpu_type": type_at.of(legs["gpu_type"]),
        "plan": plan_at.of(legs["plan"]),
    }
    uses = NO_USES
    if use_half_life_s > 0:
        names = [row[1] for row in cluster.gpu_types]
        uses = load_uses(connection, cluster.id, names, use_half_life_s)
    return Snapshot(
        cluster=name,
        epoch=cluster.epoch,
        round_number=cluster.last_round + 1,
        now_s=cluster.now_s,
        gpu_types=tuple(
            GpuType(
                name=name, memory_bytes=memory, dollars_per_hour=float(dollars), watts=float(watts)
            )
            for _, name, memory, dollars, watts in cluster.gpu_types
        ),
        nodes=_nodes(cluster.nodes, type_at),
        workloads=tuple(
            Workload(model=model, params=params, global_batch=batch)
            for _, model, params, batch, _ in cluster.workloads
        ),
        plans=plans,
        estimates=estimates,
        jobs=jobs,
        allocations=Allocations(
            job=job_at.of(a["job"]),
            node=node_at.of(a["node"]),
            gpu=a["gpu"],
            hold=a["hold"],
            generation=a["generation"],
        ),
        tenants=tenants,
        quotas=quotas,
        avoids=Avoids(job=job_at.of(avoiding), node=node_at.of(avoided)),
        allowed_types=AllowedTypes(job=job_at.of(allowing), gpu_type=type_at.of(allowed)),
        selectors=selectors,
        unmatched_nodes=unmatched,
        legs=Legs(**legs),
        **_reservations(cluster, type_at, node_at, job_at),
        prices=Prices(
            name=tuple(key for key, _ in cluster.prices),
            price=np.array([price for _, price in cluster.prices], np.float64),
        ),
        runtimes=runtimes,
        refused_plans=refused,
        uses=uses,
        use_half_life_s=use_half_life_s,
        dependencies=_dependencies(cluster.dependencies, job_at),
        **_network(connection, cluster, (job_at, workload_at, type_at, plan_at, node_at)),
    )


class _ReservationFacts(TypedDict):
    reservations: Reservations
    reserved_nodes: ReservedNodes
    entitlements: Entitlements


def _reservations(
    row: sa.Row[Any], type_at: _Index, node_at: _Index, job_at: _Index
) -> _ReservationFacts:
    """Return the snapshot's facts about reservations."""
    keys, names, start_s, end_s, types, gpus, maintenance = (
        list(zip(*row.reservations, strict=True)) or [()] * 7
    )
    at = _Index(keys)
    (of_nodes, nodes), (of_jobs, jobs) = (
        np.array(pairs, np.int64).reshape(-1, 2).T
        for pairs in (row.reserved_nodes, row.entitlements)
    )
    return {
        "reservations": Reservations(
            name=tuple(names),
            start_s=np.array(start_s, np.float64),
            end_s=np.array(end_s, np.float64),
            gpu_type=type_at.of(np.array(types, np.int64)),
            gpus=np.array(gpus, np.int64),
            maintenance=np.array(maintenance, np.bool_),
        ),
        "reserved_nodes": ReservedNodes(reservation=at.of(of_nodes), node=node_at.of(nodes)),
        "entitlements": Entitlements(reservation=at.of(of_jobs), job=job_at.of(jobs)),
    }


class _NetworkFacts(TypedDict, total=False):
    topology: DescribedTopology
    traffic: Traffics
    standing: StandingNetworkPlan
    measured: TrafficMeasurements


def _network(
    connection: sa.Connection,
    row: sa.Row[Any],
    at: tuple[_Index, _Index, _Index, _Index, _Index],
) -> _NetworkFacts:
    """Return the snapshot's facts about the network, or nothing if no network is described."""
    if row.topology is None:
        return {}
    cluster = row.id
    job_at, workload_at, type_at, plan_at, node_at = at
    rows = connection.execute(_TRAFFIC, {"cluster": cluster}).all()
    columns = list(zip(*rows, strict=True)) if rows else [()] * 7
    keys = [np.array(column, np.int64) for column in columns[:-1]]
    keys[0], keys[1], keys[5] = workload_at.of(keys[0]), type_at.of(keys[1]), plan_at.of(keys[5])
    # The same order as that of the estimates. The last key counts first.
    order = np.lexsort([keys[k] for k in (3, 5, 4, 2, 1, 0)])
    workload, gpu_type, gpus, nodes, degree, plan = (key[order] for key in keys)
    s = read_columns(connection, _STANDING.format(cluster=cluster), wire_types(StandingNetworkPlan))
    m = read_columns(connection, _MEASURED.format(cluster=cluster), wire_types(TrafficMeasurements))
    m |= {"job": job_at.of(m["job"]), "node": node_at.of(m["node"])}
    return {
        "topology": decode_topology(row.topology),
        "traffic": Traffics(
            workload=workload,
            gpu_type=gpu_type,
            gpus=gpus,
            nodes=nodes,
            pipeline_degree=degree,
            plan=plan,
            document=tuple(intern_traffic(columns[-1][k]) for k in order.tolist()),
        ),
        "standing": StandingNetworkPlan(
            job=job_at.of(s["job"]),
            generation=s["generation"],
            rank=s["rank"],
            level=s["level"],
            tag=s["tag"],
        ),
        "measured": TrafficMeasurements(**m),
    }


class _Index:
    """A map from keys of rows to positions in the snapshot."""

    def __init__(self, keys: Sequence[int] | Ints) -> None:
        found = np.asarray(keys, dtype=np.int64)
        self._order = np.argsort(found)
        self._sorted = found[self._order]

    def of(self, keys: Ints, absent: int = -1) -> Ints:
        """Return the position of each key, int64[keys], or ``absent`` for an unknown key."""
        if not len(self._sorted):
            return np.full(len(keys), absent, np.int64)
        at = np.minimum(np.searchsorted(self._sorted, keys), len(self._sorted) - 1)
        return np.where(self._sorted[at] == keys, self._order[at], absent).astype(np.int64)


def _nodes(rows: Sequence[Sequence[Any]], type_at: _Index) -> Nodes:
    _, names, types, gpus, racks, versions, schedulable, cpus, host_bytes, _ = (
        list(zip(*rows, strict=True)) or [()] * 10
    )
    return Nodes(
        name=tuple(names),
        gpu_type=type_at.of(np.array(types, np.int64)),
        gpus=np.array(gpus, np.int64),
        rack=tuple(racks),
        schedulable=np.array(schedulable, np.bool_),
        version=np.array(versions, np.int64),
        cpus=np.array(cpus, np.int64),
        host_bytes=np.array(host_bytes, np.int64),
    )


def _jobs(
    connection: sa.Connection,
    cluster: sa.Row[Any],
    type_at: _Index,
    workload_at: _Index,
    plan_at: _Index,
) -> tuple[Jobs, Ints, _Index]:
    """Return the jobs, their techniques as ``TECHNIQUES_MASK`` has them, and the index of their keys."""
    names, tenants = list(zip(*cluster.job_names, strict=True)) or [()] * 2
    j = read_columns(connection, _JOBS.format(cluster=cluster.id), _JOB_COLUMNS)
    keys, techniques = _Index(j.pop("id")), j.pop("techniques")
    for kind in ("requested_type", "current_type"):
        j[kind] = type_at.of(j[kind])
    j["workload"] = workload_at.of(j["workload"])
    j["current_plan"] = plan_at.of(j["current_plan"], absent=0)
    for kind in ("stated_plan", "submitted_plan"):
        j[kind] = plan_at.of(j[kind])
    limited = j["array"] >= 0
    j["array"][limited] = np.unique(j["array"][limited], return_inverse=True)[1]
    return Jobs(name=names, tenant=tenants, **j), techniques, keys


def _dependencies(rows: Sequence[tuple[int, int, str]], job_at: _Index) -> Dependencies:
    jobs, others, conditions = list(zip(*rows, strict=True)) or [()] * 3
    codes = [CONDITIONS.index(Condition(condition)) for condition in conditions]
    return Dependencies(
        job=job_at.of(np.array(jobs, np.int64)),
        on=job_at.of(np.array(others, np.int64)),
        condition=np.array(codes, np.int64),
    )


def _with_selectors(
    jobs: Jobs, job_at: _Index, cluster: sa.Row[Any]
) -> tuple[Jobs, Selectors, UnmatchedNodes]:
    """Return the jobs with their selectors, and the nodes that do not match these."""
    if not cluster.selections:
        return jobs, NO_SELECTORS, NO_UNMATCHED_NODES
    keys, required, preferred = zip(*cluster.selections, strict=True)
    labels = [row[-1] for row in cluster.nodes]
    selectors, unmatched, stated = tabulate_selectors(required, preferred, labels)
    at, columns = job_at.of(np.array(keys, np.int64)), dict[str, Any]()
    for name, indices in stated.items():
        columns[name] = np.array(getattr(jobs, name))
        columns[name][at] = indices
    return replace(jobs, **columns), selectors, unmatched


def _unestimated(workloads: Sequence[Sequence[Any]], jobs: Jobs, estimates: Estimates) -> Bools:
    """Return whether each job's workload has no estimates, and none can be derived, bool[jobs]."""
    underivable = np.array([row[-1] for row in workloads], dtype=np.bool_)
    underivable[estimates.workload] = False
    return underivable[jobs.workload] if len(jobs) else np.zeros(0, np.bool_)


def _tenants(
    tenants: Sequence[Sequence[Any]], quotas: Sequence[Sequence[int]], type_at: _Index
) -> tuple[Tenants, Quotas]:
    keys, names, weights, borrow_gpus, lends, parents = list(zip(*tenants, strict=True)) or [()] * 6
    of_tenants, of_types, gpus = np.array(quotas, np.int64).reshape(-1, 3).T
    return Tenants(
        name=tuple(names),
        weight=np.array(weights, np.float64),
        borrow_gpus=np.array(borrow_gpus, np.int64),
        lends=np.array(lends, np.bool_),
        parent=_Index(keys).of(np.array(parents, np.int64)),
    ), Quotas(
        tenant=_Index(keys).of(of_tenants),
        gpu_type=type_at.of(of_types),
        gpus=np.ascontiguousarray(gpus),
    )


def _estimates(
    connection: sa.Connection, cluster: int, type_at: _Index, workload_at: _Index, plan_at: _Index
) -> Estimates:
    e = read_columns(connection, _ESTIMATES.format(cluster=cluster), wire_types(Estimates))
    e["workload"], e["gpu_type"] = workload_at.of(e["workload"]), type_at.of(e["gpu_type"])
    e["plan"] = plan_at.of(e["plan"])
    keys = ("nodes", "plan", "pipeline_degree", "gpus", "gpu_type", "workload")
    order = np.lexsort([e[key] for key in keys])  # the last key counts first
    return Estimates(**{name: column[order] for name, column in e.items()})
