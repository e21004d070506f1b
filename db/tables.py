"""The tables, with constraints and triggers that make the database refuse invalid states."""

from __future__ import annotations

from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, BYTEA, DOUBLE_PRECISION, JSONB, TIMESTAMP

from tessera.formulation.lifecycle import ACTIVE, LEAVING, JobState, successors
from tessera.formulation.values import Hold

NAMING = {
    "pk": "pk_%(table_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
}

metadata = sa.MetaData(naming_convention=NAMING)

Name = sa.Text(collation="C")  # sorts as Python sorts
Moment = TIMESTAMP(timezone=True)


def _key() -> sa.Column[int]:
    return sa.Column("id", sa.BigInteger, sa.Identity(always=True), primary_key=True)


def _ref(
    name: str,
    target: str,
    *,
    nullable: bool = False,
    ondelete: str | None = None,
    primary_key: bool = False,
) -> sa.Column[int]:
    key = sa.ForeignKey(target, ondelete=ondelete)
    return sa.Column(name, sa.BigInteger, key, nullable=nullable, primary_key=primary_key)


def _count(name: str, default: int | None = 0) -> sa.Column[int]:
    default_sql = None if default is None else sa.text(str(default))
    return sa.Column(name, sa.BigInteger, nullable=False, server_default=default_sql)


def _real(name: str, *, nullable: bool = False, default: str | None = None) -> sa.Column[float]:
    default_sql = None if default is None else sa.text(default)
    return sa.Column(name, DOUBLE_PRECISION, nullable=nullable, server_default=default_sql)


def _flag(name: str, *, default: bool = False) -> sa.Column[bool]:
    default_sql = sa.true() if default else sa.false()
    return sa.Column(name, sa.Boolean, nullable=False, server_default=default_sql)


def _text(name: str, *, default: str | None = None, primary_key: bool = False) -> sa.Column[str]:
    default_sql = None if default is None else sa.text(f"'{default}'")
    return sa.Column(
        name, Name, nullable=False, server_default=default_sql, primary_key=primary_key
    )


def _moment(name: str, *, nullable: bool = False) -> sa.Column[datetime]:
    default_sql = None if nullable else sa.text("now()")
    return sa.Column(name, Moment, nullable=nullable, server_default=default_sql)


def one_of(values: list[str]) -> str:
    """Return the values as an SQL list of literals."""
    return "(" + ", ".join(f"'{value}'" for value in values) + ")"


clusters = sa.Table(
    "clusters",
    metadata,
    _key(),
    _text("name"),
    _count("version", 1),
    _count("epoch", 0),
    _count("revision", 0),  # of the desired state
    _count("last_round", 0),
    _count("decided_round", 0),  # the last round that was not refused
    _moment("created_at"),
    _moment("deleted_at", nullable=True),  # NULL unless deleted; see tessera.db.purge
    _count("node_version", 0),  # the highest version of a deleted node
    sa.UniqueConstraint("name"),
    sa.CheckConstraint("decided_round BETWEEN 0 AND last_round", name="rounds"),
)

high_water = sa.Table(  # above the counters of all deleted clusters; at most one row
    "high_water",
    metadata,
    sa.Column("one", sa.Boolean, primary_key=True, server_default=sa.true()),
    _count("version", None),
    _count("epoch", None),
    _count("revision", None),
    sa.CheckConstraint("one", name="one"),
)

gpu_types = sa.Table(
    "gpu_types",
    metadata,
    _key(),
    _ref("cluster_id", "clusters.id"),
    _text("name"),
    _count("memory_bytes", None),
    _count("ordinal", None),
    _real("dollars_per_hour", default="0"),  # of one GPU; 0 if unknown
    _real("watts", default="0"),  # of one busy GPU; 0 if unknown
    sa.UniqueConstraint("cluster_id", "name"),
    sa.CheckConstraint("memory_bytes > 0", name="memory"),
    sa.CheckConstraint("dollars_per_hour >= 0 AND dollars_per_hour < 'Infinity'", name="dollars"),
    sa.CheckConstraint("watts >= 0 AND watts < 'Infinity'", name="watts"),
)

agents = sa.Table(
    "agents",
    metadata,
    _key(),
    _ref("cluster_id", "clusters.id"),
    _text("name"),
    _text("incarnation"),
    _moment("heard_at"),
    sa.Column("network_remarks", JSONB, server_default=sa.text("'[]'"), nullable=False),
    # names of its nodes that were deleted since this incarnation started
    sa.Column("deleted_nodes", JSONB, server_default=sa.text("'[]'"), nullable=False),
    sa.UniqueConstraint("cluster_id", "name"),
)

nodes = sa.Table(
    "nodes",
    metadata,
    _key(),
    _ref("cluster_id", "clusters.id"),
    _text("name"),
    _ref("gpu_type_id", "gpu_types.id"),
    _count("gpus", None),
    _text("rack", default=""),
    sa.Column("draining", sa.Boolean, nullable=False, server_default=sa.false()),
    _count("version", 1),
    _ref("agent_id", "agents.id", nullable=True),
    _moment("heard_at", nullable=True),  # by an agent that no longer reports this node
    _text("drain_reason", default=""),
    _text("drained_by", default=""),
    _moment("drained_at", nullable=True),
    sa.UniqueConstraint("cluster_id", "name"),
    sa.CheckConstraint("gpus BETWEEN 1 AND 64", name="gpus"),
    sa.CheckConstraint(
        "draining OR (drained_at IS NULL AND drain_reason = '' AND drained_by = '')", name="drain"
    ),
    sa.Index(None, "agent_id"),
    sa.Index(None, "gpu_type_id"),
)

gpus = sa.Table(
    "gpus",
    metadata,
    _ref("node_id", "nodes.id", primary_key=True),
    sa.Column("gpu", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.CheckConstraint("gpu >= 0", name="gpu"),
)

workloads = sa.Table(
    "workloads",
    metadata,
    _key(),
    _ref("cluster_id", "clusters.id"),
    _text("model"),
    _text("params"),
    _count("global_batch", None),
    _text("derived_from", default=""),  # digest of the inputs of its derived estimates
    sa.Column("waits_for", JSONB),  # the reason why the service has derived no estimates
    sa.UniqueConstraint("cluster_id", "model", "params", "global_batch"),
    sa.CheckConstraint("global_batch > 0", name="global_batch"),
)

plans = sa.Table(
    "plans",
    metadata,
    _key(),
    _ref("cluster_id", "clusters.id"),
    _text("name"),
    sa.UniqueConstraint("cluster_id", "name"),
)

estimates = sa.Table(
    "estimates",
    metadata,
    _key(),
    _ref("workload_id", "workloads.id"),
    _ref("gpu_type_id", "gpu_types.id"),
    _count("gpus", None),
    _count("nodes", None),
    _count("pipeline_degree", None),
    _ref("plan_id", "plans.id"),
    _real("iter_time_s"),  # infinite if it was tried and does not run
    _count("source", None),
    _text("provenance", default=""),
    _real("sd", nullable=True),  # of the logarithm of iter_time_s; NULL if unknown
    _flag("derived"),  # made by the service, which may replace it; it never replaces users' rows
    _text("traffic", default=""),  # of its plan (formulation.network); "" if unknown
    sa.UniqueConstraint(
        "workload_id",
        "gpu_type_id",
        "gpus",
        "nodes",
        "pipeline_degree",
        "plan_id",
        name="uq_estimates_shape",
    ),
    sa.CheckConstraint("gpus > 0 AND nodes BETWEEN 1 AND gpus", name="shape"),
    sa.CheckConstraint("pipeline_degree >= 0", name="pipeline_degree"),
    sa.CheckConstraint("iter_time_s > 0 AND iter_time_s <= 'Infinity'", name="iter_time"),
    sa.CheckConstraint("source BETWEEN 0 AND 2", name="source"),
    sa.CheckConstraint("sd >= 0 AND sd < 'Infinity'", name="sd"),
    sa.Index(None, "gpu_type_id"),
    sa.Index(None, "plan_id"),
)

models = sa.Table(
    "models",
    metadata,
    _key(),
    _ref("cluster_id", "clusters.id"),
    _text("model"),
    _text("params"),
    _text("architecture"),  # YAML or JSON, as the user wrote it
    sa.Column("reading", JSONB, nullable=False),  # how to read the architecture, and its training
    sa.UniqueConstraint("cluster_id", "model", "params"),
)

jobs = sa.Table(
    "jobs",
    metadata,
    _key(),  # increases in order of submission
    _ref("cluster_id", "clusters.id"),
    _text("name"),
    _ref("workload_id", "workloads.id"),
    _count("iterations", None),
    _count("requested_gpus", None),
    _text("requested_type", default=""),
    _flag("pinned_type"),
    _text("tenant", default=""),
    _count("queue", 1),
    _real("weight"),
    sa.Column("guaranteed", sa.Boolean, nullable=False),
    sa.Column("movable", sa.Boolean, nullable=False),
    _real("deadline_s"),
    _real("restart_s"),
    sa.Column("labels", JSONB, nullable=False),
    sa.Column("command", JSONB, nullable=False),
    _count("max_retries", None),
    _flag("profile"),  # whether the layers of its workload are to be measured
    _count("min_gpus", 0),  # lower bound on its GPUs; 0 if it has none
    _count("max_gpus", 0),  # upper bound on its GPUs; 0 if it has none
    _text("state", default=JobState.QUEUED.value),
    _count("version", 1),
    _count("generation", 0),
    sa.Column("iterations_done", DOUBLE_PRECISION, nullable=False, server_default=sa.text("0")),
    _count("retries", 0),
    _text("last_error", default=""),
    _moment("created_at"),
    _moment("started_at", nullable=True),
    _moment("ended_at", nullable=True),
    _moment("queued_at"),  # when it last began to wait
    _moment("since_at", nullable=True),  # when its present allocation began
    _real("service_gpu_s", default="0"),  # of earlier allocations
    _flag("admitted"),
    sa.Column("certificate", JSONB, nullable=False, server_default=sa.text("'[]'")),
    _flag("opportunistic"),
    sa.Column("rejection", JSONB),  # the round and the reason of a rejected job
    # The Cell that it runs on, and the node whose agent reports for the gang.
    _ref("cell_type_id", "gpu_types.id", nullable=True),
    sa.Column("cell_gpus", sa.BigInteger),
    sa.Column("cell_degree", sa.BigInteger),
    _ref("cell_plan_id", "plans.id", nullable=True),
    _real("cell_rate", nullable=True),
    _ref("leader_id", "nodes.id", nullable=True),
    _count("failures"),  # consecutive ones
    _moment("retry_at", nullable=True),  # it is not started again before this time
    _moment("ran_at", nullable=True),  # when its gang first reported that it runs
    sa.UniqueConstraint("cluster_id", "name"),
    sa.CheckConstraint("state IN " + one_of([s.value for s in JobState]), name="state"),
    sa.CheckConstraint("iterations > 0 AND requested_gpus > 0 AND queue > 0", name="positive"),
    sa.CheckConstraint(
        "min_gpus BETWEEN 0 AND requested_gpus AND (max_gpus = 0 OR max_gpus >= requested_gpus)",
        name="gpu_bounds",
    ),
    sa.CheckConstraint("generation >= 0 AND retries >= 0 AND max_retries >= 0", name="counts"),
    sa.CheckConstraint("iterations_done >= 0 AND iterations_done < 'Infinity'", name="progress"),
    sa.CheckConstraint("weight > 0 AND weight < 'Infinity'", name="weight"),
    sa.CheckConstraint("deadline_s > 0 AND deadline_s <= 'Infinity'", name="deadline"),
    sa.CheckConstraint("restart_s >= 0 AND restart_s < 'Infinity'", name="restart"),
    sa.CheckConstraint(
        "CASE WHEN state IN " + one_of(sorted(ACTIVE)) + " THEN"
        " num_nulls(cell_type_id, cell_gpus, cell_degree, cell_plan_id, cell_rate, leader_id) = 0"
        " ELSE num_nonnulls(cell_type_id, cell_gpus, cell_degree, cell_plan_id, cell_rate) = 0 END",
        name="cell",
    ),
    sa.CheckConstraint("NOT pinned_type OR requested_type <> ''", name="pinned_type"),
    sa.CheckConstraint(
        "(since_at IS NOT NULL) = (state IN " + one_of(sorted(ACTIVE)) + ")", name="since"
    ),
    sa.CheckConstraint("service_gpu_s >= 0 AND service_gpu_s < 'Infinity'", name="service"),
    sa.CheckConstraint(
        "jsonb_typeof(certificate) = 'array' AND (admitted OR certificate = '[]')",
        name="certificate",
    ),
    sa.CheckConstraint("rejection IS NULL OR state = 'rejected'", name="rejection"),
    sa.CheckConstraint("failures >= 0", name="back_off"),
    sa.CheckConstraint(
        "NOT opportunistic OR state IN " + one_of(sorted(ACTIVE)), name="opportunistic"
    ),
)

LIVE = "state NOT IN ('succeeded', 'failed', 'cancelled', 'rejected')"
ENDED = "ended_at IS NOT NULL"
LEAVES = "state IN " + one_of(sorted(LEAVING))
sa.Index("ix_jobs_leaving", jobs.c.cluster_id, jobs.c.id, postgresql_where=sa.text(LEAVES))
sa.Index("ix_jobs_ended_at", jobs.c.cluster_id, jobs.c.ended_at, postgresql_where=sa.text(ENDED))
sa.Index("ix_jobs_live", jobs.c.cluster_id, jobs.c.id, postgresql_where=sa.text(LIVE))

# Indexes for foreign keys that a deletion checks. Without them each deleted row reads all jobs.
sa.Index("ix_jobs_workload_id", jobs.c.workload_id)
sa.Index(
    "ix_jobs_cell_type_id",
    jobs.c.cell_type_id,
    postgresql_where=sa.text("cell_type_id IS NOT NULL"),
)
sa.Index(
    "ix_jobs_cell_plan_id",
    jobs.c.cell_plan_id,
    postgresql_where=sa.text("cell_plan_id IS NOT NULL"),
)
sa.Index("ix_jobs_leader_id", jobs.c.leader_id, postgresql_where=sa.text("leader_id IS NOT NULL"))

measurements = sa.Table(
    "measurements",
    metadata,
    _key(),
    _ref("workload_id", "workloads.id"),
    _ref("gpu_type_id", "gpu_types.id"),
    _count("gpus", None),
    _count("nodes", None),
    _count("pipeline_degree", None),
    _ref("plan_id", "plans.id"),
    _ref("job_id", "jobs.id", nullable=True, ondelete="SET NULL"),
    _count("generation", None),
    _count("skipped"),  # number of reports that were ignored as warm-up
    sa.Column("samples", ARRAY(DOUBLE_PRECISION), nullable=False, server_default=sa.text("'{}'")),
    _real("iter_time_s", nullable=True),  # the median of the samples once there are enough
    _moment("changed_at"),
    sa.UniqueConstraint("job_id", "generation"),
    sa.CheckConstraint("gpus > 0 AND nodes BETWEEN 1 AND gpus", name="shape"),
    sa.CheckConstraint("iter_time_s > 0 AND iter_time_s < 'Infinity'", name="iter_time"),
    sa.Index(None, "workload_id"),
    sa.Index(None, "gpu_type_id"),
    sa.Index(None, "plan_id"),
)

profiles = sa.Table(  # measured layers; rows are added and never changed
    "profiles",
    metadata,
    _key(),
    _ref("workload_id", "workloads.id"),
    _ref("gpu_type_id", "gpu_types.id"),
    _text("task"),  # the name of the job that measured, which may be deleted
    _text("source"),  # the step that was measured, with its arguments
    _text("kind"),
    _count("layers", None),  # number of the model's layers of this kind
    _real("samples"),
    _count("tp", None),
    _text("dtype"),
    _real("forward_s"),
    _real("backward_s"),
    _text("method"),
    _count("repeats", None),
    _real("device_s"),  # time for which the measurement held the device
    _text("device"),
    sa.Column("versions", JSONB, nullable=False),
    _text("date"),
    _moment("added_at"),
    sa.UniqueConstraint(
        "workload_id",
        "gpu_type_id",
        "task",
        "source",
        "kind",
        "samples",
        "tp",
        name="uq_profiles_layer",
    ),
    sa.CheckConstraint("layers > 0 AND tp > 0 AND repeats > 0", name="counts"),
    sa.CheckConstraint("samples > 0 AND samples < 'Infinity'", name="samples"),
    sa.CheckConstraint(
        "forward_s > 0 AND forward_s < 'Infinity' AND backward_s >= 0 AND backward_s < 'Infinity'",
        name="times",
    ),
    sa.CheckConstraint("device_s >= 0 AND device_s < 'Infinity'", name="device"),
    sa.Index(None, "gpu_type_id"),
)

job_avoids = sa.Table(
    "job_avoids",
    metadata,
    _ref("job_id", "jobs.id", ondelete="CASCADE", primary_key=True),
    _ref("node_id", "nodes.id", primary_key=True),
    sa.Index(None, "node_id"),
)

tenants = sa.Table(
    "tenants",
    metadata,
    _key(),
    _ref("cluster_id", "clusters.id"),
    _text("name"),
    _real("weight"),
    _count("borrow_gpus", -1),  # beyond its quota; -1 for any number
    _flag("lends", default=True),
    sa.UniqueConstraint("cluster_id", "name"),
    sa.CheckConstraint("weight >= 0 AND weight < 'Infinity'", name="weight"),
    sa.CheckConstraint("borrow_gpus >= -1", name="borrow"),
)

quotas = sa.Table(
    "quotas",
    metadata,
    _key(),
    _ref("tenant_id", "tenants.id", ondelete="CASCADE"),
    _ref("gpu_type_id", "gpu_types.id", nullable=True),  # NULL for any type
    _count("gpus", None),
    sa.Index("uq_quotas_tenant_id", "tenant_id", sa.text("coalesce(gpu_type_id, 0)"), unique=True),
    sa.Index(None, "gpu_type_id"),
    sa.CheckConstraint("gpus >= 0", name="gpus"),
)

job_history = sa.Table(
    "job_history",
    metadata,
    _key(),
    _ref("job_id", "jobs.id", ondelete="CASCADE"),
    _moment("at"),
    _text("event"),
    _text("state"),
    _text("detail", default=""),
    sa.Index(None, "job_id"),
)

allocations = sa.Table(
    "allocations",
    metadata,
    sa.Column("node_id", sa.BigInteger, primary_key=True),
    sa.Column("gpu", sa.BigInteger, primary_key=True),
    _ref("job_id", "jobs.id", primary_key=True),
    sa.Column("generation", sa.BigInteger, primary_key=True),
    _text("hold"),
    sa.Column("release_revision", sa.BigInteger),  # of the desired state that lacks it
    sa.ForeignKeyConstraint(["node_id", "gpu"], ["gpus.node_id", "gpus.gpu"]),
    sa.CheckConstraint("generation > 0", name="generation"),
    sa.CheckConstraint("hold IN " + one_of([h.name.lower() for h in Hold]), name="hold"),
    sa.CheckConstraint("(hold = 'releasing') = (release_revision IS NOT NULL)", name="release"),
    sa.Index(
        "uq_allocations_holder",
        "node_id",
        "gpu",
        unique=True,
        postgresql_where=sa.text("hold IN ('held', 'releasing')"),
    ),
    sa.Index(
        "uq_allocations_successor",
        "node_id",
        "gpu",
        unique=True,
        postgresql_where=sa.text("hold = 'reserved'"),
    ),
    sa.Index(None, "job_id"),
)

rounds = sa.Table(
    "rounds",
    metadata,
    _ref("cluster_id", "clusters.id", primary_key=True),
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    _count("epoch", None),
    _moment("created_at"),
    sa.Column("summary", JSONB, nullable=False),
    sa.Column("snapshot", BYTEA),  # packed by tessera.db.snapshots; NULL if no longer kept
    sa.Column("base", sa.BigInteger),  # the round that the snapshot differs from; NULL if whole
    sa.UniqueConstraint("cluster_id", "epoch"),
    sa.CheckConstraint("number > 0", name="number"),
    sa.CheckConstraint("base < number", name="base"),
)

decisions = sa.Table(  # of rounds up to revision 0005; later ones use decision_pages
    "decisions",
    metadata,
    sa.Column("cluster_id", sa.BigInteger, primary_key=True),
    sa.Column("round", sa.BigInteger, primary_key=True),
    _text("job", primary_key=True),  # by name, because the job may be deleted
    _count("ordinal", None),
    _text("kind"),
    sa.Column("allocation", JSONB),
    sa.Column("reason", JSONB),
    _real("restart_price"),
    _text("skipped", default=""),
    _flag("admitted"),
    _flag("opportunistic"),
    sa.ForeignKeyConstraint(
        ["cluster_id", "round"], ["rounds.cluster_id", "rounds.number"], ondelete="CASCADE"
    ),
)

decision_pages = sa.Table(  # decisions of a round on jobs that were submitted one after another
    "decision_pages",
    metadata,
    sa.Column("cluster_id", sa.BigInteger, primary_key=True),
    sa.Column("round", sa.BigInteger, primary_key=True),
    sa.Column("page", sa.BigInteger, primary_key=True),
    _count("first_job_id", None),  # of a job that may be deleted; 0 if all jobs of the page are
    sa.Column("document", BYTEA, nullable=False),  # packed by tessera.db.decisions
    sa.ForeignKeyConstraint(
        ["cluster_id", "round"], ["rounds.cluster_id", "rounds.number"], ondelete="CASCADE"
    ),
)

networks = sa.Table(  # one for each cluster whose network is described
    "networks",
    metadata,
    _ref("cluster_id", "clusters.id", primary_key=True),
    _text("topology"),  # tessera.formulation.topologies.document as canonical JSON
    _count("version", 1),
    _count("last_plan"),
)

network_plans = sa.Table(
    "network_plans",
    metadata,
    _ref("cluster_id", "clusters.id", primary_key=True),
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    _moment("planned_at"),
    _text("cause"),
    _count("round", None),  # the last round at that time, which may be deleted
    _count("levels", None),
    _count("changed", None),
    _real("seconds"),
    sa.Column("notes", JSONB, nullable=False, server_default=sa.text("'[]'")),
    sa.CheckConstraint("number > 0 AND levels > 0 AND changed >= 0", name="counts"),
    sa.CheckConstraint("seconds >= 0 AND seconds < 'Infinity'", name="seconds"),
)

standings = sa.Table(  # the network plan in force, by job
    "standings",
    metadata,
    _ref("job_id", "jobs.id", primary_key=True, ondelete="CASCADE"),
    _count("generation", None),  # of the allocation that the decision was made for
    _count("rank", None),
    _count("level", None),
    _count("tag", -1),
    sa.Column("document", JSONB, nullable=False),  # the rest of the decision
    sa.CheckConstraint("rank >= 0 AND level >= 0 AND tag BETWEEN -1 AND 63", name="numbers"),
)

measured_traffic = sa.Table(  # by agents, of the latest allocation that was measured on the node
    "measured_traffic",
    metadata,
    _ref("job_id", "jobs.id", primary_key=True, ondelete="CASCADE"),
    _ref("node_id", "nodes.id", primary_key=True),
    _count("generation", None),
    _real("period_s"),
    _real("sent_bytes"),  # by the node in one iteration
    _flag("unhindered"),  # whether each job that it meets had a lower priority level
    sa.CheckConstraint("period_s > 0 AND period_s < 'Infinity'", name="period"),
    sa.CheckConstraint("sent_bytes > 0 AND sent_bytes < 'Infinity'", name="sent_bytes"),
    sa.Index(None, "node_id"),
)

request_ids = sa.Table(
    "request_ids",
    metadata,
    _text("id", primary_key=True),
    _text("method"),
    _text("digest"),
    sa.Column("response", BYTEA),  # NULL only inside the transaction that stores it
    _moment("created_at"),
    sa.Index(None, "created_at"),
)

leases = sa.Table(
    "leases",
    metadata,
    _ref("cluster_id", "clusters.id", primary_key=True),
    _text("holder"),
    _moment("expires_at"),
)


def _transitions() -> str:
    pairs = [(b.value, a.value) for b, after in successors().items() for a in sorted(after)]
    return ",\n        ".join(f"('{before}', '{after}')" for before, after in pairs)


FUNCTIONS: tuple[str, ...] = (
    f"""
CREATE FUNCTION check_job_transition() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (OLD.state, NEW.state) NOT IN (
        {_transitions()}
    ) THEN
        RAISE EXCEPTION 'a job that is % cannot become %', OLD.state, NEW.state
            USING ERRCODE = 'check_violation', CONSTRAINT = 'jobs_transition';
    END IF;
    RETURN NEW;
END $$
""",
    """
CREATE FUNCTION check_job_owns_nothing() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (
        SELECT FROM allocations a JOIN jobs j ON j.id = a.job_id
        WHERE a.job_id = NEW.id AND a.hold <> 'releasing' AND j.state = NEW.state
    ) THEN
        RAISE EXCEPTION 'a job that is % cannot own GPUs', NEW.state
            USING ERRCODE = 'check_violation', CONSTRAINT = 'jobs_own_nothing';
    END IF;
    RETURN NULL;
END $$
""",
)
"""The functions of the triggers, with the states of ``tessera.formulation.lifecycle``."""

TRIGGERS: tuple[str, ...] = (
    """
CREATE TRIGGER jobs_transition BEFORE UPDATE OF state ON jobs FOR EACH ROW
WHEN (OLD.state IS DISTINCT FROM NEW.state) EXECUTE FUNCTION check_job_transition()
""",
    f"""
CREATE CONSTRAINT TRIGGER jobs_own_nothing AFTER UPDATE OF state ON jobs
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
WHEN (NEW.state NOT IN {one_of(sorted(ACTIVE))}) EXECUTE FUNCTION check_job_owns_nothing()
""",
)


@sa.event.listens_for(metadata, "after_create")
def _create_triggers(_: sa.MetaData, connection: sa.Connection, **__: object) -> None:
    for statement in (*FUNCTIONS, *TRIGGERS):
        connection.execute(sa.text(statement))
