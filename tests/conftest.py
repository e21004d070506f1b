"""Fixtures that every kind of test may use."""

from tests.support.database import database, make_database, postgres_url, server_url, store

__all__ = ["database", "make_database", "postgres_url", "server_url", "store"]
