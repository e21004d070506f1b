"""Processes of a member that are left without their keeper: how they are found and ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tessera.service.agent.process import identity_of
from tessera.service.agent.strays import (
    MARK_FILE,
    MARK_VARIABLE,
    PROCESSES_FILE,
    end_strays,
    find_strays,
    is_alive,
    kill_keeper,
    kill_marked,
)

PARENT = """
import ctypes, os, subprocess, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # orphans below become children, as below a keeper
code = "import os, time; print(os.getpid(), flush=True); time.sleep(1e6)"
child = ["/usr/bin/env", "-i", sys.executable, "-c", code]
middle = f"import subprocess; subprocess.Popen({child!r}, start_new_session=True)"
subprocess.run([sys.executable, "-c", middle])
os.kill(os.getpid(), 19)
"""
"""A keeper that hangs, and below it an orphan with nothing that tells where it belongs."""

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


def mark_member(directory: Path, mark: str) -> None:
    """Write a member's mark down as an agent does."""
    (directory / MARK_FILE).write_text(json.dumps({"mark": mark}))


def ids(directory: Path) -> set[int]:
    return {identity.pid for identity in find_strays(directory)}


def record(directory: Path, *pairs: tuple[int, int]) -> None:
    """Write processes down as a keeper does."""
    (directory / PROCESSES_FILE).write_text(json.dumps({"processes": pairs}))


def test_strays_are_found_by_their_whole_mark(strays: Strays, tmp_path: Path) -> None:
    marked, other = strays.start("abc"), strays.start("abcd")
    for mark, found in (("abc", {marked.pid}), ("abcd", {other.pid}), ("ab", set())):
        mark_member(tmp_path, mark)
        assert ids(tmp_path) == found


def test_a_stray_that_lost_its_mark_is_found_by_what_the_keeper_recorded(
    strays: Strays, tmp_path: Path
) -> None:
    bare = strays.start(None)
    identity = identity_of(bare.pid)
    assert identity is not None
    record(tmp_path, (bare.pid, identity.start_ticks))
    assert ids(tmp_path) == {bare.pid}
    record(tmp_path, (bare.pid, identity.start_ticks + 1))  # an earlier process with this id
    assert ids(tmp_path) == set()


def test_a_zombie_is_no_stray(strays: Strays, tmp_path: Path) -> None:
    marked = strays.start("abc")
    identity = identity_of(marked.pid)
    assert identity is not None
    record(tmp_path, (marked.pid, identity.start_ticks))
    assert ids(tmp_path) == {marked.pid}
    marked.kill()
    os.waitid(os.P_PID, marked.pid, os.WEXITED | os.WNOWAIT)
    assert ids(tmp_path) == set()


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"processes": [1]}', '{"processes": [["x", 2]]}', '{"processes": 5}']
)
def test_a_record_that_is_damaged_is_logged_and_the_mark_still_counts(
    strays: Strays, tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    marked = strays.start("abc")
    mark_member(tmp_path, "abc")
    (tmp_path / PROCESSES_FILE).write_text(text)
    assert ids(tmp_path) == {marked.pid}
    assert "cannot read" in caplog.text


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"mark": 3}', '{"mark": ""}'])
def test_without_a_mark_nothing_is_killed(strays: Strays, tmp_path: Path, text: str) -> None:
    bare = strays.start(None)
    assert kill_marked(tmp_path) == []
    (tmp_path / MARK_FILE).write_text(text)
    assert kill_marked(tmp_path) == []
    assert bare.poll() is None


def test_an_unmarked_orphan_ends_with_its_keeper_that_hangs() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        orphan, keeper = identity_of(int(parent.stdout.readline())), identity_of(parent.pid)
        assert orphan is not None
        assert keeper is not None
        os.waitid(os.P_PID, parent.pid, os.WSTOPPED)
        assert is_alive(orphan)
        kill_keeper(keeper)
        assert not is_alive(orphan)
        parent.stdout.close()
    assert parent.returncode == -signal.SIGKILL


def test_nothing_below_a_process_with_the_id_of_a_dead_keeper_is_killed(strays: Strays) -> None:
    child, me = strays.start(None), identity_of(os.getpid())
    assert me is not None
    kill_keeper(replace(me, start_ticks=me.start_ticks - 1))
    assert child.poll() is None


async def test_ending_strays_leaves_others_alone(strays: Strays, tmp_path: Path) -> None:
    marked, other = [strays.start("abc") for _ in range(3)], strays.start("abcd")
    mark_member(tmp_path, "abc")
    await end_strays(tmp_path)
    assert [process.wait() for process in marked] == [-9, -9, -9]
    assert other.poll() is None
