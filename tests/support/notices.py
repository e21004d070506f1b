"""Notices of the database, as a server gets them, read one step at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from psycopg2.extensions import ISOLATION_LEVEL_AUTOCOMMIT

from tessera.db.base.turn import ROUNDS_CHANNEL
from tessera.db.schema.engine import Database

MARK = "everything before this has been heard"


class RoundRequests:
    """The clusters for which rounds were requested since the last call."""

    def __init__(self, connection: Any) -> None:
        self._connection, self._cursor = connection, connection.cursor()
        self._cursor.execute(f"LISTEN {ROUNDS_CHANNEL}")

    def take(self) -> list[str]:
        """Return the clusters of the requests that were committed since the last call, in order."""
        self._cursor.execute("SELECT pg_notify(%s, %s)", (ROUNDS_CHANNEL, MARK))
        heard = list[str]()
        while MARK not in heard:
            self._connection.poll()
            heard += [notice.payload for notice in self._connection.notifies]
            self._connection.notifies.clear()
        return [name for name in heard if name != MARK]


@contextmanager
def round_requests(database: Database) -> Iterator[RoundRequests]:
    """Listen for requests of rounds."""
    connection: Any = database.engine.raw_connection()
    driver = connection.driver_connection
    try:
        driver.set_isolation_level(ISOLATION_LEVEL_AUTOCOMMIT)
        yield RoundRequests(driver)
    finally:
        connection.invalidate()
