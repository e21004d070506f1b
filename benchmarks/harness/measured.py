"""The code that a benchmark measures: its module, and all modules that this one imports, directly or not.

A stored run has a digest of each package of that code, so that a later tree can tell whether the run
is old.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from tessera.simulator.provenance import ROOT

PLACES: Final = ("", "proto/client/tessera", "proto/gen/tessera")
"""The folders below the root that hold the packages of ``tessera``."""
DATA: Final = (".json", ".jsonl", ".yaml", ".toml", ".csv")
"""Endings of files next to a module that it may read."""
MODULE_NAME: Final = re.compile(r"(tessera(?:\.\w+)+)(?::\w+)?")
"""A text that names a module: one that is started by name, or imported late."""
COMMANDS: Final = "tessera.service.cli"
"""The command line, which names the modules of all commands. Benchmarks start one command by it."""
SERVER: Final = f"{COMMANDS}.servers.serve"
DIGITS: Final = 12


def digest_code(bench: str, root: Path = ROOT) -> dict[str, str]:
    """Return a digest of each package, such as ``solvers.rounds``, of the code that ``bench`` measures.

    Comments, docstrings and layout do not count, and files of data next to a module do.
    """
    packages: dict[str, list[str]] = defaultdict(list)
    for module, file in sorted(find_modules(bench, root).items()):
        packages[_package_of(file, root)].append(f"{module} {_read_code(file).digest}")
    return {package: _digest("\n".join(parts)) for package, parts in packages.items()}


def find_modules(bench: str, root: Path = ROOT) -> dict[str, Path]:
    """Return the files of the benchmark's module and of all that it imports, by the module's name.

    A text that names one of our modules counts as an import. Raises KeyError without such a benchmark.
    """
    waiting = [_module_of(bench, root)]
    files: dict[str, Path] = {}
    while waiting:
        module = waiting.pop()
        if module in files or (file := _file_of(module, root)) is None:
            continue
        files[module] = file
        waiting += _read_code(file).names
    return files


@cache
def _package_of(file: Path, root: Path) -> str:
    """Return the folder of a module as a dotted name, at most two folders deep."""
    return ".".join(file.parent.relative_to(root).parts[:2])


def _module_of(bench: str, root: Path) -> str:
    registered = re.compile(rf'@register_case\(\s*"{re.escape(bench)}"')
    for file in sorted((root / "benchmarks").glob("*/bench_*.py")):
        if registered.search(file.read_text("utf-8")):
            return f"tessera.benchmarks.{file.parent.name}.{file.stem}"
    raise KeyError(bench)


@cache
def _file_of(module: str, root: Path) -> Path | None:
    """Return the file of a module of ours, or None for a name that is something else."""
    parts = module.split(".")[1:]
    for place in PLACES:
        path = root / place / "/".join(parts)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if parts and file.is_file():
                return file
    return None


class Code(NamedTuple):
    """A module's code: its digest, and the names of modules in it, some of which do not exist."""

    digest: str
    names: tuple[str, ...]


@cache
def _read_code(file: Path) -> Code:
    """Read a module, without what does not run, and the data in its folder.

    The digest is of the nodes of the syntax tree in order. A list has its length before it, so that
    different trees have different texts. Empty fields are left out, since releases of Python differ
    in which ones exist.
    """
    parts: list[str] = []
    names: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(file.read_bytes())]
    while waiting:
        node = waiting.pop()
        names.update(_names_in(node))
        parts.append(type(node).__name__)
        below: list[ast.AST] = []
        for field in node._fields:
            match getattr(node, field, None):
                case None | []:
                    continue
                case ast.AST() as child:
                    below.append(child)
                case [*children]:
                    nodes = [c for c in children if isinstance(c, ast.AST) and _runs(c)]
                    parts.append(
                        f"{field} {len(nodes)} {[c for c in children if isinstance(c, str)]}"
                    )
                    below += nodes
                case value:
                    parts.append(repr(value))
        waiting += reversed(below)
    data = [
        path.read_text("utf-8") for path in sorted(file.parent.glob("*")) if path.suffix in DATA
    ]
    return Code(_digest("\n".join([*parts, *data])), tuple(sorted(names)))


def _runs(node: ast.AST) -> bool:
    """Return whether a statement is more than a text, or imports that only types need."""
    match node:
        case ast.Expr(value=ast.Constant()):
            return False
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
            return False
    return True


def _names_in(node: ast.AST) -> list[str]:
    """Return the names of modules that a node imports or names."""
    match node:
        case ast.Import(names=names):
            return [name for alias in names for name in _with_packages(alias.name)]
        case ast.ImportFrom(module=str(module), names=names):
            return [*_with_packages(module), *(f"{module}.{alias.name}" for alias in names)]
        case ast.Constant(value=str(text)) if text == COMMANDS:
            return _with_packages(SERVER)
        case ast.Constant(value=str(text)) if named := MODULE_NAME.fullmatch(text):
            return [] if text.startswith(COMMANDS) else _with_packages(named[1])
    return []


def _with_packages(module: str) -> list[str]:
    """Return a module of ours with the packages above it, or nothing for another module."""
    parts = module.split(".")
    if parts[0] != "tessera":
        return []
    return [".".join(parts[:end]) for end in range(2, len(parts) + 1)]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]
