"""The first schema: the SQL of the file with this name, and a fence around each of its tables."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from alembic import op

SCHEMA = Path(__file__).with_suffix(".sql").read_text(encoding="utf-8")

# Until the first release, commits change this schema in place. Databases of other ones are refused.
revision = f"0001_{hashlib.sha256(SCHEMA.encode()).hexdigest()[:8]}"
down_revision = None
branch_labels = None
depends_on = None

TABLES = re.findall(r"^CREATE (?:UNLOGGED )?TABLE (\w+)", SCHEMA, re.MULTILINE)
FUNCTIONS = re.findall(r"^CREATE FUNCTION (\w+)", SCHEMA, re.MULTILINE)

FENCE = """
CREATE TRIGGER schema_fence BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON {table}
FOR EACH STATEMENT EXECUTE FUNCTION check_stated_schema()
"""


def upgrade() -> None:
    """Apply the migration."""
    op.execute(SCHEMA)
    for table in TABLES:
        op.execute(FENCE.format(table=table))


def downgrade() -> None:
    """Undo the migration."""
    op.execute(f"DROP TABLE {', '.join(TABLES)}")
    op.execute(f"DROP FUNCTION {', '.join(FUNCTIONS)}")
