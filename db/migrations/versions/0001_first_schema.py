"""The first schema."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

FUNCTIONS = (
    """
CREATE FUNCTION check_job_transition() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (OLD.state, NEW.state) NOT IN (
        ('queued', 'cancelled'),
        ('queued', 'held'),
        ('queued', 'rejected'),
        ('queued', 'starting'),
        ('held', 'cancelled'),
        ('held', 'queued'),
        ('starting', 'cancelling'),
        ('starting', 'failing'),
        ('starting', 'holding'),
        ('starting', 'running'),
        ('starting', 'stopping'),
        ('starting', 'succeeded'),
        ('running', 'cancelling'),
        ('running', 'failing'),
        ('running', 'holding'),
        ('running', 'starting'),
        ('running', 'stopping'),
        ('running', 'succeeded'),
        ('stopping', 'cancelling'),
        ('stopping', 'holding'),
        ('stopping', 'queued'),
        ('stopping', 'starting'),
        ('stopping', 'succeeded'),
        ('holding', 'cancelling'),
        ('holding', 'held'),
        ('holding', 'stopping'),
        ('holding', 'succeeded'),
        ('cancelling', 'cancelled'),
        ('cancelling', 'succeeded'),
        ('failing', 'failed')
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

TRIGGERS = (
    """
CREATE TRIGGER jobs_transition BEFORE UPDATE OF state ON jobs FOR EACH ROW
WHEN (OLD.state IS DISTINCT FROM NEW.state) EXECUTE FUNCTION check_job_transition()
""",
    """
CREATE CONSTRAINT TRIGGER jobs_own_nothing AFTER UPDATE OF state ON jobs
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
WHEN (NEW.state NOT IN ('running', 'starting')) EXECUTE FUNCTION check_job_owns_nothing()
""",
)


def upgrade() -> None:
    """Apply the migration."""
    op.create_table(
        "clusters",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("name", sa.Text(collation="C"), nullable=False),
        sa.Column("version", sa.BigInteger(), server_default=sa.text("1"), nullable=False),
        sa.Column("epoch", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("revision", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("last_round", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("decided_round", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column(
            "created_at",
            postgresql.TIMESTAMP(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.CheckConstraint(
            "decided_round BETWEEN 0 AND last_round", name=op.f("ck_clusters_rounds")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_clusters")),
        sa.UniqueConstraint("name", name=op.f("uq_clusters_name")),
    )
    op.create_table(
        "request_ids",
        sa.Column("id", sa.Text(collation="C"), nullable=False),
        sa.Column("method", sa.Text(collation="C"), nullable=False),
        sa.Column("digest", sa.Text(collation="C"), nullable=False),
        sa.Column("response", postgresql.BYTEA(), nullable=True),
        sa.Column(
            "created_at",
            postgresql.TIMESTAMP(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_request_ids")),
    )
    op.create_index(op.f("ix_request_ids_created_at"), "request_ids", ["created_at"], unique=False)
    op.create_table(
        "agents",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("cluster_id", sa.BigInteger(), nullable=False),
        sa.Column("name", sa.Text(collation="C"), nullable=False),
        sa.Column("incarnation", sa.Text(collation="C"), nullable=False),
        sa.Column(
            "heard_at",
            postgresql.TIMESTAMP(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.ForeignKeyConstraint(["cluster_id"], ["clusters.id"], name=op.f("fk_agents_cluster_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_agents")),
        sa.UniqueConstraint("cluster_id", "name", name=op.f("uq_agents_cluster_id_name")),
    )
    op.create_table(
        "gpu_types",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("cluster_id", sa.BigInteger(), nullable=False),
        sa.Column("name", sa.Text(collation="C"), nullable=False),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("ordinal", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("memory_bytes > 0", name=op.f("ck_gpu_types_memory")),
        sa.ForeignKeyConstraint(
            ["cluster_id"], ["clusters.id"], name=op.f("fk_gpu_types_cluster_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_gpu_types")),
        sa.UniqueConstraint("cluster_id", "name", name=op.f("uq_gpu_types_cluster_id_name")),
    )
    op.create_table(
        "leases",
        sa.Column("cluster_id", sa.BigInteger(), nullable=False),
        sa.Column("holder", sa.Text(collation="C"), nullable=False),
        sa.Column(
            "expires_at",
            postgresql.TIMESTAMP(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.ForeignKeyConstraint(["cluster_id"], ["clusters.id"], name=op.f("fk_leases_cluster_id")),
        sa.PrimaryKeyConstraint("cluster_id", name=op.f("pk_leases")),
    )
    op.create_table(
        "plans",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("cluster_id", sa.BigInteger(), nullable=False),
        sa.Column("name", sa.Text(collation="C"), nullable=False),
        sa.ForeignKeyConstraint(["cluster_id"], ["clusters.id"], name=op.f("fk_plans_cluster_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_plans")),
        sa.UniqueConstraint("cluster_id", "name", name=op.f("uq_plans_cluster_id_name")),
    )
    op.create_table(
        "rounds",
        sa.Column("cluster_id", sa.BigInteger(), nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column(
            "created_at",
            postgresql.TIMESTAMP(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("summary", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("snapshot", postgresql.BYTEA(), nullable=False),
        sa.CheckConstraint("number > 0", name=op.f("ck_rounds_number")),
        sa.ForeignKeyConstraint(["cluster_id"], ["clusters.id"], name=op.f("fk_rounds_cluster_id")),
        sa.PrimaryKeyConstraint("cluster_id", "number", name=op.f("pk_rounds")),
        sa.UniqueConstraint("cluster_id", "epoch", name=op.f("uq_rounds_cluster_id_epoch")),
    )
    op.create_table(
        "workloads",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("cluster_id", sa.BigInteger(), nullable=False),
        sa.Column("model", sa.Text(collation="C"), nullable=False),
        sa.Column("params", sa.Text(collation="C"), nullable=False),
        sa.Column("global_batch", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("global_batch > 0", name=op.f("ck_workloads_global_batch")),
        sa.ForeignKeyConstraint(
            ["cluster_id"], ["clusters.id"], name=op.f("fk_workloads_cluster_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_workloads")),
        sa.UniqueConstraint(
            "cluster_id",
            "model",
            "params",
            "global_batch",
            name=op.f("uq_workloads_cluster_id_model_params_global_batch"),
        ),
    )
    op.create_table(
        "decisions",
        sa.Column("cluster_id", sa.BigInteger(), nullable=False),
        sa.Column("round", sa.BigInteger(), nullable=False),
        sa.Column("job", sa.Text(collation="C"), nullable=False),
        sa.Column("ordinal", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.Text(collation="C"), nullable=False),
        sa.Column("allocation", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("reason", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("restart_price", sa.DOUBLE_PRECISION(), nullable=False),
        sa.Column("skipped", sa.Text(collation="C"), server_default=sa.text("''"), nullable=False),
        sa.ForeignKeyConstraint(
            ["cluster_id", "round"],
            ["rounds.cluster_id", "rounds.number"],
            name=op.f("fk_decisions_cluster_id_round"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("cluster_id", "round", "job", name=op.f("pk_decisions")),
    )
    op.create_table(
        "estimates",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("workload_id", sa.BigInteger(), nullable=False),
        sa.Column("gpu_type_id", sa.BigInteger(), nullable=False),
        sa.Column("gpus", sa.BigInteger(), nullable=False),
        sa.Column("nodes", sa.BigInteger(), nullable=False),
        sa.Column("pipeline_degree", sa.BigInteger(), nullable=False),
        sa.Column("plan_id", sa.BigInteger(), nullable=False),
        sa.Column("iter_time_s", sa.DOUBLE_PRECISION(), nullable=False),
        sa.Column("source", sa.BigInteger(), nullable=False),
        sa.Column(
            "provenance", sa.Text(collation="C"), server_default=sa.text("''"), nullable=False
        ),
        sa.CheckConstraint(
            "iter_time_s > 0 AND iter_time_s <= 'Infinity'", name=op.f("ck_estimates_iter_time")
        ),
        sa.CheckConstraint(
            "gpus > 0 AND nodes BETWEEN 1 AND gpus", name=op.f("ck_estimates_shape")
        ),
        sa.CheckConstraint("pipeline_degree >= 0", name=op.f("ck_estimates_pipeline_degree")),
        sa.CheckConstraint("source BETWEEN 0 AND 2", name=op.f("ck_estimates_source")),
        sa.ForeignKeyConstraint(
            ["gpu_type_id"], ["gpu_types.id"], name=op.f("fk_estimates_gpu_type_id")
        ),
        sa.ForeignKeyConstraint(["plan_id"], ["plans.id"], name=op.f("fk_estimates_plan_id")),
        sa.ForeignKeyConstraint(
            ["workload_id"], ["workloads.id"], name=op.f("fk_estimates_workload_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_estimates")),
        sa.UniqueConstraint(
            "workload_id",
            "gpu_type_id",
            "gpus",
            "nodes",
            "pipeline_degree",
            "plan_id",
            name="uq_estimates_shape",
        ),
    )
    op.create_index(op.f("ix_estimates_gpu_type_id"), "estimates", ["gpu_type_id"], unique=False)
    op.create_table(
        "nodes",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("cluster_id", sa.BigInteger(), nullable=False),
        sa.Column("name", sa.Text(collation="C"), nullable=False),
        sa.Column("gpu_type_id", sa.BigInteger(), nullable=False),
        sa.Column("gpus", sa.BigInteger(), nullable=False),
        sa.Column("rack", sa.Text(collation="C"), server_default=sa.text("''"), nullable=False),
        sa.Column("draining", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("version", sa.BigInteger(), server_default=sa.text("1"), nullable=False),
        sa.Column("agent_id", sa.BigInteger(), nullable=True),
        sa.Column("heard_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.CheckConstraint("gpus BETWEEN 1 AND 64", name=op.f("ck_nodes_gpus")),
        sa.ForeignKeyConstraint(["agent_id"], ["agents.id"], name=op.f("fk_nodes_agent_id")),
        sa.ForeignKeyConstraint(["cluster_id"], ["clusters.id"], name=op.f("fk_nodes_cluster_id")),
        sa.ForeignKeyConstraint(
            ["gpu_type_id"], ["gpu_types.id"], name=op.f("fk_nodes_gpu_type_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_nodes")),
        sa.UniqueConstraint("cluster_id", "name", name=op.f("uq_nodes_cluster_id_name")),
    )
    op.create_index(op.f("ix_nodes_agent_id"), "nodes", ["agent_id"], unique=False)
    op.create_table(
        "gpus",
        sa.Column("node_id", sa.BigInteger(), nullable=False),
        sa.Column("gpu", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.CheckConstraint("gpu >= 0", name=op.f("ck_gpus_gpu")),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_gpus_node_id")),
        sa.PrimaryKeyConstraint("node_id", "gpu", name=op.f("pk_gpus")),
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("cluster_id", sa.BigInteger(), nullable=False),
        sa.Column("name", sa.Text(collation="C"), nullable=False),
        sa.Column("workload_id", sa.BigInteger(), nullable=False),
        sa.Column("iterations", sa.BigInteger(), nullable=False),
        sa.Column("requested_gpus", sa.BigInteger(), nullable=False),
        sa.Column(
            "requested_type", sa.Text(collation="C"), server_default=sa.text("''"), nullable=False
        ),
        sa.Column("tenant", sa.Text(collation="C"), server_default=sa.text("''"), nullable=False),
        sa.Column("queue", sa.BigInteger(), server_default=sa.text("1"), nullable=False),
        sa.Column("weight", sa.DOUBLE_PRECISION(), nullable=False),
        sa.Column("guaranteed", sa.Boolean(), nullable=False),
        sa.Column("movable", sa.Boolean(), nullable=False),
        sa.Column("deadline_s", sa.DOUBLE_PRECISION(), nullable=False),
        sa.Column("restart_s", sa.DOUBLE_PRECISION(), nullable=False),
        sa.Column("labels", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("command", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("max_retries", sa.BigInteger(), nullable=False),
        sa.Column(
            "state", sa.Text(collation="C"), server_default=sa.text("'queued'"), nullable=False
        ),
        sa.Column("version", sa.BigInteger(), server_default=sa.text("1"), nullable=False),
        sa.Column("generation", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column(
            "iterations_done", sa.DOUBLE_PRECISION(), server_default=sa.text("0"), nullable=False
        ),
        sa.Column("retries", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column(
            "last_error", sa.Text(collation="C"), server_default=sa.text("''"), nullable=False
        ),
        sa.Column(
            "created_at",
            postgresql.TIMESTAMP(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("started_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("ended_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("cell_type_id", sa.BigInteger(), nullable=True),
        sa.Column("cell_gpus", sa.BigInteger(), nullable=True),
        sa.Column("cell_degree", sa.BigInteger(), nullable=True),
        sa.Column("cell_plan_id", sa.BigInteger(), nullable=True),
        sa.Column("cell_rate", sa.DOUBLE_PRECISION(), nullable=True),
        sa.Column("leader_id", sa.BigInteger(), nullable=True),
        sa.CheckConstraint(
            "CASE WHEN state IN ('running', 'starting') THEN num_nulls(cell_type_id, cell_gpus, cell_degree, cell_plan_id, cell_rate, leader_id) = 0 ELSE num_nonnulls(cell_type_id, cell_gpus, cell_degree, cell_plan_id, cell_rate) = 0 END",
            name=op.f("ck_jobs_cell"),
        ),
        sa.CheckConstraint(
            "deadline_s > 0 AND deadline_s <= 'Infinity'", name=op.f("ck_jobs_deadline")
        ),
        sa.CheckConstraint(
            "iterations_done >= 0 AND iterations_done < 'Infinity'", name=op.f("ck_jobs_progress")
        ),
        sa.CheckConstraint(
            "restart_s >= 0 AND restart_s < 'Infinity'", name=op.f("ck_jobs_restart")
        ),
        sa.CheckConstraint(
            "state IN ('queued', 'held', 'starting', 'running', 'stopping', 'holding', 'cancelling', 'failing', 'succeeded', 'failed', 'cancelled', 'rejected')",
            name=op.f("ck_jobs_state"),
        ),
        sa.CheckConstraint("weight > 0 AND weight < 'Infinity'", name=op.f("ck_jobs_weight")),
        sa.CheckConstraint(
            "generation >= 0 AND retries >= 0 AND max_retries >= 0", name=op.f("ck_jobs_counts")
        ),
        sa.CheckConstraint(
            "iterations > 0 AND requested_gpus > 0 AND queue > 0", name=op.f("ck_jobs_positive")
        ),
        sa.ForeignKeyConstraint(["cell_plan_id"], ["plans.id"], name=op.f("fk_jobs_cell_plan_id")),
        sa.ForeignKeyConstraint(
            ["cell_type_id"], ["gpu_types.id"], name=op.f("fk_jobs_cell_type_id")
        ),
        sa.ForeignKeyConstraint(["cluster_id"], ["clusters.id"], name=op.f("fk_jobs_cluster_id")),
        sa.ForeignKeyConstraint(["leader_id"], ["nodes.id"], name=op.f("fk_jobs_leader_id")),
        sa.ForeignKeyConstraint(
            ["workload_id"], ["workloads.id"], name=op.f("fk_jobs_workload_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
        sa.UniqueConstraint("cluster_id", "name", name=op.f("uq_jobs_cluster_id_name")),
    )
    op.create_index(
        "ix_jobs_live",
        "jobs",
        ["cluster_id", "id"],
        unique=False,
        postgresql_where=sa.text("state NOT IN ('succeeded', 'failed', 'cancelled', 'rejected')"),
    )
    op.create_table(
        "allocations",
        sa.Column("node_id", sa.BigInteger(), nullable=False),
        sa.Column("gpu", sa.BigInteger(), nullable=False),
        sa.Column("job_id", sa.BigInteger(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("hold", sa.Text(collation="C"), nullable=False),
        sa.Column("release_revision", sa.BigInteger(), nullable=True),
        sa.CheckConstraint(
            "(hold = 'releasing') = (release_revision IS NOT NULL)",
            name=op.f("ck_allocations_release"),
        ),
        sa.CheckConstraint(
            "hold IN ('held', 'releasing', 'reserved')", name=op.f("ck_allocations_hold")
        ),
        sa.CheckConstraint("generation > 0", name=op.f("ck_allocations_generation")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_allocations_job_id")),
        sa.ForeignKeyConstraint(
            ["node_id", "gpu"],
            ["gpus.node_id", "gpus.gpu"],
            name=op.f("fk_allocations_node_id_gpu"),
        ),
        sa.PrimaryKeyConstraint(
            "node_id", "gpu", "job_id", "generation", name=op.f("pk_allocations")
        ),
    )
    op.create_index(op.f("ix_allocations_job_id"), "allocations", ["job_id"], unique=False)
    op.create_index(
        "uq_allocations_holder",
        "allocations",
        ["node_id", "gpu"],
        unique=True,
        postgresql_where=sa.text("hold IN ('held', 'releasing')"),
    )
    op.create_index(
        "uq_allocations_successor",
        "allocations",
        ["node_id", "gpu"],
        unique=True,
        postgresql_where=sa.text("hold = 'reserved'"),
    )
    op.create_table(
        "job_history",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("job_id", sa.BigInteger(), nullable=False),
        sa.Column(
            "at",
            postgresql.TIMESTAMP(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("event", sa.Text(collation="C"), nullable=False),
        sa.Column("state", sa.Text(collation="C"), nullable=False),
        sa.Column("detail", sa.Text(collation="C"), server_default=sa.text("''"), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name=op.f("fk_job_history_job_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_job_history")),
    )
    op.create_index(op.f("ix_job_history_job_id"), "job_history", ["job_id"], unique=False)
    for statement in (*FUNCTIONS, *TRIGGERS):
        op.execute(statement)


def downgrade() -> None:
    """Undo the migration."""
    op.drop_index(op.f("ix_job_history_job_id"), table_name="job_history")
    op.drop_table("job_history")
    op.drop_index(
        "uq_allocations_successor",
        table_name="allocations",
        postgresql_where=sa.text("hold = 'reserved'"),
    )
    op.drop_index(
        "uq_allocations_holder",
        table_name="allocations",
        postgresql_where=sa.text("hold IN ('held', 'releasing')"),
    )
    op.drop_index(op.f("ix_allocations_job_id"), table_name="allocations")
    op.drop_table("allocations")
    op.drop_index(
        "ix_jobs_live",
        table_name="jobs",
        postgresql_where=sa.text("state NOT IN ('succeeded', 'failed', 'cancelled', 'rejected')"),
    )
    op.drop_table("jobs")
    op.drop_table("gpus")
    op.drop_index(op.f("ix_nodes_agent_id"), table_name="nodes")
    op.drop_table("nodes")
    op.drop_index(op.f("ix_estimates_gpu_type_id"), table_name="estimates")
    op.drop_table("estimates")
    op.drop_table("decisions")
    op.drop_table("workloads")
    op.drop_table("rounds")
    op.drop_table("plans")
    op.drop_table("leases")
    op.drop_table("gpu_types")
    op.drop_table("agents")
    op.drop_index(op.f("ix_request_ids_created_at"), table_name="request_ids")
    op.drop_table("request_ids")
    op.drop_table("clusters")
    op.execute("DROP FUNCTION check_job_transition()")
    op.execute("DROP FUNCTION check_job_owns_nothing()")
