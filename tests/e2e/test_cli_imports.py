"""Estimates and traces that are imported into a real server on PostgreSQL, and derived by it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tessera.benchmarks.service.fleet import Fleet
from tessera.service.cli.client import connect
from tessera.service.cli.names import short_name
from tessera.simulator.traces.profiles import read_profiles
from tessera.v1 import estimates_pb2
from tests.support.agent_server import AgentProcess
from tests.support.command_line import PROFILES, TRACE, Tessera, read, submit
from tests.support.waiting import until

FAT = "gpu_types: {a100: 40GiB}\nnodes: [{name: n, gpu_type: a100, gpus: 16}]\n"
ARCHITECTURE = (
    "{architecture: transformer, layers: 4, hidden: 256, heads: 4, sequence: 128, vocabulary: 1000}"
)


def write_file(folder: Path, text: str) -> str:
    """Write a file to import, and return its path."""
    file = folder / "imported.csv"
    file.write_text(text)
    return str(file)


def test_estimates_are_imported_again_and_those_of_other_types_are_refused_or_skipped(
    tessera: Tessera, address: str, tmp_path: Path
) -> None:
    def cells() -> list[estimates_pb2.CellEstimate]:
        request = estimates_pb2.ListCellsRequest(parent="clusters/c")
        with connect(address) as client:
            return list(client.call(client.stubs.estimates.ListCells, request).cells)

    tessera("import", "profiles", write_file(tmp_path, PROFILES.replace("2.0", "3.0")))
    file = write_file(tmp_path, PROFILES)
    assert "3 estimates imported" in tessera("import", "profiles", file).stderr
    assert [c.iter_time_s for c in cells() if c.cell.gpus == 4] == [2.0]
    assert not any(c.complete for c in cells())
    tessera("import", "profiles", file, "--complete")
    assert all(c.complete for c in cells())

    others = "bert,1.3B,256,h100,1,4,0.5,ok,2\nbert,1.3B,256,v100,1,4,9.0,ok,2\n"
    write_file(tmp_path, PROFILES + others)
    refused = tessera("import", "profiles", file, code=2).stderr
    assert "the cluster lacks h100, v100 (it has a100)" in refused
    assert "--skip-unknown-types" in refused
    done = tessera("import", "profiles", file, "--skip-unknown-types").stderr
    assert "2 estimates skipped: the cluster lacks h100, v100" in done
    assert "3 estimates imported" in done
    write_file(tmp_path, PROFILES.replace("a100", "h100"))
    only = tessera("import", "profiles", file, "--skip-unknown-types", code=2).stderr
    assert "has only estimates of other types" in only
    write_file(tmp_path, PROFILES.replace("2.0", "fast"))
    wrong = tessera("import", "profiles", file, code=2).stderr
    assert "imported.csv line 2, column iter_time_s" in wrong

    assert "estimates imported" in tessera("import", "samples").stderr
    exotic = "gpu_types: {exotic: 1GiB}\nnodes: []\n"
    tessera("cluster", "apply", "-f", "-", "-c", "other", stdin=exotic)
    assert "do not exist for exotic" in tessera("import", "samples", "-c", "other", code=2).stderr


def test_a_trace_import_that_failed_halfway_may_be_repeated(
    tessera: Tessera, tmp_path: Path
) -> None:
    file = write_file(tmp_path, TRACE)
    done = tessera("import", "trace", file, "--limit", "1", "--tenant", "t")
    assert done.stderr == "1 job imported\n"
    tessera("cancel", "t1")  # whatever its state, it is not submitted again
    done = tessera("import", "trace", file, "--tenant", "t")
    assert done.stderr.splitlines() == ["1 job already there, left unchanged", "2 jobs imported"]
    jobs = read(tessera, "jobs", "--all")["jobs"]
    assert [(short_name(job["name"]), job["iterations"], job["state"]) for job in jobs] == [
        ("t1", "1000", "CANCELLED"),
        ("t2", "1000", "QUEUED"),
        ("t3", "1000", "QUEUED"),
    ]
    deadlines = [job["deadline"] for job in jobs if "deadline" in job]
    assert len(deadlines) == 1
    assert "3 jobs already there" in tessera("import", "trace", file, "--tenant", "t").stderr
    assert [j["deadline"] for j in read(tessera, "jobs")["jobs"] if "deadline" in j] == deadlines
    write_file(tmp_path, TRACE.replace("t2,10,bert,1.3B,256,5000", "t2,10,bert,1.3B,256,500"))
    refused = tessera("import", "trace", file, "--tenant", "t", code=1).stderr
    assert "clusters/c/jobs/t2 already exists and differs from the job" in refused
    head, *rows = TRACE.splitlines()
    write_file(tmp_path, "\n".join([head, *reversed(rows), ""]))
    note = "listed after a job that arrives later"
    assert note in tessera("import", "trace", file, "--tenant", "t").stderr


def test_a_trace_is_shaped_for_the_servers_cluster_and_its_tenants_get_their_quota(
    tessera: Tessera, tmp_path: Path
) -> None:
    file = write_file(tmp_path, TRACE + "giant,30,gpt9,1T,256,5000,4,\n")
    refused = tessera("import", "trace", file, "--on-bad", "refuse", code=2).stderr
    assert "giant (gpt9 1T 256)" in refused
    assert read(tessera, "jobs").get("jobs", []) == []
    head, *rows = TRACE.splitlines()
    write_file(tmp_path, "\n".join([head, *reversed(rows), ""]))
    done = tessera("import", "trace", file, "--guaranteed", "0.34", "--on-bad", "drop")
    assert "load" in done.stdout
    assert "listed after a job that arrives later" in done.stderr
    jobs = read(tessera, "jobs")["jobs"]
    assert sorted((j["tenant"], j["guaranteed"]) for j in jobs).count(("tenant-a", True)) == 1
    tenants = read(tessera, "tenants", "list")["tenants"]
    quotas = {short_name(t["name"]): sum(t["quotas"].values()) for t in tenants}
    assert quotas == {"tenant-a": 8, "tenant-b": 0}
    header = "job_id,submit_time_s,model,params,global_batch,iterations,num_gpus,plan,guaranteed"
    write_file(tmp_path, f"{header}\np,5,bert,1.3B,256,100,4,248,1\n")
    assert tessera("import", "trace", file).stderr == "1 job imported\n"
    job = read(tessera, "job", "p")
    assert (job["labels"], job["guaranteed"], job["iterations"]) == ({"plan": "248"}, True, "100")


def test_a_cell_has_one_estimate_on_the_server_and_on_the_command_line(
    tessera: Tessera, address: str
) -> None:
    tessera("cluster", "apply", "-f", "-", "-c", "fat", stdin=FAT)
    work = estimates_pb2.Workload(model="bert", params="1.3B", global_batch=256)
    request = estimates_pb2.EstimateCellsRequest(
        parent="clusters/fat", workload=work, gpus=[8], gpu_types=["a100"], validate_only=True
    )
    with connect(address) as client:
        answer = client.call(client.stubs.estimates.EstimateCells, request)
    server = {c.estimate.cell.pipeline_degree: c.estimate.iter_time_s for c in answer.cells}
    query = ("estimate", "--model", "bert/1.3B", "--batch", "256", "--gpu", "a100", "--count", "8")
    done = tessera(*query, "-c", "fat", "--json")
    local = {c["pipeline_degree"]: c["iter_time_s"] for c in json.loads(done.stdout)["cells"]}
    assert local == pytest.approx({d: s for d, s in server.items() if s}, rel=1e-12)
    assert f"nodes of 16 x a100, as in cluster fat at {address}" in done.stderr
    offline = json.loads(tessera(*query, "--offline", "--json").stdout)["cells"]
    assert {c["nodes"] for c in offline} == {2}
    assert min(c["iter_time_s"] for c in offline) > min(local.values())


def test_a_file_of_estimates_carries_their_execution_plans_to_the_server(
    tessera: Tessera, tmp_path: Path
) -> None:
    file = str(tmp_path / "estimates.csv")
    query = ("estimate", "--model", "bert/760M", "--batch", "128", "--gpu", "a100", "--count", "4")
    tessera(*query, "--write", file)
    records = {r.cell.pipeline_degree: r for r in read_profiles(Path(file))}
    assert set(records) == {1, 2, 4}
    tessera("import", "profiles", file)
    cells = read(tessera, "cells", "--model", "bert/760M", "--batch", "128")["cells"]
    assert len(cells) == len(records)
    for cell in cells:
        record = records[cell["cell"]["pipeline_degree"]]
        assert record.plan is not None
        assert cell["cell"]["plan"] == record.cell.plan == record.plan.digest
        assert cell["execution_plan"] == record.plan.to_json()
        assert (cell["iter_time_s"], cell["source"]) == (record.iter_time_s, "ANALYTIC")


def test_published_models_get_cells_and_unknown_ones_once_they_are_added(
    tessera: Tessera, fleet: Fleet, tmp_path: Path
) -> None:
    submit(tessera, "known", "--batch", "128", "--max-gpus", "4")
    submit(tessera, "j", "--model", "sphinx", "--params", "")
    known, unknown = (
        ("cells", "--model", model, "--batch", batch)
        for model, batch in (("bert/1.3B", "128"), ("sphinx", "256"))
    )
    until(lambda: read(tessera, *known).get("cells"), "the published model has Cells")
    until(lambda: read(tessera, "job", "j").get("reason"), "the server has looked for the other")
    tessera("round")
    job, cells = read(tessera, "job", "known"), read(tessera, *known)["cells"]
    assert {(c["source"], c["cell"]["gpus"]) for c in cells} == {("ANALYTIC", n) for n in (2, 4, 8)}
    assert job["allocation"]["cell"] in [c["cell"] for c in cells if c["cell"]["gpus"] == 4]
    reason = read(tessera, "job", "j")["reason"]
    assert reason["code"] == "NO_ESTIMATE"
    assert "the model sphinx is unknown" in reason["message"]
    assert "describe it with `tessera models add`" in reason["next_step"]
    net = tmp_path / "net.yaml"
    net.write_text(ARCHITECTURE)
    tessera("models", "add", "sphinx", "--architecture", str(net))
    until(lambda: read(tessera, *unknown).get("cells"), "the added model has Cells")
    assert "estimated since the last round" in read(tessera, "job", "j")["reason"]["message"]
    tessera("round")
    assert read(tessera, "job", "j")["state"] != "QUEUED"


@pytest.mark.parametrize("address", [{"estimate_cells": False}], indirect=True)
def test_a_server_with_estimation_off_estimates_nothing(tessera: Tessera, fleet: Fleet) -> None:
    submit(tessera, "j", "--batch", "128")
    until(lambda: read(tessera, "job", "j").get("reason"), "the server says so")
    tessera("round")
    message = read(tessera, "job", "j")["reason"]["message"]
    assert "bert/1.3B/128 has no estimates: the server derives none" in message
    cells = ("cells", "--model", "bert/1.3B", "--batch", "128")
    assert read(tessera, *cells).get("cells", []) == []


@pytest.fixture
def agent(tessera: Tessera, address: str, tmp_path: Path) -> Iterator[AgentProcess]:
    flags = ("--clock-factor", "100", "--inspect-s", "0.1", "--heartbeat-s", "0.5")
    nodes = [f"n{i}:a100:4:r0" for i in range(2)]
    process = AgentProcess(tmp_path / "agent", [int(address.split(":")[1])], *flags, nodes=nodes)
    process.start()
    yield process
    process.clean()


@pytest.mark.usefixtures("agent")
def test_a_job_of_a_model_that_nobody_knows_runs_as_requested_and_is_not_measured_by_replay(
    tessera: Tessera,
) -> None:
    sphinx = ("--model", "sphinx", "--params", "9B", "--batch", "8", "--iterations", "1000000000")
    submit(tessera, "s", *sphinx, "--gpu-type", "a100", "--restart", "1s")
    submit(tessera, "any", *sphinx)

    def starts() -> bool:
        tessera("round")
        return bool(read(tessera, "job", "s")["state"] != "QUEUED")

    until(starts, "the server finds that it knows no such model, and a round starts the job")
    until(lambda: read(tessera, "job", "s")["state"] == "RUNNING", "the job runs")
    job = read(tessera, "job", "s")
    cell = job["allocation"]["cell"]
    assert (cell["gpu_type"], cell["gpus"], cell["plan"]) == ("a100", 4, "")
    assert job["allocation"]["rate"] == 0.0
    assert "4 x a100, unknown rate" in tessera("jobs").stdout
    assert read(tessera, "job", "any")["reason"]["code"] == "NO_ESTIMATE"

    until(
        lambda: read(tessera, "job", "s")["allocation"]["iter_time_s"] > 0, "its time is reported"
    )
    assert read(tessera, "job", "s")["allocation"]["iter_time_source"] == "REPLAYED"
    assert "1 s, replayed: nothing is trained" in " ".join(tessera("job", "s").stdout.split())
    model = ("--model", "sphinx/9B", "--batch", "8")
    assert read(tessera, "cells", *model).get("cells", []) == []
    tessera("round")
    again = read(tessera, "job", "s")
    assert (again["generation"], again["allocation"]["rate"]) == (job["generation"], 0.0)
