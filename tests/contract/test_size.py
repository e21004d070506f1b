"""The check of sizes counts tracked files, and fails above a limit."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.support.scripts import SCRIPTS, load_script


@pytest.fixture(scope="module")
def size() -> Any:
    return load_script("size")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a repository with three modules, a generated one, a test, and two documents."""
    texts = {
        "db/store/store.py": "x = 1\ny = 2\n",
        "db/schema/tables/jobs.py": "x = 1\n",
        "proto/client/calls.py": "x = 1\n",
        "proto/gen/jobs_pb2.py": "x = 1\n",
        "tests/unit/test_store.py": "x = 1\n" * 5,
        "README.md": "Two words\n",
        "docs/pages/page.md": "and three more\n",
    }
    for path, text in texts.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    (tmp_path / "db" / "draft.py").write_text("x = 1\n")  # not tracked
    return tmp_path


def test_sizes_are_those_of_tracked_files_without_generated_ones(
    size: Any, repository: Path
) -> None:
    sizes = size.measure_files(repository)
    assert (sizes["lines of db"], sizes["lines of proto"], sizes["lines of solvers"]) == (3, 1, 0)
    assert (sizes["product_lines"], sizes["product_modules"]) == (4, 3)
    assert (sizes["test_lines"], sizes["document_words"]) == (5, 5)


def test_options_of_subcommands_are_counted(size: Any) -> None:
    app, jobs = typer.Typer(), typer.Typer()

    @app.command()
    def submit(job: str, gpus: int = 1, *, watch: bool = False) -> None:
        raise NotImplementedError

    @jobs.command("list")
    def list_jobs(tenant: str = "") -> None:
        raise NotImplementedError

    jobs.callback()(lambda: None)
    app.add_typer(jobs, name="jobs")
    assert size.count_options(typer.main.get_command(app)) == 3 + len(("--install", "--show"))


@pytest.mark.parametrize(("lines", "is_within"), [(99, True), (100, True), (101, False)])
def test_a_size_above_its_limit_fails_and_says_why(size: Any, lines: int, is_within: bool) -> None:
    limits = {"product_lines": size.SizeLimit(100, "to be readable")}
    table, is_accepted = size.report_sizes({"product_lines": lines, "db": 7}, limits)
    assert is_accepted == is_within
    assert ("above its limit: to be readable" in table) != is_within


def test_a_limit_without_its_size_fails_unless_it_is_a_time(size: Any) -> None:
    limits = {"test_cpu_s": size.SizeLimit(100, ""), "test_lines": size.SizeLimit(1, "")}
    assert size.report_sizes({"test_lines": 1}, limits)[1]
    table, is_accepted = size.report_sizes({"test_lines": 1}, {"words": size.SizeLimit(100, "")})
    assert not is_accepted
    assert "'words'" in table


@pytest.mark.parametrize(("tier", "is_read"), [("quick", True), ("full", False)])
def test_the_time_of_tests_is_read_for_make_test_alone(
    size: Any, tmp_path: Path, tier: str, is_read: bool
) -> None:
    file = tmp_path / "test-cpu.json"
    assert size.read_test_time(file) == {}
    file.write_text(json.dumps({tier: {"cpu_s": 900, "wall_s": 400}}))
    sizes = {"test_cpu_s": 900} if is_read else {}
    assert size.read_test_time(file) == sizes


def test_each_limit_has_a_reason(size: Any) -> None:
    limits = size.load_limits(SCRIPTS / "size_limits.toml")
    assert {"product_lines", "test_lines", "document_words"} <= limits.keys()
    assert all(limit.reason and limit.limit > 0 for limit in limits.values())
