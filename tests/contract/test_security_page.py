"""The page on security has the roles' table of ``service/security/roles.py``, and all settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from tessera.formulation.access import PEOPLE, Role
from tessera.service.config import Config
from tessera.service.security.roles import PACKAGE, RULES, Rule

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
    pages = "".join((DOCS / name).read_text() for name in ("operating.md", "security.md"))
    rows = [line for line in pages.splitlines() if line.startswith("|")]
    cells = [line.split("|")[1] for line in rows]
    missing = [f.name for f in fields(Config) if not any(f"`{f.name}`" in cell for cell in cells)]
    assert missing == ["insecure_any_interface"]  # the earlier name of `insecure`
