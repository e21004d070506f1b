"""Rows in the whole database."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from tessera.db.schema import tables
from tessera.db.schema.engine import Database


def rows_left(database: Database) -> dict[str, int]:
    """Return the number of rows of each nonempty table, except request ids and the high water."""
    counts = {}
    with database.read() as connection:
        for table in tables.metadata.sorted_tables:
            if table.name not in ("request_ids", "high_water"):
                count = connection.execute(sa.select(sa.func.count()).select_from(table)).scalar()
                counts[table.name] = count or 0
    return {name: count for name, count in counts.items() if count}


def query_scalar(database: Database, query: str) -> Any:
    """Return the only value that a query finds."""
    with database.read() as connection:
        return connection.execute(sa.text(query)).scalar_one()
