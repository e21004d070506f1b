"""A recorder of the round trips to the database."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg2.extensions
import sqlalchemy as sa

from tessera.db.schema.engine import Database


@contextmanager
def record_trips(database: Database) -> Iterator[list[str]]:
    """Yield a text for each wait for the database, also for the begin and the end of a transaction."""
    trips: list[str] = []

    class Cursor(psycopg2.extensions.cursor):
        def execute(self, query: Any, *args: Any) -> None:
            trips.append(str(query))
            super().execute(query, *args)

        def copy_expert(self, sql: Any, *args: Any) -> None:
            trips.append(str(sql))
            super().copy_expert(sql, *args)

    def connected(connection: Any, _record: object) -> None:
        connection.cursor_factory = Cursor

    events = ("begin", "commit", "rollback")
    hooks = {name: (lambda _connection, name=name: trips.append(name)) for name in events}
    database.engine.dispose()  # existing connections lack the hooks
    sa.event.listen(database.engine, "connect", connected)
    for name, hook in hooks.items():
        sa.event.listen(database.engine, name, hook)
    yield trips
    sa.event.remove(database.engine, "connect", connected)
    for name, hook in hooks.items():
        sa.event.remove(database.engine, name, hook)
