"""``tessera topology show`` on files: its output, and how it refuses an invalid one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tessera.service.cli.main import app

CLOS = """
kind: clos
nodes: [{name: "a100-{}", count: 4}]
host: a100
tors: 2
aggregations: 3
tor_bytes_per_s: 100 Gb/s
tor_delay_s: 1e-6
"""
LINGJUN = """
kind: lingjun
file: hosts.csv
host: a100
ports_per_nic: 2
asw_cables: 4
asw_bytes_per_s: 400 Gb/s
psw_cables: 4
psw_bytes_per_s: 50e9
"""
ROWS = "host_id,dsw,psw,asw\nh1,G,P1,S1\nh2,G,P1,S1\nh3,G,P2,S1\n"


@pytest.fixture
def topology(tmp_path: Path) -> Callable[..., Result]:
    """Return a function that runs ``tessera topology show`` on a file with this text."""
    path = tmp_path / "net.yaml"

    def run(text: str, options: str = "", code: int = 0) -> Result:
        path.write_text(text, encoding="utf-8")
        result = CliRunner().invoke(app, ["topology", "show", str(path), *options.split()])
        assert result.exit_code == code, result.output
        return result

    return run


def test_a_topology_is_shown_by_tiers_links_and_paths(topology: Callable[..., Result]) -> None:
    shown = topology(CLOS).stdout
    rows = [row.split() for row in shown.splitlines()]
    for row in (["hosts", "4"], ["ToR", "2"], ["GPU", "32"]):
        assert row in rows
    assert ["ToR", "aggregation", "6", "12.5", "1"] in rows
    assert "37.5 GB/s between halves of the ToRs" in shown
    paths = topology(CLOS, "--paths a100-0 a100-3").stdout
    lines = [text for text in paths.splitlines() if " > " in text]
    assert len(lines) == 3
    assert lines[1] == (
        "a100-0/gpu-0 > a100-0/pcie-0 > a100-0/nic-0 > tor-0 > agg-1 > tor-1 > a100-3/nic-0"
        " > a100-3/pcie-0 > a100-3/gpu-0"
    )
    some = topology(CLOS, "--paths a100-0 a100-3 --most 2")
    assert "2 of 3 equal-cost paths are listed; --most lists more" in some.stderr


def test_a_lingjun_file_is_read_from_the_same_folder_and_assumptions_are_printed(
    topology: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "hosts.csv").write_text(ROWS, encoding="utf-8")
    output = json.loads(topology(LINGJUN, "--paths h1 h2 --json").stdout)
    assert (output["hosts"], output["vertices"]["tor"]) == (3, 2)
    assert "assumed" in output["assumed"][0]
    shown = topology(LINGJUN, "--paths h1 h2")
    assert "(4 parallel cables)" in shown.stdout
    assert "speeds of cables" in shown.stderr


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (CLOS + "---\n" + CLOS, "", "holds 2 documents; give one"),
        ("", "", "must contain one topology, but is empty"),
        (CLOS, "--paths a100-0 a100-9", "--paths: unknown host 'a100-9'; did you mean"),
        (CLOS, "--paths a100-0 a100-0", "--paths: needs two different hosts"),
        (
            CLOS.replace("100 Gb/s", "1"),
            "",
            "tor_bytes_per_s: must be a number of bytes/s from 1e6",
        ),
        (LINGJUN, "", "hosts.csv: cannot be read"),
        (LINGJUN + "rows: []\n", "", "needs exactly one of 'file' and 'rows'"),
    ],
)
def test_a_mistake_in_a_topology_is_refused_by_name(
    topology: Callable[..., Result], text: str, options: str, message: str
) -> None:
    result = topology(text, options, code=2)
    assert message in result.stderr
    assert result.stdout == ""
