"""Fixtures that all tests may use, and the hypothesis profile."""

import signal

import pytest

from tessera.formulation.logs import begin_ids
from tests.support.data_directories import make_data_directory
from tests.support.database import (
    database,
    empty_databases,
    make_database,
    postgres_url,
    server_url,
    store,
)
from tests.support.laws import IS_FAST, load_profile
from tests.support.training import trainer

__all__ = [
    "database",
    "empty_databases",
    "make_data_directory",
    "make_database",
    "postgres_url",
    "server_url",
    "store",
    "trainer",
]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Shells start background jobs with SIGINT ignored. The processes that tests start and
    # interrupt would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

load_profile()


@pytest.fixture(autouse=True)
def without_ids() -> None:
    """Give the log records of a test no ids of what ran before it in this process."""
    begin_ids()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked ``full`` in the profile ``fast``."""
    skipped = pytest.mark.skip(reason="only `make test-full` runs it")
    for item in items:
        if IS_FAST and item.get_closest_marker("full"):
            item.add_marker(skipped)
