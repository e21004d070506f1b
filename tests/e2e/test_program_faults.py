"""Programs that fail, lie, hang or flood: the reason is shown, GPUs are freed, and others go on.

GPUs that vanish are in ``test_nodes.py``, ranks that die alone in ``test_reconfiguration_crashes.py``.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tessera.formulation.job.launch import SecretVariable
from tessera.service.cli.main import app
from tessera.v1 import clusters_pb2, jobs_pb2, launch_pb2
from tests.support.programs import UNTIL_EXIT, train
from tests.support.small_disk import fill_disk
from tests.support.system import until
from tests.support.training_lab import TrainingLab, run_training_lab

ITERATIONS = 10**9
"""Iterations that no test waits for."""


NEIGHBOUR = "neighbour"


GPUS = 3


WAIT = "import time; time.sleep(0.02)"
"""What a program does that takes its time in each iteration."""


def python(program: str) -> tuple[str, ...]:
    return (sys.executable, "-c", program)


@pytest.fixture(scope="module")
def site() -> Iterator[TrainingLab]:
    """Yield a cluster with one agent, on which a job trains that nothing may disturb."""
    with run_training_lab("faults") as lab:
        lab.program_agent("n0", GPUS, "--log-mib=1")
        lab.train(NEIGHBOUR, python(train(WAIT)), iterations=ITERATIONS)
        lab.wait_for_state(NEIGHBOUR, jobs_pb2.RUNNING)
        yield lab


@pytest.fixture
def lab(site: TrainingLab) -> Iterator[TrainingLab]:
    """Yield the cluster, and check afterwards that the neighbour trains on and all else is over."""
    yield site
    for job in site.jobs(jobs_pb2.QUEUED, jobs_pb2.HELD):
        site.cancel(job.name)
    before = site.job(NEIGHBOUR)
    assert (before.state, before.generation, before.retries) == (jobs_pb2.RUNNING, 1, 0)
    until(lambda: site.job(NEIGHBOUR).iterations_done > before.iterations_done, "it trains on")
    until(lambda: site.nodes()["n0"].free_gpus == GPUS - 1, "the other GPUs are free")
    assert site.nodes()["n0"].state == clusters_pb2.Node.READY
    assert site.broken_rules() == []


def shown(lab: TrainingLab, name: str) -> str:
    """Return what `tessera job` shows, with single spaces."""
    variables = {
        "TESSERA_SERVER": lab.stack.addresses[0],
        "TESSERA_CLUSTER": lab.cluster,
        "COLUMNS": "2000",
    }
    done = CliRunner().invoke(app, ["job", name], env=variables)
    assert done.exit_code == 0, (done.stdout, done.stderr, done.exception)
    return " ".join(done.stdout.split())


def wait_for_progress(lab: TrainingLab, name: str, least: float) -> jobs_pb2.Job:
    def reached() -> jobs_pb2.Job | None:
        job = lab.job(name)
        return job if job.iterations_done >= least else None

    return until(reached, f"{name} has done {least} iterations")


def wait_for_remark(lab: TrainingLab, name: str, remark: str) -> None:
    until(lambda: remark in lab.job(name).training.remark, f"{name} has the remark {remark!r}")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "secret": (
        {"secrets": (SecretVariable(variable="KEY", name="wandb"),)},
        "this agent was started without --secrets-dir",
    ),
    "user": ({"user": "nobody"}, "nobody"),
}
"""Launches that a node cannot run although another may, and what its agent says."""


@pytest.mark.parametrize("what", REFUSED)
def test_a_launch_that_a_node_cannot_run_uses_a_retry_and_says_what_it_lacks(
    lab: TrainingLab, what: str
) -> None:
    launch, sentence = REFUSED[what]
    lab.train(f"refused-{what}", python("pass"), launch=launch, max_retries=0)
    failed = lab.wait_for_state(f"refused-{what}", jobs_pb2.FAILED)
    assert (failed.retries, failed.training.exit_reason) == (1, launch_pb2.EXIT_NOT_STARTED)
    assert sentence in failed.last_error
    text = shown(lab, f"refused-{what}")
    assert sentence in text
    assert "it could not be started" in text


FAILURES: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "framework": (
        "import absent_framework",
        {},
        launch_pb2.EXIT_NOT_STARTED,
        "ModuleNotFoundError: No module named 'absent_framework'",
    ),
    "staging": (
        "pass",
        {"staging_command": ("/bin/sh", "-c", "echo no such bucket; exit 4")},
        launch_pb2.EXIT_NOT_STARTED,
        "the staging command failed: the program exited with status 4; launcher 0 says: no such bucket",
    ),
    "disk": (
        "open('/dev/full', 'w').write(10_000 * 'x')",
        {},
        launch_pb2.EXIT_ERROR,
        "OSError: [Errno 28] No space left on device",
    ),
    "hangs": (
        train("import time; time.sleep(1e6 if done == 3 else 0)"),
        {"stall_limit_s": 0.5},
        launch_pb2.EXIT_STALLED,
        "s after iteration 3, and was ended",
    ),
    "memory": (
        "raise MemoryError('no room')",
        {},
        launch_pb2.EXIT_OUT_OF_MEMORY,
        "MemoryError: no room",
    ),
}
"""Programs that fail, their launches, and the reasons that are shown."""


@pytest.mark.parametrize("what", FAILURES)
def test_a_failure_is_explained_and_the_job_will_be_tried_again(
    lab: TrainingLab, what: str
) -> None:
    program, launch, reason, sentence = FAILURES[what]
    lab.train(f"fails-{what}", python(program), launch=launch)
    failed = lab.wait_for_failure(f"fails-{what}")
    assert failed.training.exit_reason == reason
    assert sentence in failed.last_error
    assert sentence in shown(lab, f"fails-{what}")


def test_a_program_that_somebody_else_stops_is_tried_again_and_ends_with_the_right_count(
    lab: TrainingLab,
) -> None:
    wait = "while not progress.stop_requested() and os.environ['TESSERA_GENERATION'] == '1': time.sleep(0.01)"
    note = "progress.job_dir().joinpath('pid').write_text(str(os.getpid()))"
    step = f"{note}\n    if done == 30: progress.report(30)\n    if done == 30:\n        {wait}"
    lab.train("killed", python(f"import os, time\n{train(step)}"), iterations=4000)
    wait_for_progress(lab, "killed", 30)
    os.kill(int((lab.files("killed") / "pid").read_text()), signal.SIGTERM)
    failed = lab.wait_for_failure("killed")
    assert (failed.iterations_done, failed.retries) == (31, 1)
    assert failed.training.exit_reason == launch_pb2.EXIT_ENDED_EARLY
    sentence = (
        "the program exited with status 0 after 31 of 4,000 iterations; if the program decides when it"
        " is done, submit the job with --until-exit; rank 0 says: begins at 0"
    )
    assert sentence in failed.last_error
    assert sentence in shown(lab, "killed")
    assert "it ended before its iterations were done" in shown(lab, "killed")
    lab.try_again("killed")
    done = lab.wait_for_state("killed", jobs_pb2.SUCCEEDED)
    assert (done.iterations_done, done.generation) == (4000, 2)
    assert "100.0 % (4,000 of 4,000 iterations)" in shown(lab, "killed")


def test_a_program_without_iterations_fails_unless_it_decides_when_it_is_done(
    lab: TrainingLab,
) -> None:
    sleeps = ("sleep", "0.1")
    lab.train("sleeps", sleeps, iterations=100_000, max_retries=0)
    failed = lab.wait_for_state("sleeps", jobs_pb2.FAILED)
    assert (failed.iterations_done, failed.training.exit_reason) == (0, launch_pb2.EXIT_ENDED_EARLY)
    assert "submit the job with --until-exit" in failed.last_error
    lab.train("decides", sleeps, iterations=100_000, launch=UNTIL_EXIT)
    done = lab.wait_for_state("decides", jobs_pb2.SUCCEEDED)
    assert (done.iterations_done, done.retries) == (0, 0)
    assert "no iterations reported (100,000 expected)" in shown(lab, "decides")


def test_a_taken_port_is_named_and_the_next_start_takes_another(lab: TrainingLab) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        program = (
            "import os, socket\n"
            "first = os.environ['TESSERA_GENERATION'] == '1'\n"
            f"port = {taken.getsockname()[1]} if first else int(os.environ['MASTER_PORT'])\n"
            "socket.create_server((os.environ['MASTER_ADDR'], port))\n"
        )
        lab.train("port", python(program), launch=UNTIL_EXIT)
        failed = lab.wait_for_failure("port")
        assert failed.training.exit_reason == launch_pb2.EXIT_NOT_STARTED
        assert "Address already in use" in shown(lab, "port")
        lab.try_again("port")
        assert lab.wait_for_state("port", jobs_pb2.SUCCEEDED).retries == 1


def test_a_program_without_checkpoints_that_ignores_the_stop_starts_again_with_a_remark(
    lab: TrainingLab,
) -> None:
    program = """
import os, signal, time
from tessera import progress
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for done in range(progress.resume_iterations(), 4):
    progress.report(done + 1)
    while progress.job_dir().joinpath("go").exists() < (done == 2): time.sleep(0.01)
    time.sleep(0.3)
"""
    lab.train("forgets", python(program), iterations=4, launch={"stop_grace_s": 0.2})
    wait_for_progress(lab, "forgets", 3)
    lab.hold("forgets")
    lab.release("forgets")
    remark = "started without a checkpoint, because the job has reported none"
    wait_for_remark(lab, "forgets", remark)
    assert remark in shown(lab, "forgets")
    (lab.files("forgets") / "go").touch()
    done = lab.wait_for_state("forgets", jobs_pb2.SUCCEEDED)
    assert (done.generation, done.retries, done.training.HasField("checkpoint_iterations")) == (
        2,
        0,
        False,
    )


def test_a_damaged_checkpoint_is_passed_over_and_a_bad_one_is_given_up(lab: TrainingLab) -> None:
    lab.train("damaged", python(train(WAIT)), iterations=ITERATIONS)
    for generation in (1, 2, 3):
        before = lab.listed("damaged")
        wait_for_progress(lab, "damaged", max(before, default=0) + 1)
        lab.hold("damaged")
        assert len(lab.listed("damaged")) == generation
        if generation < 3:
            lab.release("damaged")
    newest, middle, oldest = lab.listed("damaged")
    rows = json.loads((lab.store("damaged") / "checkpoints.json").read_text())["checkpoints"]
    paths = {row["iterations"]: Path(row["path"]) for row in rows}
    paths[newest].write_text("")  # as if its end had never reached the disk
    paths[middle].write_text(len(str(middle)) * "x")  # as long as before
    lab.release("damaged")
    assert lab.wait_for_failure("damaged").training.exit_reason == launch_pb2.EXIT_BAD_CHECKPOINT
    lab.try_again("damaged")
    lab.wait_for_failure("damaged", failures=2)
    lab.try_again("damaged")
    wait_for_progress(lab, "damaged", oldest + 1)
    lab.wait_for_state("damaged", jobs_pb2.RUNNING)
    text = shown(lab, "damaged")
    assert f"went back to iteration {oldest}, because" in text
    assert f"the checkpoint of iteration {newest} is damaged or was removed" in text
    assert f"2 starts from iteration {middle} failed" in text
    lab.hold("damaged")


def test_a_program_that_dies_while_it_writes_a_checkpoint_goes_on_from_the_one_before(
    lab: TrainingLab,
) -> None:
    step = """
    if done == 6 and os.environ["TESSERA_GENERATION"] == "1":
        progress.checkpoint_path(6).write_text("[")
        os.kill(os.getpid(), 9)
    if done == 3:
        path = progress.checkpoint_path(3)
        path.write_text(json.dumps(3))
        progress.report_checkpoint(3, path)"""
    program = f"import os\n{train(step.strip())}"
    lab.train("half", python(program))
    assert lab.wait_for_failure("half").training.exit_reason == launch_pb2.EXIT_KILLED
    assert lab.listed("half") == [3]
    lab.try_again("half")
    assert lab.wait_for_state("half", jobs_pb2.SUCCEEDED).retries == 1


def test_progress_that_cannot_be_true_is_ignored_with_a_remark(lab: TrainingLab) -> None:
    program = """
import json, os, time
path = os.environ["TESSERA_PROGRESS_FILE"]
def write(text, until):
    with open(path + ".tmp", "w") as file:
        file.write(text)
    os.replace(path + ".tmp", path)
    while not os.path.exists(until): time.sleep(0.01)
write('{"iterations": 4, "loss": 0.5}', "seen")
write(LIE, "reported")
write('{"iterations": 10}', "reported")
"""
    lies = {
        '{"iterations": 2}': "the program reported 2 iterations after 4; that was ignored",
        '{"iterations": NaN}': "the program reported nan iterations",
        '{"iterations": 1e300}': "the program reported 1e+300 iterations",
        "[": "the progress file cannot be read",
    }
    for number, (lie, remark) in enumerate(lies.items()):
        name = f"lies-{number}"
        lab.train(name, python(program.replace("LIE", repr(lie))))
        wait_for_progress(lab, name, 4)
        (lab.files(name) / "seen").touch()
        wait_for_remark(lab, name, remark)
        assert lab.job(name).iterations_done == 4
        assert remark in shown(lab, name)
        (lab.files(name) / "reported").touch()
        assert lab.wait_for_state(name, jobs_pb2.SUCCEEDED).retries == 0


def test_a_flood_of_output_is_bounded_on_disk_and_keeps_no_agent_from_its_lease(
    lab: TrainingLab,
) -> None:
    line = 1000 * "x"
    program = f"for k in range(200_000): print(k, '{line}')\nprint('the end')"
    launch = {"env": {"PYTHONUNBUFFERED": ""}, **UNTIL_EXIT}
    lab.train("flood", python(program), launch=launch)
    done = lab.wait_for_state("flood", jobs_pb2.SUCCEEDED)
    assert done.retries == 0
    agent = lab.agents[0]
    files = list((agent.folder / "logs" / "flood" / "1").iterdir())
    assert sum(path.stat().st_size for path in files) < 2 << 20
    newest = max(files, key=lambda path: int(path.suffixes[0][1:]) if path.suffix == ".log" else -1)
    assert newest.read_text().endswith("the end\n")
    assert " lease_" not in agent.log.read_text()


def test_a_full_disk_costs_output_and_no_training(lab: TrainingLab, small_disk: Path) -> None:
    agent = lab.program_agent("full", 2, f"--data-dir={small_disk / 'agent'}")
    program = """
import sys, time
from tessera import progress
def wait(name):
    while not progress.job_dir().joinpath(name).exists(): time.sleep(0.01)
progress.report(1)
wait("full")
print(1_000_000 * "x", flush=True)
for done in range(2, 6):
    progress.report(done)
    time.sleep(0.3)
progress.job_dir().joinpath("did").touch()
wait("free")
for done in range(6, 11):
    progress.report(done)
"""
    lab.train("no-space", python(program), gpus=2)
    wait_for_progress(lab, "no-space", 1)
    fill_disk(small_disk / "rest")
    files = lab.files("no-space")
    (files / "full").touch()
    until((files / "did").exists, "the program goes on without space")
    (small_disk / "rest").unlink()
    (files / "free").touch()
    done = lab.wait_for_state("no-space", jobs_pb2.SUCCEEDED)
    assert (done.retries, done.generation) == (0, 1)
    lab.drain("full")
    agent.close()
