"""Tables of rounds, their decisions, and network plans."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import BYTEA, JSONB

from tessera.db.schema.tables.columns import (
    count_column,
    flag_column,
    metadata,
    moment_column,
    real_column,
    reference_column,
    text_column,
)

rounds = sa.Table(
    "rounds",
    metadata,
    reference_column("cluster_id", "clusters.id", primary_key=True),
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    count_column("epoch", None),
    moment_column("created_at"),
    sa.Column("summary", JSONB, nullable=False),
    sa.Column("snapshot", BYTEA),  # packed by db.rounds.round_snapshots; NULL if no longer kept
    sa.Column("base", sa.BigInteger),  # the round that the snapshot differs from; NULL if whole
    sa.Column("proof", BYTEA),  # packed by tessera.db.rounds.proofs; NULL if nothing is certified
    sa.UniqueConstraint("cluster_id", "epoch"),
    sa.CheckConstraint("number > 0", name="number"),
    sa.CheckConstraint("base < number", name="base"),
)

decision_pages = sa.Table(  # decisions of a round on jobs that were submitted one after another
    "decision_pages",
    metadata,
    sa.Column("cluster_id", sa.BigInteger, primary_key=True),
    sa.Column("round", sa.BigInteger, primary_key=True),
    sa.Column("page", sa.BigInteger, primary_key=True),
    count_column(
        "first_job_id", None
    ),  # of a job that may be deleted; 0 if all jobs of the page are
    sa.Column("document", BYTEA, nullable=False),  # packed by tessera.db.base.decisions
    sa.ForeignKeyConstraint(
        ["cluster_id", "round"], ["rounds.cluster_id", "rounds.number"], ondelete="CASCADE"
    ),
)

networks = sa.Table(  # one for each cluster whose network is described
    "networks",
    metadata,
    reference_column("cluster_id", "clusters.id", primary_key=True),
    text_column("topology"),  # tessera.formulation.state.topologies.document as canonical JSON
    count_column("version", 1),
    count_column("last_plan"),
)

network_plans = sa.Table(
    "network_plans",
    metadata,
    reference_column("cluster_id", "clusters.id", primary_key=True),
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    moment_column("planned_at"),
    text_column("cause"),
    count_column("round", None),  # the last round at that time, which may be deleted
    count_column("levels", None),
    count_column("changed", None),
    real_column("seconds"),
    sa.Column("notes", JSONB, nullable=False, server_default=sa.text("'[]'")),
    sa.CheckConstraint("number > 0 AND levels > 0 AND changed >= 0", name="counts"),
    sa.CheckConstraint("seconds >= 0 AND seconds < 'Infinity'", name="seconds"),
)

standings = sa.Table(  # the network plan in force, by job
    "standings",
    metadata,
    reference_column("job_id", "jobs.id", primary_key=True, ondelete="CASCADE"),
    count_column("generation", None),  # of the allocation that the decision was made for
    count_column("rank", None),
    count_column("level", None),
    count_column("tag", -1),
    sa.Column("document", JSONB, nullable=False),  # the rest of the decision
    sa.CheckConstraint("rank >= 0 AND level >= 0 AND tag BETWEEN -1 AND 63", name="numbers"),
)

measured_traffic = sa.Table(  # by agents, of the latest allocation that was measured on the node
    "measured_traffic",
    metadata,
    reference_column("job_id", "jobs.id", primary_key=True, ondelete="CASCADE"),
    reference_column("node_id", "nodes.id", primary_key=True),
    count_column("generation", None),
    real_column("period_s"),
    real_column("sent_bytes"),  # by the node in one iteration
    flag_column("unhindered"),  # whether each job that it meets had a lower priority level
    sa.CheckConstraint("period_s > 0 AND period_s < 'Infinity'", name="period"),
    sa.CheckConstraint("sent_bytes > 0 AND sent_bytes < 'Infinity'", name="sent_bytes"),
    sa.Index(None, "node_id"),
)
