"""A newcomer's path through the README alone: from nothing to what-if, in ten commands at most.

``tests/e2e/test_pages.py`` types these commands in a fresh clone.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from tessera.service.cli.main import app
from tests.support.documents import Block, blocks, steps, without_comment

ROOT = Path(__file__).parents[2]
SECTION = "## Ten commands"
MAX_COMMANDS = 10

PATH = (
    r"git clone \S+ && cd \S+",
    r"make demo",
    r"tessera up\b",
    r"tessera submit\b",
    r"tessera explain\b",
    r"tessera whatif\b",
    r"tessera simulate\b",
)
"""What a newcomer does, in this order."""


@pytest.fixture(scope="module")
def block() -> Block:
    """Return the only block of commands of the section."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition(SECTION)[2]
    (found,) = blocks(section.partition("\n## ")[0])
    return found


@pytest.fixture(scope="module")
def commands(block: Block) -> list[str]:
    return [without_comment(step.command) for step in steps(block)]


def test_the_path_is_complete_and_short(commands: list[str]) -> None:
    assert len(commands) <= MAX_COMMANDS
    left = iter(commands)
    for wanted in PATH:
        assert any(re.match(wanted, command) for command in left), f"{wanted} is missing"


def test_what_does_not_exist_is_not_typed_and_all_else_is(
    block: Block, commands: list[str]
) -> None:
    pages = yaml.safe_load((ROOT / "tests" / "e2e" / "page_blocks.yaml").read_text())
    (entry,) = [e for e in pages["README.md"] if e["block"] == block.first]
    root: Any = typer.main.get_command(app)
    known = set(root.list_commands(typer.Context(root)))
    unknown = {
        command
        for command in commands
        if command.startswith("tessera ") and command.split()[1] not in known
    }
    skipped = {c for c in commands if any(c.startswith(key) for key in entry["skip"])}
    clones = {command for command in commands if command.startswith("git clone ")}
    assert entry["run"] is True
    assert skipped == unknown | clones, "page_blocks.yaml must skip what does not exist, only that"


def test_every_command_says_what_it_is_for_or_is_plain(block: Block) -> None:
    texts = [line for line in block.lines if line.startswith("tessera ")]
    assert texts
    assert [t for t in texts if "#" not in t and not t.startswith("tessera submit")] == []
