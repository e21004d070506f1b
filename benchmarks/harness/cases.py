"""Finds the benchmarks: every module ``bench_*.py`` in the folder of a subject."""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path

from tessera import benchmarks
from tessera.benchmarks.harness.registry import CASES, Case


@cache
def find_cases() -> dict[str, Case]:
    """Return all benchmarks by name, their modules imported."""
    (folder,) = (Path(path) for path in benchmarks.__path__)
    for module in sorted(folder.glob("*/bench_*.py")):
        importlib.import_module(f"tessera.benchmarks.{module.parent.name}.{module.stem}")
    return dict(sorted(CASES.items()))
