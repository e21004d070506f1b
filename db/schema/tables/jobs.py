"""Tables of jobs, their histories and the GPUs that they hold."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, DOUBLE_PRECISION, JSONB

from tessera.db.schema.host import list_host
from tessera.db.schema.tables.columns import (
    count_column,
    flag_column,
    id_column,
    metadata,
    moment_column,
    one_of,
    real_column,
    reference_column,
    text_column,
)
from tessera.formulation.base.resources import HOST_NAMES
from tessera.formulation.base.values import Hold
from tessera.formulation.job.dependencies import Condition
from tessera.formulation.job.lifecycle import ACTIVE, LEAVING, WAITING, JobState

job_arrays = sa.Table(
    "job_arrays",
    metadata,
    id_column(),
    reference_column("cluster_id", "clusters.id"),
    text_column("name"),
    text_column("tenant", default=""),
    count_column("size", None),  # members that were submitted
    count_column("max_running"),  # of members that run at the same time; 0 if there is none
    count_column("ended"),  # members that have ended, whether they are still stored or not
    count_column("lost"),  # of these, those that have ended without success
    moment_column("created_at"),
    sa.UniqueConstraint("cluster_id", "name"),
    sa.CheckConstraint("size > 0 AND max_running >= 0", name="size"),
    sa.CheckConstraint("lost BETWEEN 0 AND ended AND ended <= size", name="ends"),
)
"""Jobs that differ only in an index. The jobs themselves are rows of ``jobs``."""

jobs = sa.Table(
    "jobs",
    metadata,
    id_column(),  # increases in order of submission
    reference_column("cluster_id", "clusters.id"),
    text_column("name"),
    reference_column("workload_id", "workloads.id"),
    count_column("iterations", None),
    count_column("requested_gpus", None),
    text_column("requested_gpu_type", default=""),
    flag_column("pinned_gpu_type"),
    text_column("tenant", default=""),
    count_column("priority", 1),
    real_column("weight"),
    sa.Column("guaranteed", sa.Boolean, nullable=False),
    sa.Column("pinned", sa.Boolean, nullable=False),
    flag_column("preemptible"),  # whether a round may suspend or shrink it at any time
    real_column("deadline_s"),
    real_column("restart_s"),
    sa.Column("labels", JSONB, nullable=False),
    sa.Column("command", JSONB, nullable=False),
    count_column("max_retries", None),
    flag_column("profile"),  # whether the layers of its workload are to be measured
    count_column("min_gpus", 0),  # lower bound on its GPUs; 0 if it has none
    count_column("max_gpus", 0),  # upper bound on its GPUs; 0 if it has none
    # the GPU types that it may run on; [] for all
    sa.Column("allowed_gpu_types", JSONB, nullable=False, server_default=sa.text("'[]'")),
    text_column("node_selector", default=""),  # of the labels of its nodes
    text_column("preferred_labels", default=""),
    real_column("longest_run_s", default="'Infinity'"),  # 'Infinity' for no limit
    reference_column("plan_id", "plans.id", nullable=True),  # as its user states it
    flag_column("plan_first"),  # whether only its first start must use the stated plan
    reference_column("submitted_plan_id", "plans.id", nullable=True),  # it binds nothing
    # the techniques of plans that its script can use; [] for all of its runtime
    sa.Column("techniques", JSONB, nullable=False, server_default=sa.text("'[]'")),
    count_column("requested_cpus"),  # cores in all; 0 if they are not stated
    text_column("runtime"),  # the one that starts its program, whether stated or implied
    sa.Column("launch", JSONB, nullable=False, server_default=sa.text("'{}'")),  # the rest of it
    text_column("submitted_by", default=""),  # who submitted it; "" if the server does not know
    text_column("state", default=JobState.QUEUED.value),
    count_column("version", 1),
    count_column("generation", 0),
    sa.Column("iterations_done", DOUBLE_PRECISION, nullable=False, server_default=sa.text("0")),
    count_column("retries", 0),
    text_column("last_error", default=""),
    moment_column("created_at"),
    moment_column("started_at", nullable=True),
    moment_column("ended_at", nullable=True),
    moment_column("queued_at"),  # when it last began to wait
    moment_column("since_at", nullable=True),  # when its present allocation began
    real_column("service_gpu_s", default="0"),  # of earlier allocations
    real_column("run_s", default="0"),  # duration of earlier allocations
    flag_column("admitted"),
    sa.Column("schedule", JSONB, nullable=False, server_default=sa.text("'[]'")),
    real_column("start_by_s", nullable=True),  # when it is promised to start at the latest
    sa.Column("planned_start", JSONB),  # the reserved start: times, Cell, and GPUs by node
    flag_column("opportunistic"),
    sa.Column("rejection", JSONB),  # the round and the reason of a rejected job
    # The Cell that it runs on, and the node whose agent reports for the gang.
    reference_column("cell_type_id", "gpu_types.id", nullable=True),
    sa.Column("cell_gpus", sa.BigInteger),
    sa.Column("cell_degree", sa.BigInteger),
    reference_column("cell_plan_id", "plans.id", nullable=True),
    real_column("cell_rate", nullable=True),
    real_column("cell_effective_gpus", nullable=True),  # by the estimates of when it was given
    # The cores and the host memory that it was given with its Cell, whatever estimates say later.
    *(count_column(f"cell_{name}") for name in HOST_NAMES),
    reference_column("leader_id", "nodes.id", nullable=True),
    count_column("failures"),  # consecutive ones
    moment_column("retry_at", nullable=True),  # it is not started again before this time
    moment_column("ran_at", nullable=True),  # when its gang first reported that it runs
    moment_column("progress_at", nullable=True),  # when it last reported other progress
    count_column("unmet"),  # dependencies that are not met yet
    reference_column("array_id", "job_arrays.id", nullable=True),
    sa.Column("array_index", sa.BigInteger),
    sa.UniqueConstraint("cluster_id", "name"),
    sa.CheckConstraint("state IN " + one_of([s.value for s in JobState]), name="state"),
    sa.CheckConstraint("iterations > 0 AND requested_gpus > 0 AND priority > 0", name="positive"),
    sa.CheckConstraint(
        "min_gpus BETWEEN 0 AND requested_gpus AND (max_gpus = 0 OR max_gpus >= requested_gpus)",
        name="gpu_bounds",
    ),
    sa.CheckConstraint("NOT plan_first OR plan_id IS NOT NULL", name="plan"),
    sa.CheckConstraint(
        "requested_cpus >= 0 AND jsonb_typeof(techniques) = 'array'", name="techniques"
    ),
    sa.CheckConstraint("runtime <> '' AND jsonb_typeof(launch) = 'object'", name="launch"),
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
    sa.CheckConstraint(
        f"{list_host('cell_@ >= 0', ' AND ')}"
        f" AND (cell_gpus IS NOT NULL OR ({list_host('cell_@ = 0', ' AND ')}))",
        name="cell_demand",
    ),
    sa.CheckConstraint("NOT pinned_gpu_type OR requested_gpu_type <> ''", name="pinned_gpu_type"),
    sa.CheckConstraint(
        "(since_at IS NOT NULL) = (state IN " + one_of(sorted(ACTIVE)) + ")", name="since"
    ),
    sa.CheckConstraint("service_gpu_s >= 0 AND service_gpu_s < 'Infinity'", name="service"),
    sa.CheckConstraint("jsonb_typeof(allowed_gpu_types) = 'array'", name="allowed_gpu_types"),
    sa.CheckConstraint(
        "longest_run_s > 0 AND longest_run_s <= 'Infinity' AND run_s >= 0 AND run_s < 'Infinity'",
        name="run_time",
    ),
    sa.CheckConstraint(
        "jsonb_typeof(schedule) = 'array' AND (admitted OR schedule = '[]')",
        name="schedule",
    ),
    sa.CheckConstraint(
        "num_nonnulls(start_by_s, planned_start) = 0 OR state IN " + one_of(sorted(WAITING)),
        name="start",
    ),
    sa.CheckConstraint("start_by_s > 0 AND start_by_s < 'Infinity'", name="start_by"),
    sa.CheckConstraint("jsonb_typeof(planned_start->'nodes') = 'object'", name="planned_start"),
    sa.CheckConstraint("rejection IS NULL OR state = 'rejected'", name="rejection"),
    sa.CheckConstraint("failures >= 0", name="back_off"),
    # No job starts before those that it waits for have ended.
    sa.CheckConstraint(
        "unmet = 0 OR (unmet > 0 AND state IN ('queued', 'held', 'cancelled', 'rejected'))",
        name="dependencies",
    ),
    sa.CheckConstraint("(array_id IS NULL) = (array_index IS NULL)", name="array"),
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
# The live jobs of a tenant are counted, and its jobs are listed.
sa.Index("ix_jobs_tenant", jobs.c.cluster_id, jobs.c.tenant, jobs.c.state)
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
sa.Index(
    "ix_jobs_plan_id",
    jobs.c.plan_id,
    postgresql_where=sa.text("plan_id IS NOT NULL"),
)
sa.Index(
    "ix_jobs_submitted_plan_id",
    jobs.c.submitted_plan_id,
    postgresql_where=sa.text("submitted_plan_id IS NOT NULL"),
)
sa.Index("ix_jobs_leader_id", jobs.c.leader_id, postgresql_where=sa.text("leader_id IS NOT NULL"))
sa.Index("ix_jobs_array_id", jobs.c.array_id, postgresql_where=sa.text("array_id IS NOT NULL"))

job_dependencies = sa.Table(
    "job_dependencies",
    metadata,
    reference_column("job_id", "jobs.id", ondelete="CASCADE", primary_key=True),
    sa.Column("position", sa.BigInteger, primary_key=True),  # in the order of the user
    text_column("name"),  # of the job or array, which may be deleted once it has ended
    text_column("tenant"),
    text_column("condition"),
    flag_column("met"),
    reference_column("on_job_id", "jobs.id", nullable=True, ondelete="SET NULL"),
    reference_column("on_array_id", "job_arrays.id", nullable=True, ondelete="SET NULL"),
    sa.CheckConstraint("condition IN " + one_of([c.value for c in Condition]), name="condition"),
    sa.CheckConstraint("num_nonnulls(on_job_id, on_array_id) <= 1", name="target"),
    sa.Index(None, "on_job_id", postgresql_where=sa.text("on_job_id IS NOT NULL")),
    sa.Index(None, "on_array_id", postgresql_where=sa.text("on_array_id IS NOT NULL")),
)
"""The jobs that must end before a job may start. ``jobs.unmet`` counts those that are not met."""

job_avoids = sa.Table(
    "job_avoids",
    metadata,
    reference_column("job_id", "jobs.id", ondelete="CASCADE", primary_key=True),
    reference_column("node_id", "nodes.id", primary_key=True),
    sa.Index(None, "node_id"),
)

failed_starts = sa.Table(  # of jobs that have not run since; they avoid the nodes
    "failed_starts",
    metadata,
    reference_column("job_id", "jobs.id", ondelete="CASCADE", primary_key=True),
    reference_column("node_id", "nodes.id", ondelete="CASCADE", primary_key=True),
    count_column("gpus", None),  # of the start, on all nodes
    flag_column("counted"),  # whether it counts against the node
    sa.Index(None, "node_id"),
)

job_history = sa.Table(
    "job_history",
    metadata,
    id_column(),
    reference_column("job_id", "jobs.id", ondelete="CASCADE"),
    moment_column("at"),
    text_column("event"),
    text_column("state"),
    sa.Column("detail", JSONB, server_default=sa.text("'\"\"'"), nullable=False),
    sa.Index(None, "job_id"),
)

job_starts = sa.Table(
    "job_starts",
    metadata,
    reference_column("job_id", "jobs.id", ondelete="CASCADE", primary_key=True),
    sa.Column("generation", sa.BigInteger, primary_key=True),
    moment_column("given_at"),  # when the job got these GPUs
    sa.Column("shares", JSONB, nullable=False),  # [[a node's name, [GPUs]], ...] in rank order
    sa.CheckConstraint("generation > 0", name="generation"),
    sa.CheckConstraint("jsonb_typeof(shares) = 'array'", name="shares"),
)
"""The places where each generation of a job runs or ran. Nodes are named, because a node may be
deleted while its output can still be asked for.
"""
trainings = sa.Table(  # what the programs of jobs report; a job that is replayed has no row
    "trainings",
    metadata,
    reference_column("job_id", "jobs.id", primary_key=True, ondelete="CASCADE"),
    count_column("generation"),  # of the last report
    real_column("loss", nullable=True),
    count_column("memory_bytes"),  # the most that a rank of the generation has held; 0 if unknown
    real_column("checkpoint_iterations", nullable=True),  # of the newest complete checkpoint
    moment_column("checkpoint_at", nullable=True),
    sa.Column("start_times", JSONB),  # RestartTimes of the last start that reached an iteration
    # The durations of the last complete starts, oldest first, their median, and the last's generation.
    sa.Column(
        "restarts_s", ARRAY(DOUBLE_PRECISION), nullable=False, server_default=sa.text("'{}'")
    ),
    real_column("restart_s", nullable=True),
    count_column("restart_generation"),
    count_column("tuned_generation"),  # the last that reported the plan it tuned
    text_column("exit_reason", default=""),  # of the last failure; "" if it is not known
    text_column("remark", default=""),
    sa.Column("failed_cell", JSONB),  # of the last failure: names, nodes and the generation
    sa.CheckConstraint("loss > '-Infinity' AND loss < 'Infinity'", name="loss"),
    sa.CheckConstraint("memory_bytes >= 0", name="memory"),
    sa.CheckConstraint(
        "checkpoint_iterations >= 0 AND checkpoint_iterations < 'Infinity'", name="checkpoint"
    ),
    sa.CheckConstraint("restart_s > 0 AND restart_s < 'Infinity'", name="restart"),
)

allocations = sa.Table(
    "allocations",
    metadata,
    sa.Column("node_id", sa.BigInteger, primary_key=True),
    sa.Column("gpu", sa.BigInteger, primary_key=True),
    reference_column("job_id", "jobs.id", primary_key=True),
    sa.Column("generation", sa.BigInteger, primary_key=True),
    text_column("hold"),
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

SELECTOR_COLUMNS: Final = ("node_selector", "preferred_labels")
"""The columns of jobs with selectors of nodes: the required ones, and the preferred ones."""
