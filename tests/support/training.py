"""A runtime that trains and checks nothing, for tests of what is learned from jobs."""

from __future__ import annotations

import pytest

from tessera.formulation.job.runtimes import RUNTIMES, Capabilities

TRAINER = "trainer"
"""The runtime that agents of tests name if a job really trained."""


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> str:
    """Let the server know a runtime that trains; return its name."""
    capabilities = Capabilities(trains=True, check_command=lambda _field, _command: None)
    monkeypatch.setitem(RUNTIMES, TRAINER, capabilities)
    return TRAINER
