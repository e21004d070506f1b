"""Print the size of the repository, and fail where it is above a limit of ``size_limits.toml``.

Lines are counted in tracked modules, without generated ones. The command line is read from its Typer
application, and settings and policies from their classes, so that no server is needed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import typer

from tessera.formulation.round.policy import Policy
from tessera.service.cli.main import app
from tessera.service.server.settings.config import Config

ROOT: Final = Path(__file__).resolve().parents[1]
LIMITS: Final = Path(__file__).with_name("size_limits.toml")
TEST_TIME: Final = Path("build", "test-cpu.json")
"""The time of the last tests by tier, which `scripts/run_tests.py` writes: ``cpu_s`` and ``wall_s``."""
ROOMS: Final = (
    "benchmarks",
    "db",
    "estimator",
    "formulation",
    "modelling",
    "proto",
    "service",
    "simulator",
    "solvers",
)
"""The rooms of the product."""
GENERATED_PATHS: Final = ("proto/gen/", "proto/client/tessera/client/sync.py")


@dataclass(frozen=True, slots=True)
class SizeLimit:
    """The largest value of a measure, and the reason for it."""

    limit: float
    reason: str


def load_limits(file: Path) -> dict[str, SizeLimit]:
    """Return the limits by measure."""
    entries = tomllib.loads(file.read_text(encoding="utf-8"))
    return {name: SizeLimit(**entry) for name, entry in entries.items()}


def tracked_files(root: Path, *patterns: str) -> list[Path]:
    """Return the tracked files that match patterns, without generated ones."""
    command = ["git", "ls-files", "--", *patterns]
    listing = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    paths = [path for path in listing.stdout.splitlines() if not path.startswith(GENERATED_PATHS)]
    return [root / path for path in paths if (root / path).is_file()]


def count_lines(files: list[Path]) -> int:
    """Return the number of lines of files."""
    return sum(file.read_bytes().count(b"\n") for file in files)


def count_words(files: list[Path]) -> int:
    """Return the number of words of files."""
    return sum(len(file.read_text(encoding="utf-8").split()) for file in files)


def measure_files(root: Path) -> dict[str, float]:
    """Return the sizes of modules, and of documents without decisions and generated results."""
    modules = {room: tracked_files(root, f"{room}/*.py") for room in ROOMS}
    lines = {f"lines of {room}": count_lines(files) for room, files in modules.items()}
    pages = ("README.md", "CONTRIBUTING.md", "docs/*.md", ":!docs/decisions", ":!docs/results.md")
    documents = tracked_files(root, *pages)
    return {
        **lines,
        "product_lines": sum(lines.values()),
        "test_lines": count_lines(tracked_files(root, "tests/*.py")),
        "product_modules": sum(map(len, modules.values())),
        "document_words": count_words(documents),
    }


def count_options(command: Any) -> int:
    """Return the number of options of a command and its subcommands, without ``--help``."""
    options = [row for row in command.params if row.param_type_name == "option"]
    return len(options) + sum(map(count_options, getattr(command, "commands", {}).values()))


def measure_options() -> dict[str, float]:
    """Return the numbers of options, settings and fields that a user may set."""
    root: Any = typer.main.get_command(app)
    context = typer.Context(root)
    for name in root.list_commands(context):
        root.resolve_command(context, [name])  # loads the command
    return {
        "command_options": count_options(root),
        "server_settings": len(fields(Config)),
        "policy_fields": len(fields(Policy)),
    }


def read_test_time(file: Path) -> dict[str, float]:
    """Return the time of the last `make test`, or nothing if it is not stored."""
    report = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if "quick" not in report:
        return {}
    return {"test_cpu_s": report["quick"]["cpu_s"]}


def report_sizes(sizes: Mapping[str, float], limits: Mapping[str, SizeLimit]) -> tuple[str, bool]:
    """Return a table of sizes, and whether all are within their limits.

    A limit of the time of tests holds where no time is stored. Any other needs its size.
    """
    rows = [f"{'size':<24}{'now':>10}{'limit':>10}"]
    excess = {name for name, limit in limits.items() if sizes.get(name, 0) > limit.limit}
    for name, size in sizes.items():
        limit = f"{limits[name].limit:,}" if name in limits else ""
        reason = f"  above its limit: {limits[name].reason}" if name in excess else ""
        rows.append(f"{name:<24}{size:>10,.0f}{limit:>10}{reason}")
    strangers = [name for name in limits if name not in sizes and not name.startswith("test_")]
    rows += [f"{LIMITS.name} has a limit for {name!r}, which is not a size" for name in strangers]
    return "\n".join(rows), not excess and not strangers


def main() -> int:
    """Print the table; return 1 where a size is above its limit."""
    sizes = measure_files(ROOT) | measure_options() | read_test_time(ROOT / TEST_TIME)
    table, is_within = report_sizes(sizes, load_limits(LIMITS))
    sys.stdout.write(table + "\n")
    return 0 if is_within else 1


if __name__ == "__main__":
    sys.exit(main())
