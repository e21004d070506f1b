"""COPY writes rows unchanged, and makes them while the database takes in earlier rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import sqlalchemy as sa

from tessera.db.copy import NULL, ROWS_PER_CHUNK, escape_text, write_rows
from tessera.db.engine import Database
from tessera.db.store import PostgresStore
from tessera.formulation.clock import SystemClock
from tessera.formulation.codec import digest
from tessera.service.loop import RoundLoop
from tessera.solvers.rounds.options import RoundOptions
from tests.support.stored_cluster import C, a_cluster, a_spec, commit, execute, submit, wait

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


@pytest.fixture
def notes(database: Database) -> Database:
    """Return a database with a table of numbered texts."""
    execute(database, "CREATE TABLE notes (n bigint PRIMARY KEY, text text)")
    return database


def read_texts(notes: Database) -> list[str | None]:
    with notes.read() as connection:
        return list(connection.execute(sa.text("SELECT text FROM notes ORDER BY n")).scalars())


def write_texts(notes: Database, rows: Iterator[tuple[str, str]]) -> None:
    notes.write(lambda connection: write_rows(connection, "notes", ("n", "text"), rows))


def test_any_text_reads_back_unchanged(notes: Database) -> None:
    write_texts(notes, ((str(i), escape_text(text)) for i, text in enumerate(AWKWARD)))
    assert read_texts(notes) == list(AWKWARD)


def test_null_is_distinct_from_text_and_nul_characters_are_removed(notes: Database) -> None:
    write_texts(notes, iter([("0", NULL), ("1", escape_text("a\0b"))]))
    assert read_texts(notes) == [None, "ab"]


@pytest.mark.parametrize("rows", [0, 1, ROWS_PER_CHUNK, 2 * ROWS_PER_CHUNK + 1])
def test_any_number_of_rows_can_be_written(notes: Database, rows: int) -> None:
    write_texts(notes, ((str(i), str(i)) for i in range(rows)))
    assert read_texts(notes) == [str(i) for i in range(rows)]


def test_a_row_that_cannot_be_made_is_not_reported_as_busy_and_nothing_is_written(
    notes: Database,
) -> None:
    def rows() -> Iterator[tuple[str, str]]:
        yield from ((str(i), "") for i in range(ROWS_PER_CHUNK + 1))
        raise KeyError("what")

    with pytest.raises(AssertionError, match="row of notes cannot be made") as error:
        write_texts(notes, rows())
    assert "KeyError 'what'" in str(error.value.__cause__)
    assert read_texts(notes) == []


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
