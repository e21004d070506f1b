"""Documents: the README's path of a newcomer, the tables on security, and the decisions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from tessera.formulation.base.access import PEOPLE, Role
from tessera.service.cli.main import app
from tessera.service.server.security.roles import PACKAGE, RULES, Rule
from tessera.service.server.settings.config import Config
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


DOCS = Path(__file__).parents[2] / "docs"

ANYONE = "anyone"

COLUMNS = (*PEOPLE, Role.AGENT, ANYONE)

EVERYBODY = {"GetCaller"}


def columns_of(rule: Rule) -> Iterator[str]:
    """Yield the columns of the table to which a method belongs."""
    if rule.is_open:
        yield ANYONE
        return
    people = [role for role in PEOPLE if role in rule.roles]
    yield from people[:1]
    if Role.AGENT in rule.roles:
        yield Role.AGENT


def roles_table() -> str:
    """Return the table of the least roles of all methods, by service."""
    rows: dict[str, dict[str, list[str]]] = {}
    for method, rule in RULES.items():
        service, _, name = method.removeprefix("/").partition("/")
        if service.startswith(f"{PACKAGE}.") and name not in EVERYBODY:
            row = rows.setdefault(service.rpartition(".")[2], {column: [] for column in COLUMNS})
            for column in columns_of(rule):
                row[column].append(name)
    lines = [f"| service | {' | '.join(COLUMNS)} |", "| --- " * (len(COLUMNS) + 1) + "|"]
    lines += [
        f"| `{service}` | {' | '.join(', '.join(names) for names in row.values())} |"
        for service, row in rows.items()
    ]
    return "\n".join(line.replace("  ", " ") for line in lines)


def test_the_table_of_roles_is_that_of_the_rules() -> None:
    page = (DOCS / "security.md").read_text(encoding="utf-8")
    shown = page.partition("<!-- roles -->")[2].partition("<!-- /roles -->")[0].strip()
    assert shown == roles_table(), f"put this table there:\n\n{roles_table()}\n"


def test_every_setting_of_the_server_is_described_for_operators() -> None:
    pages = "".join((DOCS / name).read_text() for name in ("settings.md", "security.md"))
    rows = [line for line in pages.splitlines() if line.startswith("|")]
    cells = [line.split("|")[1] for line in rows]
    missing = [f.name for f in fields(Config) if not any(f"`{f.name}`" in cell for cell in cells)]
    assert missing == ["insecure_any_interface"]  # the earlier name of `insecure`


DECISIONS = DOCS / "decisions"

MAX_DECISION_WORDS = 300


def test_no_page_of_a_decision_is_long() -> None:
    pages = {page.name: page.read_text(encoding="utf-8") for page in DECISIONS.glob("2*.md")}
    lengths = {name: len(text.split()) for name, text in pages.items()}
    assert lengths
    assert {n: words for n, words in lengths.items() if words > MAX_DECISION_WORDS} == {}


def test_the_list_of_decisions_names_each_page_once_newest_first() -> None:
    index = (DECISIONS / "index.md").read_text(encoding="utf-8")
    names = re.findall(r"\]\((2[\w-]+\.md)\)", index)
    dates = [name[: len("2026-11-21")] for name in names]
    assert sorted(names) == sorted(page.name for page in DECISIONS.glob("2*.md"))
    assert dates == sorted(dates, reverse=True)
