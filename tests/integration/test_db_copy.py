"""Stored rounds read back unchanged, whatever texts they have."""

from __future__ import annotations

from dataclasses import replace

from tessera.db.store import PostgresStore
from tessera.formulation.clock import SystemClock
from tessera.formulation.codec import digest
from tessera.service.loop import RoundLoop
from tessera.solvers.rounds.options import RoundOptions
from tests.support.stored_cluster import C, a_cluster, a_spec, commit, submit, wait

AWKWARD = (
    "",
    "a\tb",
    "a\nb\r\n",
    "\\",
    "\\N",
    "\\.",
    "\\t",
    '"quoted"',
    "naïve 漢字",
    "x" * 70_000,
)


def test_a_decision_with_any_text_reads_back_unchanged(store: PostgresStore) -> None:
    a_cluster(store)
    submit(store, a_spec("a"))
    snapshot = store.snapshot(C)
    decision = wait(snapshot, "a")
    assert decision.reason is not None
    reason = replace(
        decision.reason, message=" ".join(AWKWARD), evidence=tuple((t, t) for t in AWKWARD)
    )
    commit(store, snapshot, decision._replace(reason=reason))
    (stored,) = store.get_round(C, 1).decisions
    assert stored.reason == reason


def test_a_round_is_named_by_the_digest_of_its_stored_snapshot(
    store: PostgresStore,
) -> None:
    a_cluster(store)
    submit(store, a_spec("a"))
    loop = RoundLoop(store, SystemClock())
    record = loop.schedule(
        C,
        RoundOptions(solver="greedy"),
        remaining_s=lambda: float("inf"),
        dry_run=False,
        request=None,
        cancelled=lambda: False,
    )
    assert record.summary.snapshot_digest == digest(store.round_snapshot(C, 1))
