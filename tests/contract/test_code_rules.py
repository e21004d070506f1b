"""Rules that scripts and scans keep: who uses paths, who opens channels, and that stubs are fresh."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripts import SCRIPTS, load_script

ROOT = SCRIPTS.parent


@pytest.fixture(scope="module")
def agent_paths() -> Any:
    return load_script("stylerules.agentpaths")


def uses_in(agent_paths: Any, text: str) -> list[str]:
    uses = agent_paths.find_uses("service/agent/m.py", ast.parse(text))
    return [use.rpartition(" ")[2] for use in uses]


@pytest.mark.parametrize(
    ("text", "use"),
    [
        ("os.chown(path, uid, gid)", "chown"),
        ("os.open(path, flags, dir_fd=folder)", "open"),
        ("action = (os.POSIX_SPAWN_OPEN, 2, path, 0, 0)", "POSIX_SPAWN_OPEN"),
        ("from os import rename as move", "rename"),
        ("import os as system", "os"),
        ("shutil.rmtree(path)", "rmtree"),
        ("import tempfile", "tempfile"),
        ("with open(path) as file: pass", "open"),
        ("(folder / name).read_text()", "read_text"),
        ("path.write_text(text, encoding='utf-8')", "write_text"),
        ("path.replace(other)", "replace"),
        ("subprocess.Popen(words, cwd=folder)", "cwd"),
        ("list(map(Path.unlink, paths))", "unlink"),
        ("from io import open as read", "open"),
        ("system = os", "os"),
        ("change = getattr(os, 'chown')", "os"),
        ("import posix", "posix"),
        ("__import__('os').chown(path, uid, gid)", "__import__"),
    ],
)
def test_a_use_of_a_path_is_found(agent_paths: Any, text: str, use: str) -> None:
    assert uses_in(agent_paths, text) == [use]


@pytest.mark.parametrize(
    ("path", "may_use"),
    [
        ("service/agent/files.py", True),
        ("service/agent/programs/alpa_runner.py", True),
        ("service/agent/keeper/rank_program.py", True),
        ("service/cli/jobs/logs.py", True),
        ("service/agent/keeper/spec.py", False),
        ("service/agent/network/files.py", False),
    ],
)
def test_few_modules_of_the_agent_may_use_paths(agent_paths: Any, path: str, may_use: bool) -> None:
    assert agent_paths.may_use_paths(path) == may_use


def test_the_agent_uses_paths_in_one_module(agent_paths: Any) -> None:
    for file in (ROOT / "service" / "agent").rglob("*.py"):
        path = file.relative_to(ROOT).as_posix()
        if not agent_paths.may_use_paths(path):
            assert list(agent_paths.find_uses(path, ast.parse(file.read_text()))) == []


ROOMS = (
    *("benchmarks", "db", "estimator", "formulation", "modelling", "service", "simulator"),
    "solvers",
)

OPENERS = {"insecure_channel", "secure_channel"}


def openers_of(path: Path) -> list[str]:
    """Return where a module names a function of gRPC that opens a channel."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = [
        (node.lineno, node.attr if isinstance(node, ast.Attribute) else node.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute | ast.alias)
    ]
    where = path.relative_to(ROOT)
    return [f"{where}:{line}: {name}" for line, name in names if name in OPENERS]


def test_no_module_of_the_product_opens_a_channel_by_hand() -> None:
    paths = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    assert len(paths) > 100
    assert [place for path in paths for place in openers_of(path)] == []


def test_the_scan_recognises_what_it_looks_for() -> None:
    client = ROOT / "proto" / "client" / "tessera" / "client"
    openers = [place for path in client.rglob("*.py") for place in openers_of(path)]
    assert {place.partition(":")[0] for place in openers} == {
        "proto/client/tessera/client/channels.py"
    }
    assert len(openers) == 4


def test_generating_again_gives_the_checked_in_code() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "protos.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
