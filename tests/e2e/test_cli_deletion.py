"""Deletion, draining and round trips on the command line, against a real server on PostgreSQL."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.benchmarks.service.fleet import Fleet
from tessera.db.engine import Database
from tessera.db.store import PostgresStore
from tessera.service.cli import deletion as asking
from tests.support.command_line import CLUSTER, NODES, Tessera, read, submit
from tests.support.rows import rows_left
from tests.support.system import until


def node_states(tessera: Tessera) -> list[str]:
    return [node["state"] for node in read(tessera, "nodes")["nodes"]]


def test_a_cluster_with_live_jobs_is_refused_and_the_error_says_what_to_do(
    tessera: Tessera,
) -> None:
    submit(tessera, "j")
    done = tessera("cluster", "delete", "c", "--force", code=1)
    assert (
        "clusters/c is in use by 1 live job (j); cancel live jobs with `tessera cancel`"
        in done.stderr
    )
    assert "[IN_USE]" in done.stderr
    tessera("cancel", "j")
    assert "nothing changed" in tessera("cluster", "delete", "c", "--validate-only").stderr
    assert read(tessera, "cluster", "delete", "c") == {}
    tessera("cluster", "get", "c", code=4)
    tessera("cluster", "delete", "c", code=4)
    tessera("cluster", "delete", "c", "--allow-missing")


def test_a_running_server_removes_the_rows_of_a_deleted_cluster_and_its_name_is_free_again(
    tessera: Tessera, database: Database
) -> None:
    PostgresStore(database).hello("c", "fleet", "first", NODES)
    done = tessera("cluster", "delete", "c", code=1)
    assert "1 connected agent (fleet)" in done.stderr
    tessera("cluster", "delete", "c", "--force", "-o", "name")
    until(lambda: set(rows_left(database)) <= {"audit_log"}, "all rows are removed")
    tessera("cluster", "apply", "-f", "-", stdin=CLUSTER)
    assert read(tessera, "cluster", "get")["nodes"] == "2"


def test_a_gpu_type_in_use_can_be_removed_step_by_step(tessera: Tessera) -> None:
    more = """\
gpu_types: {a100: 40GiB, v100: 32GiB}
nodes: [{name: old, gpu_type: v100, gpus: 4}]
"""
    tessera("cluster", "apply", "-f", "-", stdin=more)
    less = "gpu_types: {v100: 32GiB}"
    done = tessera("cluster", "apply", "-f", "-", code=1, stdin=less)
    assert "`tessera cells delete --gpu-type a100`" in done.stderr
    assert "in use by 1 node (old)" in tessera("cluster", "types", "delete", "v100", code=1).stderr
    tessera("nodes", "delete", "old")
    assert [
        t["name"] for t in read(tessera, "cluster", "types", "delete", "v100")["gpu_types"]
    ] == ["a100"]
    assert tessera("cluster", "types", "list", "-o", "name").stdout.split() == ["a100"]
    tessera("cluster", "types", "delete", "v100", code=4)


def test_cells_are_listed_and_deleted_by_filter(tessera: Tessera) -> None:
    assert len(tessera("cells").stdout.splitlines()) == 4
    assert read(tessera, "cells", "delete", "--gpus", "1", "--validate-only") == {"deleted": 1}
    assert read(tessera, "cells", "delete", "--gpus", "1") == {"deleted": 1}
    assert read(tessera, "cells", "delete", "--model", "bert/1.3B", "--batch", "256") == {
        "deleted": 2
    }
    assert read(tessera, "cells", "delete", "--all") == {"deleted": 0}
    tessera("cells", "delete", code=2)
    tessera("cells", "delete", "--all", "--gpus", "4", code=2)
    tessera("cells", "delete", "--model", "bert", code=2)


def test_a_model_is_deleted(tessera: Tessera, tmp_path: Path) -> None:
    net = tmp_path / "net.yaml"
    net.write_text(
        "{architecture: transformer, layers: 4, hidden: 64, heads: 4, sequence: 32, vocabulary: 100}"
    )
    tessera("models", "add", "owl/1B", "--architecture", str(net))
    assert tessera("models", "-o", "name").stdout.split() == ["owl/1B"]
    tessera("models", "delete", "owl/1B")
    assert tessera("models", "-o", "name").stdout == ""
    tessera("models", "delete", "owl/1B", code=4)
    tessera("models", "delete", "owl/1B", "--allow-missing")


def test_deletion_asks_for_confirmation_on_a_terminal(
    tessera: Tessera, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal:
        answer = "no\n"

        def isatty(self) -> bool:
            return True

        def readline(self) -> str:
            return self.answer

    terminal = Terminal()

    class Sys:
        stdin = terminal

    monkeypatch.setattr(asking, "sys", Sys)
    done = tessera("cluster", "delete", "c", code=1)
    assert "Delete cluster c (2 nodes, 8 GPUs, 0 rounds)" in done.stderr
    assert "nothing was deleted" in done.stderr
    tessera("cluster", "get", "c")
    terminal.answer = "y\n"
    tessera("nodes", "delete", "n0")
    terminal.answer = "no\n"
    tessera("nodes", "delete", "n1", "--yes")
    assert read(tessera, "nodes")["nodes"] == []


def test_draining_waits_until_the_jobs_have_left_and_says_why(
    tessera: Tessera, fleet: Fleet
) -> None:
    tessera("cells", "delete", "--gpus", "8")
    submit(tessera, "j")
    tessera("round")
    until(lambda: read(tessera, "jobs")["jobs"][0]["state"] == "RUNNING" or None, "j runs")
    (name,) = [n["name"] for n in read(tessera, "nodes")["nodes"] if n["jobs"]]
    done = tessera("drain", name, "--wait", "--timeout", "0s", "--reason", "bad fan", code=1)
    assert "not drained after 0 s: " in done.stderr
    assert "1 job left (j)" in done.stderr
    assert sorted(node_states(tessera)) == ["DRAINING", "READY"]
    tessera("hold", "j")
    drained = tessera("drain", name, "--wait", "--timeout", "60s")
    assert "DRAINED" in drained.stdout
    wide = tessera("nodes", "-o", "wide").stdout
    assert "bad fan" in wide
    assert "@" in wide
    node = next(n for n in read(tessera, "nodes")["nodes"] if n["name"] == name)
    assert node["drain_reason"] == "bad fan"
    assert node["drain_time"]
    tessera("undrain", name)
    assert node_states(tessera) == ["READY", "READY"]


def test_applying_a_printed_cluster_and_its_tenants_changes_nothing(
    tessera: Tessera,
) -> None:
    tenants = "tenants: {nlp: {weight: 2, quotas: {a100: 4, any: 6}, borrow_gpus: 1}, cv: {}}"
    tessera("tenants", "apply", "-f", "-", stdin=tenants)
    before = [
        read(tessera, *command) for command in (("cluster", "get"), ("tenants", "list"), ("nodes",))
    ]
    assert before[1]["tenants"][1]["quotas"] == {"a100": 4, "any": 6}
    for form in ("yaml", "json"):
        for get, put in (("get", "cluster"), ("list", "tenants")):
            printed = tessera(put, get, "-o", form).stdout
            tessera(put, "apply", "-f", "-", stdin=printed)
    after = [
        read(tessera, *command) for command in (("cluster", "get"), ("tenants", "list"), ("nodes",))
    ]
    assert after == before
    stale = tessera("cluster", "get", "-o", "yaml").stdout
    tessera("cluster", "apply", "-f", "-", stdin="gpu_types: {a100: 80GiB}")
    assert "[STALE_ETAG]" in tessera("cluster", "apply", "-f", "-", stdin=stale, code=1).stderr
