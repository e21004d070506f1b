"""The store of ``tessera.service.ports`` on PostgreSQL. Each method is one transaction."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import sqlalchemy as sa

from tessera.db import audit_log, derived_estimates, prune, purge, requests
from tessera.db.agent_store import AgentStore
from tessera.db.clock_watch import SilenceLimit
from tessera.db.engine import Database
from tessera.db.health import PROBATION_S
from tessera.db.limits import DEFAULT_LIMITS
from tessera.db.migrate import MigratedDatabase
from tessera.db.record_store import RecordStore
from tessera.db.round_store import RoundStore
from tessera.db.snapshot.load import load_snapshot
from tessera.db.writer import PostgresWriter, Work
from tessera.formulation.records.estimates import EstimationInputs
from tessera.formulation.records.store import Request, Retention, StoreLimits
from tessera.formulation.snapshot import Snapshot

_CHECK_AT_ONCE = sa.text("SET CONSTRAINTS ALL IMMEDIATE")
"""A check now, and not at the commit, which a call that only validates does not reach."""


class _DryRun(Exception):
    """An exception that rolls a validating call back and carries its answer out."""

    def __init__(self, response: bytes) -> None:
        self.response = response


class PostgresStore(RecordStore, RoundStore, AgentStore):
    """The store of ``tessera.service.ports.store.Store`` on PostgreSQL.

    An agent is dead when it was silent for ``lease_s`` plus ``margin_s``. In the margin, an agent
    stops its gangs after its lease has run out.
    """

    def __init__(
        self,
        database: Database,
        lease_s: float = 30.0,
        margin_s: float = 15.0,
        limits: StoreLimits = DEFAULT_LIMITS,
        monotonic_s: Callable[[], float] = time.monotonic,
        probation_s: float = PROBATION_S,
    ) -> None:
        """Use a database, whose schema is checked in each transaction."""
        silence = SilenceLimit(lease_s + margin_s, monotonic_s)
        super().__init__(MigratedDatabase(database.engine), silence, limits, probation_s)

    def write(
        self,
        request: Request | None,
        work: Work,
        *,
        validate_only: bool = False,
    ) -> bytes:
        """Run ``work`` in one transaction. With a request id it runs only once."""

        def transaction(connection: sa.Connection) -> bytes:
            if (
                request is not None
                and (done := requests.claim_request(connection, request)) is not None
            ):
                return done
            response = work(self._writer(connection))
            audit_log.record_change(connection)
            if request is not None:
                requests.store_answer(connection, request, response)
            if validate_only:
                connection.execute(_CHECK_AT_ONCE)
                raise _DryRun(response)
            return response

        try:
            return self._database.write(transaction)
        except _DryRun as done:
            return done.response

    def rehearse(
        self,
        cluster: str,
        works: Sequence[Work],
        use_half_life_s: float = 0.0,
    ) -> tuple[Snapshot, EstimationInputs]:
        """Return the snapshot, and the inputs of estimates, after changes that are rolled back."""

        def transaction(connection: sa.Connection) -> tuple[Snapshot, EstimationInputs]:
            writer = self._writer(connection)
            for work in works:
                work(writer)
            silence_s = self._silence.read(connection)
            return (
                load_snapshot(connection, cluster, silence_s, use_half_life_s),
                derived_estimates.load_estimation(connection, cluster),
            )

        return self._database.rehearse(transaction)

    def _writer(self, connection: sa.Connection) -> PostgresWriter:
        return PostgresWriter(connection, self._silence.usual_s, self._limits)

    def ready(self) -> None:
        """Check the connection and the schema."""
        with self._database.read() as connection:  # this checks the schema
            self._silence.read(connection)

    def purge(self) -> bool:
        """Remove a batch of rows of deleted clusters; return whether there may be more."""
        return self._database.write(purge.purge_batch)

    def prune(
        self, older_than_s: float, keep_rounds: int, audit_s: float = math.inf
    ) -> dict[str, int]:
        """Delete all old rows; return the deleted numbers by kind.

        Entries of the audit log are kept for ``audit_s``.
        """
        retention = _retention(older_than_s, keep_rounds, audit_s)
        return prune.prune_database(self._database, retention)

    def count_old(
        self, older_than_s: float, keep_rounds: int, audit_s: float = math.inf
    ) -> dict[str, int]:
        """Return how many rows of each kind ``prune`` would delete."""
        return prune.count_old(self._database, _retention(older_than_s, keep_rounds, audit_s))

    def prune_batch(self, cluster: str, retention: Retention) -> dict[str, int]:
        """Delete a bounded number of old rows of each kind; return the deleted numbers by kind."""
        return prune.prune_batch(self._database, cluster, retention)


def _retention(older_than_s: float, keep_rounds: int, audit_s: float) -> Retention:
    return Retention(
        requests_s=older_than_s,
        rounds_s=older_than_s,
        jobs_s=older_than_s,
        least_rounds=keep_rounds,
        audit_s=audit_s,
    )
