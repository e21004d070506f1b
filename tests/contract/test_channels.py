"""Channels to servers are opened by tessera.client alone, with the identity of their caller."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
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
