"""The libraries that each part of Tessera needs, and the hints shown when one is missing."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tessera.formulation.base import release

ROOT = Path(__file__).parents[3]

HEAVY = (
    *("ortools", "scipy", "numba", "jax", "matplotlib", "sqlalchemy", "psycopg2", "cvxpy", "pulp"),
    *("alembic", "platformdirs", "psutil", "jwt", "cryptography"),
    *("tessera.solvers", "tessera.db", "tessera.simulator"),
)
"""Libraries that a client's machine lacks, and the packages of Tessera that need them."""

READS_TRACES = (
    *(name for name in HEAVY if name != "tessera.simulator"),
    "tessera.simulator.world",
    "tessera.simulator.run",
)
"""The same for the readers of trace files, which are the lightest part of the simulator."""

CLIENT = (
    "tessera.service.cli.main",
    "tessera.service.cli.clusters.clusters",
    "tessera.service.cli.jobs.jobchanges",
    "tessera.service.cli.jobs.jobs",
    "tessera.service.cli.access.login",
    "tessera.service.cli.estimates.models",
    "tessera.service.cli.clusters.networks",
    "tessera.service.cli.rounds.rounds",
    "tessera.service.cli.clusters.tenants",
)
"""Command modules that a client needs."""

ESTIMATES = (
    "tessera.service.cli.simulation.importing",
    "tessera.service.cli.clusters.topology",
    "tessera.service.cli.estimates.estimate",
    "tessera.service.cli.simulation.traces",
)
"""Command modules that compute on the client, with NumPy."""


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def run_without(missing: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line as if the library ``missing`` were not installed."""
    return run_python(
        f"import sys; sys.modules[{missing!r}] = None; sys.argv = ['tessera', *{arguments!r}];"
        " import tessera.service.cli; tessera.service.cli.run()"
    )


def test_the_distribution_is_named_as_in_installation_hints() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == release.DISTRIBUTION
    assert release.install_hint("server") == "pip install 'tessera-scheduler[server]'"
    own = [
        d for extra in project["optional-dependencies"].values() for d in extra if "tessera" in d
    ]
    assert own
    names = (f"{release.DISTRIBUTION}[", "tessera-client[")
    assert all(d.startswith(names) for d in own)


def test_no_text_names_an_extra_of_an_unrelated_distribution() -> None:
    foreign = re.compile(r"tessera\[(?!\.)[a-z]")
    rooms = [
        "benchmarks",
        "db",
        "estimator",
        "formulation",
        "modelling",
        "service",
        "simulator",
        "solvers",
    ]
    files = [f for room in rooms for kind in ("py", "md") for f in (ROOT / room).rglob(f"*.{kind}")]
    assert len(files) > 100
    assert [str(f) for f in files if foreign.search(f.read_text(encoding="utf-8"))] == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("names", "heavy"),
    [
        (
            CLIENT,
            (*HEAVY, "numpy", "pydantic", "tessera.estimator.cells"),
        ),
        (ESTIMATES, READS_TRACES),
        (
            ("tessera.service.agent.main",),
            (*HEAVY, "numpy", "pydantic", "typer", "rich", "yaml", "tessera.estimator"),
        ),
    ],
)
def test_clients_and_agents_import_no_library_of_the_server(
    names: tuple[str, ...], heavy: tuple[str, ...]
) -> None:
    helped = "tessera.service.cli.main.deferred_commands(); " * (len(names) > len(ESTIMATES))
    found = f"sorted(set({heavy!r}) & sys.modules.keys())"
    code = f"import sys, {', '.join(names)}; {helped}print({found})"
    result = run_python(code)
    assert (result.returncode, result.stdout) == (0, "[]\n"), result.stderr


def test_an_agent_that_cannot_measure_traffic_says_what_to_install(tmp_path: Path) -> None:
    arguments = (
        f"--server 127.0.0.1:1 --cluster c --node n:a100:1 --data-dir {tmp_path}"
        " --measure-traffic 30"
    ).split()
    code = (
        "import sys; sys.modules['numpy'] = None;"
        f" from tessera.service.agent.main import main; sys.exit(main({arguments!r}))"
    )
    result = run_python(code)
    assert result.returncode != 0
    assert "pip install 'tessera-scheduler[traffic]'" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    ("missing", "command", "extra"),
    [
        ("sqlalchemy", "up", "server"),
        ("numba", "solve", "server"),
        ("matplotlib", "demo", "server"),
        ("numpy", "import", "estimates"),
        ("numpy", "estimate", "estimates"),
    ],
)
def test_a_command_with_missing_libraries_says_what_to_install(
    missing: str, command: str, extra: str
) -> None:
    result = run_without(missing, command)
    assert result.returncode == 1
    assert result.stderr == (
        f"error: `tessera {command}` needs {missing}; install it with:"
        f" pip install 'tessera-scheduler[{extra}]'\n"
    )


def test_without_the_command_lines_libraries_it_says_what_to_install() -> None:
    result = run_without("typer", "jobs")
    assert result.returncode == 1
    assert result.stderr.endswith("install them with: pip install 'tessera-scheduler[client]'\n")
    assert result.stderr.count("\n") == 1
