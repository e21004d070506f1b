"""Habits of the command line against a real server: queue, top, doctor, completion, watching."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import pytest
from typer.testing import CliRunner

from tessera.benchmarks.service.fleet import Fleet
from tessera.service.cli.main import app
from tests.support.command_line import Tessera, read, submit
from tests.support.patience import PATIENCE_S
from tests.support.terminal import Terminal

PROGRAM = [sys.executable, "-m", "tessera.service.cli.main"]
CHOSEN = "TESSERA_SERVER", "TESSERA_CLUSTER"


def complete(address: str, line: str) -> list[str]:
    """Return what the shell offers at the end of an incomplete command line."""
    variables = {
        "_TESSERA_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
        **dict(zip(CHOSEN, (address, "c"), strict=True)),
    }
    done = CliRunner().invoke(app, prog_name="tessera", env=variables)
    assert done.stderr == ""
    return done.stdout.split()


def test_the_queue_top_and_doctor_show_a_cluster(
    tessera: Tessera, fleet: Fleet, address: str
) -> None:
    for name, tenant in (("first", "nlp"), ("second", "nlp"), ("third", "vision")):
        submit(tessera, name, "--tenant", tenant, "--max-gpus", "4")
    submit(tessera, "held", "--tenant", "nlp")
    tessera("hold", "held")
    tessera("round", "--solver", "cp-sat")
    waiting, held = tessera("queue", "-o", "name").stdout.split()
    assert held == "clusters/c/jobs/held"
    name = waiting.rpartition("/")[2]
    rows = tessera("queue").stdout.splitlines()
    assert rows[0].split()[:3] == ["POSITION", "JOB", "TENANT"]
    assert read(tessera, "job", name)["reason"]["code"] in rows[1]
    listed = read(tessera, "queue", "--tenant", "nlp")["jobs"]
    assert {job["tenant"] for job in listed} == {"nlp"}
    picture = tessera("top", "--once").stdout
    assert "a100" in picture
    assert "[########################]" in picture
    assert f"{name} " in picture.partition("Waiting")[2]
    assert tessera("top").stdout.splitlines()[2:5] == picture.splitlines()[2:5]  # no terminal
    checks = {c["name"]: c for c in json.loads(tessera("doctor", "--json").stdout)}
    assert {c["result"] for c in checks.values()} <= {"ok", "skipped", "warn"}
    for check in ("address", "release", "clock", "token", "agents", "rounds"):
        assert checks[check]["result"] == "ok", checks[check]

    assert complete(address, "tessera job se") == ["second"]
    assert complete(address, "tessera cancel ") == ["first", "second", "third", "held"]
    assert complete(address, "tessera drain n") == ["n0", "n1"]
    assert complete(address, "tessera queue --tenant ") == ["nlp", "vision"]
    assert complete(address, "tessera round show ") == ["1"]
    assert complete(address, "tessera job -c absent ") == []
    assert complete("127.0.0.1:1", "tessera job se") == []


@pytest.fixture
def terminal(address: str, tmp_path: Path) -> Iterator[Terminal]:
    environment = {**os.environ, **dict(zip(CHOSEN, (address, "c"), strict=True))}
    with Terminal(tmp_path, environment) as opened:
        yield opened


def test_top_on_a_terminal_ends_cleanly_with_ctrl_c(
    tessera: Tessera, fleet: Fleet, terminal: Terminal
) -> None:
    submit(tessera, "first")
    terminal.type(f"NO_COLOR=1 {' '.join(PROGRAM)} top --every 1s")
    terminal.wait_for_match(re.compile("first"), PATIENCE_S)
    submit(tessera, "second")
    terminal.wait_for_match(re.compile("second"), PATIENCE_S)  # it was read again
    terminal.interrupt()
    code, shown = terminal.end(PATIENCE_S)
    assert code == 0, shown
    assert "Traceback" not in shown


def test_watched_lists_print_what_changes_until_they_are_interrupted(
    tessera: Tessera, fleet: Fleet, address: str
) -> None:
    submit(tessera, "one", "--max-gpus", "4")
    tessera("round", "--solver", "cp-sat")
    submit(tessera, "two")
    expected = {
        "nodes": ["nodes/n0", "nodes/n1", "nodes/n0"],
        "rounds": ["rounds/1", "rounds/2"],
        "queue": ["jobs/two", "jobs/three"],
    }
    environment = {**os.environ, **dict(zip(CHOSEN, (address, "c"), strict=True))}
    with ExitStack() as stack:
        watching = {
            command: subprocess.Popen(
                [*PROGRAM, command, "--watch", "-o", "name"],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for command in expected
        }
        for process in watching.values():
            stack.callback(process.communicate)
            stack.callback(process.kill)
        lines = {command: process.stdout for command, process in watching.items()}
        for command, names in expected.items():
            before = len(names) - 1
            for name in names[:before]:
                assert _line(lines[command]) == f"clusters/c/{name}"
        submit(tessera, "three", "--max-gpus", "4")
        assert _line(lines["queue"]) == "clusters/c/jobs/three"
        tessera("hold", "two")
        tessera("drain", "n0")
        assert _line(lines["nodes"]) == "clusters/c/nodes/n0"
        tessera("round", "--solver", "cp-sat")
        assert _line(lines["rounds"]) == "clusters/c/rounds/2"
        for process in watching.values():
            process.send_signal(signal.SIGINT)
        assert [process.wait(PATIENCE_S) for process in watching.values()] == [130, 130, 130]


def _line(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.readline().strip()
