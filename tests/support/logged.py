"""Captured log records as text."""

from __future__ import annotations

import pytest

from tessera.formulation.base.logs import RecordFormatter


def logged_lines(caplog: pytest.LogCaptureFixture, event: str = "") -> list[str]:
    """Return the captured records of an event, or all, as a log shows them without ids and times."""
    formatter = RecordFormatter()
    return [
        formatter.format(record).partition(" ")[2]
        for record in caplog.records
        if event in ("", getattr(record, "event", ""))
    ]
