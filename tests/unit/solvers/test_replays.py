"""Recorded rounds: what an earlier program decided, this one decides too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.recording import load_round, load_rounds, repeat


def test_there_are_recorded_rounds() -> None:
    assert len(load_rounds()) > 50


@pytest.mark.parametrize("path", load_rounds(), ids=lambda path: path.name.partition(".")[0])
def test_a_recorded_round_is_decided_as_it_was(path: Path) -> None:
    recorded = load_round(path)

    assert repeat(recorded) == recorded.decided
