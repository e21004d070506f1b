"""The settings with which a profiling task sends its records."""

from __future__ import annotations

from pathlib import Path

from tessera.client import PLAIN_TEXT, ChannelSettings
from tessera.service.profiletask import channel_settings


def test_a_task_shows_the_files_of_its_agent() -> None:
    files = {name: f"/agent/current/{name}.pem" for name in ("authorities", "certificate", "key")}
    assert channel_settings(files) == ChannelSettings(
        authorities="/agent/current/authorities.pem",
        certificate=Path("/agent/current/certificate.pem"),
        key=Path("/agent/current/key.pem"),
    )


def test_a_task_of_an_agent_without_tls_sends_plain_text() -> None:
    assert channel_settings({}) == PLAIN_TEXT
