"""The commit that a reported number comes from."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tessera.simulator.provenance import measured_commit


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a repository with one module and one page."""
    (tmp_path / "module.py").write_text("A = 1\n", "utf-8")
    (tmp_path / "README.md").write_text("# A\n", "utf-8")
    author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for words in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "One"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    return tmp_path


def test_a_clean_tree_is_its_commit(tree: Path) -> None:
    assert len(measured_commit(tree)) == 12


@pytest.mark.parametrize("name", ["module.py", "new.py", "service/new.py"])
def test_changed_and_new_modules_mark_the_commit(name: str, tree: Path) -> None:
    (tree / name).parent.mkdir(exist_ok=True)
    (tree / name).write_text("B = 2\n", "utf-8")
    assert measured_commit(tree).endswith("+")


@pytest.mark.parametrize(
    "name", ["README.md", "docs/results.md", "benchmarks/results/solve-64.json", "notes.txt"]
)
def test_documents_stored_runs_and_new_notes_are_not_code(name: str, tree: Path) -> None:
    (tree / name).parent.mkdir(parents=True, exist_ok=True)
    (tree / name).write_text("text\n", "utf-8")
    assert len(measured_commit(tree)) == 12


def test_outside_git_the_commit_is_unknown(tmp_path: Path) -> None:
    assert measured_commit(tmp_path) == "unknown"
