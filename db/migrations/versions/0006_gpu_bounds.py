"""Lower and upper bounds on the GPUs of a job."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

COLUMNS = ("min_gpus", "max_gpus")
BOUNDS = "min_gpus BETWEEN 0 AND requested_gpus AND (max_gpus = 0 OR max_gpus >= requested_gpus)"


def upgrade() -> None:
    """Apply the migration. Existing jobs have no bounds."""
    for name in COLUMNS:
        bound: sa.Column[int] = sa.Column(
            name, sa.BigInteger(), server_default=sa.text("0"), nullable=False
        )
        op.add_column("jobs", bound)
    op.create_check_constraint(op.f("ck_jobs_gpu_bounds"), "jobs", BOUNDS)


def downgrade() -> None:
    """Undo the migration. Jobs lose their bounds."""
    op.drop_constraint(op.f("ck_jobs_gpu_bounds"), "jobs")
    for name in COLUMNS:
        op.drop_column("jobs", name)
