"""Networks of clusters: their topology, the network plan in force, and earlier plans."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from tessera.db.access import audit_log
from tessera.db.base.documents import dump_json
from tessera.db.base.rows import cluster_id
from tessera.db.base.turn import Turn
from tessera.formulation.answer.network.outcome import (
    NetworkDecision,
    NetworkOutcome,
    NetworkPlanRecord,
    Route,
)
from tessera.formulation.base.errors import NotFound, RoundSuperseded, StaleEtag
from tessera.formulation.records.clusters import TopologyRecord
from tessera.formulation.records.rounds import NetworkCommit
from tessera.formulation.state.topologies.described import DescribedTopology

_NETWORK = sa.text("SELECT topology, version, last_plan FROM networks WHERE cluster_id = :cluster")

_EXISTS = sa.text("SELECT EXISTS (SELECT FROM networks WHERE cluster_id = :cluster)")

_SAME = sa.text("SELECT topology = :topology FROM networks WHERE cluster_id = :cluster")

_PUT = sa.text("""
INSERT INTO networks AS n (cluster_id, topology) VALUES (:cluster, :topology)
ON CONFLICT (cluster_id) DO UPDATE SET topology = excluded.topology, version = n.version + 1
RETURNING version
""")

_DROP = tuple(
    sa.text(statement)
    for statement in (
        "DELETE FROM standings s USING jobs j WHERE j.id = s.job_id AND j.cluster_id = :cluster",
        "DELETE FROM network_plans WHERE cluster_id = :cluster",
        "DELETE FROM networks WHERE cluster_id = :cluster",
    )
)

_NUMBER = sa.text("""
UPDATE networks SET last_plan = last_plan + 1 WHERE cluster_id = :cluster RETURNING last_plan
""")

_STANDINGS = sa.text("""
SELECT j.id, j.name, j.generation AS now, s.generation, s.rank, s.level, s.tag, s.document
FROM jobs j LEFT JOIN standings s ON s.job_id = j.id
WHERE j.cluster_id = :cluster AND (j.name = ANY(:names) OR s.job_id IS NOT NULL)
""")

_PUT_STANDINGS = sa.text("""
INSERT INTO standings (job_id, generation, rank, level, tag, document)
SELECT r.* FROM json_to_recordset(CAST(:rows AS json)) AS
    r(job bigint, generation bigint, rank bigint, level bigint, tag bigint, document jsonb)
ON CONFLICT (job_id) DO UPDATE SET generation = excluded.generation, rank = excluded.rank,
    level = excluded.level, tag = excluded.tag, document = excluded.document
""")

_FORGET = sa.text("DELETE FROM standings WHERE job_id = ANY(:jobs)")

_PUT_PLAN = sa.text("""
INSERT INTO network_plans (cluster_id, number, cause, round, levels, changed, seconds, notes)
SELECT :cluster, :number, :cause, c.last_round, :levels, :changed, :seconds, CAST(:notes AS jsonb)
FROM clusters c WHERE c.id = :cluster
""")

_PLANS = sa.text("""
SELECT number, extract(epoch FROM planned_at)::float8 AS planned_s, cause, round, levels, changed,
    seconds, notes
FROM network_plans WHERE cluster_id = :cluster AND (:before = 0 OR number < :before)
ORDER BY number DESC LIMIT :limit
""")

_EPOCH = sa.text("SELECT epoch, last_round FROM clusters WHERE id = :cluster")

_IN_FORCE = sa.text("""
SELECT j.name, s.generation, s.rank, s.level, s.tag, s.document
FROM standings s JOIN jobs j ON j.id = s.job_id AND j.generation = s.generation
WHERE j.cluster_id = :cluster AND (:job = '' OR j.name = :job) ORDER BY s.rank, j.id
""")


def load_topology(connection: sa.Connection, cluster: str) -> tuple[str, int]:
    """Return the stored document of the cluster's network, and its version. Raises NotFound."""
    found = connection.execute(_NETWORK, {"cluster": cluster_id(connection, cluster)})
    row = found.one_or_none()
    if row is None:
        raise NotFound(f"clusters/{cluster}/topology")
    return row.topology, row.version


def has_topology(connection: sa.Connection, cluster: str) -> bool:
    """Return whether the cluster's network is described. Raises NotFound (the cluster)."""
    values = {"cluster": cluster_id(connection, cluster)}
    return bool(connection.execute(_EXISTS, values).scalar())


def set_topology(
    connection: sa.Connection, cluster: str, described: DescribedTopology, version: int | None
) -> TopologyRecord:
    """Describe the cluster's network. If ``version`` is 0, there must be none yet.

    The version rises only if it changed. Raises NotFound, StaleEtag.
    """
    turn = Turn.take(connection, cluster)
    stored = connection.execute(_NETWORK, {"cluster": turn.cluster}).one_or_none()
    if version is not None and version != (stored.version if stored is not None else 0):
        now = f"is at etag {stored.version}" if stored is not None else "does not exist"
        raise StaleEtag(
            f"the topology of {cluster} {now}, not at etag {version}; read it again and retry"
        )
    if stored is not None and stored.topology == described.document:
        return TopologyRecord(described=described, version=stored.version)
    put = connection.execute(_PUT, {"cluster": turn.cluster, "topology": described.document})
    turn.changed = True
    turn.end()
    return TopologyRecord(described=described, version=put.scalar_one())


def drop_topology(
    connection: sa.Connection,
    cluster: str,
    version: int | None = None,
    *,
    allow_missing: bool = False,
) -> None:
    """Delete the network and its plans. Jobs continue unchanged.

    Raises:
        NotFound: the cluster; or its network, unless ``allow_missing``. StaleEtag.
    """
    turn = Turn.take(connection, cluster)
    stored = connection.execute(_NETWORK, {"cluster": turn.cluster}).one_or_none()
    if stored is None and allow_missing:
        return
    if stored is not None and version is not None and version != stored.version:
        raise StaleEtag(
            f"the topology of {cluster} is at etag {stored.version}, not at etag {version}; read it"
            " again and retry"
        )
    for statement in _DROP:  # the network itself is the last one
        found = connection.execute(statement, {"cluster": turn.cluster})
    if not found.rowcount:
        raise NotFound(f"clusters/{cluster}/topology")
    turn.changed = True
    turn.end()


def commit_plan(connection: sa.Connection, plan: NetworkCommit) -> NetworkPlanRecord | None:
    """Put a network plan that was made between rounds in force.

    Return None if it changes nothing. Decisions for allocations that have gone in the meantime are
    left out.

    Raises:
        RoundSuperseded: a round was committed since; its own plan stays in force.
        StaleEtag: the topology has changed since.
        NotFound: the cluster, or its network.
    """
    turn = Turn.take(connection, plan.snapshot.cluster)
    now = connection.execute(_EPOCH, {"cluster": turn.cluster}).one()
    if now.epoch != plan.snapshot.epoch:
        raise RoundSuperseded(f"clusters/{turn.name}/rounds/{now.last_round}")
    if not is_described_by(turn, plan.snapshot.topology):
        _, version = load_topology(connection, turn.name)
        raise StaleEtag(f"the topology of {turn.name} has changed to version {version}; plan again")
    number = record_plan(turn, plan.outcome, plan.cause, plan.seconds)
    turn.end()
    if number is None:
        return None
    audit_log.record_change(connection)
    return list_plans(connection, turn.name, number + 1, 1)[0]


def is_described_by(turn: Turn, described: DescribedTopology | None) -> bool:
    """Return whether the cluster's network still has this description."""
    if described is None:
        return False
    values = {"cluster": turn.cluster, "topology": described.document}
    return bool(turn.connection.execute(_SAME, values).scalar())


def record_plan(turn: Turn, outcome: NetworkOutcome, cause: str, seconds: float) -> int | None:
    """Write the standings that differ, and the network plan.

    Return the plan's number, or None if nothing differs. Decisions for allocations that have gone
    are left out, and standings without a decision are deleted. An allocation keeps the tag that it
    was given, because live connections use it. This also holds if a plan that was made in the
    meantime has another one.
    """
    connection, decided = turn.connection, {d.job: d for d in outcome.decisions}
    values = {"cluster": turn.cluster, "names": list(decided)}
    stored = connection.execute(_STANDINGS, values).mappings().all()
    rows, gone = [], []
    for row in stored:
        decision = decided.get(row["name"])
        if decision is None or decision.generation != row["now"]:
            gone += [row["id"]] if row["generation"] is not None else []
            continue
        plain = _plain(decision, outcome.levels)
        if row["generation"] == decision.generation and row["tag"] >= 0:
            plain["tag"] = row["tag"]
        if plain != {key: row[key] for key in plain}:
            rows.append({"job": row["id"], **plain})
    if not rows and not gone:
        return None
    connection.execute(_FORGET, {"jobs": gone})
    connection.execute(_PUT_STANDINGS, {"rows": dump_json(rows)})
    number = connection.execute(_NUMBER, {"cluster": turn.cluster}).scalar_one()
    connection.execute(
        _PUT_PLAN,
        {
            "cluster": turn.cluster,
            "number": number,
            "cause": cause,
            "levels": outcome.levels,
            "changed": len(rows),
            "seconds": seconds,
            "notes": dump_json(list(outcome.notes)),
        },
    )
    turn.changed = True
    return int(number)


def list_plans(
    connection: sa.Connection, cluster: str, before: int, limit: int
) -> list[NetworkPlanRecord]:
    """Return plans with a number below ``before`` (0: all) without decisions, newest first.

    Raises NotFound.
    """
    values = {"cluster": cluster_id(connection, cluster), "before": before, "limit": limit}
    return [
        NetworkPlanRecord(**{**row, "notes": tuple(row["notes"])})
        for row in connection.execute(_PLANS, values).mappings()
    ]


def plan_in_force(connection: sa.Connection, cluster: str, job: str = "") -> NetworkPlanRecord:
    """Return the network plan in force with its decisions by rank.

    If ``job`` is given, only its decisions are included.

    Raises:
        NotFound: the cluster, or there is no plan yet.
    """
    found = list_plans(connection, cluster, 0, 1)
    if not found:
        load_topology(connection, cluster)
        raise NotFound(f"clusters/{cluster}/networkPlans/-")
    values = {"cluster": cluster_id(connection, cluster), "job": job}
    rows = connection.execute(_IN_FORCE, values).mappings()
    return replace(found[0], decisions=tuple(map(decision_from, rows)))


def _plain(decision: NetworkDecision, levels: int) -> dict[str, Any]:
    """Return a decision as columns of ``standings``.

    They contain ``levels``, so every job's columns change if the number of priority levels changes.
    """
    document = {
        "priority": _number(decision.priority),
        "intensity": _number(decision.intensity),
        "contending_jobs": list(decision.contending_jobs),
        "note": decision.note,
        "levels": levels,
        "routes": [
            {"source": r.source, "target": r.target, "via": list(r.via), "sent_bytes": r.sent_bytes}
            for r in decision.routes
        ],
    }
    return {
        "generation": decision.generation,
        "rank": decision.rank,
        "level": decision.level,
        "tag": decision.tag,
        "document": document,
    }


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def decision_from(row: sa.RowMapping) -> NetworkDecision:
    """Return the decision of a row of ``standings`` with its job's name."""
    document = row["document"]
    return NetworkDecision(
        job=row["name"],
        generation=row["generation"],
        rank=row["rank"],
        level=row["level"],
        tag=row["tag"],
        priority=float(document["priority"]),
        intensity=float(document["intensity"]),
        contending_jobs=tuple(document["contending_jobs"]),
        note=document["note"],
        routes=tuple(
            Route(
                source=r["source"],
                target=r["target"],
                via=tuple(r["via"]),
                sent_bytes=r["sent_bytes"],
            )
            for r in document["routes"]
        ),
    )
