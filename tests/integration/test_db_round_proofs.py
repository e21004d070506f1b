"""Proofs of rounds in PostgreSQL, which are kept as long as their rounds."""

from __future__ import annotations

import pytest

from tessera.db.store import PostgresStore
from tessera.formulation.errors import NotFound
from tessera.formulation.goals import GoalResult
from tessera.formulation.records.rounds import RoundRecord
from tessera.formulation.records.store import Retention
from tests.support.proofs import a_round_proof
from tests.support.stored_cluster import C, a_cluster, a_round, a_spec, a_summary, commit, submit

GOALS = (
    GoalResult(name="max-min", unit="s", objective=1.0, bound=1.0, gap=0.0, proved_by="levels"),
    GoalResult(
        name="jct",
        unit="jobs",
        objective=5.0,
        bound=5.5,
        gap=0.1,
        proved_by="prices",
        certified=True,
    ),
)


def commit_proven(store: PostgresStore) -> RoundRecord:
    """Commit a round whose last goal has a certificate."""
    snapshot = store.snapshot(C)
    summary = a_summary(snapshot, goals=GOALS, proved_by="prices", has_certificate=True)
    return store.commit(a_round(snapshot, summary=summary, proof=a_round_proof()))


def test_a_round_reads_back_with_who_proved_it(store: PostgresStore) -> None:
    a_cluster(store)
    submit(store, a_spec("a"))
    record = commit_proven(store)
    assert store.get_round(C, 1) == record
    assert store.list_rounds(C, 0, 10) == [record.summary]
    assert record.summary.goals == GOALS
    assert store.round_proof(C, 1) == a_round_proof()


def test_a_proof_is_kept_as_long_as_its_round(store: PostgresStore) -> None:
    a_cluster(store)
    commit_proven(store)
    for _ in range(3):
        commit(store, store.snapshot(C))
    store.prune_batch(C, Retention(most_snapshots=2))
    assert store.round_proof(C, 1) == a_round_proof()
    store.prune_batch(C, Retention(least_rounds=1, most_rounds=1))
    with pytest.raises(NotFound):
        store.round_proof(C, 1)
