"""A runtime whose programs tune at launch, for tests that need no JAX."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tessera.formulation.job.runtimes import COMMAND, RUNTIMES


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> str:
    """Let programs of the runtime ``command`` tune; return its name."""
    monkeypatch.setitem(RUNTIMES, COMMAND, replace(RUNTIMES[COMMAND], tunes=True))
    return COMMAND
