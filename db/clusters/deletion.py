"""Deletion of clusters, GPU types, nodes, Cells and models, refused while they are in use."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import sqlalchemy as sa

from tessera.db.access import enrolment
from tessera.db.base.documents import dump_json
from tessera.db.base.rows import enter_cluster
from tessera.db.base.turn import STATE_CHANNEL, Turn, request_round
from tessera.db.estimates import derived_estimates, workloads
from tessera.db.schema.tables import LIVE
from tessera.formulation.base.errors import InUse, InvalidInput, NotFound, StaleEtag, Use
from tessera.formulation.base.values import EstimateSource
from tessera.formulation.records.estimates import CellFilter

PURGE_CHANNEL = "tessera_deleted"
"""Channel that receives a notice when a cluster was deleted (see ``tessera.db.upkeep.purge``)."""

NAMED_USERS = 3
"""Number of users of a kind that an error names. It counts all of them."""

_CLUSTER = sa.text("""
SELECT id, version, epoch, revision FROM clusters WHERE name = :name FOR UPDATE
""")

# No cluster can have a name with a slash. It frees the cluster's own name, and no lookup finds the
# row.
_BURY = sa.text("""
UPDATE clusters SET name = 'deleted/' || id, deleted_at = now() WHERE id = :cluster
""")

_RAISE_HIGH_WATER = sa.text("""
INSERT INTO high_water AS h (version, epoch, revision) VALUES (:version, :epoch, :revision)
ON CONFLICT (one) DO UPDATE SET version = greatest(h.version, excluded.version),
    epoch = greatest(h.epoch, excluded.epoch), revision = greatest(h.revision, excluded.revision)
""")

_START_ABOVE = sa.text("""
UPDATE clusters c SET version = h.version, epoch = h.epoch, revision = h.revision
FROM high_water h WHERE c.id = :cluster
""")

_NOTIFY = sa.text("SELECT pg_notify(:channel, :payload)")


_NODES = sa.text("""
SELECT id, name, version FROM nodes WHERE cluster_id = :cluster AND name = ANY(:names)
""")


_OCCUPIED = sa.text("""
SELECT DISTINCT n.name FROM allocations l JOIN nodes n ON n.id = l.node_id
WHERE l.node_id = ANY(:nodes) ORDER BY n.name
""")

_KEEP_VERSION = sa.text("""
UPDATE clusters SET node_version = greatest(node_version, :version) WHERE id = :cluster
""")

_TELL_AGENTS = sa.text("""
UPDATE agents a SET deleted_nodes = a.deleted_nodes || n.names
FROM (SELECT agent_id, jsonb_agg(name ORDER BY name) AS names FROM nodes
    WHERE id = ANY(:nodes) AND agent_id IS NOT NULL GROUP BY agent_id) AS n
WHERE a.id = n.agent_id
""")

_DROP_NODES = tuple(
    sa.text(statement)
    for statement in (
        "UPDATE jobs SET leader_id = NULL WHERE leader_id = ANY(:nodes)",  # of jobs that have ended
        "UPDATE jobs j SET planned_start = NULL FROM nodes n WHERE n.id = ANY(:nodes)"
        " AND j.cluster_id = n.cluster_id AND j.planned_start IS NOT NULL"
        " AND j.planned_start->'nodes' ? n.name",
        "DELETE FROM job_avoids WHERE node_id = ANY(:nodes)",
        "DELETE FROM reservation_nodes WHERE node_id = ANY(:nodes)",
        "DELETE FROM measured_traffic WHERE node_id = ANY(:nodes)",
        "DELETE FROM gpus WHERE node_id = ANY(:nodes)",
        "DELETE FROM nodes WHERE id = ANY(:nodes)",
    )
)

_MATCHING = """
    w.cluster_id = :cluster
    AND (:model = '' OR (w.model = :model AND w.params = :params AND w.global_batch = :batch))
    AND (:gpu_type = '' OR e.gpu_type_id = (
        SELECT t.id FROM gpu_types t WHERE t.cluster_id = :cluster AND t.name = :gpu_type))
    AND (:gpus = 0 OR e.gpus = :gpus)
"""

_MATCHING_WORKLOADS = sa.text(f"""
SELECT DISTINCT w.id FROM estimates e JOIN workloads w ON w.id = e.workload_id WHERE {_MATCHING}
""")  # noqa: S608 - a constant of this module


_DROP_CELLS = sa.text(f"""
DELETE FROM estimates e USING workloads w WHERE w.id = e.workload_id AND {_MATCHING}
""")  # noqa: S608 - a constant of this module

_ESTIMATE_AGAIN = sa.text("""
UPDATE workloads SET derived_from = 'before Cells were deleted'
WHERE id = ANY(:ids) AND derived_from <> ''
""")

_MODELS = sa.text("""
SELECT m.id, m.model, m.params FROM models m
JOIN json_to_recordset(CAST(:rows AS json)) AS r(model text, params text)
    ON r.model = m.model AND r.params = m.params
WHERE m.cluster_id = :cluster
""")

_MODEL_WORKLOADS = sa.text("""
SELECT w.id FROM workloads w JOIN models m
    ON m.cluster_id = w.cluster_id AND m.model = w.model AND m.params = w.params
WHERE m.id = ANY(:models)
""")


_DROP_COMPUTED = sa.text(f"""
DELETE FROM estimates WHERE workload_id = ANY(:workloads) AND derived
    AND source > {int(EstimateSource.MEASURED)}
""")  # noqa: S608 - a constant of formulation

_DROP_MODELS = sa.text("DELETE FROM models WHERE id = ANY(:models)")


class Users:
    """A kind of users of a resource, and the query for them.

    The query returns rows of (name, at), which are shown in order of ``at``.
    """

    def __init__(self, kind: str, one: str, many: str, query: str) -> None:
        self._kind, self._one, self._many = kind, one, many
        self._query = sa.text(f"""
WITH users AS ({query}) SELECT (SELECT count(*) FROM users) AS total, (
    SELECT coalesce(json_agg(f.name ORDER BY f.at), '[]')
    FROM (SELECT name, at FROM users ORDER BY at, name LIMIT {NAMED_USERS}) AS f) AS names
""")  # noqa: S608 - constants of db

    def find(self, connection: sa.Connection, values: Mapping[str, object]) -> list[Use]:
        """Return one item that counts and names the users, or an empty list if there is no user."""
        row = connection.execute(self._query, values).one()
        if not row.total:
            return []
        names = tuple(row.names)
        return [Use(kind=self._kind, one=self._one, many=self._many, count=row.total, names=names)]


LIVE_JOBS = Users(
    "jobs",
    "live job",
    "live jobs",
    f"""
SELECT j.name, j.id AS at FROM jobs j WHERE j.cluster_id = :cluster AND j.{LIVE}
""",  # noqa: S608 - a constant of tessera.db.schema.tables
)

ENDED_JOBS_WITH_GPUS = Users(
    "ended_jobs",
    "ended job",
    "ended jobs",
    f"""
SELECT DISTINCT j.name, j.id AS at FROM jobs j JOIN allocations l ON l.job_id = j.id
WHERE j.cluster_id = :cluster AND NOT (j.{LIVE})
""",  # noqa: S608 - a constant of tessera.db.schema.tables
)

CONNECTED_AGENTS = Users(
    "agents",
    "connected agent",
    "connected agents",
    """
SELECT a.name, a.id AS at FROM agents a WHERE a.cluster_id = :cluster
    AND a.heard_at > clock_timestamp() - make_interval(secs => :silence_s)
""",
)

JOBS_ON_NODES = Users(
    "jobs",
    "job",
    "jobs",
    """
SELECT DISTINCT j.name, j.id AS at FROM allocations l JOIN jobs j ON j.id = l.job_id
WHERE l.node_id = ANY(:nodes)
""",
)

JOBS_ON_CELLS = Users(
    "jobs",
    "job",
    "jobs",
    f"""
SELECT DISTINCT j.name, j.id AS at FROM jobs j JOIN workloads w ON w.id = j.workload_id
JOIN estimates e ON e.workload_id = j.workload_id AND e.gpu_type_id = j.cell_type_id
    AND e.gpus = j.cell_gpus AND e.pipeline_degree = j.cell_degree AND e.plan_id = j.cell_plan_id
WHERE j.cluster_id = :cluster AND j.{LIVE} AND {_MATCHING}
""",  # noqa: S608 - constants
)

JOBS_OF_WORKLOADS = Users(
    "jobs",
    "live job",
    "live jobs",
    f"""
SELECT j.name, j.id AS at FROM jobs j WHERE j.workload_id = ANY(:workloads) AND j.{LIVE}
""",  # noqa: S608 - a constant of tessera.db.schema.tables
)


def start_above_deleted(connection: sa.Connection, cluster: int) -> None:
    """Start the counters of a new cluster above those of all deleted clusters.

    It may have the same name as one of them. A round that was loaded from a deleted cluster then
    fits no epoch, and an etag fits no version. An agent that ignores older desired states than it
    has seen follows the new cluster.
    """
    connection.execute(_START_ABOVE, {"cluster": cluster})


def delete_cluster(
    connection: sa.Connection, name: str, version: int | None, silence_s: float, *, force: bool
) -> None:
    """Delete a cluster. After the commit it cannot be found, and its name is free.

    Its rows are removed later, in batches (``tessera.db.upkeep.purge``). Its agents' certificates are
    revoked, and kept until they expire. An agent that was silent for ``silence_s`` seconds counts
    as disconnected.

    Raises:
        NotFound, StaleEtag.
        InUse: a job is live or has not given back its GPUs; or an agent is connected, unless
            ``force``.
    """
    row = connection.execute(_CLUSTER, {"name": name}).one_or_none()
    if row is None:
        raise NotFound(f"clusters/{name}")
    require_version(f"cluster {name}", version, row.version)
    values = {"cluster": row.id, "silence_s": silence_s}
    jobs = [
        *LIVE_JOBS.find(connection, values),
        *ENDED_JOBS_WITH_GPUS.find(connection, values),
    ]
    if jobs:
        advice = (
            "cancel live jobs with `tessera cancel`, wait until all GPUs are free, and try again"
        )
        raise InUse(f"clusters/{name}", jobs, advice)
    if not force and (agents := CONNECTED_AGENTS.find(connection, values)):
        advice = "stop them, or delete with --force (`force` in the API)"
        raise InUse(f"clusters/{name}", agents, advice)
    # New clusters count from above these numbers, because they may have the same name.
    above = {"version": row.version + 1, "epoch": row.epoch + 1, "revision": row.revision + 1}
    connection.execute(_RAISE_HIGH_WATER, above)
    connection.execute(_BURY, {"cluster": row.id})
    enrolment.revoke_certificates(connection, row.id)
    for channel in (
        STATE_CHANNEL,
        derived_estimates.ESTIMATING_CHANNEL,
    ):  # streams end, and tasks forget the cluster
        connection.execute(_NOTIFY, {"channel": channel, "payload": name})
    connection.execute(_NOTIFY, {"channel": PURGE_CHANNEL, "payload": name})


def delete_nodes(
    connection: sa.Connection,
    cluster: str,
    names: Sequence[str],
    versions: Mapping[str, int],
    *,
    allow_missing: bool,
) -> None:
    """Delete nodes, all or none. Nodes in ``versions`` must be at that version.

    An agent that runs on a deleted node is informed. It does not register the node again until it
    is restarted or a user creates the node again. The node is removed from the lists of nodes that
    jobs avoid.

    Raises:
        NotFound: the cluster, or a node unless ``allow_missing``. StaleEtag. InUse: jobs hold GPUs
            there.
    """
    turn, run = Turn.take(connection, cluster), connection.execute
    stored = {row.name: row for row in run(_NODES, {"cluster": turn.cluster, "names": list(names)})}
    missing = set(names) - stored.keys()
    if missing and not allow_missing:
        raise NotFound(f"clusters/{turn.name}/nodes/{min(missing)}")
    for name, row in stored.items():
        require_version(f"node {name}", versions.get(name), row.version)
    if not stored:
        return
    nodes = {"nodes": [row.id for row in stored.values()]}
    if uses := JOBS_ON_NODES.find(connection, nodes):
        occupied = run(_OCCUPIED, nodes).scalars().all()
        more = f" (and {len(occupied) - 1:,} more)" if len(occupied) > 1 else ""
        raise InUse(
            f"clusters/{turn.name}/nodes/{occupied[0]}{more}",
            uses,
            "drain it first and wait until the jobs have left: `tessera drain NODE --wait`",
        )
    # A node that is created again must not repeat a version, or an old etag would match it.
    highest = max(row.version for row in stored.values())
    run(_KEEP_VERSION, {"cluster": turn.cluster, "version": highest})
    run(_TELL_AGENTS, nodes)
    for statement in _DROP_NODES:
        run(statement, nodes)
    turn.changed = turn.needs_round = True
    turn.end()


def delete_cells(connection: sa.Connection, cluster: str, cells: CellFilter) -> int:
    """Delete all matching estimates; return how many.

    Measurements stay. Workloads that had estimates made by the service are estimated again.

    Raises:
        NotFound: the cluster. InvalidInput: unknown GPU type. InUse: jobs run on one of them.
    """
    key = enter_cluster(connection, cluster)
    if cells.gpu_type:
        workloads.require_types(connection, key, [cells.gpu_type])
    wanted = cells.workload
    values = {
        "cluster": key,
        "model": wanted.model if wanted else "",
        "params": wanted.params if wanted else "",
        "batch": wanted.global_batch if wanted else 0,
        "gpu_type": cells.gpu_type,
        "gpus": cells.gpus,
    }
    ids = list(connection.execute(_MATCHING_WORKLOADS, values).scalars())
    workloads.lock_workloads(connection, ids)
    if uses := JOBS_ON_CELLS.find(connection, values):
        advice = "cancel or hold the jobs that run on them, or wait until they have ended"
        raise InUse(f"a Cell of clusters/{cluster}", uses, advice)
    deleted = connection.execute(_DROP_CELLS, values).rowcount
    connection.execute(_ESTIMATE_AGAIN, {"ids": ids})
    derived_estimates.notify_estimators(connection, cluster)
    if deleted:
        request_round(connection, key, ids)
    return deleted


def delete_models(
    connection: sa.Connection,
    cluster: str,
    models: Collection[tuple[str, str]],
    *,
    allow_missing: bool,
) -> None:
    """Delete users' models, by (model, params), and the estimates that were computed from them.

    Raises:
        NotFound: the cluster, or a model unless ``allow_missing``. InUse: live jobs train one of
            them.
    """
    key = enter_cluster(connection, cluster)
    rows = [{"model": model, "params": params} for model, params in sorted(models)]
    stored = connection.execute(_MODELS, {"cluster": key, "rows": dump_json(rows)}).all()
    missing = set(models) - {(row.model, row.params) for row in stored}
    if missing and not allow_missing:
        raise NotFound(f"clusters/{cluster}/models/{'/'.join(filter(None, min(missing)))}")
    ids = {"models": [row.id for row in stored]}
    affected = {"workloads": sorted(connection.execute(_MODEL_WORKLOADS, ids).scalars())}
    workloads.lock_workloads(connection, affected["workloads"])
    if uses := JOBS_OF_WORKLOADS.find(connection, affected):
        advice = "cancel the jobs, or wait until they have ended; to change a model, add it again"
        raise InUse(f"a model of clusters/{cluster}", uses, advice)
    connection.execute(_DROP_COMPUTED, affected)
    connection.execute(_ESTIMATE_AGAIN, {"ids": affected["workloads"]})
    connection.execute(_DROP_MODELS, ids)
    derived_estimates.notify_estimators(connection, cluster)


def require_version(what: str, wanted: int | None, stored: int) -> None:
    """Raise StaleEtag unless ``wanted`` is the stored version or None."""
    if wanted is not None and wanted != stored:
        raise StaleEtag(
            f"{what} has changed since you read it (etag {wanted}, now {stored}); read it again and retry"
        )


def require_remaining(names: Collection[str], gone: Collection[str]) -> None:
    """Raise InvalidInput if no GPU type of the cluster would remain."""
    if set(names) <= set(gone):
        raise InvalidInput(
            "gpu_types", "a cluster needs at least one GPU type; delete the cluster instead"
        )
