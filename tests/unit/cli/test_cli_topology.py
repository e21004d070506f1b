"""``tessera topology show``: its output for a file, and how it refuses an invalid one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tessera.service.cli import main

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


def run_show(path: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main.app, ["topology", "show", str(path), *arguments])


def show_json(path: Path, *arguments: str) -> dict[str, Any]:
    result = run_show(path, *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


@pytest.fixture
def clos(tmp_path: Path) -> Path:
    path = tmp_path / "net.yaml"
    path.write_text(CLOS, encoding="utf-8")
    return path


def test_a_topology_is_shown_by_tiers_and_links(clos: Path) -> None:
    result = run_show(clos)
    assert result.exit_code == 0, result.stderr
    rows = [row.split() for row in result.stdout.splitlines()]
    assert ["hosts", "4"] in rows
    assert ["ToR", "2"] in rows
    assert ["GPU", "32"] in rows
    assert ["ToR", "aggregation", "6", "12.5", "1"] in rows
    assert "37.5 GB/s between halves of the ToRs" in result.stdout


def test_paths_between_two_hosts_are_listed(clos: Path) -> None:
    result = run_show(clos, "--paths", "a100-0", "a100-3")
    lines = [text for text in result.stdout.splitlines() if " > " in text]
    assert len(lines) == 3
    assert lines[1] == (
        "a100-0/gpu-0 > a100-0/pcie-0 > a100-0/nic-0 > tor-0 > agg-1 > tor-1 > a100-3/nic-0 > a100-3/pcie-0"
        " > a100-3/gpu-0"
    )
    some = run_show(clos, "--paths", "a100-0", "a100-3", "--most", "2")
    assert "2 of 3 equal-cost paths are listed; --most lists more" in some.stderr


def test_json_contains_the_whole_topology(clos: Path) -> None:
    output = show_json(clos, "--paths", "a100-0", "a100-1")
    assert output["vertices"]["aggregation"] == 3
    assert output["bisection_bytes_per_s"] == pytest.approx(37.5e9)
    assert {
        "from": "tor",
        "to": "aggregation",
        "links": 6,
        "bytes_per_s": 12.5e9,
        "delay_s": 1e-6,
    } in (output["links"])
    assert len(output["paths"]) == output["equal_cost_paths"] == 1
    assert output["paths"][0][3] == "tor-0"
    assert "paths" not in show_json(clos)


def test_a_lingjun_file_is_read_from_the_same_folder_and_assumptions_are_printed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "net.yaml"
    path.write_text(LINGJUN, encoding="utf-8")
    (tmp_path / "hosts.csv").write_text(ROWS, encoding="utf-8")
    output = show_json(path, "--paths", "h1", "h2")
    assert output["hosts"] == 3
    assert output["vertices"]["tor"] == 2
    assert "assumed" in output["assumed"][0]
    shown = run_show(path, "--paths", "h1", "h2")
    assert "(4 parallel cables)" in shown.stdout
    assert "speeds of cables" in shown.stderr


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (CLOS.replace("clos", "closs"), [], "kind: unknown kind 'closs'; did you mean 'clos'?"),
        (CLOS + "tors: 3\n", [], "the key 'tors' occurs twice"),
        (CLOS + "---\n" + CLOS, [], "holds 2 documents; give one"),
        ("", [], "must contain one topology, but is empty"),
        (
            CLOS.replace("100 Gb/s", "1"),
            [],
            "tor_bytes_per_s: must be a number of bytes/s from 1e6 to 1e14",
        ),
        (CLOS, ["--paths", "a100-0", "a100-9"], "--paths: unknown host 'a100-9'; did you mean"),
        (CLOS, ["--paths", "a100-0", "a100-0"], "--paths: needs two different hosts"),
        (LINGJUN, [], "hosts.csv: cannot be read"),
        (LINGJUN + "rows: []\n", [], "needs exactly one of 'file' and 'rows'"),
        (LINGJUN.replace("file: hosts.csv", ""), [], "needs the key 'rows'"),
    ],
)
def test_a_mistake_is_refused_by_name(
    tmp_path: Path, text: str, arguments: list[str], message: str
) -> None:
    path = tmp_path / "net.yaml"
    path.write_text(text, encoding="utf-8")
    result = run_show(path, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""
