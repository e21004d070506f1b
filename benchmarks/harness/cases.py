"""A search for the benchmarks, which are the modules ``bench_*.py`` in the folders of subjects."""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path

from tessera import benchmarks
from tessera.benchmarks.harness.registry import CASES, BenchmarkCase


@cache
def find_cases() -> dict[str, BenchmarkCase]:
    """Import the modules of all benchmarks, and return the benchmarks by name."""
    (folder,) = (Path(path) for path in benchmarks.__path__)
    for module in sorted(folder.glob("*/bench_*.py")):
        importlib.import_module(f"tessera.benchmarks.{module.parent.name}.{module.stem}")
    return dict(sorted(CASES.items()))
