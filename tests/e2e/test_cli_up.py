"""``tessera up`` as a process: jobs run to success, parts that die start again, and nothing is open."""

from __future__ import annotations

import json
import os
import pwd
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from tessera.db.schema.engine import Database
from tessera.service.cli.client import connect
from tessera.service.cli.main import app
from tessera.v1 import jobs_pb2
from tests.support.data_directories import MakeDataDirectory
from tests.support.patience import PATIENCE_S
from tests.support.up_process import (
    TESSERA,
    make_home,
    read_json,
    run_client,
    run_up,
    wait_for_cells,
)
from tests.support.waiting import until

PASSWORD = "hunter2" + "-of-the-database"
LIST = """
import os, sys
nobody = int(sys.argv[1])
os.setgroups([]); os.setgid(nobody); os.setuid(nobody)
print(os.listdir(sys.argv[2]))
"""


def expect_refusal(home: Path, *options: str, code: int) -> str:
    """Run an `up` in this process that must end at once, and return its one line of error."""
    done = CliRunner().invoke(app, ["up", *options], env={"TESSERA_HOME": str(home / "home")})
    assert (done.exit_code, done.stdout) == (code, ""), done.stderr
    return one_error(done.stderr)


def one_error(messages: str) -> str:
    """Return the messages, which must be one line of error."""
    assert messages.count("\n") == 1
    assert messages.startswith("error: ")
    return messages


def write_cluster_file(
    home: Path, name: str, nodes: int, gpu_type: str = "a40", cluster: str = ""
) -> str:
    """Write a cluster file, without a name unless one is given, and return its path."""
    path, head = home / name, f"name: {cluster}\n" if cluster else ""
    path.write_text(
        f"{head}gpu_types: {{{gpu_type}: 48GiB}}\n"
        f"nodes: [{{name: 'n{{}}', count: {nodes}, gpu_type: {gpu_type}, gpus: 2}}]\n"
    )
    return str(path)


def nodes_of(address: str, cluster: str = "default") -> dict[str, str]:
    """Return the states of a cluster's nodes."""
    nodes = read_json(address, f"nodes -c {cluster}")["nodes"]
    return {node["name"].rpartition("/")[2]: node["state"] for node in nodes}


@pytest.fixture
def home() -> Iterator[Path]:
    with make_home() as folder:
        yield folder


def test_one_command_runs_a_job_to_success_and_an_interrupt_leaves_nothing(home: Path) -> None:
    bert = "--model bert --params 1.3B --batch 256 --restart 0"
    options = ("--agents", "2", "--clock-factor", "2000")
    with run_up(home, *options, directory=()) as (address, process):
        run_client(address, f"submit j {bert} --iterations 9000 --gpus 8")
        wait_for_cells(address, "bert/1.3B", 256)
        decided = read_json(address, "round --seed 1")
        assert (decided["running"], decided["verified"]) == (1, True)
        watched = run_client(address, "job j --watch -o json").splitlines()
        jobs = [json.loads(text) for text in watched]
        states = [job["state"] for job in jobs]
        assert "RUNNING" in states
        assert states[-1] == "SUCCEEDED"
        assert jobs[-1]["iterations_done"] == 9000.0
        assert "SUCCEEDED" in run_client(address, "jobs --all")
        until(  # the agents report that the job's processes are gone
            lambda: (
                [n["free_gpus"] for n in read_json(address, "nodes")["nodes"]] == [4, 4, 4, 4, 16]
            ),
            "all GPUs are free again",
        )
        assert read_json(address, "replay 1")["same_decisions"]

        run_client(address, f"submit long {bert} --iterations 1000000000 --gpus 4")
        run_client(address, "round")
        with connect(address) as client:
            request = jobs_pb2.WatchJobRequest(name="clusters/default/jobs/long")
            for job in client.stream(client.stubs.jobs.WatchJob, request):
                if job.state == jobs_pb2.RUNNING:
                    break
        place = home / "home" / "pg"  # without a file and a directory, it is TESSERA_HOME's
        assert data_directories(home) == {Path()}
        postgres = psutil.Process(int((place / "postmaster.pid").read_text().split()[0]))
        children = [postgres, *psutil.Process(process.pid).children(recursive=True)]
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
    assert len(children) >= 5  # PostgreSQL, a server, two agents, at least one member of the gang
    _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
    assert alive == []


def test_a_second_up_leaves_a_running_one_alone_that_has_the_directory_of_its_file(
    home: Path, database: Database
) -> None:
    lab, other = (write_cluster_file(home, f"{name}.yaml", 2, cluster="lab") for name in "ab")
    outside = ("--database-url", database.url)
    with run_up(home, "--file", lab, *outside, directory=()) as (address, first):
        (folder,) = data_directories(home)
        assert str(folder).startswith("clusters/a-")
        same = expect_refusal(home, "-f", lab, *outside, code=1)
        assert f"is used by another `tessera up` (process {first.pid})" in same
        assert f"whose server is {address}" in same
        elsewhere = ("--data-dir", str(home / "second"))
        port = expect_refusal(home, *elsewhere, "-f", other, "--listen", address, code=1)
        assert f"another Tessera server listens on {address}" in port
        assert "--listen 127.0.0.1:0" in port
        assert not (home / "second" / "pg").exists()
        third = ("--data-dir", str(home / "third"), "-f", other, "--listen", "127.0.0.1:0")
        shared = CliRunner().invoke(app, ["up", *third, *outside])
        assert shared.exit_code == 1
        assert "another `tessera up` runs clusters/lab on this database" in shared.stderr
        assert nodes_of(address, "lab") == {"n0": "READY", "n1": "READY"}
        assert first.poll() is None


def test_a_port_used_by_another_program_is_recognised(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as program:
        address = f"127.0.0.1:{program.getsockname()[1]}"
        refused = expect_refusal(home, "--data-dir", str(home / "d"), "--listen", address, code=1)
    assert f"another program, which is not a Tessera server, listens on {address}" in refused
    assert not (home / "d" / "pg").exists()


def test_up_continues_with_the_cluster_of_its_data_directory_even_after_a_kill(
    home: Path, make_data_directory: MakeDataDirectory
) -> None:
    make_data_directory(home / "pg")
    lab, other = (
        write_cluster_file(home, "lab.yaml", 3),
        write_cluster_file(home, "other.yaml", 2, gpu_type="a10"),
    )
    with run_up(home, "-f", lab, "--clock-factor", "60", "--agents", "8") as (
        address,
        process,
    ):
        run_client(
            address,
            "submit kept --model bert --params 760M --batch 128 --iterations 1000000 --gpus 2",
        )
        assert nodes_of(address) == {"n0": "READY", "n1": "READY", "n2": "READY"}
        kill_and_clear(home, process, agents=3)
    with run_up(home) as (address, _):
        assert nodes_of(address) == {"n0": "READY", "n1": "READY", "n2": "READY"}
        (job,) = read_json(address, "jobs")["jobs"]
        assert (job["name"], job["state"]) == ("clusters/default/jobs/kept", "QUEUED")
    messages = (home / "messages").read_text()
    assert f"continuing with cluster default of {lab}" in messages
    assert "clock factor is" not in messages
    assert json.loads((home / "up.json").read_text())["clock_factor"] == 60
    wrong = expect_refusal(home, "--data-dir", str(home), "-f", other, code=2)
    assert f"{other} has no GPU type a40 with the same memory, but {home} was made with" in wrong
    assert "omit --file" in wrong
    assert "--data-dir" in wrong
    assert "--reset" in wrong
    write_cluster_file(home, "lab.yaml", 4)
    with run_up(home, "-f", lab) as (address, _):
        assert len(nodes_of(address)) == 4
        (job,) = read_json(address, "jobs")["jobs"]
        assert job["name"] == "clusters/default/jobs/kept"


def kill_and_clear(home: Path, process: subprocess.Popen[str], agents: int) -> None:
    """Kill an `up`, check that what it left is named and not taken over, and end that."""
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    commands = {child: " ".join(child.cmdline()) for child in children}
    left = [
        c for c, command in commands.items() if "service" in command and "warden.py" not in command
    ]
    assert len(left) == 1 + agents  # the server and the agents; wardens end by themselves
    error = expect_refusal(home, "--data-dir", str(home), code=1)
    assert "still used by processes of a `tessera up` that was killed" in error
    for child in left:
        assert str(child.pid) in error
        child.terminate()
    _, alive = psutil.wait_procs(left, timeout=PATIENCE_S)
    assert alive == []


def data_directories(home: Path) -> set[Path]:
    """Return the data directories that were made in TESSERA_HOME."""
    return {p.parent.relative_to(home / "home") for p in (home / "home").rglob("up.json")}


def test_reset_deletes_only_what_up_made_and_starts_from_scratch(
    home: Path, make_data_directory: MakeDataDirectory
) -> None:
    lab, place = write_cluster_file(home, "lab.yaml", 2), home / "d"
    make_data_directory(place / "pg")
    foreign = home / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("all of it")
    where = ("--data-dir", str(place))
    assert "was not made by `tessera up`" in expect_refusal(
        home, "--data-dir", str(foreign), "--reset", "--yes", code=2
    )
    with run_up(home, "-f", lab, directory=where) as (address, _):
        run_client(
            address,
            "submit gone --model bert --params 760M --batch 128 --iterations 1000000 --gpus 2",
        )
        assert "is used by another" in expect_refusal(home, *where, "--reset", "--yes", code=1)
    (place / "mine.txt").write_text("kept")
    assert "add --yes" in expect_refusal(home, *where, "--reset", code=2)
    other = write_cluster_file(home, "other.yaml", 3, gpu_type="a10")
    with run_up(home, "-f", other, "--reset", "--yes", directory=where) as (address, _):
        assert read_json(address, "jobs --all")["jobs"] == []
        assert len(nodes_of(address)) == 3
    assert (place / "mine.txt").read_text() == "kept"
    assert (foreign / "thesis.tex").read_text() == "all of it"


def part_of(home: Path, name: str) -> psutil.Process:
    """Return the process of a part of the `up` whose data directory is ``home``."""
    if name == "the database":
        return psutil.Process(int((home / "pg" / "postmaster.pid").read_text().split()[0]))
    running = json.loads((home / "up.json").read_text())["running"]
    (pid,) = [process["pid"] for process in running if process["name"] == name]
    return psutil.Process(pid)


def tells(home: Path, text: str) -> bool:
    """Return whether the `up` whose data directory is ``home`` has printed a text."""
    return text in (home / "messages").read_text()


def answer_of(address: str, command: str) -> Any:
    """Return the answer of a command once it succeeds."""
    arguments = [*command.split(), "-o", "json"]
    done = until(
        lambda: (
            answer
            if (
                answer := CliRunner().invoke(app, arguments, env={"TESSERA_SERVER": address})
            ).exit_code
            == 0
            else None
        ),
        f"`{command}` succeeds",
    )
    return json.loads(done.stdout)


def wait_for_progress(address: str, job: str, done: float) -> Any:
    """Return a job once it has trained more than ``done`` iterations."""

    def progress() -> Any:
        shown = answer_of(address, f"job {job}")
        return shown if shown.get("iterations_done", 0.0) > done else None

    return until(progress, f"{job} trains on from {done} iterations")


def test_parts_that_are_killed_are_started_again_until_one_cannot_be(home: Path) -> None:
    bert, submitted = "--model bert --params 1.3B --batch 256 --gpus 4 --max-gpus 4", {"long"}
    options = ("--clock-factor", "2000", "--period", "1s")
    with run_up(home, *options) as (address, process):
        run_client(address, f"submit long {bert} --iterations 1000000000")
        before = wait_for_progress(address, "long", 0.0)
        until(partial(tells, home, "Tessera is up"), "it is up")
        for name in ("the database", "server", "agent-0"):
            part_of(home, name).kill()
            ended = f"\n{name} "
            until(partial(tells, home, ended), f"the end of {name} is reported")
            job = name.split()[-1]
            answer_of(address, f"submit {job} {bert} --iterations 1000000000")
            submitted.add(job)
            now = wait_for_progress(address, "long", before["iterations_done"])
            assert now["generation"] == before["generation"], name
            before = now
        listed = read_json(address, "jobs --all")["jobs"]
        assert {job["name"].rpartition("/")[2] for job in listed} == submitted
        assert process.poll() is None
        told = (home / "messages").read_text()
        for end in ("the database has ended", "server was killed by", "agent-0 was killed by"):
            assert told.count(end) == 1, told
        started = psutil.Process(process.pid).children(recursive=True)
        postmaster = part_of(home, "the database")
        (home / "pg" / "global" / "pg_control").rename(home / "pg_control")
        postmaster.kill()
        assert process.wait(PATIENCE_S) == 3  # it cannot start again
    error = " ".join((home / "messages").read_text().partition("\nerror: ")[2].split())
    assert "the database was started again 5 times within 10 minutes, but does not start" in error
    assert f"run `tessera up --data-dir {home}`" in error
    assert f"{home}/pg/log ends with:" in error
    assert "TESSERA_DATABASE_URL" not in error
    assert "pg_control" in error
    _, alive = psutil.wait_procs(started, timeout=PATIENCE_S)  # a warden ends once nothing runs
    assert alive == []


@pytest.fixture
def url(database: Database) -> str:
    """Return the test database's URL with a password, which its server does not ask for."""
    with_password = sa.make_url(database.url).set(drivername="postgresql", password=PASSWORD)
    return with_password.render_as_string(hide_password=False)


def test_nothing_of_a_running_system_is_open_to_other_users_or_shows_the_password(
    home: Path, url: str
) -> None:
    place = home / "above" / "data"
    where = ("--data-dir", str(place))
    options = ("--clock-factor", "1")
    with run_up(home, *options, directory=where, umask=0, TESSERA_DATABASE_URL=url) as (
        address,
        process,
    ):
        run_client(
            address, "submit a --model bert --params 1.3B --batch 256 --iterations 100000 --gpus 4"
        )
        wait_for_cells(address, "bert/1.3B", 256)
        run_client(address, "round")
        until(lambda: any(place.rglob("progress.json")), "the job runs")
        parent = psutil.Process(process.pid)
        family = [parent, *parent.children(recursive=True)]
        gangs = [p for p in family if "replay_job" in " ".join(p.cmdline())]
        agents = [p for p in family if "tessera.service.agent.main" in p.cmdline()]
        assert gangs
        assert agents
        assert [p.cmdline() for p in family if PASSWORD in " ".join(p.cmdline())] == []
        for part in (*gangs, *agents):
            assert PASSWORD not in str(part.environ())
            assert "TESSERA_DATABASE_URL" not in part.environ()
    made = [place.parent, *place.parent.rglob("*")]
    assert {"up.json", "server.log", "agent-0.log", "checkpoint.json"} <= {p.name for p in made}
    assert [p for p in made if p.lstat().st_mode & 0o077] == []
    texts = [p.read_text(errors="replace") for p in made if p.is_file()]
    assert not any(PASSWORD in text for text in (*texts, (home / "messages").read_text()))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_another_user_does_not_see_a_data_directory(home: Path) -> None:
    place = home / "data"
    nowhere = ("--database-url", f"postgresql://me:{PASSWORD}@127.0.0.1:1/none")
    done = subprocess.run(
        [*TESSERA, "up", "--data-dir", str(place), *nowhere],
        capture_output=True,
        text=True,
        check=False,
        umask=0,
    )
    assert done.returncode != 0
    assert PASSWORD not in done.stdout + done.stderr
    looked = subprocess.run(
        [sys.executable, "-I", "-c", LIST, str(pwd.getpwnam("nobody").pw_uid), str(place)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "PermissionError" in looked.stderr


@pytest.mark.parametrize("kind", ["open", "theirs", "link"])
def test_a_data_directory_in_which_others_could_write_is_refused(home: Path, kind: str) -> None:
    place = home / "data"
    place.mkdir(mode=0o700)
    match kind:
        case "open":
            place.chmod(0o777)
            message = "every user may write to"
        case "theirs":
            if os.geteuid() != 0:
                pytest.skip("needs root to give a directory away")
            os.chown(place, pwd.getpwnam("nobody").pw_uid, -1)
            message = "belongs to another user"
        case _:
            (place / ".up.lock").symlink_to(home / "target")
            message = "cannot be written"
    refused = expect_refusal(home, "--data-dir", str(place), "--listen", "127.0.0.1:0", code=2)
    assert message in refused
    assert not (home / "target").exists()
