"""The databases that tests get: empty ones, although others have used them."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from tessera.db.store import PostgresStore
from tests.support.database import EmptyDatabases
from tests.support.stored_cluster import C, a_cluster, a_spec, execute, submit


def test_a_used_database_is_empty_for_others_under_another_name(
    empty_databases: EmptyDatabases,
) -> None:
    with empty_databases.take() as first:
        store = PostgresStore(first)
        a_cluster(store)
        submit(store, a_spec("a"))
        old = first.engine.url.database
    assert old in empty_databases.names
    with empty_databases.take() as second:
        assert second.engine.url.database != old
        store = PostgresStore(second)
        assert store.list_clusters("", 10) == []
        a_cluster(store)  # the rows and names of the first one are gone
        submit(store, a_spec("a"))
        with second.engine.connect() as connection:
            assert connection.execute(sa.text("SELECT id FROM clusters")).scalars().all() == [1]
        assert store.get_job(C, "a").retries == 0


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE jobs ADD COLUMN extra int",
        "ALTER TABLE nodes DROP CONSTRAINT ck_nodes_labels",
        "CREATE INDEX extra ON jobs (name)",
        "UPDATE alembic_version SET version_num = '9999'",
    ],
)
def test_a_database_with_another_schema_is_dropped(
    empty_databases: EmptyDatabases, change: str
) -> None:
    with empty_databases.take() as database:
        name = database.engine.url.database
        execute(database, change)
    assert name not in empty_databases.names
