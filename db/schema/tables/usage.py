"""Tables of what jobs have used."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from tessera.db.schema.host import list_host
from tessera.db.schema.tables.columns import (
    count_column,
    id_column,
    metadata,
    moment_column,
    real_column,
    reference_column,
    text_column,
)
from tessera.formulation.base.resources import HOST_NAMES

stints = sa.Table(  # the times in which a job had the same GPUs; one that lasts is in `jobs`
    "stints",
    metadata,
    id_column(),
    reference_column("job_id", "jobs.id", ondelete="CASCADE"),
    text_column("gpu_type"),  # by name, because the type may be deleted
    count_column("gpus", None),
    # Of cores, a value must be given. The other resources are younger than the table.
    *(count_column(name, None if name == "cpus" else 0) for name in HOST_NAMES),
    real_column("effective_gpus"),
    moment_column("began_at", required=True),
    moment_column("trained_at", nullable=True),  # when its gang reported that it runs
    moment_column("ended_at", required=True),
    text_column("ending"),  # the event of the job that ended it
    sa.CheckConstraint("gpus > 0 AND " + list_host("@ >= 0", " AND "), name="counts"),
    sa.CheckConstraint(
        "effective_gpus >= 0 AND effective_gpus < 'Infinity'", name="effective_gpus"
    ),
    sa.CheckConstraint("began_at <= ended_at", name="times"),
    sa.Index(None, "job_id"),
)

usage_days = sa.Table(  # sums over stints and jobs that retention has deleted; days of UTC
    "usage_days",
    metadata,
    id_column(),
    reference_column("cluster_id", "clusters.id"),
    sa.Column("day", sa.Date, nullable=False),
    text_column("tenant"),
    text_column("gpu_type"),
    text_column("submitted_by"),
    sa.Column("labels", JSONB, nullable=False),
    count_column("gpu_us", None),  # GPU-microseconds, so that sums are exact
    real_column("effective_gpu_s"),
    count_column("cpu_us", None),
    real_column("host_byte_s", default="0"),
    count_column("lost_gpu_us", None),
    count_column("preemptions", None),
    count_column("jobs_ended", None),
    count_column("jobs_finished", None),
    count_column("waited_us", None),
    sa.Index(
        "uq_usage_days_group",
        "cluster_id",
        "day",
        "tenant",
        "gpu_type",
        "submitted_by",
        sa.text("md5(CAST(labels AS text))"),
        unique=True,
    ),
)

__all__ = ["stints", "usage_days"]
