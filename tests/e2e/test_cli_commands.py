"""Every command against a real server on PostgreSQL, with an agent that speaks the real protocol."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tessera.benchmarks.service.fleet import Fleet
from tessera.formulation.codec import decode
from tessera.formulation.snapshot import Snapshot
from tessera.service.cli.client import connect
from tessera.service.cli.names import short_name
from tessera.v1 import estimates_pb2, jobs_pb2
from tests.support.command_line import CLUSTER, PROFILES, TRACE, Tessera, read, submit
from tests.support.logged import logged_lines


def test_a_cluster_is_described_listed_and_shown(tessera: Tessera) -> None:
    assert read(tessera, "cluster", "get")["gpus"] == "8"
    assert [c["name"] for c in read(tessera, "cluster", "list")["clusters"]] == ["clusters/c"]
    assert "40 GiB" in tessera("cluster", "get", "c").stdout
    nodes = tessera("nodes").stdout.splitlines()
    assert nodes[1].split() == [
        "n0",
        "UNREACHABLE",
        "a100",
        "4",
        "4",
        "not",
        "stated",
        "not",
        "stated",
        "r0",
    ]
    assert tessera("cluster", "get", "absent", code=4).stdout == ""


def test_validating_a_cluster_changes_nothing_even_if_the_cluster_is_new(tessera: Tessera) -> None:
    done = tessera("cluster", "apply", "-f", "-", "-c", "new", "--validate-only", stdin=CLUSTER)
    assert "nothing changed" in done.stderr
    tessera("cluster", "get", "new", code=4)
    more = CLUSTER.replace("count: 2", "count: 3")
    tessera("cluster", "apply", "-f", "-", "--validate-only", stdin=more)
    assert read(tessera, "cluster", "get")["nodes"] == "2"


def test_jobs_are_submitted_scheduled_and_listed(tessera: Tessera, fleet: Fleet) -> None:
    for name in ("one", "two", "three"):
        submit(tessera, name, "--label", f"run={name}", "--max-gpus", "4")
    decided = read(tessera, "round", "--solver", "cp-sat", "--seed", "3")
    assert (decided["outcome"], decided["running"], decided["waiting"]) == ("committed", 2, 1)
    states = [job["state"] for job in read(tessera, "jobs")["jobs"]]
    assert sorted(states) == ["QUEUED", "STARTING", "STARTING"] or "RUNNING" in states
    waits = next(job for job in read(tessera, "jobs")["jobs"] if job["state"] == "QUEUED")
    shown = tessera("job", waits["name"]).stdout
    assert f"{waits['reason']['code']}: {waits['reason']['message']} (round 1)" in shown
    assert waits["reason"]["next_step"] in shown
    assert "why it waits" in shown
    assert waits["reason"]["code"] in tessera("jobs").stdout
    assert "4 x a100, pp 2" in tessera("jobs", "-o", "wide").stdout
    assert "4 x a100, pp 2" in tessera("round", "show", "1").stdout
    names = tessera("jobs", "-o", "name").stdout.split()
    assert names == [f"clusters/c/jobs/{name}" for name in ("one", "two", "three")]


def test_a_job_is_watched_until_it_ends(tessera: Tessera, fleet: Fleet, address: str) -> None:
    submit(tessera, "j")
    tessera("round")
    with connect(address) as client:
        request = jobs_pb2.WatchJobRequest(name="clusters/c/jobs/j")
        for job in client.stream(client.jobs.WatchJob, request):
            if job.state == jobs_pb2.RUNNING:  # its agent has reported it, so it knows the job
                break
    fleet.advance(1e6)
    jobs = [
        json.loads(text) for text in tessera("job", "j", "-w", "-o", "json").stdout.splitlines()
    ]
    assert jobs[-1]["state"] == "SUCCEEDED"
    assert tessera("jobs").stdout == ""
    assert "100.0" in tessera("jobs", "--all").stdout
    assert tessera("jobs", "--state", "succeeded", "-o", "name").stdout == "clusters/c/jobs/j\n"


def test_a_file_of_jobs_is_submitted_completely_or_not_at_all(tessera: Tessera) -> None:
    text = (
        "defaults: {model: bert, params: 1.3B, global_batch: 256, iterations: 10, gpus: 4}\n"
        "jobs: [{name: a}, {name: b, weight: 2, deadline: 1h}]\n"
    )
    done = tessera("submit", "-f", "-", "--validate-only", stdin=text)
    assert "2 jobs valid" in done.stderr
    assert read(tessera, "jobs")["jobs"] == []
    tessera("submit", "-f", "-", stdin=text)
    assert [job["weight"] for job in read(tessera, "jobs")["jobs"]] == [1.0, 2.0]
    again = tessera("submit", "-f", "-", stdin=text.replace("name: a", "name: c"), code=1)
    assert "[ALREADY_EXISTS]" in again.stderr
    assert len(read(tessera, "jobs")["jobs"]) == 2


def test_jobs_are_held_released_changed_and_cancelled(tessera: Tessera) -> None:
    submit(tessera, "a")
    submit(tessera, "b")
    tessera("hold", "a", "--validate-only")
    assert read(tessera, "job", "a")["state"] == "QUEUED"
    tessera("hold", "a", "b")
    assert {job["state"] for job in read(tessera, "jobs")["jobs"]} == {"HELD"}
    tessera("release", "clusters/c/jobs/a")
    supposed = read(tessera, "update", "a", "--weight", "2.5", "--dry-run")
    assert "before" in supposed["now"]
    assert read(tessera, "job", "a")["weight"] == 1.0
    tessera("update", "a", "--weight", "2.5", "--pinned", "--deadline", "2h", "--label", "k=v")
    job = read(tessera, "job", "a")
    assert (job["state"], job["weight"], job["pinned"]) == ("QUEUED", 2.5, True)
    assert job["labels"] == {"k": "v"}
    assert "deadline" in job
    tessera("update", "a", "--deadline", "none", "--movable")
    job = read(tessera, "job", "a")
    assert (job["weight"], job["pinned"], "deadline" in job) == (2.5, False, False)
    tessera("cancel", "a", "b")
    assert {job["state"] for job in read(tessera, "jobs", "--all")["jobs"]} == {"CANCELLED"}
    shown = tessera("job", "a").stdout
    steps = ("hold -> HELD", "release -> QUEUED", "cancel -> CANCELLED")
    assert [shown.index(step) for step in steps] == sorted(shown.index(step) for step in steps)
    refused = tessera("hold", "a", code=1).stderr
    assert "job a was cancelled, so it cannot be held; submit it again under another" in refused
    again = tessera("cancel", "absent", "a", "-o", "name", code=4)
    assert again.stdout == "clusters/c/jobs/a\n"
    assert again.stderr.splitlines() == [
        "error: absent: clusters/c/jobs/absent does not exist [NOT_FOUND]",
        "a is already cancelled",
    ]
    submit(tessera, "b2")
    error = tessera("release", "b2", code=1).stderr
    assert "job b2 is queued, so it cannot be released; it can be cancelled or held" in error


def test_nodes_are_drained_and_brought_back(tessera: Tessera, fleet: Fleet) -> None:
    tessera("drain", "n0")
    assert [node["state"] for node in read(tessera, "nodes")["nodes"]] == ["DRAINING", "READY"]
    tessera("undrain", "clusters/c/nodes/n0")
    assert [node["state"] for node in read(tessera, "nodes")["nodes"]] == ["READY", "READY"]
    tessera("drain", "absent", code=4)


def test_a_dry_run_commits_nothing(tessera: Tessera, fleet: Fleet) -> None:
    submit(tessera, "j")
    assert "dry run" in tessera("round", "--dry-run").stdout
    assert tessera("round", "--dry-run", "-o", "name").stdout == "dry run\n"
    assert tessera("rounds").stdout == ""
    assert read(tessera, "job", "j")["state"] == "QUEUED"


def test_a_round_is_replayed_as_recorded_and_with_another_solver(
    tessera: Tessera, fleet: Fleet, tmp_path: Path
) -> None:
    for name in ("one", "two", "three"):
        submit(tessera, name)
    tessera("round", "--deadline", "30s")
    as_recorded = tessera("replay", "1", "-o", "json")
    assert json.loads(as_recorded.stdout)["same_decisions"]
    assert tessera("replay", "1", "-o", "name").stdout == "clusters/c/rounds/1\n"
    otherwise = tessera("replay", "1", "--solver", "greedy")
    head, solver, *_ = otherwise.stdout.splitlines()
    assert head.split() == ["RECORDED", "REPLAYED"]
    assert solver.split() == ["solver", "portfolio", "greedy"]
    assert [r["name"] for r in read(tessera, "rounds")["rounds"]] == ["clusters/c/rounds/1"]
    file = tmp_path / "round.json"
    tessera("replay", "1", "--save-snapshot", str(file))
    assert isinstance(decode(file.read_bytes()), Snapshot)
    solved = json.loads(tessera("solve", str(file), "--solver", "cp-sat", "-o", "json").stdout)
    recorded = read(tessera, "round", "show", "1")
    assert (solved["objective"], solved["snapshot_digest"]) == (
        recorded["objective"],
        recorded["snapshot_digest"],
    )
    assert "nothing was committed" in tessera("solve", str(file)).stdout
    file.write_text("{}")
    assert "not a saved snapshot" in tessera("solve", str(file), code=2).stderr
    tessera("replay", "7", code=4)
    tessera("round", "--solver", "magic", code=1)


def test_importing_estimates_again_replaces_later_changes(
    tessera: Tessera, address: str, tmp_path: Path
) -> None:
    file = tmp_path / "profiles.csv"
    file.write_text(PROFILES.replace("2.0", "3.0"))
    tessera("import", "profiles", str(file))
    file.write_text(PROFILES)
    assert "3 estimates imported" in tessera("import", "profiles", str(file)).stderr
    request = estimates_pb2.ListCellsRequest(parent="clusters/c")
    with connect(address) as client:
        cells = client.call(client.estimates.ListCells, request).cells
        assert [c.iter_time_s for c in cells if c.cell.gpus == 4] == [2.0]
        assert not any(c.complete for c in cells)
        tessera("import", "profiles", str(file), "--complete")
        cells = client.call(client.estimates.ListCells, request).cells
        assert all(c.complete for c in cells)


def test_profiles_of_types_that_the_cluster_lacks_are_refused_or_skipped(
    tessera: Tessera, tmp_path: Path
) -> None:
    file = tmp_path / "profiles.csv"
    file.write_text(PROFILES + "bert,1.3B,256,h100,1,4,0.5,ok,2\nbert,1.3B,256,v100,1,4,9.0,ok,2\n")
    refused = tessera("import", "profiles", str(file), code=2).stderr
    assert "the cluster lacks h100, v100 (it has a100)" in refused
    assert "--skip-unknown-types" in refused
    done = tessera("import", "profiles", str(file), "--skip-unknown-types").stderr
    assert "2 estimates skipped: the cluster lacks h100, v100" in done
    assert "3 estimates imported" in done
    file.write_text(PROFILES.replace("a100", "h100"))
    only = tessera("import", "profiles", str(file), "--skip-unknown-types", code=2).stderr
    assert "has only estimates of other types" in only


def test_a_trace_import_that_failed_halfway_may_be_repeated(
    tessera: Tessera, tmp_path: Path
) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(TRACE)
    done = tessera("import", "trace", str(file), "--limit", "1", "--tenant", "t")
    assert done.stderr == "1 job imported\n"
    tessera("cancel", "t1")  # whatever its state, it is not submitted again
    done = tessera("import", "trace", str(file), "--tenant", "t")
    assert done.stderr.splitlines() == [
        "1 job already there, left unchanged",
        "2 jobs imported",
    ]
    jobs = read(tessera, "jobs", "--all")["jobs"]
    assert [(short_name(job["name"]), job["iterations"], job["state"]) for job in jobs] == [
        ("t1", "1000", "CANCELLED"),
        ("t2", "1000", "QUEUED"),
        ("t3", "1000", "QUEUED"),
    ]
    deadlines = [job["deadline"] for job in jobs if "deadline" in job]
    assert len(deadlines) == 1
    assert "3 jobs already there" in tessera("import", "trace", str(file), "--tenant", "t").stderr
    assert [j["deadline"] for j in read(tessera, "jobs")["jobs"] if "deadline" in j] == deadlines


def test_a_trace_that_differs_from_an_existing_job_is_refused(
    tessera: Tessera, tmp_path: Path
) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(TRACE)
    tessera("import", "trace", str(file), "--limit", "2")
    file.write_text(TRACE.replace("t2,10,bert,1.3B,256,5000", "t2,10,bert,1.3B,256,500"))
    refused = tessera("import", "trace", str(file), code=1).stderr
    assert "clusters/c/jobs/t2 already exists and differs from the job" in refused
    assert len(read(tessera, "jobs")["jobs"]) == 2


def test_a_mistake_in_a_csv_is_code_2_and_names_line_and_column(
    tessera: Tessera, tmp_path: Path
) -> None:
    file = tmp_path / "bad.csv"
    file.write_text(PROFILES.replace("2.0", "fast"))
    assert (
        "bad.csv line 2, column iter_time_s"
        in tessera("import", "profiles", str(file), code=2).stderr
    )
    tessera("import", "trace", str(tmp_path / "absent.csv"), code=2)


def test_sample_estimates_cover_the_types_that_the_cluster_has(tessera: Tessera) -> None:
    assert "estimates imported" in tessera("import", "samples").stderr
    tessera(
        "cluster", "apply", "-f", "-", "-c", "other", stdin="gpu_types: {exotic: 1GiB}\nnodes: []\n"
    )
    assert "do not exist for exotic" in tessera("import", "samples", "-c", "other", code=2).stderr


FAT = "gpu_types: {a100: 40GiB}\nnodes: [{name: n, gpu_type: a100, gpus: 16}]\n"


def test_a_cell_has_one_estimate_on_the_server_and_on_the_command_line(
    tessera: Tessera, address: str
) -> None:
    tessera("cluster", "apply", "-f", "-", "-c", "fat", stdin=FAT)
    work = estimates_pb2.Workload(model="bert", params="1.3B", global_batch=256)
    request = estimates_pb2.EstimateCellsRequest(
        parent="clusters/fat", workload=work, gpus=[8], gpu_types=["a100"], validate_only=True
    )
    with connect(address) as client:
        answer = client.call(client.estimates.EstimateCells, request)
    server = {c.estimate.cell.pipeline_degree: c.estimate.iter_time_s for c in answer.cells}
    query = ("estimate", "--model", "bert/1.3B", "--batch", "256", "--gpu", "a100", "--count", "8")
    done = tessera(*query, "-c", "fat", "--json")
    local = {c["pipeline_degree"]: c["iter_time_s"] for c in json.loads(done.stdout)["cells"]}
    assert local == pytest.approx({d: s for d, s in server.items() if s}, rel=1e-12)
    assert f"nodes of 16 x a100, as in cluster fat at {address}" in done.stderr
    offline = json.loads(tessera(*query, "--offline", "--json").stdout)["cells"]
    assert {c["nodes"] for c in offline} == {2}
    assert min(c["iter_time_s"] for c in offline) > min(local.values())


def test_commands_say_that_rounds_run_only_on_request(tessera: Tessera) -> None:
    submit(tessera, "j")
    for command in (("jobs",), ("job", "j")):
        done = tessera(*command)
        assert "only on request (`tessera round`)" in done.stdout + done.stderr
    assert "round_period" in read(tessera, "cluster", "get")


def test_looking_at_a_job_makes_no_request_that_the_server_refuses(
    tessera: Tessera, fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    submit(tessera, "j")
    tessera("round")
    caplog.clear()
    with caplog.at_level("INFO"):
        assert "runs on" in tessera("job", "j").stdout
        tessera("jobs")
    assert logged_lines(caplog, "rpc_refused") == []


def test_the_exit_code_of_watching_is_the_outcome_of_the_job(tessera: Tessera) -> None:
    submit(tessera, "j")
    tessera("cancel", "j")
    done = tessera("job", "j", "--watch", code=6)
    assert "requested" in done.stdout
    assert done.stderr == "error: j cancelled\n"


def test_a_job_is_submitted_with_all_that_its_program_needs(
    tessera: Tessera, tmp_path: Path
) -> None:
    variables = tmp_path / "train.env"
    variables.write_text("# shared\nNCCL_DEBUG=INFO\nHF_HOME=/hf\n")
    words = "--runtime torchrun --workdir /srv --secret WANDB_API_KEY=wandb --run-as ana"
    words += " --stall-limit 30m --stop-grace 2m --until-exit --env SEED=7 --env-from-file"
    more = [*words.split(), str(variables), "--command", "train.py --name 'a b'"]
    more += ["--staging", "cp -r /data /scratch", "--progress-pattern", "it (?P<iteration>[0-9]+)"]
    submit(tessera, "own", *more)
    job = read(tessera, "job", "own")
    assert job["command"] == ["train.py", "--name", "a b"]
    assert job["launch"] == {
        "runtime": "torchrun",
        "environment": {"NCCL_DEBUG": "INFO", "HF_HOME": "/hf", "SEED": "7"},
        "working_directory": "/srv",
        "image": "",
        "secrets": [{"variable": "WANDB_API_KEY", "name": "wandb"}],
        "staging_command": ["cp", "-r", "/data", "/scratch"],
        "user": "ana",
        "progress_pattern": "it (?P<iteration>[0-9]+)",
        "stall_limit": "1800s",
        "stop_grace": "120s",
        "tuning_space": "",
        "until_exit": True,
    }
    shown = tessera("job", "own").stdout
    assert "WANDB_API_KEY from wandb" in shown
    assert "torchrun" in shown
    submit(tessera, "plain")
    plain = read(tessera, "job", "plain")["launch"]
    assert {name: value for name, value in plain.items() if value} == {"runtime": "replay"}


def test_a_program_that_no_runtime_can_run_is_refused_by_its_field(
    tessera: Tessera, tmp_path: Path
) -> None:
    file = tmp_path / "job.yaml"
    job = "model: bert\nparams: 1.3B\nglobal_batch: 256\niterations: 10\ngpus: 4\n"
    file.write_text(f"{job}environment: {{WANDB_API_KEY: xyzzy}}\n")
    refused = tessera("submit", "-f", str(file), code=2).stderr
    assert "environment[WANDB_API_KEY]: looks like a secret" in refused
    assert "xyzzy" not in refused
    file.write_text(f"{job}runtime: slurm\n")
    refused = tessera("submit", "-f", str(file), code=1).stderr
    assert "error: job.launch.runtime: 'slurm' is not a runtime of users' jobs" in refused
    file.write_text(job)
    both = tessera("submit", "-f", str(file), "--command", "train", code=2).stderr
    assert "takes one job from options or the jobs of --file, not both" in both
