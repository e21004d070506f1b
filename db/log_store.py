"""The store of ``tessera.service.ports.logs.LogStore`` on PostgreSQL. Each method is one transaction."""

from __future__ import annotations

from collections.abc import Sequence

from tessera.db import log_reads, migrate
from tessera.db.engine import Database
from tessera.formulation.records.logs import LogAnswer, LogRead, StartedJob


class PostgresLogStore:
    """The store of ``tessera.service.ports.logs.LogStore`` on PostgreSQL.

    A node is not asked if it was silent for longer than ``lease_s``.
    """

    def __init__(self, database: Database, lease_s: float = 30.0) -> None:
        self._database = migrate.MigratedDatabase(database.engine)
        self._lease_s = lease_s

    def find_start(self, cluster: str, job: str, generation: int) -> StartedJob:
        """Return a job and one of its starts."""
        with self._database.read() as connection:
            return log_reads.find_start(connection, cluster, job, generation)

    def ask_agent(self, cluster: str, read: LogRead, client: str) -> None:
        """Store a request for output."""
        self._database.write(
            lambda c: log_reads.store_request(c, cluster, read, client, self._lease_s)
        )

    def take_answer(self, read_id: str) -> LogAnswer | None:
        """Return the answer to a request and delete both, or return None if there is no answer."""
        return self._database.write(lambda c: log_reads.take_answer(c, read_id))

    def withdraw(self, read_id: str) -> None:
        """Delete a request that nobody waits for any more."""
        self._database.write(lambda c: log_reads.drop_request(c, read_id))

    def silence_s(self, cluster: str, node: str) -> float | None:
        """Return the seconds since a node was heard, or None if it was never heard."""
        with self._database.read() as connection:
            return log_reads.silence_of_node(connection, cluster, node)

    def find_pending(self, cluster: str, agent: str) -> list[LogRead]:
        """Return the requests that an agent has not answered."""
        with self._database.read() as connection:
            return log_reads.find_pending(connection, cluster, agent)

    def store_answers(self, cluster: str, agent: str, answers: Sequence[LogAnswer]) -> None:
        """Store an agent's answers."""
        self._database.write(lambda c: log_reads.store_answers(c, cluster, agent, answers))
