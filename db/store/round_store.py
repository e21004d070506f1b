"""PostgreSQL's store of rounds: what they read, and what they commit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from tessera.db.agents import agents, health
from tessera.db.agents.clock_watch import SilenceLimit
from tessera.db.jobs import run_times
from tessera.db.rounds import proofs, round_snapshots, rounds
from tessera.db.rounds.snapshot.load import load_snapshot
from tessera.db.schema.migrate import MigratedDatabase
from tessera.formulation.answer.proofs import RoundProof
from tessera.formulation.records.rounds import RoundCommit, RoundRecord
from tessera.formulation.records.store import Request
from tessera.formulation.state.snapshot import Snapshot

log = logging.getLogger(__name__)

MAX_ATTEMPTS: Final = 8
"""The times for which a round looks whether nodes have fallen silent while it freed those that had."""


class RoundStore:
    """The store of ``tessera.service.server.ports.rounds.Rounds`` on PostgreSQL."""

    def __init__(self, database: MigratedDatabase, silence: SilenceLimit) -> None:
        """Use a database. An agent that was silent for longer than ``silence`` is dead."""
        self._database, self._silence = database, silence

    def begin_round(
        self, cluster: str, request: Request | None, use_half_life_s: float = 0.0
    ) -> Snapshot | RoundRecord:
        """Return the snapshot of a new round; see ``tessera.service.server.ports.rounds.Rounds``.

        If no node has fallen silent and no job has timed out, this is one transaction that only
        reads, because rounds begin often. Otherwise it is repeated after their jobs have lost their
        GPUs, for other nodes may have fallen silent meanwhile: a round would move their jobs, which
        would wait for gangs that cannot answer.
        """
        for _ in range(MAX_ATTEMPTS):
            with self._database.read() as connection:
                if (
                    request is not None
                    and (done := rounds.find_committed_round(connection, request)) is not None
                ):
                    return done
                silence = agents.find_silence(connection, cluster)
                silence_s = self._silence.at(silence.clock_s)
                returning = silence.returning_s <= silence_s
                if not silence.is_ahead and silence.longest_s <= silence_s and not returning:
                    loaded = load_snapshot(connection, cluster, silence_s, use_half_life_s)
                    if not run_times.has_overlong_jobs(loaded):
                        return loaded
            self._catch_up(cluster, returning=returning)
        return self.snapshot(cluster, use_half_life_s)

    def _catch_up(self, cluster: str, *, returning: bool) -> None:
        """Free the GPUs of silent nodes and end overlong jobs, and perhaps the probations of nodes."""
        if returning:
            self._end_probations(cluster)
        self.expire(cluster)
        ended = self._database.write(lambda c: run_times.end_overlong_jobs(c, cluster))
        if ended:
            log.info(
                "ended jobs that ran for longer than they may",
                extra={"event": "jobs_timed_out", "cluster": cluster, "jobs": ended},
            )

    def expire(self, cluster: str) -> list[str]:
        """Free the GPUs of silent nodes; return the names of the jobs that lost some."""
        lost = self._database.write(
            lambda c: agents.expire_silent_nodes(c, cluster, self._silence.read(c))
        )
        if lost:
            log.warning(
                "jobs have lost their GPUs, because nodes fell silent",
                extra={
                    "event": "nodes_fell_silent",
                    "cluster": cluster,
                    "nodes": {node for nodes in lost.values() for node in nodes},
                    "jobs": list(lost),
                },
            )
        return list(lost)

    def _end_probations(self, cluster: str) -> None:
        for node in self._database.write(
            lambda c: health.end_probations(c, cluster, self._silence.read(c))
        ):
            health.log_health(cluster, node, health.HealthEvent.RETURN)

    def snapshot(self, cluster: str, use_half_life_s: float = 0.0) -> Snapshot:
        """Read everything a round may look at."""
        with self._database.read() as connection:
            silence_s = self._silence.read(connection)
            return load_snapshot(connection, cluster, silence_s, use_half_life_s)

    def commit(
        self, commit: RoundCommit, in_time: Callable[[], bool] = lambda: True
    ) -> RoundRecord:
        """Commit a round."""
        return rounds.commit_round(self._database, commit, in_time)

    def get_round(self, cluster: str, number: int) -> RoundRecord:
        """Return a round with its decisions."""
        with self._database.read() as connection:
            return rounds.get_round(connection, cluster, number)

    def round_snapshot(self, cluster: str, number: int) -> Snapshot:
        """Return the snapshot that a round was decided on."""
        with self._database.read() as connection:
            return round_snapshots.round_snapshot(connection, cluster, number)

    def round_proof(self, cluster: str, number: int) -> RoundProof:
        """Return what is kept of the proof of a round."""
        with self._database.read() as connection:
            return proofs.round_proof(connection, cluster, number)
