"""Stored runs of benchmarks, and the page of results that is rendered from them."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tessera.benchmarks.harness import results, stored
from tessera.benchmarks.harness.measured import digest_code
from tessera.benchmarks.harness.results import render_page, repeat_headlines
from tessera.benchmarks.harness.stored import (
    Machine,
    NotStored,
    StoredRun,
    load_commands,
    load_runs,
    store_run,
)

COMMAND = "tessera bench solve --jobs 20 --json"
OUTPUT: dict[str, Any] = {
    "bench": "solve",
    "command": COMMAND,
    "commit": "0123456789ab",
    "seed": 3,
    "figures": {"solve_s": 0.25, "gap": None, "jobs": 20},
    "bounds": {},
    "ok": True,
}


def a_machine() -> Machine:
    return Machine(
        processor="a processor",
        cores=2,
        memory_gib=4.0,
        system="Linux 6.1",
        python="3.11.7",
        libraries={"numpy": "2.0"},
        load_before=0.5,
    )


def a_run(**output: Any) -> StoredRun:
    result = OUTPUT | output
    return StoredRun(
        name="solve",
        command=COMMAND,
        commit=result["commit"],
        date="2026-11-23 15:22",
        seed=3,
        machine=a_machine(),
        wall_s=2.0,
        cpu_s=1.5,
        modules=digest_code("solve"),
        result=result,
    )


def write_run(folder: Path, run: StoredRun) -> None:
    (folder / f"{run.name}.json").write_text(json.dumps(asdict(run)), "utf-8")


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Make every command print this object, and return it."""
    output: dict[str, Any] = {**OUTPUT}

    def run(arguments: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        status = 1 if output.get("fails") else 0
        return subprocess.CompletedProcess(arguments, status, stdout=json.dumps(output))

    monkeypatch.setattr(subprocess, "run", run)
    return output


def test_a_stored_run_is_loaded_as_it_was_written(tmp_path: Path, printed: dict[str, Any]) -> None:
    run = store_run("solve", COMMAND, tmp_path)
    assert (run.commit, run.seed, run.uncommitted_changes) == ("0123456789ab", 3, False)
    assert run.result == printed
    assert load_runs({"solve": COMMAND}, tmp_path) == {"solve": run}


def test_a_run_from_a_changed_tree_says_so(tmp_path: Path, printed: dict[str, Any]) -> None:
    printed["commit"] = "0123456789ab+"
    assert store_run("solve", COMMAND, tmp_path).uncommitted_changes


@pytest.mark.parametrize(
    "output", [{"fails": True}, {"skipped": "the data are absent"}], ids=["failed", "skipped"]
)
def test_a_run_without_figures_is_not_stored(
    output: dict[str, Any], tmp_path: Path, printed: dict[str, Any]
) -> None:
    printed.update(output)
    with pytest.raises(NotStored, match="nothing is stored"):
        store_run("solve", COMMAND, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["tessera demo", "tessera bench solve", "rm -rf --json"])
def test_only_benchmarks_with_json_are_run(command: str, tmp_path: Path) -> None:
    with pytest.raises(NotStored, match="is not a `tessera bench"):
        store_run("solve", command, tmp_path)


def test_a_run_of_another_command_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, a_run())
    with pytest.raises(NotStored, match="store it again"):
        load_runs({"solve": "tessera bench solve --jobs 30 --json"}, tmp_path)


def test_a_run_without_a_command_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, a_run())
    with pytest.raises(NotStored, match="add it, or delete it"):
        load_runs({}, tmp_path)


@pytest.mark.parametrize("text", ["{", "{}", '{"machine": {}}', '{"machine": 1}'])
def test_a_file_that_is_not_a_stored_run_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "solve.json").write_text(text, "utf-8")
    with pytest.raises(NotStored, match=r"solve\.json is not a stored run"):
        load_runs({"solve": COMMAND}, tmp_path)


def test_a_name_stands_for_one_command(tmp_path: Path) -> None:
    path = tmp_path / "commands.toml"
    path.write_text('[a]\nsolve = "x"\n[b]\nsolve = "y"\nrpc = "z"\n', "utf-8")
    with pytest.raises(NotStored, match="has solve twice"):
        load_commands(path)


def test_missed_bounds_are_named_with_the_figure() -> None:
    bounds = {
        "solve_s": {"comparison": "<=", "limit": 0.2},
        "gap": {"comparison": "<=", "limit": 1e-4},
        "jobs": {"comparison": ">=", "limit": 20},
    }
    assert a_run(bounds=bounds).missed_bounds() == [
        "`solve_s` <= 0.2 (0.25)",
        "`gap` <= 0.0001 (no number)",
    ]


def test_figures_of_the_page_are_expressions_over_stored_runs() -> None:
    template = '{% if "solve" in runs %}{{ runs["solve"].result.figures.jobs + 1 }}{% endif %}'
    commands = {"solve": COMMAND}
    assert render_page(template, commands, {"solve": a_run()}) == "21"
    assert render_page(template, commands, {}) == ""


def test_every_command_is_quoted_by_the_page() -> None:
    with pytest.raises(NotStored, match="never quotes rpc, solve"):
        render_page("", {"rpc": COMMAND, "solve": COMMAND}, {})


def test_the_readme_repeats_the_headlines_where_it_has_their_comments() -> None:
    page = "# Results\n<!-- headlines -->\n| new |\n<!-- /headlines -->\nrest\n"
    readme = "# A\n<!-- headlines -->\n| old |\n<!-- /headlines -->\nB\n"
    assert repeat_headlines(readme, page) == readme.replace("old", "new")
    assert repeat_headlines("# A\n", page) == "# A\n"
    with pytest.raises(NotStored, match="no headlines"):
        repeat_headlines(readme, "# Results\n")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a template, one command with its stored run, and an empty README."""
    commands = tmp_path / "commands.toml"
    commands.write_text(f'[deciding]\nsolve = "{COMMAND}"\n', "utf-8")
    template = tmp_path / "results.md.jinja"
    template.write_text(
        "<!-- headlines -->\n{{ runs['solve'].commit }} {# \"solve\" #}\n<!-- /headlines -->\n",
        "utf-8",
    )
    (tmp_path / "README.md").write_text("# A\n", "utf-8")
    write_run(tmp_path, a_run())
    monkeypatch.setattr(results, "TEMPLATE", template)
    monkeypatch.setattr(results, "PAGE", tmp_path / "results.md")
    monkeypatch.setattr(results, "README", tmp_path / "README.md")
    monkeypatch.setattr(results, "load_commands", lambda: load_commands(commands))
    monkeypatch.setattr(results, "load_runs", lambda known: load_runs(known, tmp_path))
    return tmp_path


def test_the_check_fails_until_the_page_is_written_again(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert results.main(["--check"]) == 1
    assert "results.md are not those of the stored runs: run `python" in capsys.readouterr().err
    assert results.main([]) == 0
    assert results.main(["--check"]) == 0
    write_run(project, replace(a_run(), commit="ba9876543210"))
    assert results.main(["--check"]) == 1
    assert "ba98" not in (project / "results.md").read_text("utf-8")


def test_a_run_is_old_once_code_that_it_measured_has_changed(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "results.md.jinja").write_text(
        '<!-- headlines -->\n{{ old }} {# "solve" #}\n<!-- /headlines -->\n', "utf-8"
    )
    assert results.main([]) == 0
    assert results.main(["--check"]) == 0
    assert "old" not in capsys.readouterr().out

    run = a_run()
    write_run(project, replace(run, modules=run.modules | {"solvers": "0123456789ab"}))
    assert results.main(["--check"]) == 1  # the page does not say so yet
    assert "old: solve, at 0123456789ab; changed: solvers\n" in capsys.readouterr().out
    assert results.main([]) == 0
    assert "{'solve'}" in (project / "results.md").read_text("utf-8")


def a_tree(folder: Path, helper: str) -> Path:
    """Return a folder with a benchmark that uses one module, and one that it does not use."""
    files = {
        "benchmarks/rounds/bench_a.py": "from tessera.solvers.helper import help\n"
        '@register_case("a", smoke={})\ndef a() -> None:\n    help()\n',
        "solvers/helper.py": helper,
        "solvers/other.py": "X = 1\n",
    }
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")
    return folder


HELPER = 'def help() -> int:\n    """Help."""\n    return 1\n'


@pytest.mark.parametrize(
    ("changed", "is_old"),
    [
        (HELPER, False),
        ("# A comment.\n" + HELPER.replace("Help.", "Help others."), False),
        (HELPER.replace("return 1", "return 2"), True),
        (HELPER + "from tessera.solvers import other\n", True),
        (HELPER + "PROGRAM = 'tessera.solvers.other'\n", True),
    ],
    ids=["same", "words", "value", "import", "program"],
)
def test_words_do_not_make_a_run_old_and_code_does(
    changed: str, is_old: bool, tmp_path: Path
) -> None:
    before = digest_code("a", a_tree(tmp_path / "before", HELPER))
    after = digest_code("a", a_tree(tmp_path / "after", changed))
    assert before.keys() == {"benchmarks.rounds", "solvers"}
    assert (before != after) is is_old


def test_an_unknown_name_is_an_error(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert results.main(["run", "rpc"]) == 1
    assert "has no command 'rpc'" in capsys.readouterr().err


def test_the_commands_of_the_project_are_benchmarks_that_exist() -> None:
    for command in load_commands(stored.COMMANDS).values():
        assert command.startswith("tessera bench "), command
        assert command.endswith(" --json"), command
