"""Networks on the command line, against a real server on PostgreSQL."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tessera.benchmarks.service.fleet import Fleet
from tessera.service.cli.client import connect
from tessera.v1 import estimates_pb2
from tests.support.command_line import Tessera, read, submit

TOPOLOGY = """\
kind: clos
nodes: [{name: "n{}", count: 2}]
host: {like: pcie, gpus: 4}
tors: 2
aggregations: 2
tor_bytes_per_s: 100 Gb/s
"""


@pytest.fixture
def described(tessera: Tessera, tmp_path: Path) -> Path:
    """Describe a network, and return its file."""
    path = tmp_path / "net.yaml"
    path.write_text(TOPOLOGY)
    tessera("topology", "set", str(path))
    return path


def add_traffic(address: str) -> None:
    """Set the traffic of the Cells of 4 and 8 GPUs."""
    cells = []
    for gpus, nodes, iter_time_s in ((4, 1, 2.0), (8, 2, 1.0)):
        stage = estimates_pb2.StageTraffic(
            data_parallel=gpus // 2,
            tensor_parallel=1,
            data=estimates_pb2.Sent(bytes=1e9, messages=4),
            handed=estimates_pb2.Sent(bytes=1e8, messages=2),
        )
        cell_traffic = estimates_pb2.CellTraffic(
            work_flop=1e14, compute_s=0.5, start_s=0.5, stages=[stage, stage]
        )
        cells.append(
            estimates_pb2.CellEstimate(
                workload=estimates_pb2.Workload(model="bert", params="1.3B", global_batch=256),
                cell=estimates_pb2.Cell(gpu_type="a100", gpus=gpus, pipeline_degree=2),
                nodes=nodes,
                iter_time_s=iter_time_s,
                source=estimates_pb2.MEASURED,
                traffic=cell_traffic,
            )
        )
    request = estimates_pb2.UpsertCellsRequest(parent="clusters/c", cells=cells)
    with connect(address) as client:
        client.call(client.estimates.UpsertCells, request)


def test_a_network_is_described_shown_changed_by_etag_and_deleted(
    tessera: Tessera, described: Path
) -> None:
    shown = tessera("topology", "get").stdout
    rows = dict(line.strip().split(maxsplit=1) for line in shown.splitlines())
    assert (rows["topology"], rows["hosts"], rows["switches"]) == ("clusters/c/topology", "2", "4")
    assert tessera("topology", "get", "-o", "name").stdout == "clusters/c/topology\n"
    topology = read(tessera, "topology", "get")
    assert json.loads(topology["document"])["tors"] == 2
    document = tessera("topology", "get", "--document").stdout
    again = tessera("topology", "set", "-", stdin=document)
    assert topology["etag"] in again.stdout
    other = TOPOLOGY.replace("aggregations: 2", "aggregations: 3")
    checked = tessera("topology", "set", "-", "--validate-only", stdin=other)
    assert "valid; nothing changed" in checked.stderr
    tessera("topology", "set", "-", "--etag", topology["etag"], stdin=other)
    stale = tessera("topology", "set", "-", "--etag", topology["etag"], stdin=TOPOLOGY, code=1)
    assert "STALE_ETAG" in stale.stderr
    tors = [row.split() for row in tessera("topology", "show").stdout.splitlines()]
    assert ["aggregation", "3"] in tors
    paths = tessera("topology", "show", "--paths", "n0", "n1", "--json").stdout
    assert json.loads(paths)["equal_cost_paths"] == 3
    assert "network deleted" in tessera("topology", "delete").stderr
    error = tessera("topology", "get", code=4).stderr
    assert "describe it with `tessera topology set FILE`" in error
    tessera("topology", "show", code=4)


def test_an_invalid_network_is_refused_by_file_and_field(tessera: Tessera) -> None:
    wrong = TOPOLOGY.replace("tors: 2", "tors: none")
    error = tessera("topology", "set", "-", stdin=wrong, code=2).stderr
    assert "-: tors: must be a whole number" in error
    nan = TOPOLOGY.replace("100 Gb/s", ".nan")
    assert "tor_bytes_per_s" in tessera("topology", "set", "-", stdin=nan, code=2).stderr


def test_nodes_missing_from_a_description_are_reported(tessera: Tessera) -> None:
    done = tessera("topology", "set", "-", stdin=TOPOLOGY.replace("n{}", "x{}"))
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["hosts", "without", "a", "node", "x0,", "x1"] in rows
    assert ["missing", "nodes", "n0,", "n1"] in rows
    assert "free of contention" in done.stderr


def test_network_plans_are_made_shown_and_listed(
    tessera: Tessera, fleet: Fleet, address: str, described: Path
) -> None:
    assert "no network plan yet" in tessera("network", "history").stderr
    nothing = tessera("network", code=4).stderr
    assert (
        "It is planned at the next start or end of a job, or by `tessera network plan`" in nothing
    )
    add_traffic(address)
    submit(tessera, "one", "--gpus", "8")
    tessera("round")
    head, row = tessera("network").stdout.splitlines()
    assert head.split()[:5] == ["RANK", "JOB", "LEVEL", "DSCP", "INTENSITY"]
    assert row.split()[:2] == ["0", "one"]
    plan = read(tessera, "network")
    assert (plan["cause"], plan["levels"]) == ("round", 8)
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
    assert read(tessera, "network", "plan")["decisions"] == plan["decisions"]
    assert tessera("network", "-o", "name").stdout == "clusters/c/jobs/one\n"
    head, row = tessera("network", "history").stdout.splitlines()
    assert row.split()[:2] == ["1", "round"]
    error = tessera("network", "--paths", "history", code=2).stderr
    assert "--paths: must follow `history`" in error
    levels = read(tessera, "round", "--network-levels", "1")
    assert levels["options"]["network_levels"] == 1
    assert read(tessera, "network")["levels"] == 1
    assert len(read(tessera, "network", "history")["plans"]) == 2


def test_a_job_without_a_part_in_the_network_plan_says_why(
    tessera: Tessera, fleet: Fleet, described: Path
) -> None:
    submit(tessera, "one", "--gpus", "8")
    tessera("round")
    shown = tessera("job", "one").stdout
    assert "not planned: the traffic of its Cell is not known" in shown
    assert "the traffic of its Cell is not known" in tessera("network").stdout


def test_a_job_is_shown_by_its_full_name_whichever_cluster_the_command_names(
    tessera: Tessera, described: Path
) -> None:
    submit(tessera, "mine")
    shown = tessera("job", "clusters/c/jobs/mine", "-c", "absent")
    assert "mine" in shown.stdout
