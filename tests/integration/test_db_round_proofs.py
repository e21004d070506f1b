"""Proofs of rounds in PostgreSQL: as long as their rounds, and unknown to earlier releases."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sqlalchemy as sa

from tessera.db import migrate
from tessera.db.engine import Database
from tessera.db.store import PostgresStore
from tessera.formulation.errors import NotFound
from tessera.formulation.goals import GoalResult
from tessera.formulation.proofs import NO_PROOF
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


def test_an_earlier_release_reads_the_rounds_after_a_downgrade(
    store: PostgresStore, database: Database
) -> None:
    a_cluster(store)
    record = commit_proven(store)
    plain = commit(store, store.snapshot(C))
    migrate.downgrade_schema(database, "0021")
    with database.engine.begin() as connection:
        text = connection.execute(
            sa.text("SELECT string_agg(summary::text, '') FROM rounds")
        ).scalar_one()
    assert not any(name in text for name in ("proved_by", "certified", "has_certificate"))
    migrate.upgrade_schema(database)
    assert store.round_proof(C, 1) == NO_PROOF
    goals = tuple(replace(goal, proved_by="", certified=False) for goal in GOALS)
    summary = replace(record.summary, goals=goals, proved_by="", has_certificate=False)
    assert store.get_round(C, 1).summary == summary
    assert store.get_round(C, 2) == plain
