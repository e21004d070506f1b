"""Rounds: what is decided on, and what was decided."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tessera.formulation.answer.proofs import RoundProof
from tessera.formulation.records.rounds import RoundCommit, RoundRecord
from tessera.formulation.records.store import Request
from tessera.formulation.state.snapshot import Snapshot


class Rounds(Protocol):
    """The part of a store that rounds need. Every method is one transaction."""

    def begin_round(
        self, cluster: str, request: Request | None, use_half_life_s: float = 0.0
    ) -> Snapshot | RoundRecord:
        """Return the snapshot of a new round, after nodes that fell silent have lost their jobs.

        A node is silent if it was not heard from for longer than lease plus margin, by the
        database's clock. Its jobs go through LOST. The GPUs of the dead node need no report; those
        of a gang's members on live nodes do. Nodes whose probation is over are undrained. Jobs that
        have held GPUs for their longest run time go through TIME_OUT. If
        ``request`` committed a round before, nothing happens, and that round is returned.

        The snapshot has the use of tenants that decays by ``use_half_life_s``, unless that is 0.

        Raises:
            NotFound: the cluster. RequestIdReused.
        """
        ...

    def snapshot(self, cluster: str, use_half_life_s: float = 0.0) -> Snapshot:
        """Read the snapshot of a round in one REPEATABLE READ transaction. Raises NotFound.

        It has the use of tenants that decays by ``use_half_life_s``, unless that is 0.
        """
        ...

    def commit(
        self, commit: RoundCommit, in_time: Callable[[], bool] = lambda: True
    ) -> RoundRecord:
        """Commit a round, all or nothing. The first statement advances the epoch or gives up.

        Each decision is guarded by the versions of its job and nodes. If they changed during the
        solve, they are left alone and the decision is recorded as not applied. ``in_time`` is
        called last, because a round may wait for its turn.

        Raises:
            RoundSuperseded: the epoch moved on; nothing was written.
            DeadlineTooShort: not ``in_time``; nothing was written.
        """
        ...

    def get_round(self, cluster: str, number: int) -> RoundRecord:
        """Return a round with its decisions. Raises NotFound."""
        ...

    def round_snapshot(self, cluster: str, number: int) -> Snapshot:
        """Return the snapshot that a round was decided on. Raises NotFound."""
        ...

    def round_proof(self, cluster: str, number: int) -> RoundProof:
        """Return what is kept of the proof of a round. Raises NotFound."""
        ...
