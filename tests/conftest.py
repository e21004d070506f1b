"""Fixtures that all tests may use, and the hypothesis profile."""

import signal
from pathlib import Path

import pytest

from tessera.formulation.base.logs import begin_ids
from tests.support.data_directories import make_data_directory
from tests.support.database import (
    database,
    empty_databases,
    make_database,
    postgres_url,
    server_url,
    store,
)
from tests.support.laws import TIER, load_profile
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

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def without_ids() -> None:
    """Give the log records of a test no ids of what ran before it in this process."""
    begin_ids()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of later tiers: ``full`` in the quick tier, ``night`` in the full one."""
    later = {"quick": ("full", "night"), "full": ("night",)}.get(TIER, ())
    for item in items:
        folder = item.path.relative_to(ROOT / "tests").parts[0]
        if folder in ("integration", "e2e") and not item.get_closest_marker("story"):
            item.add_marker("full")
        if (
            isinstance(item, pytest.Function)
            and {"examples", "given", "scaled"} & vars(item.module).keys()
        ):
            item.add_marker("law")
    left_out = [item for item in items if any(map(item.get_closest_marker, later))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
