"""Tables of workloads and models, and of what is known of the speed of Cells."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, DOUBLE_PRECISION, JSONB

from tessera.db.schema.host import list_host
from tessera.db.schema.tables.columns import (
    count_column,
    flag_column,
    id_column,
    metadata,
    moment_column,
    real_column,
    reference_column,
    text_column,
)
from tessera.formulation.base.resources import HOST_NAMES

workloads = sa.Table(
    "workloads",
    metadata,
    id_column(),
    reference_column("cluster_id", "clusters.id"),
    text_column("model"),
    text_column("params"),
    count_column("global_batch", None),
    text_column("derived_from", default=""),  # digest of the inputs of its derived estimates
    sa.Column("waits_for", JSONB),  # the reason why the service has derived no estimates
    sa.UniqueConstraint("cluster_id", "model", "params", "global_batch"),
    sa.CheckConstraint("global_batch > 0", name="global_batch"),
)

plans = sa.Table(
    "plans",
    metadata,
    id_column(),
    reference_column("cluster_id", "clusters.id"),
    text_column("name"),  # its digest; "" is the best plan that the author of a Cell found
    text_column("document", default=""),  # its canonical JSON; "" if nothing but a name is known
    sa.UniqueConstraint("cluster_id", "name"),
    sa.CheckConstraint(
        "document = '' OR name = encode(sha256(convert_to(document, 'UTF8')), 'hex')",
        name="digest",
    ),
)

estimates = sa.Table(
    "estimates",
    metadata,
    id_column(),
    reference_column("workload_id", "workloads.id"),
    reference_column("gpu_type_id", "gpu_types.id"),
    count_column("gpus", None),
    count_column("nodes", None),
    count_column("pipeline_degree", None),
    reference_column("plan_id", "plans.id"),
    real_column("iter_time_s"),  # infinite if it was tried and does not run
    count_column("source", None),
    text_column("provenance", default=""),
    real_column("sd", nullable=True),  # of the logarithm of iter_time_s; NULL if unknown
    flag_column(
        "derived"
    ),  # made by the service, which may replace it; it never replaces users' rows
    text_column("traffic", default=""),  # of its plan (formulation.state.traffic); "" if unknown
    text_column("tuned", default=""),  # space in which a job tuned it at launch; "" for none
    flag_column("complete"),  # its profile has all shapes that run of the workload on the type
    *map(count_column, HOST_NAMES),  # what a job on the Cell needs in all
    sa.Column("stated_degree", sa.BigInteger),  # its user's, if the service gave it its plan
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
    sa.CheckConstraint(list_host("@ >= 0", " AND "), name="demand"),
    sa.Index(None, "gpu_type_id"),
    sa.Index(None, "plan_id"),
)

tunings = sa.Table(  # plans that programs may try at launch, around that of a Cell
    "tunings",
    metadata,
    id_column(),
    reference_column("workload_id", "workloads.id", ondelete="CASCADE"),
    reference_column("gpu_type_id", "gpu_types.id", ondelete="CASCADE"),
    reference_column("plan_id", "plans.id", ondelete="CASCADE"),  # of the Cell
    text_column("runtime"),
    text_column("space"),
    sa.Column("plans", ARRAY(sa.Text), nullable=False),  # canonical JSON, the best estimate first
    count_column("space_plans", None),  # number of all plans of the space, which may be far more
    count_column("whole_plans", None),  # number of plans of the full space
    sa.UniqueConstraint(
        "plan_id", "gpu_type_id", "workload_id", "runtime", "space", name="uq_tunings_plan"
    ),
    sa.CheckConstraint("space_plans >= 0 AND whole_plans >= space_plans", name="counts"),
    sa.Index(None, "workload_id"),
    sa.Index(None, "gpu_type_id"),
)

models = sa.Table(
    "models",
    metadata,
    id_column(),
    reference_column("cluster_id", "clusters.id"),
    text_column("model"),
    text_column("params"),
    text_column("architecture"),  # YAML or JSON, as the user wrote it
    sa.Column("reading", JSONB, nullable=False),  # how to read the architecture, and its training
    sa.UniqueConstraint("cluster_id", "model", "params"),
)

measurements = sa.Table(
    "measurements",
    metadata,
    id_column(),
    reference_column("workload_id", "workloads.id"),
    reference_column("gpu_type_id", "gpu_types.id"),
    count_column("gpus", None),
    count_column("nodes", None),
    count_column("pipeline_degree", None),
    reference_column("plan_id", "plans.id"),
    reference_column("job_id", "jobs.id", nullable=True, ondelete="SET NULL"),
    count_column("generation", None),
    count_column("skipped"),  # number of reports that were ignored as warm-up
    sa.Column("samples", ARRAY(DOUBLE_PRECISION), nullable=False, server_default=sa.text("'{}'")),
    real_column("iter_time_s", nullable=True),  # the median of the samples once there are enough
    count_column("source"),  # MEASURED, or REPLAYED if the job's runtime trained nothing
    moment_column("changed_at"),
    sa.UniqueConstraint("job_id", "generation"),
    sa.CheckConstraint("gpus > 0 AND nodes BETWEEN 1 AND gpus", name="shape"),
    sa.CheckConstraint("iter_time_s > 0 AND iter_time_s < 'Infinity'", name="iter_time"),
    sa.CheckConstraint("source IN (0, 3)", name="source"),
    sa.Index(None, "workload_id"),
    sa.Index(None, "gpu_type_id"),
    sa.Index(None, "plan_id"),
)

profiles = sa.Table(  # measured layers; rows are added and never changed
    "profiles",
    metadata,
    id_column(),
    reference_column("workload_id", "workloads.id"),
    reference_column("gpu_type_id", "gpu_types.id"),
    text_column("task"),  # the name of the job that measured, which may be deleted
    text_column("source"),  # the step that was measured, with its arguments
    text_column("kind"),
    count_column("layers", None),  # number of the model's layers of this kind
    real_column("samples"),
    count_column("tp", None),
    text_column("dtype"),
    real_column("forward_s"),
    real_column("backward_s"),
    text_column("method"),
    count_column("repeats", None),
    real_column("device_s"),  # time for which the measurement held the device
    text_column("device"),
    sa.Column("versions", JSONB, nullable=False),
    text_column("date"),
    moment_column("added_at"),
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

profile_gaps = sa.Table(  # sizes that profiling tasks left out
    "profile_gaps",
    metadata,
    id_column(),
    reference_column("workload_id", "workloads.id", ondelete="CASCADE"),
    reference_column("gpu_type_id", "gpu_types.id", ondelete="CASCADE"),
    text_column("task"),  # the name of the job that left them out, which may be deleted
    text_column("source"),  # the step that it measured, with its arguments
    sa.Column("left_out", JSONB, nullable=False),  # pairs of samples and tensor degree
    text_column("reason"),
    moment_column("added_at"),
    sa.UniqueConstraint(
        "workload_id", "gpu_type_id", "task", "source", name="uq_profile_gaps_task"
    ),
    sa.CheckConstraint(
        "jsonb_typeof(left_out) = 'array' AND left_out <> '[]' AND reason <> ''", name="content"
    ),
    sa.Index(None, "gpu_type_id"),
)

host_profiles = sa.Table(  # rates of nodes' hosts that profiling tasks measured
    "host_profiles",
    metadata,
    id_column(),
    reference_column("gpu_type_id", "gpu_types.id", ondelete="CASCADE"),
    text_column("task"),  # the name of the job that measured, which may be deleted
    sa.Column("rates", JSONB, nullable=False),  # formulation.records.estimates.HostRates
    moment_column("added_at"),
    sa.UniqueConstraint("gpu_type_id", "task", name="uq_host_profiles_task"),
    sa.CheckConstraint("jsonb_typeof(rates) = 'object'", name="rates"),
)
