"""The database round trips of a round. On a busy server, each waits for a core as well."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg2.extensions
import sqlalchemy as sa

from tessera.db.engine import Database
from tessera.db.store import PostgresStore
from tessera.formulation.records.store import Request
from tessera.service.loop import RoundLoop
from tessera.solvers.rounds.options import RoundOptions
from tests.support.stored_cluster import C, a_cluster, a_record, a_spec, do, submit
from tests.support.worlds import StoppedClock

MOST_TRIPS = 26
"""The most round trips of a round that starts jobs. They were 59 before it began in one transaction."""


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


def test_a_round_makes_few_database_round_trips(store: PostgresStore, database: Database) -> None:
    a_cluster(store)
    do(store, lambda w: w.upsert_estimates(C, [a_record(n) for n in (1, 2, 4)]))
    submit(store, a_spec("one", requested_gpus=2))
    loop = RoundLoop(store, StoppedClock())
    store.ready()
    with record_trips(database) as trips:
        record = loop.schedule(
            C,
            RoundOptions(),
            remaining_s=lambda: math.inf,
            dry_run=False,
            request=Request(id="r", method="Schedule", digest="d"),
            cancelled=lambda: False,
        )
    assert record.summary.started == 1
    assert any(trip.startswith("COPY") for trip in trips)
    assert trips.count("begin") == trips.count("commit") == 2
    assert len(trips) <= MOST_TRIPS, "\n".join(" ".join(trip.split()) for trip in trips)
