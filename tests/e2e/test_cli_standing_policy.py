"""The commands on standing policies, shadows, use and reservations, with a server."""

from __future__ import annotations

import csv
import io

from tessera.benchmarks.service.fleet import Fleet
from tests.support.command_line import Tessera, read, submit


def test_a_policy_is_set_shown_listed_and_restored(tessera: Tessera) -> None:
    first = tessera("policy", "show").stdout
    assert "0 (the server's settings)" in first
    assert "no policy was set" in tessera("policy", "history").stderr
    done = tessera("policy", "set", "--objective", "jct", "--min-run", "60s", "-m", "shorter waits")
    assert "version 1 is in force from the next round on" in done.stderr
    # Options that are not given stay as they are.
    tessera("policy", "set", "--max-changes", "3")
    shown = tessera("policy", "show").stdout
    assert "jct; minimum run 1m; maximum changes 3" in shown
    tessera("policy", "set", "--from-defaults", "--objective", "throughput")
    assert "minimum run" not in tessera("policy", "show").stdout
    listed = read(tessera, "policy", "history")["policies"]
    assert [policy["version"] for policy in listed] == ["3", "2", "1"]
    assert listed[-1]["message"] == "shorter waits"
    tessera("policy", "restore", "1")
    assert "restores version 1" in tessera("policy", "show").stdout
    decided = read(tessera, "round")
    assert (decided["options"]["objective"], decided["policy_version"]) == ("jct", "4")
    assert "(policy version 4)" in tessera("round", "show", "1").stdout
    assert "names no option to set" in tessera("policy", "set", code=2).stderr
    assert "policies/9" in tessera("policy", "show", "9", code=4).stderr
    valid = tessera("policy", "set", "--objective", "makespan", "--validate-only")
    assert "nothing changed" in valid.stderr
    assert read(tessera, "policy", "show")["version"] == "4"


def test_a_shadow_is_set_shown_and_stopped(tessera: Tessera) -> None:
    assert "shadow" in tessera("shadow", "show", code=4).stderr
    tessera("shadow", "set", "--scheduler", "fcfs", "-m", "would it do?")
    shown = tessera("shadow", "show", "--rounds", "3").stdout
    assert "the published scheduler fcfs" in shown
    assert "none was decided by the shadow yet" in shown
    tessera("shadow", "stop")
    tessera("shadow", "stop", code=4)
    tessera("shadow", "stop", "--allow-missing")


def test_use_is_shown_as_a_table_as_json_and_as_csv(tessera: Tessera, fleet: Fleet) -> None:
    submit(tessera, "j", "--tenant", "nlp", "--label", "team=x")
    tessera("round")
    shown = tessera("usage", "--by", "tenant", "--by", "type", "--by", "day")
    assert "nlp" in shown.stdout
    assert "a100" in shown.stdout
    assert "EFFECTIVE" in shown.stdout
    assert "from 2" in shown.stderr
    (row,) = read(tessera, "usage", "--by", "label:team", "--tenant", "nlp")["rows"]
    assert row["group"] == {"label:team": "x"}
    assert row["gpu_hours"] > 0
    text = tessera("usage", "--csv", "--by", "tenant").stdout
    (line,) = csv.DictReader(io.StringIO(text))
    assert (line["tenant"], line["jobs_ended"], line["mean_waiting_seconds"]) == ("nlp", "0", "")
    assert float(line["gpu_hours"]) > 0
    assert "--csv" in tessera("usage", "--csv", "-o", "json", code=2).stderr
    assert "label:KEY" in tessera("usage", "--by", "colour", code=1).stderr


def test_gpus_and_nodes_are_reserved_listed_moved_and_given_back(tessera: Tessera) -> None:
    submit(tessera, "j", "--tenant", "nlp")
    node, *_ = read(tessera, "nodes")["nodes"]
    name = node["name"].rpartition("/")[2]
    what = ("--gpus", "1", "--gpu-type", node["gpu_type"], "--tenant", "nlp")
    tessera("reserve", "create", "exam", *what, "--from", "2099-12-01 09:00", "--to", "17:00")
    tessera(
        "reserve",
        "create",
        "fans",
        "--nodes",
        name,
        "--maintenance",
        "--from",
        "2099-12-02",
        "--for",
        "3h",
    )
    listed = tessera("reserve", "list").stdout
    assert "exam" in listed
    assert "maintenance" in listed
    tessera("reserve", "update", "exam", "--to", "2099-12-01 18:00")
    clash = tessera(
        *("reserve", "create", "more", "--nodes", name, "--tenant", "nlp"),
        *("--from", "2099-12-02 01:00", "--for", "1h"),
        code=1,
    )
    assert "fans" in clash.stderr
    tessera("reserve", "delete", "exam", "fans")
    assert "nothing is reserved" in tessera("reserve", "list").stderr
