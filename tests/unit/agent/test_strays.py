"""Processes of a member that are left without their keeper: how they are found and ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tessera.service.agent.process import identity_of
from tessera.service.agent.strays import (
    MARK_FILE,
    MARK_VARIABLE,
    PROCESSES_FILE,
    end_strays,
    find_strays,
    kill_member,
    read_mark,
)

ENDLESS = (sys.executable, "-c", "print(flush=True); import time; time.sleep(1e6)")


class Strays:
    """Processes that run until they are killed."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, mark: str | None) -> subprocess.Popen[bytes]:
        """Return a process that has begun its program, with ``mark`` in its environment if any."""
        environment = {**os.environ} | ({MARK_VARIABLE: mark} if mark else {})
        process = subprocess.Popen(ENDLESS, env=environment, stdout=subprocess.PIPE)
        self.processes.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    def clean(self) -> None:
        """End all."""
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def strays() -> Iterator[Strays]:
    started = Strays()
    yield started
    started.clean()


def ids(mark: str, recorded: Path) -> set[int]:
    return {identity.pid for identity in find_strays(mark, recorded)}


def record(path: Path, *pairs: tuple[int, int]) -> Path:
    """Write processes down as a keeper does."""
    path.write_text(json.dumps({"processes": pairs}))
    return path


def test_strays_are_found_by_their_whole_mark(strays: Strays, tmp_path: Path) -> None:
    marked, other = strays.start("abc"), strays.start("abcd")
    assert ids("abc", tmp_path / "absent") == {marked.pid}
    assert ids("abcd", tmp_path / "absent") == {other.pid}
    assert ids("ab", tmp_path / "absent") == set()


def test_a_stray_that_lost_its_mark_is_found_by_what_the_keeper_recorded(
    strays: Strays, tmp_path: Path
) -> None:
    bare = strays.start(None)
    identity = identity_of(bare.pid)
    assert identity is not None
    recorded = record(tmp_path / PROCESSES_FILE, (bare.pid, identity.start_ticks))
    assert ids("abc", recorded) == {bare.pid}
    record(recorded, (bare.pid, identity.start_ticks + 1))  # an earlier process with this id
    assert ids("abc", recorded) == set()


def test_a_zombie_is_no_stray(strays: Strays, tmp_path: Path) -> None:
    marked = strays.start("abc")
    identity = identity_of(marked.pid)
    assert identity is not None
    recorded = record(tmp_path / PROCESSES_FILE, (marked.pid, identity.start_ticks))
    marked.kill()
    os.waitid(os.P_PID, marked.pid, os.WEXITED | os.WNOWAIT)
    assert ids("abc", recorded) == set()


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"processes": [1]}', '{"processes": [["x", 2]]}', '{"processes": 5}']
)
def test_a_record_that_is_damaged_is_logged_and_the_mark_still_counts(
    strays: Strays, tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    marked = strays.start("abc")
    recorded = tmp_path / PROCESSES_FILE
    recorded.write_text(text)
    assert ids("abc", recorded) == {marked.pid}
    assert "cannot read" in caplog.text


async def test_ending_strays_leaves_others_alone(strays: Strays, tmp_path: Path) -> None:
    marked, other = [strays.start("abc") for _ in range(3)], strays.start("abcd")
    await end_strays("abc", tmp_path / "absent")
    assert [process.wait() for process in marked] == [-9, -9, -9]
    assert other.poll() is None


def test_a_member_with_a_damaged_description_loses_its_processes(
    strays: Strays, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    marked = strays.start("abc")
    kill_member(tmp_path)  # it has no mark yet
    (tmp_path / MARK_FILE).write_text("[")
    kill_member(tmp_path)
    assert marked.poll() is None
    assert "cannot read the mark" in caplog.text
    for text, mark in (('{"mark": 3}', ""), ("{}", ""), ('{"mark": "abc"}', "abc")):
        (tmp_path / MARK_FILE).write_text(text)
        assert read_mark(tmp_path) == mark
    kill_member(tmp_path)
    assert marked.wait() == -9
