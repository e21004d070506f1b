"""Clusters, nodes, tenants and networks on the command line, against a real server on PostgreSQL."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from tessera.benchmarks.service.fleet import Fleet
from tessera.db.schema.engine import Database
from tessera.db.store.store import Store
from tessera.service.cli import deletion as asking
from tessera.service.cli.client import connect
from tessera.v1 import estimates_pb2
from tests.support.command_line import CLUSTER, NODES, Tessera, read, submit
from tests.support.rows import rows_left
from tests.support.system import until

TENANTS = "tenants: {nlp: {weight: 2, quotas: {a100: 6, any: 8}, borrow_gpus: 0}, vision: {}}\n"
ARCHITECTURE = (
    "{architecture: transformer, layers: 4, hidden: 64, heads: 4, sequence: 32, vocabulary: 100}"
)


def node_states(tessera: Tessera) -> list[str]:
    return [node["state"] for node in read(tessera, "nodes")["nodes"]]


def test_a_cluster_is_described_listed_and_shown_and_validating_one_changes_nothing(
    tessera: Tessera,
) -> None:
    described = read(tessera, "cluster", "get")
    assert (described["gpus"], "round_period" in described) == ("8", True)
    assert [c["name"] for c in read(tessera, "cluster", "list")["clusters"]] == ["clusters/c"]
    assert "40 GiB" in tessera("cluster", "get", "c").stdout
    row = " ".join(tessera("nodes").stdout.splitlines()[1].split())
    assert row == "n0 UNREACHABLE a100 4 4 not stated not stated r0"
    assert tessera("cluster", "get", "absent", code=4).stdout == ""
    done = tessera("cluster", "apply", "-f", "-", "-c", "new", "--validate-only", stdin=CLUSTER)
    assert "nothing changed" in done.stderr
    tessera("cluster", "get", "new", code=4)
    more = CLUSTER.replace("count: 2", "count: 3")
    tessera("cluster", "apply", "-f", "-", "--validate-only", stdin=more)
    assert read(tessera, "cluster", "get")["nodes"] == "2"


def test_a_cluster_file_sets_tenants_and_gpu_costs_and_a_printed_one_changes_nothing(
    tessera: Tessera,
) -> None:
    text = CLUSTER.replace("40GiB", "{memory: 40GiB, dollars_per_hour: 2.5, watts: 400}") + TENANTS
    assert "1 GPU types, 2 nodes, 2 tenants applied" in (
        tessera("cluster", "apply", "-f", "-", stdin=text).stderr
    )
    assert "a100 (40 GiB, $2.5/h, 400 W)" in tessera("cluster", "get").stdout

    def state() -> list[Any]:
        commands = (("cluster", "get"), ("tenants", "list"), ("nodes",))
        return [read(tessera, *command) for command in commands]

    before = state()
    assert before[1]["tenants"][0]["quotas"] == {"a100": 6, "any": 8}
    for form in ("yaml", "json"):
        for get, put in (("get", "cluster"), ("list", "tenants")):
            printed = tessera(put, get, "-o", form).stdout
            tessera(put, "apply", "-f", "-", stdin=printed)
    assert state() == before
    stale = tessera("cluster", "get", "-o", "yaml").stdout
    tessera("cluster", "apply", "-f", "-", stdin="gpu_types: {a100: 80GiB}")
    assert "[STALE_ETAG]" in tessera("cluster", "apply", "-f", "-", stdin=stale, code=1).stderr


def test_tenants_are_applied_listed_and_deleted(tessera: Tessera) -> None:
    assert "each has weight 1" in tessera("tenants", "list").stderr
    done = tessera("tenants", "apply", "-f", "-", "--validate-only", stdin=TENANTS)
    assert "2 tenants valid; nothing changed" in done.stderr
    assert read(tessera, "tenants", "list")["tenants"] == []
    tessera("tenants", "apply", "-f", "-", stdin=TENANTS)
    rows = tessera("tenants", "list").stdout.splitlines()
    assert [" ".join(row.split()) for row in rows] == [
        "TENANT WEIGHT QUOTAS BORROWS LENDS",
        "nlp 2 6 x a100, 8 GPUs of any type 0 yes",
        "vision 1 any number yes",
    ]
    too_much = TENANTS.replace("vision: {}", "vision: {quotas: {a100: 3}}")
    refused = tessera("tenants", "apply", "-f", "-", stdin=too_much, code=1).stderr
    assert "quotas of a100 sum to 9 GPUs, but the cluster has 8" in refused
    names = [f"clusters/c/tenants/{name}" for name in ("nlp", "vision")]
    assert tessera("tenants", "list", "-o", "name").stdout.split() == names
    tessera("tenants", "delete", "nlp", "absent", code=4)
    assert "deleted: nlp, vision" in tessera("tenants", "delete", "nlp", "vision").stderr
    assert read(tessera, "tenants", "list")["tenants"] == []


def test_a_running_server_removes_the_rows_of_a_deleted_cluster_and_its_name_is_free_again(
    tessera: Tessera, database: Database
) -> None:
    submit(tessera, "j")
    refused = tessera("cluster", "delete", "c", "--force", code=1).stderr
    assert (
        "clusters/c is in use by 1 live job (j); cancel live jobs with `tessera cancel`" in refused
    )
    assert "[IN_USE]" in refused
    tessera("cancel", "j")
    assert "nothing changed" in tessera("cluster", "delete", "c", "--validate-only").stderr
    Store(database).hello("c", "fleet", "first", NODES)
    done = tessera("cluster", "delete", "c", code=1)
    assert "1 connected agent (fleet)" in done.stderr
    tessera("cluster", "delete", "c", "--force", "-o", "name")
    tessera("cluster", "get", "c", code=4)
    tessera("cluster", "delete", "c", code=4)
    tessera("cluster", "delete", "c", "--allow-missing")
    until(lambda: set(rows_left(database)) <= {"audit_log"}, "all rows are removed")
    tessera("cluster", "apply", "-f", "-", stdin=CLUSTER)
    assert read(tessera, "cluster", "get")["nodes"] == "2"


def test_a_gpu_type_and_its_cells_can_be_removed_step_by_step(tessera: Tessera) -> None:
    more = "gpu_types: {a100: 40GiB, v100: 32GiB}\nnodes: [{name: old, gpu_type: v100, gpus: 4}]\n"
    tessera("cluster", "apply", "-f", "-", stdin=more)
    done = tessera("cluster", "apply", "-f", "-", code=1, stdin="gpu_types: {v100: 32GiB}")
    assert "`tessera cells delete --gpu-type a100`" in done.stderr
    assert "in use by 1 node (old)" in tessera("cluster", "types", "delete", "v100", code=1).stderr
    tessera("nodes", "delete", "old")
    (left,) = read(tessera, "cluster", "types", "delete", "v100")["gpu_types"]
    assert left["name"] == "a100"
    assert tessera("cluster", "types", "list", "-o", "name").stdout.split() == ["a100"]
    tessera("cluster", "types", "delete", "v100", code=4)

    assert len(tessera("cells").stdout.splitlines()) == 4
    for options, deleted in (
        ("--gpus 1 --validate-only", 1),
        ("--gpus 1", 1),
        ("--model bert/1.3B --batch 256", 2),
        ("--all", 0),
    ):
        assert read(tessera, "cells", "delete", *options.split()) == {"deleted": deleted}
    for wrong in ("--all --gpus 4", "--model bert"):
        tessera("cells", "delete", *wrong.split(), code=2)


def test_models_are_added_as_their_files_and_options_describe_them_listed_and_deleted(
    tessera: Tessera, tmp_path: Path
) -> None:
    empty = tessera("models")
    assert (empty.stdout, "`tessera models add` describes one" in empty.stderr) == ("", True)
    net, hf = tmp_path / "net.yaml", tmp_path / "config.json"
    net.write_text(ARCHITECTURE)
    hf.write_text(
        '{"model_type": "gpt2", "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 2,'
        ' "vocab_size": 100}'
    )
    stated = "--micro-batches 8 --state-bytes 12 --checkpointing --dtype bf16 --sequence 64"
    add = ("models", "add", "owl/1B", "--architecture", str(net), *stated.split(), "--flash")
    valid = tessera(*add, "--zero", "1", "--validate-only")
    assert valid.stderr == "owl/1B is valid; nothing changed\n"
    assert tessera("models", "-o", "name").stdout == ""
    assert tessera(*add, "--zero", "1").stderr == "owl/1B added\n"
    tessera("models", "add", "wren", "--hf", str(hf))
    assert tessera("models", "-o", "name").stdout.split() == ["owl/1B", "wren"]
    owl, wren = read(tessera, "models")["models"]
    fields = ("model", "params", "architecture", "micro_batches", "state_bytes", "checkpointing")
    assert [owl[name] for name in fields] == ["owl", "1B", ARCHITECTURE, 8, 12.0, True]
    assert [owl[name] for name in ("dtype", "sequence", "flash", "zero")] == ["bf16", 64, True, 1]
    assert (wren["checkpointing"], wren["flash"], wren["zero"]) == (False, False, 0)
    words = (row.split() for row in tessera("models", "--published").stdout.splitlines())
    origin = {row[0]: row[-2:] for row in words}
    assert (origin["owl/1B"], origin["bert/1.3B"]) == (["the", "cluster"], ["this", "release"])
    tessera("models", "delete", "owl/1B", "wren")
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
    assert "DRAINED" in tessera("drain", name, "--wait", "--timeout", "60s").stdout
    wide = tessera("nodes", "-o", "wide").stdout
    assert "bad fan" in wide
    assert "@" in wide
    node = next(n for n in read(tessera, "nodes")["nodes"] if n["name"] == name)
    assert (node["drain_reason"], bool(node["drain_time"])) == ("bad fan", True)
    tessera("undrain", name)
    assert node_states(tessera) == ["READY", "READY"]
    tessera("drain", "absent", code=4)


def test_use_is_shown_as_a_table_as_json_and_as_csv(tessera: Tessera, fleet: Fleet) -> None:
    submit(tessera, "j", "--tenant", "nlp", "--label", "team=x")
    tessera("round")
    shown = tessera("usage", "--by", "tenant", "--by", "type", "--by", "day")
    for text in ("nlp", "a100", "EFFECTIVE"):
        assert text in shown.stdout
    assert "from 2" in shown.stderr
    (row,) = read(tessera, "usage", "--by", "label:team", "--tenant", "nlp")["rows"]
    assert row["group"] == {"label:team": "x"}
    assert row["gpu_hours"] > 0
    (line,) = csv.DictReader(io.StringIO(tessera("usage", "--csv", "--by", "tenant").stdout))
    assert (line["tenant"], line["jobs_ended"], line["mean_waiting_seconds"]) == ("nlp", "0", "")
    assert float(line["gpu_hours"]) > 0
    assert "--csv" in tessera("usage", "--csv", "-o", "json", code=2).stderr
    assert "label:KEY" in tessera("usage", "--by", "colour", code=1).stderr


def test_gpus_and_nodes_are_reserved_listed_moved_and_given_back(tessera: Tessera) -> None:
    submit(tessera, "j", "--tenant", "nlp")
    gpus = ("--gpus", "1", "--gpu-type", "a100", "--tenant", "nlp")
    fans = ("--nodes", "n0", "--maintenance", "--from", "2099-12-02", "--for", "3h")
    tessera("reserve", "create", "exam", *gpus, "--from", "2099-12-01 09:00", "--to", "17:00")
    tessera("reserve", "create", "fans", *fans)
    listed = tessera("reserve", "list").stdout
    assert "exam" in listed
    assert "maintenance" in listed
    tessera("reserve", "update", "exam", "--to", "2099-12-01 18:00")
    more = ("--nodes", "n0", "--tenant", "nlp", "--from", "2099-12-02 01:00", "--for", "1h")
    assert "fans" in tessera("reserve", "create", "more", *more, code=1).stderr
    tessera("reserve", "delete", "exam", "fans")
    assert "nothing is reserved" in tessera("reserve", "list").stderr


TOPOLOGY = """\
kind: clos
nodes: [{name: "n{}", count: 2}]
host: {like: pcie, gpus: 4}
tors: 2
aggregations: 2
tor_bytes_per_s: 100 Gb/s
"""


def add_traffic(address: str) -> None:
    """Set the traffic of the Cells of 4 and 8 GPUs."""
    cells = []
    for gpus, nodes, iter_time_s in ((4, 1, 2.0), (8, 2, 1.0)):
        stage = estimates_pb2.StageTraffic(
            data_parallel=gpus // 2,
            tensor_parallel=1,
            data=estimates_pb2.Sent(bytes=1e9, messages=4),
            pipeline=estimates_pb2.Sent(bytes=1e8, messages=2),
        )
        cells.append(
            estimates_pb2.CellEstimate(
                workload=estimates_pb2.Workload(model="bert", params="1.3B", global_batch=256),
                cell=estimates_pb2.Cell(gpu_type="a100", gpus=gpus, pipeline_degree=2),
                nodes=nodes,
                iter_time_s=iter_time_s,
                source=estimates_pb2.MEASURED,
                traffic=estimates_pb2.CellTraffic(
                    work_flop=1e14, compute_s=0.5, start_s=0.5, stages=[stage, stage]
                ),
            )
        )
    request = estimates_pb2.UpsertCellsRequest(parent="clusters/c", cells=cells)
    with connect(address) as client:
        client.call(client.stubs.estimates.UpsertCells, request)


def test_a_network_is_described_shown_changed_by_etag_and_deleted(tessera: Tessera) -> None:
    elsewhere = tessera("topology", "set", "-", stdin=TOPOLOGY.replace("n{}", "x{}"))
    lines = [line.split() for line in elsewhere.stdout.splitlines()]
    assert ["hosts", "without", "a", "node", "x0,", "x1"] in lines
    assert ["missing", "nodes", "n0,", "n1"] in lines
    assert "free of contention" in elsewhere.stderr
    tessera("topology", "set", "-", stdin=TOPOLOGY)
    shown = tessera("topology", "get").stdout
    rows = dict(line.strip().split(maxsplit=1) for line in shown.splitlines())
    assert (rows["topology"], rows["hosts"], rows["switches"]) == ("clusters/c/topology", "2", "4")
    assert tessera("topology", "get", "-o", "name").stdout == "clusters/c/topology\n"
    topology = read(tessera, "topology", "get")
    assert json.loads(topology["document"])["tors"] == 2
    document = tessera("topology", "get", "--document").stdout
    assert topology["etag"] in tessera("topology", "set", "-", stdin=document).stdout
    other = TOPOLOGY.replace("aggregations: 2", "aggregations: 3")
    checked = tessera("topology", "set", "-", "--validate-only", stdin=other)
    assert "valid; nothing changed" in checked.stderr
    change = ("topology", "set", "-", "--etag", topology["etag"])
    tessera(*change, stdin=other)
    assert "STALE_ETAG" in tessera(*change, stdin=TOPOLOGY, code=1).stderr
    tors = [row.split() for row in tessera("topology", "show").stdout.splitlines()]
    assert ["aggregation", "3"] in tors
    paths = tessera("topology", "show", "--paths", "n0", "n1", "--json").stdout
    assert json.loads(paths)["equal_cost_paths"] == 3
    assert "network deleted" in tessera("topology", "delete").stderr
    error = tessera("topology", "get", code=4).stderr
    assert "describe it with `tessera topology set FILE`" in error
    tessera("topology", "show", code=4)
    wrong = TOPOLOGY.replace("tors: 2", "tors: none")
    refused = tessera("topology", "set", "-", stdin=wrong, code=2).stderr
    assert "-: tors: must be a whole number" in refused


def test_network_plans_are_made_shown_and_listed(
    tessera: Tessera, fleet: Fleet, address: str
) -> None:
    tessera("topology", "set", "-", stdin=TOPOLOGY)
    assert "no network plan yet" in tessera("network", "history").stderr
    nothing = tessera("network", code=4).stderr
    assert (
        "It is planned at the next start or end of a job, or by `tessera network plan`" in nothing
    )
    submit(tessera, "one", "--gpus", "8")
    tessera("round")
    unknown = "the traffic of its Cell is not known"
    assert f"not planned: {unknown}" in tessera("job", "clusters/c/jobs/one", "-c", "no").stdout
    assert unknown in tessera("network").stdout
    add_traffic(address)
    tessera("network", "plan")
    head, row = tessera("network").stdout.splitlines()
    assert head.split()[:5] == ["RANK", "JOB", "LEVEL", "DSCP", "INTENSITY"]
    assert row.split()[:2] == ["0", "one"]
    plan = read(tessera, "network")
    assert plan["levels"] == 8
    (decision,) = plan["decisions"]
    paths = tessera("network", "--paths").stdout
    assert any(f"tor-0 > agg-{k} > tor-1" in paths for k in range(2))
    line = next(x for x in tessera("job", "one").stdout.splitlines() if x.startswith("network"))
    assert line.strip().split(maxsplit=1)[1] == (
        f"rank 0, level {decision['level']} of 0 to 7, DSCP {decision['dscp']};"
        " shares links with no other job"
    )
    dry_run = tessera("network", "plan", "--dry-run")
    assert "the plan was not put in force" in dry_run.stderr
    assert tessera("network", "-o", "name").stdout == "clusters/c/jobs/one\n"
    head, *rows = tessera("network", "history").stdout.splitlines()
    assert rows[-1].split()[:2] == ["1", "round"]
    error = tessera("network", "--paths", "history", code=2).stderr
    assert "--paths: must follow `history`" in error
    levels = read(tessera, "round", "--set", "network_levels=1")
    assert levels["options"]["network_levels"] == 1
    assert read(tessera, "network")["levels"] == 1
    assert len(read(tessera, "network", "history")["plans"]) == len(rows) + 1
