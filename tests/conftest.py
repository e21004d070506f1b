"""Fixtures that every kind of test may use, and how far hypothesis looks."""

import os
import signal

from hypothesis import settings

from tests.support.database import database, make_database, postgres_url, server_url, store

__all__ = ["database", "make_database", "postgres_url", "server_url", "store"]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # shells start background jobs so, and what tests start and interrupt would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("explore", derandomize=False, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
