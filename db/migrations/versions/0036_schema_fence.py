"""The fence that keeps programs of other releases from writing."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from tessera.db.tables import metadata

revision = "0036"
down_revision = "0035"
branch_labels = None
depends_on = None

CHECK = """
CREATE FUNCTION check_stated_schema() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    stated text := current_setting('tessera.schema', true);
    present text;
BEGIN
    IF stated = 'migration' THEN
        RETURN NULL;
    END IF;
    SELECT version_num INTO present FROM alembic_version;
    IF stated IS DISTINCT FROM present THEN
        RAISE EXCEPTION 'the database has schema %, and a program for % may not write to it; upgrade'
            ' that program, or run `tessera migrate` if it is newer',
            present, coalesce('schema ' || nullif(stated, ''), 'an older schema')
            USING ERRCODE = 'undefined_table', CONSTRAINT = 'schema_fence';
    END IF;
    RETURN NULL;
END $$
"""


def _tables() -> list[str]:
    """Return the tables of Tessera that there are. Others may be in the same database."""
    return sorted(metadata.tables.keys() & set(sa.inspect(op.get_bind()).get_table_names()))


def upgrade() -> None:
    """Apply the migration. A table that a later migration makes gets its fence there."""
    op.execute(CHECK)
    for table in _tables():
        op.execute(
            f"CREATE TRIGGER schema_fence BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON {table}"
            " FOR EACH STATEMENT EXECUTE FUNCTION check_stated_schema()"
        )


def downgrade() -> None:
    """Undo the migration."""
    for table in _tables():
        op.execute(f"DROP TRIGGER schema_fence ON {table}")
    op.execute("DROP FUNCTION check_stated_schema()")
