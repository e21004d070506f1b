"""Requests for output at the agent: each is answered once, few at a time, and errors are answers."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tessera.service.agent import logreads
from tessera.service.agent.logreads import READ_THREADS, LogAnswers, answer_read
from tessera.v1 import agents_pb2 as pb
from tests.support.agents import until
from tests.support.output_files import RankFiles
from tests.support.patience import PATIENCE_S


def a_request(read_id: str = "r", **changes: Any) -> pb.LogRead:
    values: dict[str, Any] = {"job": "j", "generation": 1, "max_bytes": 100}
    return pb.LogRead(read_id=read_id, **values | changes)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(READ_THREADS) as pool:
        yield pool


def test_an_answer_has_the_output_and_the_id_of_its_request(tmp_path: Path) -> None:
    files = RankFiles(tmp_path)
    files.write(b"hello")
    files.end()
    assert answer_read(tmp_path, a_request(offset=2)) == pb.LogAnswer(
        read_id="r", offset=2, data=b"llo", ended=True
    )


def test_output_that_cannot_be_read_is_answered_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = RankFiles(tmp_path)
    files.current.unlink()
    files.current.mkdir()
    assert "is not a regular file" in answer_read(tmp_path, a_request()).error
    assert answer_read(tmp_path, a_request(job="..")).error.startswith("no job can have the name")

    def fail(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", fail)
    assert "Permission denied" in answer_read(tmp_path, a_request()).error


async def test_a_request_is_answered_once_while_it_is_repeated(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    RankFiles(tmp_path).write(b"hello")
    answers = LogAnswers(tmp_path, threads)
    for _ in range(3):
        answers.take([a_request("one")])
    assert (await answers.next_answer()).read_id == "one"
    answers.take([a_request("one"), a_request("two")])
    assert (await answers.next_answer()).read_id == "two"
    answers.take([])  # the server has both answers
    answers.take([a_request("one")])
    assert (await answers.next_answer()).read_id == "one"


async def test_few_requests_are_worked_on_at_a_time_and_the_loop_never_waits(
    tmp_path: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, free = list[str](), threading.Event()

    def hang(_logs: Path, request: pb.LogRead) -> pb.LogAnswer:
        begun.append(request.read_id)
        assert free.wait(PATIENCE_S)
        return pb.LogAnswer(read_id=request.read_id)

    monkeypatch.setattr(logreads, "answer_read", hang)
    answers = LogAnswers(tmp_path, threads)
    requests = [a_request(f"r{number}") for number in range(10)]
    answers.take(requests)
    await until(lambda: len(begun) == READ_THREADS)
    answers.take(requests[:8])  # the last two were given up before they began
    free.set()
    async with asyncio.timeout(PATIENCE_S):
        done = {(await answers.next_answer()).read_id for _ in range(8)}
    assert done == set(begun) == {f"r{number}" for number in range(8)}


async def test_a_flood_of_requests_is_bounded(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    answers = LogAnswers(tmp_path, threads)
    answers.take(a_request(f"r{number}") for number in range(1000))
    async with asyncio.timeout(PATIENCE_S):
        for _ in range(logreads.MAX_REQUESTS):
            await answers.next_answer()
    assert answers._ready.empty()
