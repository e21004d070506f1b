"""The Python client against a real server: the examples of its page, and a server that restarts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tessera.benchmarks.service.fleet import Fleet
from tessera.client import PLAIN_TEXT, Client
from tests.support.command_line import Tessera, address, fleet, tessera
from tests.support.documents import Block, blocks
from tests.support.patience import PATIENCE_S

__all__ = ["address", "fleet", "tessera"]  # fixtures

PAGE = Path(__file__).parents[2] / "docs" / "python-client.md"


@pytest.fixture
def trained(fleet: Fleet) -> Iterator[None]:
    """Let jobs train in the background, a minute at a time."""
    ended = threading.Event()

    def train() -> None:
        while not ended.wait(0.1):
            fleet.advance(60.0)

    thread = threading.Thread(target=train)
    thread.start()
    yield
    ended.set()
    thread.join(PATIENCE_S)


def examples() -> list[Block]:
    return list(blocks(PAGE.read_text(encoding="utf-8")))


def test_the_examples_of_the_page_run_in_order(
    address: str,
    trained: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TESSERA_CLUSTER", "c")
    names: dict[str, Any] = {}
    outputs = []
    for block in examples():
        code = "\n".join(["\n" * (block.line - 1), *block.lines])
        exec(compile(code.replace("127.0.0.1:7070", address), str(PAGE), "exec"), names)
        outputs.append(capsys.readouterr().out)
    shown = "".join(outputs)
    assert "1 jobs run, 0 wait" in shown
    assert "RUNNING" in shown
    assert "CANCELLED" in shown
    assert "NO_ESTIMATE" in shown
    assert names["answer"].now.unchanged_jobs + len(names["answer"].now.jobs) > 0
    assert "INVALID_INPUT job.iterations" in shown
    assert "clusters/c/jobs/absent" in shown
    assert "sweep-100" in shown
    assert names["job"].weight == 2.0
    assert "Cells are estimated" in shown


def test_a_job_of_many_is_found_in_pages_and_changed_once(address: str, tessera: Tessera) -> None:
    with Client(address, "c", settings=PLAIN_TEXT) as client:
        stored = client.submit(
            name="j", model="bert", params="1.3B", batch=256, iterations=9, gpus=4
        )
        assert [job.name for job in client.list_jobs()] == [stored.name]
        assert client.get_server().schema
        assert client.get_caller().subject == "local"
        (event,) = {event.event for event in client.list_events(client.hold(stored))} & {"hold"}
        assert event == "hold"
        assert client.drain(["n0"], "new fans")[0].drain_reason == "new fans"
        assert not client.undrain(["n0"])[0].drain_reason
