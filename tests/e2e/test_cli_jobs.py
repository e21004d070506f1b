"""Jobs on the command line, from submission to their end, against a real server on PostgreSQL."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tessera.benchmarks.service.fleet import Fleet
from tessera.service.cli.client import connect
from tessera.service.cli.jobs import jobchanges
from tessera.v1 import jobs_pb2
from tests.support.command_line import Tessera, read, submit
from tests.support.logged import logged_lines
from tests.support.waiting import until

JOB = "model: bert\nparams: 1.3B\nbatch: 256\niterations: 1000\ngpus: 4\n"
SCRIPT = """
torchrun --nproc_per_node 4 pretrain_gpt.py \\
    --tensor-model-parallel-size 4 --use-distributed-optimizer \\
    --micro-batch-size 8 --global-batch-size 256 --fp16
"""
PLAN = "tp4, ZeRO-1, f16, micro-batch 8 x 32"
"""The plan of the script, as it is shown."""


@pytest.mark.story
def test_jobs_are_submitted_scheduled_and_listed(tessera: Tessera, fleet: Fleet) -> None:
    for name in ("one", "two", "three"):
        submit(tessera, name, "--label", f"run={name}", "--max-gpus", "4")
    for command in (("jobs",), ("job", "one")):
        done = tessera(*command)
        assert "only on request (`tessera round`)" in done.stdout + done.stderr
    assert "dry run" in tessera("round", "--dry-run").stdout
    assert tessera("round", "--dry-run", "-o", "name").stdout == "dry run\n"
    assert tessera("rounds").stdout == ""
    assert {job["state"] for job in read(tessera, "jobs")["jobs"]} == {"QUEUED"}
    decided = read(tessera, "round", "--solver", "cp-sat", "--seed", "3")
    assert (decided["outcome"], decided["running"], decided["waiting"]) == ("committed", 2, 1)
    (waits,) = (job for job in read(tessera, "jobs")["jobs"] if job["state"] == "QUEUED")
    reason = waits["reason"]
    shown = tessera("job", waits["name"]).stdout
    assert f"{reason['code']}: {reason['message']} (round 1)" in shown
    assert reason["next_step"] in shown
    assert "why it waits" in shown
    assert reason["code"] in tessera("jobs").stdout
    assert "4 x a100, pp 2" in tessera("jobs", "-o", "wide").stdout
    assert "4 x a100, pp 2" in tessera("round", "show", "1").stdout
    names = tessera("jobs", "-o", "name").stdout.split()
    assert names == [f"clusters/c/jobs/{name}" for name in ("one", "two", "three")]


def test_a_job_is_watched_until_it_ends(
    tessera: Tessera, fleet: Fleet, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    submit(tessera, "j")
    tessera("round")
    with connect(address) as client:
        request = jobs_pb2.WatchJobRequest(name="clusters/c/jobs/j")
        for job in client.stream(client.stubs.jobs.WatchJob, request):
            if job.state == jobs_pb2.RUNNING:  # its agent has reported it, so it knows the job
                break
    caplog.clear()
    with caplog.at_level("INFO"):
        assert "runs on" in tessera("job", "j").stdout
        tessera("jobs")
    assert logged_lines(caplog, "rpc_refused") == []  # looking at a job asks for nothing more
    fleet.advance(1e6)
    watched = tessera("job", "j", "-w", "-o", "json").stdout.splitlines()
    assert json.loads(watched[-1])["state"] == "SUCCEEDED"
    assert tessera("jobs").stdout == ""
    assert "100.0" in tessera("jobs", "--all").stdout
    assert tessera("jobs", "--state", "succeeded", "-o", "name").stdout == "clusters/c/jobs/j\n"


def test_a_file_of_jobs_is_submitted_completely_or_not_at_all(tessera: Tessera) -> None:
    text = (
        "defaults: {model: bert, params: 1.3B, batch: 256, iterations: 10, gpus: 4}\n"
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


def test_jobs_are_held_released_changed_and_cancelled(
    tessera: Tessera, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(tessera, "a")
    submit(tessera, "b")
    tessera("hold", "a", "--validate-only")
    assert read(tessera, "job", "a")["state"] == "QUEUED"
    tessera("hold", "a", "b")
    assert {job["state"] for job in read(tessera, "jobs")["jobs"]} == {"HELD"}
    tessera("release", "clusters/c/jobs/a")
    monkeypatch.setattr(jobchanges, "DRY_RUN_HOURS", 0.01)
    supposed = read(tessera, "update", "a", "--weight", "2.5", "--dry-run")
    assert "before" in supposed["now"]
    assert read(tessera, "job", "a")["weight"] == 1.0
    tessera("update", "a", "--weight", "2.5", "--pinned", "--deadline", "2h", "--label", "k=v")
    job = read(tessera, "job", "a")
    assert (job["state"], job["weight"], job["pinned"]) == ("QUEUED", 2.5, True)
    assert job["labels"] == {"k": "v"}
    assert "deadline" in job
    tessera("update", "a", "--deadline", "none", "--no-pinned", "--preemptible")
    job = read(tessera, "job", "a")
    assert (job["weight"], job["pinned"], "deadline" in job) == (2.5, False, False)
    assert job["preemptible"]
    tessera("update", "a", "--no-preemptible")
    assert not read(tessera, "job", "a")["preemptible"]
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
    watched = tessera("job", "a", "--watch", code=6)  # the exit code is the outcome
    assert watched.stderr == "error: a cancelled\n"
    submit(tessera, "b2")
    error = tessera("release", "b2", code=1).stderr
    assert "job b2 is queued, so it cannot be released; it can be cancelled or held" in error


def test_a_job_is_pinned_and_avoids_nodes(tessera: Tessera, fleet: Fleet) -> None:
    submit(tessera, "j", "--gpu-type", "a100", "--pinned-gpu-type", "--avoid-node", "n0")
    tessera("round")
    shares = read(tessera, "job", "j")["allocation"]["shares"]
    assert [share["node"] for share in shares] == ["clusters/c/nodes/n1"]
    tessera("update", "j", "--no-pinned-gpu-type", "--avoid-node", "none")
    job = read(tessera, "job", "j")
    assert (job["pinned_gpu_type"], job["avoid_nodes"]) == (False, [])
    assert "n9" in tessera("update", "j", "--avoid-node", "n9", code=1).stderr


def test_a_job_is_submitted_with_all_that_its_program_needs(
    tessera: Tessera, tmp_path: Path
) -> None:
    variables, file = tmp_path / "train.env", tmp_path / "job.yaml"
    variables.write_text("# shared\nNCCL_DEBUG=INFO\n")
    words = "--runtime torchrun --workdir /srv --secret WANDB_API_KEY=wandb --user ana"
    words += " --stall-limit 30m --stop-grace 2m --until-exit --env SEED=7 --env-from-file"
    more = [*words.split(), str(variables), "--command", "train.py --name 'a b'"]
    submit(tessera, "own", *more, "--staging-command", "cp -r /data /scratch")
    job = read(tessera, "job", "own")
    assert job["command"] == ["train.py", "--name", "a b"]
    assert {name: value for name, value in job["launch"].items() if value} == {
        "runtime": "torchrun",
        "env": {"NCCL_DEBUG": "INFO", "SEED": "7"},
        "workdir": "/srv",
        "secrets": [{"variable": "WANDB_API_KEY", "name": "wandb"}],
        "staging_command": ["cp", "-r", "/data", "/scratch"],
        "user": "ana",
        "stall_limit": "1800s",
        "stop_grace": "120s",
        "until_exit": True,
    }
    assert "WANDB_API_KEY from wandb" in tessera("job", "own").stdout
    file.write_text(f"{JOB}env: {{WANDB_API_KEY: xyzzy}}\n")
    refused = tessera("submit", "-f", str(file), code=2).stderr
    assert "env[WANDB_API_KEY]: looks like a secret" in refused
    assert "xyzzy" not in refused
    file.write_text(f"{JOB}runtime: slurm\n")
    refused = tessera("submit", "-f", str(file), code=1).stderr
    assert "error: job.launch.runtime: 'slurm' is not a runtime of users' jobs" in refused


def test_a_job_runs_by_the_plan_of_a_command_and_everyone_can_read_it(
    tessera: Tessera, fleet: Fleet, tmp_path: Path
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT)
    submit(tessera, "own", "--plan", str(script))
    assert PLAN in tessera("job", "own").stdout

    def round_that_starts_it() -> str:
        decided = read(tessera, "round")
        return str(decided["name"]) if decided.get("started") else ""

    started = until(round_that_starts_it, "the plan is priced and the job runs")
    assert tessera("job", "own").stdout.count(PLAN) == 2  # as stated, and as it runs
    assert PLAN in tessera("round", "show", started, "-o", "wide").stdout
    assert PLAN not in tessera("round", "show", started).stdout
    techniques = ("--techniques", "tp, zero1,accumulation", "--cpus", "96")
    submit(tessera, "first", "--submitted-plan", str(script), *techniques)
    job = read(tessera, "job", "first")
    assert (job["techniques"], job["requested_cpus"]) == (["tp", "zero1", "accumulation"], 96)
    assert job["plan"] == ""
    assert PLAN in tessera("job", "first").stdout
    submit(tessera, "again", "--submitted-plan", job["submitted_plan"])  # as JSON
    assert read(tessera, "job", "again")["submitted_plan"] == job["submitted_plan"]
    script.write_text(SCRIPT.replace("tensor-model", "tensor-modle"))
    wrong = ("submit", "j", "--model", "bert", "--batch", "256", "--iterations", "9", "--gpus", "4")
    refused = tessera(*wrong, "--plan", str(script), code=1).stderr
    assert refused.startswith("error: job.plan: ")
    assert "--tensor-modle-parallel" in refused


def test_a_user_sees_a_jobs_curves_as_tables_and_json(tessera: Tessera, fleet: Fleet) -> None:
    submit(tessera, "own", "--guaranteed", "--gpu-type", "a100")
    tessera("round")
    tables = tessera("curve", "own")
    document = json.loads(tessera("curve", "own", "--json").stdout)
    rows = [line.split() for line in tables.stdout.splitlines()]
    assert ["4", "128", "128", "32"] in [row[:4] for row in rows]  # 128 more for 4 more GPUs
    assert ["8", "256", "256", "0"] in [row[:4] for row in rows]
    assert any(row[:1] == ["4"] and {"request,", "minimum"} <= set(row) for row in rows)
    assert any(row[:1] == ["8"] and "now" in row for row in rows)  # it got the whole cluster
    assert document["current"]["cell"]["gpus"] == 8
    assert document["guaranteed_rate"] == 128.0
    (own,) = document["types"]
    assert [point["amount"] for point in own["gpus"]] == ["4", "8"]
    assert own["minimum_demand"]["cell"]["gpus"] == 4
    assert "it has those of 4, 8" in tessera("curve", "own", "--gpus", "3", code=1).stderr
    assert "clusters/c/jobs/none" in tessera("curve", "none", code=4).stderr
