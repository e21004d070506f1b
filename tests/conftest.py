"""Fixtures that every kind of test may use, and how far tests look."""

import signal

import pytest

from tests.support.database import database, make_database, postgres_url, server_url, store
from tests.support.laws import IS_FAST, load_profile

__all__ = ["database", "make_database", "postgres_url", "server_url", "store"]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # shells start background jobs so, and what tests start and interrupt would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

load_profile()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to the profile ``full`` what only it runs."""
    skipped = pytest.mark.skip(reason="only `make test-full` runs it")
    for item in items:
        if IS_FAST and item.get_closest_marker("full"):
            item.add_marker(skipped)
