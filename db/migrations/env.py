"""Runs migrations on the connection, and inside the transaction, that ``tessera.db.migrate`` hands over."""

from __future__ import annotations

from alembic import context

from tessera.db.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
