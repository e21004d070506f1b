"""The check that only one module of the agent opens, makes, changes or removes what has a path."""

from __future__ import annotations

import ast
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def style(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = spec_from_file_location("style", ROOT / "scripts" / "style.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "style", module)
    spec.loader.exec_module(module)
    return module


def uses_in(style: Any, text: str) -> list[str]:
    module = style.Module(path=ROOT / "m.py", text=text, tree=ast.parse(text))
    return [use.rpartition(" ")[2] for use in style.uses_of_paths(module)]


@pytest.mark.parametrize(
    ("text", "use"),
    [
        ("os.chown(path, uid, gid)", "chown"),
        ("os.open(path, flags, dir_fd=folder)", "open"),
        ("change = os.chmod", "chmod"),
        ("os.replace(a, b)", "replace"),
        ("for step in os.walk(path): pass", "walk"),
        ("os.chdir(folder)", "chdir"),
        ("action = (os.POSIX_SPAWN_OPEN, 2, path, 0, 0)", "POSIX_SPAWN_OPEN"),
        ("from os import rename as move", "rename"),
        ("import os as system", "os"),
        ("shutil.rmtree(path)", "rmtree"),
        ("from shutil import copy", "copy"),
        ("import tempfile", "tempfile"),
        ("with open(path) as file: pass", "open"),
        ("path.open()", "open"),
        ("(folder / name).read_text()", "read_text"),
        ("path.write_text(text, encoding='utf-8')", "write_text"),
        ("path.replace(other)", "replace"),
        ("folder.mkdir(parents=True)", "mkdir"),
        ("subprocess.Popen(words, cwd=folder)", "cwd"),
        ("subprocess.run(words, cwd=folder)", "cwd"),
        ("list(map(Path.unlink, paths))", "unlink"),
        ("write = path.write_text", "write_text"),
        ("read = open", "open"),
        ("from io import open as read", "open"),
        ("system = os", "os"),
        ("change = getattr(os, 'chown')", "os"),
        ("import posix", "posix"),
        ("__import__('os').chown(path, uid, gid)", "__import__"),
    ],
)
def test_a_use_of_a_path_is_found(style: Any, text: str, use: str) -> None:
    assert uses_in(style, text) == [use]


@pytest.mark.parametrize(
    "text",
    [
        "text.replace('a', 'b')",
        "os.getpid()",
        "shutil.which('openssl')",
        "remove_tree(path)",
        "subprocess.run(words, env=variables)",
        "os.fchown(descriptor, uid, gid)",
    ],
)
def test_what_touches_no_path_is_not_found(style: Any, text: str) -> None:
    assert uses_in(style, text) == []


def test_the_agent_uses_paths_in_one_module(style: Any) -> None:
    assert style.uses_of_paths_in_agent() == []
