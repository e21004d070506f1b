"""The environment of migrations, which run in the transaction of ``tessera.db.schema.migrate``."""

from __future__ import annotations

from alembic import context

from tessera.db.schema.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
