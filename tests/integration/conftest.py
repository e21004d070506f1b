"""Fixtures of stored clusters, which the tests of many subjects share."""

from __future__ import annotations

import pytest

from tessera.db.schema.engine import Database
from tessera.db.store.store import Store
from tests.support.stored_cluster import a_cluster


@pytest.fixture
def lab(store: Store) -> Store:
    """Return a store with two nodes of four GPUs and estimates for them."""
    a_cluster(store)
    return store


@pytest.fixture
def access(database: Database) -> Store:
    """Return the store of tokens, certificates and the audit log."""
    return Store(database)
