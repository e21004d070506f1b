"""Stored rounds: small, read back byte for byte, and kept with their snapshots and proofs."""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.db import round_snapshots
from tessera.db.decisions import PAGE_DECISIONS
from tessera.db.deltas import decode_delta, encode_delta
from tessera.db.engine import Database
from tessera.db.store import PostgresStore
from tessera.formulation.codec import digest, encode
from tessera.formulation.decisions import Decision
from tessera.formulation.errors import NotAllowed, NotFound
from tessera.formulation.goals import GoalResult
from tessera.formulation.lifecycle import JobEvent
from tessera.formulation.records.jobs import JobSpec
from tessera.formulation.records.rounds import RoundRecord
from tessera.formulation.records.store import Retention
from tests.support.laws import examples
from tests.support.proofs import a_round_proof
from tests.support.rows import query_scalar
from tests.support.stored_cluster import (
    BERT,
    C,
    a_cluster,
    a_round,
    a_spec,
    a_summary,
    apply_event,
    commit,
    execute,
    job,
    start,
    submit,
    wait,
)

MANY = 2 * PAGE_DECISIONS + 10


"""The number of jobs whose decisions take three pages."""


def queued_jobs(count: int, first: int = 0) -> list[JobSpec]:
    """Return jobs whose names compress as badly as those that the server generates."""
    names = [np.random.default_rng(first + i).bytes(8).hex() for i in range(count)]
    return [a_spec(f"job-{name}") for name in names]


def commit_all_waiting(store: PostgresStore) -> None:
    """Commit a round in which every job waits."""
    snapshot = store.snapshot(C)
    commit(store, snapshot, *(wait(snapshot, name) for name in snapshot.jobs.name))


@given(st.binary(max_size=50_000), st.binary(max_size=50_000), st.integers(0, 3))
@examples(50)
def test_a_delta_restores_any_bytes(base: bytes, text: bytes, repeats: int) -> None:
    for old, new in ((base, text), (base * repeats, base * repeats + text), (b"[1],[2]", text)):
        assert decode_delta(old, encode_delta(old, new)) == new


def test_a_delta_of_similar_texts_is_small() -> None:
    rng = np.random.default_rng(1)
    rows = [rng.bytes(8).hex() for _ in range(4000)]
    changed = [row for i, row in enumerate(rows) if i % 97] + [rng.bytes(8).hex() for _ in range(9)]
    old, new = (f'{{"names":[{",".join(names)}],"n":[1]}}'.encode() for names in (rows, changed))
    assert len(encode_delta(old, new)) < len(zlib.compress(new)) / 10


def test_a_round_adds_a_tenth_of_a_row_for_each_decision(
    store: PostgresStore, database: Database
) -> None:
    """A round of 1,000 waiting jobs added 0.37 MiB when each decision was a row."""
    a_cluster(store)
    jobs, rounds = 1000, 4
    submit(store, *queued_jobs(jobs))
    commit_all_waiting(store)
    size = "SELECT pg_database_size(current_database())"
    before = query_scalar(database, size)
    for turn in range(rounds):
        submit(store, *queued_jobs(20, first=jobs + 20 * turn))
        commit_all_waiting(store)
    grown = (query_scalar(database, size) - before) / rounds
    assert grown < 60_000


def test_snapshots_are_stored_as_deltas_and_read_back_exactly(
    store: PostgresStore, database: Database
) -> None:
    a_cluster(store)
    submit(store, *queued_jobs(400))
    texts = []
    for turn in range(round_snapshots.MAX_ROUNDS_APART + 2):
        snapshot = store.snapshot(C)
        texts.append(encode(snapshot))
        commit(store, snapshot, wait(snapshot, snapshot.jobs.name[turn]))
        apply_event(store, snapshot.jobs.name[turn], JobEvent.CANCEL)
    bases = "SELECT string_agg(coalesce(base, 0)::text, ' ' ORDER BY number) FROM rounds"
    apart = round_snapshots.MAX_ROUNDS_APART
    assert query_scalar(database, bases) == " ".join(
        ["0", *["1"] * (apart - 1), "0", str(apart + 1)]
    )
    for number, encoded in enumerate(texts, 1):
        loaded = store.round_snapshot(C, number)
        assert encode(loaded) == encoded
        assert digest(loaded) == store.get_round(C, number).summary.snapshot_digest


def test_a_snapshot_with_little_in_common_is_stored_completely(
    store: PostgresStore, database: Database
) -> None:
    a_cluster(store)
    submit(store, *queued_jobs(400))
    commit_all_waiting(store)
    execute(database, "DELETE FROM jobs")
    submit(store, *queued_jobs(400, first=1000))
    commit_all_waiting(store)
    assert query_scalar(database, "SELECT count(*) FROM rounds WHERE base IS NULL") == 2


def test_each_job_finds_its_reason_and_each_round_its_decisions_in_order(
    store: PostgresStore,
) -> None:
    a_cluster(store)
    submit(store, *queued_jobs(MANY))
    snapshot = store.snapshot(C)
    names = list(snapshot.jobs.name)
    order = np.random.default_rng(1).permutation(MANY).tolist()
    decisions = [
        replace_message(wait(snapshot, names[i]), f"reason of {names[i]}") for i in order[:-1]
    ]
    runs = start(snapshot, names[order[-1]], [("a100-0", [0])])._replace(restart_price=float("inf"))
    record = commit(store, snapshot, *decisions, runs)
    assert store.get_round(C, 1) == record
    assert [d.job for d in record.decisions] == [names[i] for i in order]
    records, _ = store.list_jobs(C, [], 0, 10_000)
    messages = {r.spec.name: r.reason and r.reason.message for r in records}
    assert messages.pop(names[order[-1]]) is None
    assert messages == {names[i]: f"reason of {names[i]}" for i in order[:-1]}
    assert job(store, names[0]).reason_round == 1


def replace_message(decision: Decision, message: str) -> Decision:
    assert decision.reason is not None
    return decision._replace(reason=replace(decision.reason, message=message))


def test_decisions_on_jobs_deleted_meanwhile_are_kept(
    store: PostgresStore, database: Database
) -> None:
    a_cluster(store)
    submit(store, *queued_jobs(MANY))
    snapshot = store.snapshot(C)
    execute(database, "DELETE FROM jobs")
    record = commit(store, snapshot, *(wait(snapshot, name) for name in snapshot.jobs.name))
    assert len(record.decisions) == MANY
    assert store.get_round(C, 1) == record


def test_a_round_is_kept_while_the_snapshot_of_a_kept_round_needs_it(store: PostgresStore) -> None:
    a_cluster(store)
    submit(store, *queued_jobs(400))
    last = round_snapshots.MAX_ROUNDS_APART + 4
    for _ in range(last):
        commit_all_waiting(store)
    assert store.prune(-1.0, 6)["rounds"] == 0  # round 15 needs the snapshot of round 1
    assert store.prune(-1.0, 4)["rounds"] == round_snapshots.MAX_ROUNDS_APART
    assert [r.number for r in store.list_rounds(C, 0, 99)] == [20, 19, 18, 17]
    for number in range(17, last + 1):
        assert (
            digest(store.round_snapshot(C, number))
            == store.get_round(C, number).summary.snapshot_digest
        )
    commit_all_waiting(store)
    # The last round has the jobs' reasons, and its snapshot needs that of round 17.
    assert store.prune(-1.0, 0)["rounds"] == 3
    assert [r.number for r in store.list_rounds(C, 0, 99)] == [21, 17]
    assert digest(store.round_snapshot(C, 21))


def test_a_commit_whose_base_was_deleted_meanwhile_stores_its_snapshot_whole(
    store: PostgresStore, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_cluster(store)
    submit(store, *queued_jobs(400))
    commit_all_waiting(store)
    packed = round_snapshots.pack_snapshot

    def delete_base(
        base: round_snapshots.BaseSnapshot | None, encoded: bytes
    ) -> round_snapshots.StoredSnapshot:
        stored = packed(base, encoded)
        assert stored.base == 1
        execute(database, "UPDATE rounds SET snapshot = NULL")
        return stored

    monkeypatch.setattr("tessera.db.rounds.pack_snapshot", delete_base)
    snapshot = store.snapshot(C)
    commit(store, snapshot)
    assert encode(store.round_snapshot(C, 2)) == encode(snapshot)


def test_only_the_latest_snapshots_are_kept(store: PostgresStore) -> None:
    a_cluster(store)
    submit(store, *queued_jobs(400))
    for _ in range(round_snapshots.MAX_ROUNDS_APART + 3):
        commit_all_waiting(store)
    retention = Retention(most_snapshots=3)
    assert store.prune_batch(C, retention)["snapshots"] == round_snapshots.MAX_ROUNDS_APART
    assert store.prune_batch(C, retention)["snapshots"] == 0
    with pytest.raises(NotAllowed, match="retain_snapshots"):
        store.round_snapshot(C, round_snapshots.MAX_ROUNDS_APART)
    assert store.get_round(C, 1).decisions
    for number in range(round_snapshots.MAX_ROUNDS_APART + 1, round_snapshots.MAX_ROUNDS_APART + 4):
        store.round_snapshot(C, number)


def test_rounds_beyond_the_count_are_deleted_whatever_their_age(store: PostgresStore) -> None:
    a_cluster(store)
    submit(store, a_spec("a"))
    for _ in range(8):
        commit_all_waiting(store)
    deleted = store.prune_batch(C, Retention(least_rounds=2, most_rounds=5))
    assert (deleted["rounds"], deleted["jobs"]) == (3, 0)
    with pytest.raises(NotFound):
        store.get_round(C, 3)


def test_a_workload_is_deleted_with_its_last_job_unless_a_user_described_it(
    store: PostgresStore, database: Database
) -> None:
    a_cluster(store)
    for number in range(3):
        workload = replace(BERT, params=f"{number}B")
        submit(store, a_spec(f"job-{number}", workload=workload))
        apply_event(store, f"job-{number}", JobEvent.CANCEL)
    submit(store, a_spec("stays", workload=replace(BERT, params="9B")))
    assert store.count_old(-1.0, 0) == store.prune(-1.0, 0) | {"workloads": 0}
    assert (
        query_scalar(database, "SELECT string_agg(params, ' ' ORDER BY params) FROM workloads")
        == "1B 9B"
    )


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
