"""Programs of jobs under keepers: progress, checkpoints, stops, failures and everything they leave."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tessera.formulation.clock import SystemClock
from tessera.formulation.errors import InvalidInput
from tessera.formulation.exit_reasons import ExitReason
from tessera.formulation.launch import SecretVariable
from tessera.formulation.runtimes import TORCHRUN
from tessera.formulation.values import Workload
from tessera.service.agent.gangs import Gang
from tessera.service.agent.isolation import UserRule
from tessera.service.agent.runtimes.programs import KeeperHandle, ProgramRuntime
from tessera.service.agent.runtimes.protocol import ExitOutcome, MemberExit, Progress
from tessera.service.agent.trainer_certificate import CertificateSource, TrainerCertificate
from tests.support.agents import is_running, until
from tests.support.execution_plans import a_plan
from tests.support.patience import PATIENCE_S
from tests.support.programs import UNTIL_EXIT, ProgramBench, end_of, train
from tests.support.tuning import tuner

__all__ = ["tuner"]

SUCCESS = MemberExit(outcome=ExitOutcome.SUCCEEDED)
STOPPED = MemberExit(outcome=ExitOutcome.STOPPED)
WAIT = "import time; time.sleep(0.05)"
"""What a program does that takes its time in each iteration."""


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[ProgramBench]:
    program_bench = ProgramBench(tmp_path)
    yield program_bench
    await program_bench.clean()


def observed(handle: object) -> Progress:
    progress = handle.observe()  # type: ignore[attr-defined]
    assert isinstance(progress, Progress)
    return progress


def pid_in(path: Path) -> int:
    return int(path.read_text()) if path.exists() and path.read_text() else 0


async def test_a_program_reports_progress_and_loss_by_the_client(bench: ProgramBench) -> None:
    handle = bench.start(bench.gang(train()))
    assert await end_of(handle) == SUCCESS
    progress = observed(handle)
    assert (progress.iterations, progress.loss, progress.runtime) == (10, 0.1, "command")
    assert bench.output() == "begins at 0\n"


async def test_a_program_reports_progress_by_lines_of_its_output(bench: ProgramBench) -> None:
    program = "for k in range(1, 11): print(f'step {k:,}: loss={2 / k}', flush=True)"
    pattern = r"step (?P<iteration>[\d,]+): loss=(?P<loss>\S+)"
    handle = bench.start(bench.gang(program, launch={"progress_pattern": pattern}))
    assert await end_of(handle) == SUCCESS
    assert (observed(handle).iterations, observed(handle).loss) == (10, 0.2)


async def test_a_stopped_program_goes_on_from_its_checkpoint(bench: ProgramBench) -> None:
    first = bench.start(bench.gang(train(WAIT), iterations_total=1e9))
    await first.begun()
    await until(lambda: observed(first).iterations > 0)
    first.stop()
    assert await first.ended() == STOPPED
    stopped = observed(first)
    assert stopped.checkpoint_iterations == stopped.iterations > 0
    second = bench.start(bench.gang(train(), 2, iterations_total=stopped.iterations + 5))
    assert await end_of(second) == SUCCESS
    resumed = observed(second)
    assert resumed.resumed_iterations == stopped.iterations
    assert resumed.iterations == stopped.iterations + 5
    assert resumed.restart_times is not None
    assert resumed.restart_times.total_s is not None  # although the first iteration was immediate


async def test_a_program_is_asked_for_checkpoints_and_goes_on(bench: ProgramBench) -> None:
    handle = bench.start(bench.gang(train(WAIT), iterations_total=1e9))
    await handle.begun()
    handle.request_checkpoint()
    await until(lambda: observed(handle).checkpoint_iterations is not None)
    first = observed(handle).checkpoint_iterations
    handle.request_checkpoint()
    await until(lambda: observed(handle).checkpoint_iterations != first)
    handle.stop()
    assert await handle.ended() == STOPPED


async def test_checkpoints_are_asked_for_regularly(bench: ProgramBench) -> None:
    gang = bench.gang(train(WAIT), iterations_total=1e9)
    handle = bench.start(gang, checkpoint_s=0.1)
    await handle.begun()
    await until(lambda: (observed(handle).checkpoint_iterations or 0) > 5)
    files = list((bench.store / "generation-1").iterdir())
    assert len(files) <= 4  # three are kept, and one may be new


async def test_a_program_that_ignores_the_stop_is_killed_after_its_grace(
    bench: ProgramBench,
) -> None:
    program = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up')\n"
    handle = bench.start(bench.gang(program + "while True: time.sleep(1)"), grace_s=0.2)
    await handle.begun()
    await until(lambda: bench.output() == "up\n")
    handle.stop()
    assert await handle.ended() == STOPPED


async def test_a_program_that_was_done_when_it_was_stopped_has_succeeded(
    bench: ProgramBench, tmp_path: Path
) -> None:
    wait = "import time\nwhile not progress.stop_requested(): time.sleep(0.01)\n"
    handle = bench.start(bench.gang(train() + wait, iterations_total=3))
    await handle.begun()
    await until(lambda: observed(handle).iterations == 3)
    handle.stop()
    assert await handle.ended() == SUCCESS


@pytest.mark.parametrize(
    ("program", "reason", "error"),
    [
        ("1 / 0", ExitReason.ERROR, "ZeroDivisionError: division by zero"),
        ("import absent", ExitReason.NOT_STARTED, "ModuleNotFoundError: No module named 'absent'"),
        ("raise SystemExit(3)", ExitReason.ERROR, "exited with status 3, and wrote no message"),
        (
            "import os; os.kill(os.getpid(), 9)",
            ExitReason.KILLED,
            "was killed by SIGKILL",
        ),
        (
            "raise RuntimeError('CUDA out of memory. Tried to allocate 2 GiB')",
            ExitReason.OUT_OF_MEMORY,
            "CUDA out of memory",
        ),
    ],
)
async def test_a_failure_has_a_reason_and_a_sentence(
    bench: ProgramBench, program: str, reason: ExitReason, error: str
) -> None:
    end = await end_of(bench.start(bench.gang(program)))
    assert (end.outcome, end.reason) == (ExitOutcome.FAILED, reason)
    assert error in end.error


ORPHANS = """
import os, time
for _ in range(50):
    if os.fork() == 0:
        os.fork()
        os._exit(0)
    os.wait()
print("ready", flush=True)
time.sleep(1e6)
"""
"""A program that goes on, after many processes have become its keeper's and ended."""


async def test_processes_that_end_without_a_parent_do_not_pile_up(bench: ProgramBench) -> None:
    handle = bench.start(bench.gang(ORPHANS))
    assert isinstance(handle, KeeperHandle)
    await until(lambda: bench.output() == "ready\n")
    keeper = psutil.Process(json.loads((handle.directory / "process.json").read_text())["pid"])
    await until(lambda: len(keeper.children()) == 1)
    handle.stop()
    assert await handle.ended() == STOPPED


async def test_a_missing_program_is_named(bench: ProgramBench) -> None:
    end = await end_of(bench.start(bench.gang(("/no/such/program",))))
    assert (end.outcome, end.reason) == (ExitOutcome.FAILED, ExitReason.NOT_STARTED)
    assert "cannot start /no/such/program" in end.error


async def test_a_missing_working_directory_is_named(bench: ProgramBench) -> None:
    gang = bench.gang("pass", launch={"working_directory": "/no/such/folder"})
    end = await end_of(bench.start(gang))
    assert end.reason is ExitReason.NOT_STARTED
    assert "/no/such/folder" in end.error


LIES = ["-1", "nan", "1e300", "'many'", "[1]", "None", "True", "10**400", "11"]


@pytest.mark.parametrize("lie", LIES)
async def test_progress_that_cannot_be_true_is_ignored_with_a_remark(
    bench: ProgramBench, lie: str
) -> None:
    program = f"""
import json, os, time
def write(iterations):
    path = os.environ["TESSERA_PROGRESS_FILE"]
    with open(path + ".tmp", "w") as file:
        json.dump({{"iterations": iterations, "loss": 0.5}}, file)
    os.replace(path + ".tmp", path)
write(4)
while not os.path.exists("seen"): time.sleep(0.01)
nan = float("nan")
write({lie})
while not os.path.exists("go on"): time.sleep(0.01)
write(10)
"""
    handle = bench.start(bench.gang(program))
    await handle.begun()
    await until(lambda: observed(handle).iterations == 4)
    (bench.store / "files" / "seen").touch()
    await until(lambda: observed(handle).remark)
    assert observed(handle).iterations == 4
    assert "that was ignored" in observed(handle).remark
    (bench.store / "files" / "go on").touch()
    assert await handle.ended() == SUCCESS


async def test_progress_that_goes_back_is_ignored(bench: ProgramBench) -> None:
    program = "for k in (3, 2, 5): print('it', k, flush=True)"
    gang = bench.gang(program, launch={"progress_pattern": r"it (?P<iteration>\d+)"})
    handle = bench.start(replace(gang, iterations_total=5.0))
    assert await end_of(handle) == SUCCESS
    assert observed(handle).iterations == 5
    assert "2 iterations after 3" in observed(handle).remark


async def test_a_program_without_progress_for_too_long_is_ended(bench: ProgramBench) -> None:
    program = train("import time; time.sleep(1e6 if done == 3 else 0)")
    handle = bench.start(bench.gang(program, launch={"stall_limit_s": 0.5}))
    end = await end_of(handle)
    assert (end.outcome, end.reason) == (ExitOutcome.FAILED, ExitReason.STALLED)
    assert "made no progress for" in end.error
    assert "after iteration 3" in end.error


async def test_a_program_that_never_begins_is_ended_after_the_stated_limit(
    bench: ProgramBench,
) -> None:
    handle = bench.start(bench.gang("import time; time.sleep(1e6)", launch={"stall_limit_s": 0.5}))
    end = await end_of(handle)
    assert (end.outcome, end.reason) == (ExitOutcome.FAILED, ExitReason.STALLED)
    assert "after iteration 0" in end.error


async def test_no_process_survives_the_program(bench: ProgramBench, tmp_path: Path) -> None:
    program = f"""
import subprocess, sys, time
child = "import os, time; open({str(tmp_path / "child")!r}, 'w').write(str(os.getpid())); time.sleep(1e6)"
subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
while not __import__("os").path.exists({str(tmp_path / "child")!r}): time.sleep(0.01)
"""
    assert await end_of(bench.start(bench.gang(program, launch=UNTIL_EXIT))) == SUCCESS
    assert not is_running(pid_in(tmp_path / "child"))


async def test_no_process_survives_a_keeper_that_was_killed(
    bench: ProgramBench, tmp_path: Path
) -> None:
    program = f"""
import os, subprocess, sys, time
child = "import os, time; open({str(tmp_path / "child")!r}, 'w').write(str(os.getpid())); time.sleep(1e6)"
subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
open({str(tmp_path / "parent")!r}, "w").write(str(os.getpid()))
time.sleep(1e6)
"""
    handle = bench.start(bench.gang(program))
    await handle.begun()
    await until(lambda: pid_in(tmp_path / "child") and pid_in(tmp_path / "parent"))
    handle.kill()
    end = await handle.ended()
    assert (end.outcome, end.reason) == (ExitOutcome.FAILED, ExitReason.KILLED)
    assert not is_running(pid_in(tmp_path / "child"))
    assert not is_running(pid_in(tmp_path / "parent"))


async def test_an_agent_adopts_a_keeper_and_its_program(bench: ProgramBench) -> None:
    gang = bench.gang(train(WAIT), iterations_total=1e9)
    first = bench.start(gang)
    await first.begun()
    second = KeeperHandle.adopt(bench.member(gang).directory)
    assert second is not None
    await until(lambda: observed(second).iterations > 0)
    second.stop()
    assert await second.ended() == STOPPED
    assert observed(second).checkpoint_iterations


async def test_much_output_is_bounded_and_its_end_is_kept(bench: ProgramBench) -> None:
    program = "for k in range(40_000): print(f'{k:09}')"
    handle = bench.start(bench.gang(program, launch=UNTIL_EXIT), log_bytes=40_000)
    assert await end_of(handle) == SUCCESS
    lines = bench.output().splitlines()
    assert lines[-1] == f"{39_999:09}"
    assert sum(len(line) + 1 for line in lines) <= 200_000
    numbers = [int(line) for line in lines[1:]]  # the first may be cut
    assert numbers == list(range(numbers[0], 40_000))


async def test_the_staging_command_runs_first_and_may_fail(bench: ProgramBench) -> None:
    staging = ("/bin/sh", "-c", "echo data > data.txt")
    launch = {"staging_command": staging, **UNTIL_EXIT}
    gang = bench.gang("print(open('data.txt').read())", launch=launch)
    assert await end_of(bench.start(gang)) == SUCCESS
    assert bench.output() == "data\n\n"
    staging = ("/bin/sh", "-c", "echo no such bucket; exit 4")
    gang = bench.gang("print(1)", 2, launch={"staging_command": staging})
    end = await end_of(bench.start(gang))
    assert end.reason is ExitReason.NOT_STARTED
    assert "the staging command failed" in end.error
    assert "no such bucket" in end.error
    assert bench.output(2) == ""


async def test_a_staging_command_that_hangs_is_killed_at_the_stall_limit(
    bench: ProgramBench, tmp_path: Path
) -> None:
    staging = ("/bin/sh", "-c", f"echo $$ > {tmp_path}/pid; sleep 1000000 & wait")
    gang = bench.gang("print(1)", launch={"staging_command": staging, "stall_limit_s": 1.0})
    end = await end_of(bench.start(gang))
    assert end.reason is ExitReason.NOT_STARTED
    assert end.error == (
        "the staging command did not end within 1 s, and was killed; see its output, or submit the job"
        " with a longer --stall-limit"
    )
    assert not is_running(int((tmp_path / "pid").read_text()))
    assert bench.output() == ""


async def test_the_environment_has_the_contract_and_no_secret_of_the_agent(
    bench: ProgramBench,
) -> None:
    environment = {
        **os.environ,
        "TESSERA_JOIN_TOKEN": "x",
        "CUDA_VISIBLE_DEVICES": "6,7",
        "PGPASSWORD": "secret",
    }
    program = "import json, os; print(json.dumps(dict(os.environ)))"
    launch = {"environment": {"MINE": "1"}, **UNTIL_EXIT}
    gang = bench.gang(program, launch=launch, execution_plan="", array_index=3, array_size=10)
    handle = bench.start(gang, environment=environment)
    assert await end_of(handle) == SUCCESS
    seen = json.loads(bench.output())
    assert "TESSERA_JOIN_TOKEN" not in seen
    assert "PGPASSWORD" not in seen
    expected = {
        "MINE": "1",
        "CUDA_VISIBLE_DEVICES": "6,7",
        "TESSERA_JOB": "a",
        "TESSERA_GENERATION": "1",
        "TESSERA_NODES": "1",
        "TESSERA_NODE_RANK": "0",
        "TESSERA_NODE_GPUS": "2",
        "TESSERA_GPUS": "2",
        "TESSERA_ARRAY_INDEX": "3",
        "TESSERA_ARRAY_SIZE": "10",
        "TESSERA_ITERATIONS": "10",
        "TESSERA_GLOBAL_BATCH": "8",
        "TESSERA_JOB_DIR": str(bench.store / "files"),
        "TESSERA_CHECKPOINT_DIR": str(bench.store / "generation-1"),
        "MASTER_ADDR": "127.0.0.1",
    }
    assert {name: seen.get(name) for name in expected} == expected
    assert int(seen["MASTER_PORT"]) > 0
    assert "TESSERA_RESUME_FROM" not in seen
    assert "TESSERA_PLAN_FILE" not in seen


async def test_progress_that_trainer_posts_reaches_the_agent(bench: ProgramBench) -> None:
    program = """
import json, os, ssl, urllib.request
context = ssl.create_default_context(cafile=os.environ["KUBEFLOW_TRAINER_SERVER_CA_CERT"])
token = open(os.environ["KUBEFLOW_TRAINER_SERVER_TOKEN"]).read()
values = {"current_step": 10, "total_steps": 12, "loss": 0.25}
metrics = [{"name": name, "value": str(value)} for name, value in values.items()]
request = urllib.request.Request(
    os.environ["KUBEFLOW_TRAINER_SERVER_URL"],
    data=json.dumps({"trainerStatus": {"metrics": metrics}}).encode(),
    headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
)
print(urllib.request.urlopen(request, context=context).status)
"""
    source = CertificateSource(SystemClock().wall_s())
    handle = bench.start(bench.gang(program), certificates=source)
    assert await end_of(handle) == SUCCESS
    assert bench.output() == "200\n"
    progress = observed(handle)
    assert (progress.iterations, progress.loss) == (10, 0.25)
    assert "Trainer counts 12 steps, but the job has 10 iterations" in progress.remark


async def test_members_on_two_nodes_meet_where_the_leader_says(bench: ProgramBench) -> None:
    program = """
import os, socket
rank, place = os.environ["TESSERA_NODE_RANK"], (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == "0":
    with socket.create_server(place) as server:
        connection, _ = server.accept()
        print(connection.recv(10).decode())
else:
    while True:
        try:
            with socket.create_connection(place) as connection:
                connection.sendall(b"I am 1")
            break
        except ConnectionRefusedError:
            pass
"""
    shares = (("n0", (0,)), ("n1", (0,)))
    fields: dict[str, Any] = {"shares": shares, "members": ("n0", "n1"), "member_gpus": (1, 1)}
    gang = bench.gang(program, launch=UNTIL_EXIT, **fields)
    follower = bench.start(gang, "n1")  # before the leader
    leader = bench.start(gang)
    assert [await end_of(leader), await end_of(follower)] == [SUCCESS, SUCCESS]
    assert bench.output() == "I am 1\n"
    assert not list(bench.store.glob("rendezvous-*"))


async def test_a_member_whose_leader_never_comes_can_be_stopped(bench: ProgramBench) -> None:
    gang = bench.gang("pass", shares=(("n1", (0,)),), members=("n0", "n1"), member_gpus=(1, 1))
    handle = bench.start(gang, "n1")
    handle.stop()
    assert await end_of(handle) == STOPPED


async def test_an_older_generation_cannot_list_a_checkpoint(bench: ProgramBench) -> None:
    step = "while not __import__('os').path.exists('go'): pass"
    old = bench.start(bench.gang(train(step), iterations_total=1e9))
    await old.begun()
    new = bench.start(bench.gang(train(), 2))
    assert await end_of(new) == SUCCESS
    old.stop()
    (bench.store / "files" / "go").touch()
    end = await old.ended()
    assert "generation 2 has taken it over" in end.error
    assert not (bench.store / "checkpoints.json").exists()


async def test_a_start_from_a_bad_checkpoint_goes_back_to_the_one_before(
    bench: ProgramBench,
) -> None:
    first = bench.start(bench.gang(train(WAIT), iterations_total=1e9))
    await first.begun()
    await until(lambda: observed(first).iterations > 0)
    first.request_checkpoint()
    await until(lambda: observed(first).checkpoint_iterations is not None)
    good = observed(first).checkpoint_iterations
    await until(lambda: observed(first).iterations > (good or 0))
    first.stop()
    assert await first.ended() == STOPPED
    last = observed(first).checkpoint_iterations
    assert last is not None
    assert good is not None
    assert last > good
    picky = train().replace("assert json", f"assert done != {int(last)}, 'bad shard'; assert json")
    for generation in (2, 3):
        end = await end_of(bench.start(bench.gang(picky, generation, iterations_total=1e9)))
        assert (end.outcome, end.reason) == (ExitOutcome.FAILED, ExitReason.BAD_CHECKPOINT)
        assert "AssertionError: bad shard" in end.error
    fourth = bench.start(bench.gang(picky, 4, iterations_total=last + 3))
    assert await end_of(fourth) == SUCCESS
    assert observed(fourth).resumed_iterations == good
    assert f"2 starts from iteration {last:.0f} failed" in observed(fourth).remark
    assert "bad shard" in observed(fourth).remark


async def test_a_damaged_checkpoint_is_passed_over_and_none_left_is_an_error(
    bench: ProgramBench,
) -> None:
    first = bench.start(bench.gang(train(WAIT), iterations_total=1e9))
    await first.begun()
    await until(lambda: observed(first).iterations > 0)
    first.request_checkpoint()
    await until(lambda: observed(first).checkpoint_iterations is not None)
    await until(lambda: observed(first).iterations > (observed(first).checkpoint_iterations or 0))
    first.stop()
    await first.ended()
    newest, oldest = sorted(
        (bench.store / "generation-1").iterdir(),
        key=lambda path: int(path.name.rpartition("-")[2]),
        reverse=True,
    )
    newest.write_text("")  # half written
    second = bench.start(bench.gang(train(), 2))
    await end_of(second)
    assert "is damaged or was removed" in observed(second).remark
    oldest.unlink()
    end = await end_of(bench.start(bench.gang(train(), 3)))
    assert (end.outcome, end.reason) == (ExitOutcome.FAILED, ExitReason.BAD_CHECKPOINT)
    assert "no checkpoint of the job is intact" in end.error


def test_what_an_agent_cannot_run_is_refused_before_anything_starts(
    bench: ProgramBench, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput, match="encrypted"):
        bench.start(bench.gang("pass"), refusal="not encrypted")
    with pytest.raises(InvalidInput, match="needs an engine that runs containers"):
        bench.start(bench.gang("pass", launch={"image": "pytorch"}))
    secret = {"secrets": (SecretVariable(variable="TOKEN", name="token"),)}
    with pytest.raises(InvalidInput, match="without --secrets-dir"):
        bench.start(bench.gang("pass", launch=secret))
    with pytest.raises(InvalidInput, match="token does not exist on this node; put it into"):
        bench.start(bench.gang("pass", launch=secret), secrets=tmp_path)
    with pytest.raises(InvalidInput, match="no-such-user does not exist"):
        bench.start(bench.gang("pass"), users=UserRule(default="no-such-user"))


async def test_a_secret_reaches_the_environment_of_its_tenants_jobs_alone(
    bench: ProgramBench, tmp_path: Path
) -> None:
    (tmp_path / "blue").mkdir()
    (tmp_path / "blue" / "token").write_text("s3cret\n")
    secret = {"secrets": (SecretVariable(variable="TOKEN", name="token"),)}
    gang = bench.gang("import os; print(os.environ['TOKEN'])", launch={**secret, **UNTIL_EXIT})
    assert await end_of(bench.start(replace(gang, tenant="blue"), secrets=tmp_path)) == SUCCESS
    assert bench.output() == "s3cret\n"
    with pytest.raises(InvalidInput, match="does not exist"):
        bench.start(replace(gang, tenant="red", generation=2), secrets=tmp_path)
    for tenant in ("..", "a/b"):
        with pytest.raises(InvalidInput, match="cannot have secrets"):
            bench.start(replace(gang, tenant=tenant, generation=2), secrets=tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start programs as another user")
async def test_a_program_runs_as_its_own_user_who_cannot_read_the_agents_files(
    bench: ProgramBench,
) -> None:
    for path in (bench.root, *bench.root.parents):
        if path.owner() == "root" and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o011)
    program = """
import os, sys
print(os.getuid(), os.getgroups())
for path in sys.argv[1:]:
    try:
        print(len(os.listdir(path) if os.path.isdir(path) else open(path).read()))
    except PermissionError:
        print("refused")
open("mine", "w").close()
"""
    data = bench.settings.data_dir
    words = ("/usr/bin/python3", "-c", program, str(data), "/etc/shadow")
    gang = bench.gang(words, launch=UNTIL_EXIT)
    handle = bench.start(gang, users=UserRule(default="nobody"))
    end = await end_of(handle)
    assert (end, bench.output()) == (SUCCESS, "65534 [65534]\nrefused\nrefused\n")
    assert (bench.store / "files" / "mine").owner() == "nobody"


def test_jobs_may_name_only_users_that_the_agent_allows() -> None:
    rule = UserRule(default="nobody", allowed=("daemon",))
    assert rule.choose("", 0).name == "nobody"
    assert rule.choose("daemon", 0).name == "daemon"
    with pytest.raises(InvalidInput, match="must not be root on this node"):
        rule.choose("root", 0)
    with pytest.raises(InvalidInput, match="start it with --run-as USER"):
        UserRule().choose("", 0)
    with pytest.raises(InvalidInput, match="start the agent as root"):
        rule.choose("daemon", 65534)


async def test_a_signal_to_a_rank_alone_ends_the_job_with_its_name(bench: ProgramBench) -> None:
    handle = bench.start(bench.gang(train(WAIT), iterations_total=1e9))
    await handle.begun()
    recorded = bench.member(bench.gang("")).directory / "processes.json"
    await until(lambda: recorded.exists() and json.loads(recorded.read_text())["processes"])
    ((pid, _), *_) = json.loads(recorded.read_text())["processes"]
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        end = await handle.ended()
    assert (end.reason, "SIGKILL" in end.error) == (ExitReason.KILLED, True)


async def test_a_checkpoint_that_is_written_again_at_its_path_counts_again(
    bench: ProgramBench,
) -> None:
    program = train().replace("checkpoint_path(done)", "checkpoint_path(0)")
    program = program.replace("progress.checkpoint_requested()", "done in (3, 6)")
    handle = bench.start(
        bench.gang(program.replace("\n    done += 1", f"\n    {WAIT}\n    done += 1"))
    )
    assert await end_of(handle) == SUCCESS
    assert observed(handle).checkpoint_iterations == 6
    (row,) = json.loads((bench.store / "checkpoints.json").read_text())["checkpoints"]
    assert row["iterations"] == 6


async def test_a_checkpoint_beyond_the_job_is_not_kept_and_named(bench: ProgramBench) -> None:
    program = train() + "progress.report_checkpoint(11, progress.checkpoint_path(11))"
    handle = bench.start(bench.gang(program))
    assert await end_of(handle) == SUCCESS
    assert "iteration-11 has 11 iterations, so it is not kept" in observed(handle).remark


async def test_an_endpoint_that_cannot_open_is_remarked_and_the_program_goes_on(
    bench: ProgramBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = """
import os, socket, time, urllib.parse
place = urllib.parse.urlsplit(os.environ["KUBEFLOW_TRAINER_SERVER_URL"])
with socket.create_connection((place.hostname, place.port)) as connection:
    try:
        connection.recv(1)
    except ConnectionResetError:
        pass
"""
    source = CertificateSource(0.0)
    monkeypatch.setattr(source, "_certificate", TrainerCertificate("damaged", "damaged"))
    handle = bench.start(bench.gang(program + train()), certificates=source)
    assert await end_of(handle) == SUCCESS
    assert "progress of Trainer is not received" in observed(handle).remark


async def test_a_keeper_that_a_nameless_signal_ends_is_described(bench: ProgramBench) -> None:
    handle = bench.start(bench.gang("import time; time.sleep(1e6)"))
    await handle.begun()
    number = signal.SIGRTMIN + 5
    os.kill(
        int(
            json.loads((bench.member(bench.gang("")).directory / "process.json").read_text())["pid"]
        ),
        number,
    )
    async with asyncio.timeout(PATIENCE_S):
        end = await handle.ended()
    assert (end.reason, end.error) == (
        ExitReason.KILLED,
        f"the process was killed by signal {number}",
    )


TUNE = """
import json, math
from tessera import progress
tuning = progress.tuning()
print(json.dumps(tuning), flush=True)
if tuning:
    progress.begin_tuning()
    progress.report_plan(tuning["plans"][-1], 0.25, {planned})
"""
"""A program that runs by the last of the plans that it may try."""


def a_tuning_gang(bench: ProgramBench, program: str, **fields: Any) -> Gang:
    """Return a gang whose program may try three plans."""
    values: dict[str, Any] = {
        "tuning_plans": tuple(plan.to_json() for plan in PLANS),
        "launch": {"tuning_space": "full", "tuning_budget_s": 30.0},
    }
    return bench.gang(program, **(values | fields))


PLANS = [a_plan(Workload(model="m", params="", global_batch=8), 2, zero=z) for z in (0, 1, 2)]


@pytest.mark.parametrize(
    ("planned", "planned_s"), [("0.5", 0.5), ("None", 0.0), ("math.inf", math.inf)]
)
async def test_a_program_tries_plans_and_reports_the_one_it_runs_by(
    bench: ProgramBench, tuner: str, planned: str, planned_s: float
) -> None:
    program = TUNE.replace("{planned}", planned) + train()
    handle = bench.start(a_tuning_gang(bench, program, runtime=tuner))
    assert await end_of(handle) == SUCCESS
    told = json.loads(bench.output().partition("\n")[0])
    assert told["budget_s"] == 30.0
    plain = [json.dumps(p, sort_keys=True, separators=(",", ":")) for p in told["plans"]]
    assert plain == [plan.to_json() for plan in PLANS]
    progress = observed(handle)
    assert (progress.executed_plan, progress.executed_s) == (PLANS[-1].to_json(), 0.25)
    assert (progress.planned_s, progress.iterations, progress.remark) == (planned_s, 10, "")


async def test_a_program_without_plans_to_try_does_not_tune(
    bench: ProgramBench, tuner: str
) -> None:
    program = TUNE.replace("{planned}", "None") + train()
    without: list[dict[str, Any]] = [{"tuning_plans": ()}, {"runtime": TORCHRUN}]
    for generation, fields in enumerate(without):
        gang = a_tuning_gang(bench, program, generation=generation, **({"runtime": tuner} | fields))
        variables = ProgramRuntime(name=gang.runtime, settings=bench.settings)._environment(
            bench.member(gang), bench.settings.users.choose("", os.geteuid()), "mark"
        )
        assert "TESSERA_TUNING_FILE" not in variables
    handle = bench.start(a_tuning_gang(bench, program, generation=3, tuning_plans=()))
    assert await end_of(handle) == SUCCESS
    assert bench.output(3).startswith("null\n")
    assert observed(handle).executed_plan == ""


async def test_a_program_may_tune_for_longer_than_its_stall_limit(
    bench: ProgramBench, tuner: str
) -> None:
    wait = "import time\ntime.sleep(8)\n"
    program = (
        f"from tessera import progress\nprogress.begin_tuning()\n{wait}progress.end_tuning()\n"
    )
    launch = {"tuning_space": "full", "tuning_budget_s": 3600.0, "stall_limit_s": 4.0}
    hangs = bench.start(bench.gang(program + train(), launch=launch, runtime=tuner))
    assert (await end_of(hangs)).reason is ExitReason.STALLED
    tunes = bench.start(a_tuning_gang(bench, program + train(), generation=2, launch=launch))
    assert await end_of(tunes) == SUCCESS
    assert (observed(tunes).executed_plan, observed(tunes).iterations) == ("", 10)


async def test_a_report_of_no_valid_plan_is_left_out(bench: ProgramBench, tuner: str) -> None:
    lie = "from tessera import progress\nprogress.report_plan({'stages': []}, 0.5)\n"
    handle = bench.start(a_tuning_gang(bench, lie + train(), runtime=tuner))
    assert await end_of(handle) == SUCCESS
    assert (observed(handle).executed_plan, observed(handle).iterations) == ("", 10)
