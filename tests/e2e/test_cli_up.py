"""``tessera up`` as a process: a job goes from submission to success, and Ctrl-C leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from service.cli.client import connect
from tessera.v1 import jobs_pb2

TESSERA = [sys.executable, "-m", "service.cli.main"]
START_S = 40.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def run(address: str, *arguments: str) -> str:
    """Run a command against the server and return its stdout."""
    done = subprocess.run(
        [*TESSERA, *arguments], env={**os.environ, "TESSERA_SERVER": address}, timeout=60,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def read(address: str, *arguments: str) -> Any:
    return json.loads(run(address, *arguments, "-o", "json"))


@contextmanager
def up(home: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Yield the address of a running `tessera up`, and its process."""
    with (home / "messages").open("w") as messages:
        process = subprocess.Popen(
            [*TESSERA, "up", "--data-dir", str(home), "--listen", "127.0.0.1:0", "--period", "0",
             *options],
            stdout=subprocess.PIPE, stderr=messages, text=True,
        )  # fmt: skip
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        assert re.fullmatch(r"127\.0\.0\.1:\d+", address), (home / "messages").read_text()
        yield address, process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(START_S)
        process.stdout.close()


@pytest.fixture
def home() -> Iterator[Path]:
    """Return a folder for `up`; PostgreSQL may still write while it goes."""
    with tempfile.TemporaryDirectory(prefix="tessera-up-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def test_one_command_runs_a_job_from_submission_to_success(home: Path) -> None:
    with up(home, "--agents", "2", "--clock-factor", "2000") as (address, _):
        run(address, "submit", "j", "--model", "bert", "--params", "1.3B", "--batch", "256",
            "--iterations", "1500", "--gpus", "8", "--restart", "0")  # fmt: skip
        decided = read(address, "round", "--seed", "1")
        assert (decided["running"], decided["verified"]) == (1, True)
        seen = [
            json.loads(text)
            for text in run(address, "job", "j", "--watch", "-o", "json").splitlines()
        ]
        states = [job["state"] for job in seen]
        assert "RUNNING" in states
        assert states[-1] == "SUCCEEDED"
        assert seen[-1]["iterations_done"] == 1500.0
        assert "SUCCEEDED" in run(address, "jobs", "--all")
        assert [node["free_gpus"] for node in read(address, "nodes")["nodes"]] == [4, 4, 4, 4, 16]
        assert read(address, "replay", "1")["same_decisions"]


def test_an_interrupt_ends_every_process_and_the_gangs_that_run(home: Path) -> None:
    with up(home, "--agents", "2") as (address, process):
        run(address, "submit", "long", "--model", "bert", "--params", "1.3B", "--batch", "256",
            "--iterations", "1000000", "--gpus", "4", "--restart", "0")  # fmt: skip
        run(address, "round")
        with connect(address) as client:
            request = jobs_pb2.WatchJobRequest(name="clusters/default/jobs/long")
            for job in client.stream(client.jobs.WatchJob, request):
                if job.state == jobs_pb2.RUNNING:
                    break
        postgres = psutil.Process(int((home / "pg" / "postmaster.pid").read_text().split()[0]))
        children = [postgres, *psutil.Process(process.pid).children(recursive=True)]
        process.send_signal(signal.SIGINT)
        assert process.wait(START_S) == 0
    assert len(children) >= 5  # PostgreSQL, a server, two agents, at least one member of the gang
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []


def test_jobs_outlive_up_and_a_cluster_file_names_the_nodes(home: Path) -> None:
    file = home / "cluster.yaml"
    file.write_text(
        "name: lab\ngpu_types: {a40: 48GiB}\nnodes: [{name: 'n{}', count: 3, gpu_type: a40, gpus: 2}]\n"
    )
    options = ("-f", str(file), "--samples", "--agents", "8")
    with up(home, *options) as (address, _):
        run(address, "submit", "kept", "-c", "lab", "--model", "bert", "--params", "760M",
            "--batch", "128", "--iterations", "1000000", "--gpus", "2")  # fmt: skip
        nodes = read(address, "nodes", "-c", "lab")["nodes"]
        assert [(n["name"], n["state"]) for n in nodes] == [
            (f"clusters/lab/nodes/n{i}", "READY") for i in range(3)
        ]
    with up(home, *options) as (address, _):
        (job,) = read(address, "jobs", "-c", "lab")["jobs"]
        assert (job["name"], job["state"]) == ("clusters/lab/jobs/kept", "QUEUED")
