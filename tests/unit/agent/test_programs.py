"""Programs of jobs under keepers: progress, checkpoints, stops, ends, and everything they leave."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from tessera.formulation.base.clock import SystemClock
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.values import Workload
from tessera.formulation.job.execution_plan import ExecutionPlan, PlanStage
from tessera.formulation.job.exit_reasons import ExitReason
from tessera.formulation.job.launch import SecretVariable
from tessera.formulation.job.runtimes import ALPA, DEEPSPEED, JAX, MEGATRON, TORCHRUN
from tessera.service.agent.isolation import UserRule
from tessera.service.agent.runtimes.programs import KeeperHandle, ProgramRuntime
from tessera.service.agent.runtimes.protocol import (
    ExitOutcome,
    MemberExit,
)
from tessera.service.agent.trainer_certificate import CertificateSource, TrainerCertificate
from tessera.v1 import agents_pb2 as pb
from tests.support.agents import is_running, until
from tests.support.execution_plans import a_plan
from tests.support.patience import PATIENCE_S
from tests.support.programs import (
    ENDLESS,
    STOPPED,
    SUCCESS,
    TWO_NODES,
    UNTIL_EXIT,
    ProgramBench,
    end_of,
    observed,
    stop,
    train,
)

WAIT = "import time; time.sleep(0.05)"
"""What a program does that takes its time in each iteration."""


def pid_in(path: Path) -> int:
    return int(path.read_text()) if path.exists() and path.read_text() else 0


async def test_a_program_reports_progress_and_loss_by_the_client(bench: ProgramBench) -> None:
    handle = bench.start(bench.gang(train()))
    assert await end_of(handle) == SUCCESS
    progress = observed(handle)
    assert (progress.iterations_done, progress.loss, progress.runtime) == (10, 0.1, "command")
    assert bench.output() == "begins at 0\n"


async def test_a_program_reports_progress_by_lines_of_its_output(bench: ProgramBench) -> None:
    program = "print('\\n'.join(f'step {k:,}: loss={2 / k}' for k in range(1, 11)), end='')"
    pattern = r"step (?P<iteration>[\d,]+): loss=(?P<loss>\S+)"
    handle = bench.start(bench.gang(program, launch={"progress_pattern": pattern}))
    assert await end_of(handle) == SUCCESS  # although no newline ends the last line
    assert (observed(handle).iterations_done, observed(handle).loss) == (10, 0.2)


async def test_checkpoints_are_asked_for_regularly_and_at_once_if_somebody_asks(
    bench: ProgramBench,
) -> None:
    handle = bench.start(bench.gang(train(WAIT), iterations_total=ENDLESS))
    await handle.begun()
    handle.request_checkpoint()
    await until(lambda: observed(handle).checkpoint_iterations)
    await stop(handle)
    regular = bench.start(bench.gang(train(WAIT), 2, iterations_total=ENDLESS), checkpoint_s=0.1)
    await regular.begun()
    done = observed(handle).iterations_done
    await until(lambda: observed(regular).checkpoint_iterations > done + 5)
    files = list((bench.store / "generation-2").iterdir())
    assert len(files) <= 4  # three are kept, and one may be new


async def test_a_program_that_was_done_when_it_was_stopped_has_succeeded(
    bench: ProgramBench,
) -> None:
    wait = "import time\nwhile not progress.stop_requested(): time.sleep(0.01)\n"
    handle = bench.start(bench.gang(train() + wait, iterations_total=3))
    await handle.begun()
    await until(lambda: observed(handle).iterations_done == 3)
    handle.stop()
    assert await handle.ended() == SUCCESS


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


@pytest.mark.parametrize(
    ("program", "launch", "error"),
    [
        (("/no/such/program",), {}, "cannot start /no/such/program"),
        ("pass", {"workdir": "/no/such/folder"}, "/no/such/folder"),
    ],
)
async def test_a_program_or_directory_that_is_missing_is_named(
    bench: ProgramBench, program: str | tuple[str, ...], launch: dict[str, Any], error: str
) -> None:
    end = await end_of(bench.start(bench.gang(program, launch=launch)))
    assert (end.outcome, end.reason) == (ExitOutcome.FAILED, ExitReason.NOT_STARTED)
    assert error in end.error


async def test_a_program_that_never_begins_is_ended_after_the_stated_limit(
    bench: ProgramBench,
) -> None:
    handle = bench.start(bench.gang("import time; time.sleep(1e6)", launch={"stall_limit_s": 0.5}))
    end = await end_of(handle)
    assert (end.outcome, end.reason) == (ExitOutcome.FAILED, ExitReason.STALLED)
    assert "made no progress for" in end.error
    assert "after iteration 0" in end.error


LEAVES_A_CHILD = """
import os, subprocess, sys, time
child = "import os, time; open('child', 'w').write(str(os.getpid())); time.sleep(1e6)"
subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
while not os.path.exists("child"): time.sleep(0.01)
open("parent", "w").write(str(os.getpid()))
"""
"""A program that leaves a process in a session of its own."""


@pytest.mark.parametrize("is_killed", [False, True])
async def test_no_process_survives_the_program_or_a_keeper_that_was_killed(
    bench: ProgramBench, is_killed: bool
) -> None:
    program = LEAVES_A_CHILD + ("time.sleep(1e6)" if is_killed else "")
    handle = bench.start(bench.gang(program, launch=UNTIL_EXIT))
    files = [bench.store / "files" / name for name in ("child", "parent")]
    if is_killed:
        await until(lambda: all(map(pid_in, files)))
        handle.kill()
    end = await end_of(handle)
    assert end.reason is (ExitReason.KILLED if is_killed else None)
    assert not any(is_running(pid_in(file)) for file in files)


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
    launch = {"env": {"MINE": "1"}, **UNTIL_EXIT}
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
    assert (progress.iterations_done, progress.loss) == (10, 0.25)
    assert "Trainer counts 12 steps, but the job has 10 iterations" in progress.remark


async def test_a_member_whose_leader_never_comes_can_be_stopped(bench: ProgramBench) -> None:
    gang = bench.gang("pass", shares=(("n1", (0,)),), members=("n0", "n1"), member_gpus=(1, 1))
    handle = bench.start(gang, "n1")
    handle.stop()
    assert await end_of(handle) == STOPPED


SECRET = {"secrets": (SecretVariable(variable="TOKEN", name="token"),)}
PIPELINE = ExecutionPlan(
    stages=(PlanStage(start=0, end=3), PlanStage(start=3, end=6)), micro_batch=4, accumulation=2
)


@pytest.mark.parametrize(
    ("fields", "settings", "problem"),
    [
        ({}, {"refusal": "not encrypted"}, "encrypted"),
        ({"launch": {"image": "pytorch"}}, {}, "needs an engine that runs containers"),
        ({"launch": SECRET}, {}, "without --secrets-dir"),
        (
            {"launch": SECRET},
            {"secrets": Path("/none")},
            "does not exist on this node; put it into",
        ),
        ({}, {"users": UserRule(default="no-such-user")}, "no-such-user does not exist"),
        ({"runtime": TORCHRUN, "execution_plan": PIPELINE.to_json()}, {}, "torchrun cannot run it"),
    ],
)
def test_what_an_agent_cannot_run_is_refused_before_anything_starts(
    bench: ProgramBench, fields: dict[str, Any], settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidInput, match=problem):
        bench.start(bench.gang("pass", **fields), **settings)


@pytest.mark.parametrize("runtime", [TORCHRUN, DEEPSPEED, MEGATRON, JAX, ALPA])
def test_a_pipeline_without_a_plan_is_refused_by_each_runtime_that_needs_its_stages(
    bench: ProgramBench, runtime: str
) -> None:
    gang = bench.gang(("train.py",), runtime=runtime, pipeline_degree=2)
    with pytest.raises(InvalidInput) as refusal:
        bench.start(gang)
    assert str(refusal.value) == (
        "execution_plan: is missing for 2 pipeline stages; state a plan, or delete the Cell so that the"
        " server derives one with a plan"
    )


async def test_any_program_may_be_a_pipeline_without_a_plan(bench: ProgramBench) -> None:
    program = "import os; print('TESSERA_PLAN_FILE' in os.environ)"
    handle = bench.start(bench.gang(program, launch=UNTIL_EXIT, pipeline_degree=2))
    assert (await end_of(handle), bench.output()) == (SUCCESS, "False\n")


async def test_a_secret_reaches_the_environment_of_its_tenants_jobs_alone(
    bench: ProgramBench, tmp_path: Path
) -> None:
    (tmp_path / "blue").mkdir()
    (tmp_path / "blue" / "token").write_text("s3cret\n")
    program, launch = "import os; print(os.environ['TOKEN'])", {**SECRET, **UNTIL_EXIT}
    gang = bench.gang(program, launch=launch, tenant="blue")
    assert await end_of(bench.start(gang, secrets=tmp_path)) == SUCCESS
    assert bench.output() == "s3cret\n"
    for tenant, problem in (("red", "does not exist"), ("..", "cannot have secrets")):
        with pytest.raises(InvalidInput, match=problem):
            bench.start(bench.gang(program, 2, launch, tenant=tenant), secrets=tmp_path)


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


TUNE = """
import json, math
from tessera import progress
tuning = progress.tuning()
print(json.dumps(tuning), flush=True)
if tuning:
    progress.begin_tuning()
    progress.report_plan(tuning["plans"][-1], 0.25, 0.5)
"""
"""A program that runs by the last of the plans that it may try."""


PLANS = [a_plan(Workload(model="m", params="", global_batch=8), 2, zero=z) for z in (0, 1, 2)]


async def test_a_program_tries_plans_and_reports_the_one_it_runs_by(
    bench: ProgramBench, tuner: str
) -> None:
    fields: dict[str, Any] = {
        "runtime": tuner,
        "tuning_plans": tuple(plan.to_json() for plan in PLANS),
        "launch": {"tuning_space": "full", "tuning_budget_s": 30.0},
    }
    handle = bench.start(bench.gang(TUNE + train(), **fields))
    assert await end_of(handle) == SUCCESS
    tuning = json.loads(bench.output().partition("\n")[0])
    assert tuning["budget_s"] == 30.0
    plain = [json.dumps(p, sort_keys=True, separators=(",", ":")) for p in tuning["plans"]]
    assert plain == [plan.to_json() for plan in PLANS]
    progress = observed(handle)
    assert (progress.executed_plan, progress.executed_iter_time_s) == (PLANS[-1].to_json(), 0.25)
    assert (progress.planned_iter_time_s, progress.iterations_done, progress.remark) == (
        0.5,
        10,
        "",
    )
    for changes in ({"tuning_plans": ()}, {"runtime": TORCHRUN}):
        gang = bench.gang(TUNE, 2, **(fields | changes))
        runtime = ProgramRuntime(name=gang.launch.runtime, settings=bench.settings)
        start = runtime.derive_start(bench.member(gang))
        assert "TESSERA_TUNING_FILE" not in runtime.environment(start)


@pytest.mark.parametrize("done", [7, 25])
async def test_a_program_that_decides_its_end_may_do_fewer_or_more_iterations_than_expected(
    bench: ProgramBench, done: int
) -> None:
    program = train().replace("progress.iterations_total(10)", str(done))
    save = f"path = progress.checkpoint_path({done})\npath.touch()\n"
    save += f"open(path, 'w').write('1')\nprogress.report_checkpoint({done}, path)"
    handle = bench.start(bench.gang(f"{program}\n{save}", launch=UNTIL_EXIT))
    assert await end_of(handle) == SUCCESS
    assert (observed(handle).iterations_done, observed(handle).remark) == (done, "")
    assert observed(handle).checkpoint_iterations == done


async def test_a_program_that_decides_its_end_and_was_asked_to_stop_is_not_done(
    bench: ProgramBench,
) -> None:
    program = train(WAIT).replace("progress.iterations_total(10)", "10**9")
    handle = bench.start(bench.gang(program, launch=UNTIL_EXIT))
    await handle.begun()
    await until(lambda: observed(handle).iterations_done > 10)  # more than was expected
    handle.stop()
    async with asyncio.timeout(PATIENCE_S):
        assert await handle.ended() == STOPPED
    assert observed(handle).checkpoint_iterations == observed(handle).iterations_done


async def test_a_program_that_resumes_at_its_last_iteration_is_done_at_once(
    bench: ProgramBench,
) -> None:
    await end_of(bench.start(bench.gang(train("assert done < 10").replace("stops or", "True or"))))
    again = bench.start(bench.gang(train("1 / 0"), 2))
    assert await end_of(again) == SUCCESS
    assert (observed(again).iterations_done, observed(again).resumed_iterations) == (10, 10)


async def test_a_listed_checkpoint_proves_its_iterations(bench: ProgramBench) -> None:
    program = """
from tessera import progress
progress.report(3)
path = progress.checkpoint_path(10)
path.write_text("state")
progress.report_checkpoint(10, path)
"""
    handle = bench.start(bench.gang(program))
    assert await end_of(handle) == SUCCESS
    assert observed(handle).iterations_done == 10


async def test_the_leader_decides_for_its_gang(bench: ProgramBench) -> None:
    program = """
import os, time
from tessera import progress
here = progress.job_dir() / os.environ["TESSERA_GENERATION"]
if os.environ["TESSERA_NODE_RANK"] == "1":
    here.touch()
else:
    while not here.exists(): time.sleep(0.01)  # the other node must have met this one
    progress.report({done})
"""
    for generation, done in enumerate((9, 10), 1):
        gang = bench.gang(program.format(done=done), generation, **TWO_NODES)
        leader, follower = (bench.start(gang, node) for node in ("n0", "n1"))
        ends = await end_of(leader), await end_of(follower)
        assert [end.reason for end in ends] == [ExitReason.ENDED_EARLY if done < 10 else None, None]
        assert ends[1] == SUCCESS


SHOW = """
import importlib.util, json, os, sys
names = ("TESSERA_NODES", "TESSERA_NODE_GPUS", "TESSERA_COORDINATOR", "XLA_FLAGS")
shown = {name: os.environ.get(name) for name in names}
shown["words"] = sys.argv[1:]
shown["module"] = os.path.dirname(importlib.util.find_spec("tessera.jax").origin)
if "TESSERA_PLAN_FILE" in os.environ:
    from tessera import progress
    shown["stages"] = len(progress.plan()["stages"])
print(json.dumps(shown))
"""
"""A script that shows where it was started, without JAX."""


MEET = """
import os, time
folder, rank = os.environ["TESSERA_JOB_DIR"], int(os.environ["TESSERA_NODE_RANK"])
open(os.path.join(folder, f"here-{rank}"), "w").close()
while not os.path.exists(os.path.join(folder, f"here-{1 - rank}")):
    time.sleep(0.05)
"""
"""A script of two nodes that ends once both run. The first must not end before the other has begun."""


def a_jax_gang(bench: ProgramBench, program: str, *words: str, **fields: Any) -> pb.DesiredGang:
    """Return a gang of two GPUs whose command is a script."""
    script = bench.root / "train.py"
    script.write_text(program)
    return bench.gang((str(script), *words), runtime=JAX, **fields)


def shown_by(bench: ProgramBench, node_rank: int = 0) -> dict[str, Any]:
    """Return what the script has shown on a node."""
    shown: dict[str, Any] = json.loads(bench.output(rank=f"rank-{node_rank}"))
    return shown


async def test_a_script_of_jax_runs_once_on_its_node_and_finds_the_modules_of_the_client(
    bench: ProgramBench,
) -> None:
    launch = {"env": {"XLA_FLAGS": "--xla_own=1"}, **UNTIL_EXIT}
    gang = a_jax_gang(
        bench, SHOW, "--pp={plan.pp}", execution_plan=PIPELINE.to_json(), launch=launch
    )
    assert await end_of(bench.start(gang)) == SUCCESS, bench.output()
    shown = shown_by(bench)
    assert (shown["words"], shown["stages"]) == (["--pp=2"], 2)
    assert (shown["TESSERA_NODES"], shown["TESSERA_COORDINATOR"]) == ("1", None)
    assert shown["XLA_FLAGS"] == "--xla_own=1", "the user's flags stay"
    module = Path(shown["module"])
    assert module.is_relative_to(bench.settings.data_dir)
    assert {"__init__.py", "training.py", "plans.py"} <= {file.name for file in module.iterdir()}


async def test_the_scripts_of_several_nodes_get_the_address_and_port_of_the_first(
    bench: ProgramBench,
) -> None:
    gang = a_jax_gang(bench, SHOW + MEET, launch=UNTIL_EXIT, **TWO_NODES)
    handles = [bench.start(gang, node) for node in ("n0", "n1")]
    for handle in handles:
        assert await end_of(handle) == SUCCESS, bench.output()
    first, second = shown_by(bench), shown_by(bench, 1)
    host, _, port = first["TESSERA_COORDINATOR"].rpartition(":")
    assert host == bench.settings.address
    assert port.isdecimal()
    assert second["TESSERA_COORDINATOR"] == first["TESSERA_COORDINATOR"]
    assert (first["TESSERA_NODES"], second["TESSERA_NODE_GPUS"]) == ("2", "1")


FAIL = """
from tessera import progress
progress.report({done}, loss=float("nan"))
try:
    progress.fail("bad_checkpoint", "the shard of rank 3 is missing")
except SystemExit:
    pass
"""


@pytest.mark.parametrize("done", [9, 10])
async def test_the_end_that_a_program_states_counts_if_iterations_are_missing(
    bench: ProgramBench, done: int
) -> None:
    handle = bench.start(bench.gang(FAIL.format(done=done)))
    stated = MemberExit(
        outcome=ExitOutcome.FAILED,
        error="the shard of rank 3 is missing",
        reason=ExitReason.BAD_CHECKPOINT,
    )
    assert await end_of(handle) == (SUCCESS if done == 10 else stated)
    assert (observed(handle).iterations_done, observed(handle).HasField("loss")) == (done, False)
