"""The database round trips of a round. On a busy server, each waits for a core as well."""

from __future__ import annotations

import math

from tessera.db.engine import Database
from tessera.db.store import PostgresStore
from tessera.formulation.records.store import Request
from tessera.service.loop import RoundLoop
from tessera.solvers.rounds.options import RoundOptions
from tests.support.round_trips import record_trips
from tests.support.stored_cluster import C, a_cluster, a_record, a_spec, do, submit
from tests.support.worlds import StoppedClock

MOST_TRIPS = 26
"""The most round trips of a round that starts jobs. They were 59 before it began in one transaction."""


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
