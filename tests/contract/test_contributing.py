"""The table of CONTRIBUTING that says where a change goes: its paths exist, and it counts them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SECTION = "## Where a change goes"

PLACE_HOLDER = re.compile(r"NAME|SUBJECT")
"""The words that stand for a name of the author's choice."""

SUFFIXES = (".py", ".proto", "")
"""The suffixes of named files, the first of which may be left out. A folder of modules has none."""


def table_rows() -> Iterator[tuple[str, str, str]]:
    """Yield the change, the places and the number of files of each row."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition(SECTION)[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    for line in lines[2:]:
        change, places, files = (cell.strip() for cell in line.strip("|").split("|"))
        yield change, places, files


def paths_of(places: str) -> Iterator[str]:
    """Yield the paths of a row. A folder with a colon holds for the names up to a semicolon."""
    for part in re.split(r"[;.] ", places):
        folder = ""
        for name in re.findall(r"`([^`]+)`:?", part):
            if name.endswith("/"):
                folder = name
            elif "/" in name or folder:
                yield folder + name


def files_at(path: str) -> list[Path]:
    """Return the files or packages that a path may mean."""
    pattern = PLACE_HOLDER.sub("*", path)
    return [match for suffix in SUFFIXES for match in ROOT.glob(pattern + suffix)]


ROWS = list(table_rows())


def test_the_table_is_read() -> None:
    assert len(ROWS) > 10
    assert list(paths_of("`a/`: `b`, `c/d` (its text); `e/f`")) == ["a/b", "a/c/d", "e/f"]


@pytest.mark.parametrize(("change", "places"), [row[:2] for row in ROWS])
def test_every_path_exists(change: str, places: str) -> None:
    missing = [path for path in paths_of(places) if not files_at(path)]
    assert missing == [], f"{change}: correct these paths in CONTRIBUTING.md"


@pytest.mark.parametrize(("change", "places", "files"), ROWS)
def test_the_largest_number_of_files_is_that_of_the_paths(
    change: str, places: str, files: str
) -> None:
    paths = list(paths_of(places))
    assert max(map(int, re.findall(r"\d+", files))) == len(paths), (change, paths)


PRODUCT = (
    *("benchmarks", "db", "estimator", "formulation", "modelling", "service", "simulator"),
    *("solvers", "proto/client", "proto/tessera"),
)
"""The folders of the product. Generated files and tests are elsewhere."""


@pytest.mark.parametrize(
    ("name", "max_files"),
    [
        ("cpus_per_gpu", 5),  # a field of execution plans
        ("preferred_labels", 6),  # a field of jobs
        ("host_bytes", 12),  # a resource of nodes
    ],
)
def test_a_field_is_named_in_few_files(name: str, max_files: int) -> None:
    paths = [path for folder in PRODUCT for path in (ROOT / folder).rglob("*.p[yr]*")]
    word = re.compile(rf"\b{name}\b")
    files = [
        path.relative_to(ROOT)
        for path in paths
        if path.suffix in SUFFIXES and word.search(path.read_text(encoding="utf-8"))
    ]
    assert 0 < len(files) <= max_files, files
