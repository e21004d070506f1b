"""Tables of clusters: GPU types, agents, nodes, GPUs, tenants and their quotas."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

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
from tessera.formulation.base.resources import HOST_NAMES, REPORTED_PREFIX

clusters = sa.Table(
    "clusters",
    metadata,
    id_column(),
    text_column("name"),
    count_column("version", 1),
    count_column("epoch", 0),
    count_column("revision", 0),  # of the desired state
    count_column("last_round", 0),
    count_column("decided_round", 0),  # the last round that was not refused
    moment_column("created_at"),
    moment_column("deleted_at", nullable=True),  # NULL unless deleted; see tessera.db.upkeep.purge
    count_column("node_version", 0),  # the highest version of a deleted node
    sa.UniqueConstraint("name"),
    sa.CheckConstraint("decided_round BETWEEN 0 AND last_round", name="rounds"),
)

high_water = sa.Table(  # above the counters of all deleted clusters; at most one row
    "high_water",
    metadata,
    sa.Column("one", sa.Boolean, primary_key=True, server_default=sa.true()),
    count_column("version", None),
    count_column("epoch", None),
    count_column("revision", None),
    sa.CheckConstraint("one", name="one"),
)

gpu_types = sa.Table(
    "gpu_types",
    metadata,
    id_column(),
    reference_column("cluster_id", "clusters.id"),
    text_column("name"),
    count_column("memory_bytes", None),
    count_column("ordinal", None),
    real_column("dollars_per_hour", default="0"),  # of one GPU; 0 if unknown
    real_column("watts", default="0"),  # of one busy GPU; 0 if unknown
    sa.UniqueConstraint("cluster_id", "name"),
    sa.CheckConstraint("memory_bytes > 0", name="memory"),
    sa.CheckConstraint("dollars_per_hour >= 0 AND dollars_per_hour < 'Infinity'", name="dollars"),
    sa.CheckConstraint("watts >= 0 AND watts < 'Infinity'", name="watts"),
)

agents = sa.Table(
    "agents",
    metadata,
    id_column(),
    reference_column("cluster_id", "clusters.id"),
    text_column("name"),
    text_column("incarnation"),
    moment_column("heard_at"),
    sa.Column("network_remarks", JSONB, server_default=sa.text("'[]'"), nullable=False),
    # names of its nodes that were deleted since this incarnation started
    sa.Column("deleted_nodes", JSONB, server_default=sa.text("'[]'"), nullable=False),
    # those that it can start: see tessera.db.base.runtime_offers; {} if it does not say
    sa.Column("runtimes", JSONB, server_default=sa.text("'{}'"), nullable=False),
    sa.UniqueConstraint("cluster_id", "name"),
)

nodes = sa.Table(
    "nodes",
    metadata,
    id_column(),
    reference_column("cluster_id", "clusters.id"),
    text_column("name"),
    reference_column("gpu_type_id", "gpu_types.id"),
    count_column("gpus", None),
    text_column("rack", default=""),
    # the resources of the host as stated, and as the node's agent found; NULL if unknown
    *(
        sa.Column(prefix + name, sa.BigInteger)
        for prefix in ("", REPORTED_PREFIX)
        for name in HOST_NAMES
    ),
    # the labels by which jobs select nodes, as stated, and as its agent gives them
    sa.Column("labels", JSONB, server_default=sa.text("'{}'"), nullable=False),
    sa.Column("agent_labels", JSONB, server_default=sa.text("'{}'"), nullable=False),
    sa.Column("draining", sa.Boolean, nullable=False, server_default=sa.false()),
    count_column("version", 1),
    reference_column("agent_id", "agents.id", nullable=True),
    moment_column("heard_at", nullable=True),  # by an agent that no longer reports this node
    text_column("drain_reason", default=""),
    text_column("drained_by", default=""),
    moment_column("drained_at", nullable=True),
    flag_column("health_drain"),  # whether health drained it, and may undrain it
    # [GPU, kind, detail] of the faults that its agent reports
    sa.Column("faults", JSONB, server_default=sa.text("'[]'"), nullable=False),
    # those of them with which an operator has put it back
    sa.Column("excused_faults", JSONB, server_default=sa.text("'[]'"), nullable=False),
    moment_column("probation_until", nullable=True),
    count_column("failed_starts"),  # in a row, because of the node: see failed_starts
    sa.UniqueConstraint("cluster_id", "name"),
    sa.CheckConstraint("gpus BETWEEN 1 AND 64", name="gpus"),
    sa.CheckConstraint(
        list_host("@ >= 0", " AND ") + " AND " + list_host("reported_@ >= 0", " AND "),
        name="resources",
    ),
    sa.CheckConstraint(
        "draining OR (drained_at IS NULL AND drain_reason = '' AND drained_by = '')", name="drain"
    ),
    sa.CheckConstraint("jsonb_typeof(labels) = 'object'", name="labels"),
    sa.CheckConstraint("jsonb_typeof(agent_labels) = 'object'", name="agent_labels"),
    sa.CheckConstraint("draining OR NOT health_drain", name="health_drain"),
    sa.CheckConstraint("health_drain OR probation_until IS NULL", name="probation"),
    sa.Index(None, "agent_id"),
    sa.Index(None, "gpu_type_id"),
)

gpus = sa.Table(
    "gpus",
    metadata,
    reference_column("node_id", "nodes.id", primary_key=True),
    sa.Column("gpu", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.CheckConstraint("gpu >= 0", name="gpu"),
)

tenants = sa.Table(
    "tenants",
    metadata,
    id_column(),
    reference_column("cluster_id", "clusters.id"),
    text_column("name"),
    real_column("weight"),
    count_column("borrow_gpus", -1),  # beyond its quota; -1 for any number
    flag_column("keeps_idle_quota"),
    reference_column("parent_id", "tenants.id", nullable=True, ondelete="SET NULL"),
    sa.Index(None, "parent_id"),
    sa.UniqueConstraint("cluster_id", "name"),
    sa.CheckConstraint("weight >= 0 AND weight < 'Infinity'", name="weight"),
    sa.CheckConstraint("borrow_gpus >= -1", name="borrow"),
)

quotas = sa.Table(
    "quotas",
    metadata,
    id_column(),
    reference_column("tenant_id", "tenants.id", ondelete="CASCADE"),
    reference_column("gpu_type_id", "gpu_types.id", nullable=True),  # NULL for any type
    count_column("gpus", None),
    sa.Index("uq_quotas_tenant_id", "tenant_id", sa.text("coalesce(gpu_type_id, 0)"), unique=True),
    sa.Index(None, "gpu_type_id"),
    sa.CheckConstraint("gpus >= 0", name="gpus"),
)
