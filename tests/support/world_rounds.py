"""The rounds of a simulated world, behind the interface ``service.ports.rounds.Rounds``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tessera.formulation.decayed_use import NO_USES
from tessera.formulation.errors import DeadlineTooShort, NotFound, RequestIdReused, RoundSuperseded
from tessera.formulation.proofs import RoundProof
from tessera.formulation.records.rounds import RoundCommit, RoundRecord, decision_record
from tessera.formulation.records.store import Request
from tessera.formulation.snapshot import Snapshot
from tessera.simulator.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    record: RoundRecord
    snapshot: Snapshot
    request: Request | None
    proof: RoundProof


class WorldRounds:
    """A world's store with the behaviour of the database.

    It checks epochs, answers repeated requests, and stores rounds. Time passes only in calls of the
    world. Nothing changes while a round is decided, so no decision is skipped. The world releases
    the GPUs of silent nodes immediately, so no lease has to expire.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._kept: list[_Kept] = []  # of rounds 1, 2, ...

    def begin_round(
        self, cluster: str, request: Request | None, use_half_life_s: float = 0.0
    ) -> Snapshot | RoundRecord:
        """Return the snapshot for a round now, or the round that the request committed."""
        if request is not None and (done := self._replayed(request)) is not None:
            return done
        return self.snapshot(cluster, use_half_life_s)

    def snapshot(self, cluster: str, use_half_life_s: float = 0.0) -> Snapshot:
        """Return the snapshot for a round now. The world must count use by the same half-life."""
        self._require(cluster)
        snapshot = self._world.snapshot()
        if use_half_life_s == 0.0:
            return replace(snapshot, uses=NO_USES, use_half_life_s=0.0)
        assert snapshot.use_half_life_s == use_half_life_s
        return snapshot

    def commit(
        self, commit: RoundCommit, in_time: Callable[[], bool] = lambda: True
    ) -> RoundRecord:
        """Carry out a round, and store it."""
        request, store = commit.request, self._world.store
        self._require(commit.snapshot.cluster)
        if request is not None and (done := self._replayed(request)) is not None:
            return done
        if commit.snapshot.epoch != store.rounds + 1:
            raise RoundSuperseded(f"clusters/{store.cluster}/rounds/{store.rounds}")
        if not in_time():
            raise DeadlineTooShort("the deadline ended; nothing was changed: call again with more")
        refused = commit.summary.outcome == "refused"
        if refused:
            store.pass_round()
        else:
            self._world.carry_out(commit.decisions, commit.legs, commit.summary.prices)
        self._world.check()
        summary = replace(
            commit.summary,
            number=store.rounds,
            epoch=store.rounds + 1,
            outcome=commit.summary.outcome or "committed",
            running=len(store.gpus.gangs),
            waiting=len(store.jobs.live) - len(store.gpus.gangs),
        )
        decisions = tuple(decision_record(commit.snapshot, d) for d in commit.decisions)
        record = RoundRecord(summary=summary, decisions=decisions)
        self._kept.append(
            _Kept(record=record, snapshot=commit.snapshot, request=request, proof=commit.proof)
        )
        return record

    def _replayed(self, request: Request) -> RoundRecord | None:
        """Return the round that the request committed, if any.

        Raises:
            RequestIdReused: the id belongs to another request.
        """
        for stored in self._kept:
            if stored.request is not None and stored.request.id == request.id:
                if stored.request != request:
                    problem = f"{request.id} was used for another request; use a new id for each"
                    raise RequestIdReused("request_id", problem)
                return stored.record
        return None

    def get_round(self, cluster: str, number: int) -> RoundRecord:
        """Return a round.

        Raises:
            NotFound: there is no such round.
        """
        return self._find(cluster, number).record

    def round_snapshot(self, cluster: str, number: int) -> Snapshot:
        """Return the snapshot on which a round was decided.

        Raises:
            NotFound: there is no such round.
        """
        return self._find(cluster, number).snapshot

    def round_proof(self, cluster: str, number: int) -> RoundProof:
        """Return what is kept of the proof of a round.

        Raises:
            NotFound: there is no such round.
        """
        return self._find(cluster, number).proof

    def _find(self, cluster: str, number: int) -> _Kept:
        if cluster != self._world.store.cluster or not 1 <= number <= len(self._kept):
            raise NotFound(f"clusters/{cluster}/rounds/{number}")
        return self._kept[number - 1]

    def _require(self, cluster: str) -> None:
        if cluster != self._world.store.cluster:
            raise NotFound(f"clusters/{cluster}")
