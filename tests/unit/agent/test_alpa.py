"""Alpa: plans in its own options, the runner that calls it, and the keeper that listens to the runner."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from inspect import Parameter
from itertools import chain
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.execution_plan import (
    ExecutionPlan,
    PlanStage,
    Precision,
    Recomputation,
    Schedule,
    ZeroStage,
)
from tessera.formulation.job.exit_reasons import ExitReason
from tessera.formulation.job.runtimes import ALPA, RUNTIMES
from tessera.formulation.job.submeshes import slice_nodes
from tessera.service.agent.runtimes.arguments import alpa
from tessera.service.agent.runtimes.arguments.alpa import (
    REPORT_PREFIX,
    RUNNER,
    alpa_arguments,
    alpa_document,
)
from tessera.service.agent.runtimes.arguments.layout import RankLayout
from tessera.service.agent.runtimes.protocol import ExitOutcome, MemberExit
from tessera.v1 import agents_pb2 as pb
from tests.support.agents import until
from tests.support.alpa_conversations import (
    CLEAN,
    REPORT,
    reported,
    write_conversation,
    write_replay,
)
from tests.support.alpa_image.alpa_record import RECORD, signature_of
from tests.support.alpa_jobs import an_alpa_gang, calls_of, two_stages
from tests.support.execution_plans import execution_plans
from tests.support.laws import examples
from tests.support.programs import (
    ENDLESS,
    STOPPED,
    SUCCESS,
    TWO_NODES,
    ProgramBench,
    end_of,
    observed,
    stop,
)

SCRIPT = "train.py"
SLOWLY = "time.sleep(0.05)"


def a_layout(*gpus: int, node_rank: int = 0) -> RankLayout:
    """Return nodes with these numbers of GPUs."""
    return RankLayout(
        node_rank=node_rank,
        member_gpus=gpus,
        address="10.0.0.1",
        port="29500",
        python="/opt/alpa/bin/python",
    )


def a_plan(*degrees: tuple[int, int], layers: int = 2, **changes: Any) -> ExecutionPlan:
    """Return a plan with a stage for each pair of ``dp`` and ``tp``, for a batch of 16."""
    stages = tuple(
        PlanStage(start=layers * i, end=layers * (i + 1), dp=dp, tp=tp)
        for i, (dp, tp) in enumerate(degrees)
    )
    values: dict[str, Any] = {"stages": stages, "micro_batch": 8, "accumulation": 2}
    return ExecutionPlan(**(values | changes))


def method_of(layout: RankLayout, plan: ExecutionPlan | None) -> dict[str, Any]:
    arguments = alpa_arguments(layout, (SCRIPT,), plan, 16)
    method: dict[str, Any] = json.loads(arguments.stdin)["method"]
    return method


def test_the_runner_gets_the_plan_on_its_standard_input() -> None:
    plan = a_plan((2, 2))
    arguments = alpa_arguments(a_layout(4), ("-m", "lab.train", "--tp", "{plan.tp}"), plan, 16)
    assert arguments.argv == (
        *("/opt/alpa/bin/python", "-u", RUNNER, "-m", "lab.train", "--tp", "2"),
    )
    assert arguments.report_prefix == REPORT_PREFIX
    document = json.loads(arguments.stdin)
    assert document["plan"] == json.loads(plan.to_json())
    assert document["cluster"] == {"num_nodes": 1, "num_devices_per_node": 4}


def test_a_plan_of_unequal_stages_keeps_each_stages_layers_gpus_and_degrees() -> None:
    plan = a_plan((4, 1), (1, 2), (2, 1), zero=ZeroStage.GRADIENTS, schedule=Schedule.GPIPE)
    method = method_of(a_layout(8), plan)
    assert method["pipeline_schedule"] == "gpipe"
    assert method["num_micro_batches"] == 2
    assert method["layer_option"] == {"remat_layer": False}
    assert method["stage_option"] == {
        "forward_stage_layer_ids": [[0, 1], [2, 3], [4, 5]],
        "submesh_physical_shapes": [[1, 4], [1, 2], [1, 2]],
        "submesh_logical_shapes": [[4, 1], [1, 2], [2, 1]],
        "submesh_autosharding_option_dicts": [
            {"force_data_parallel": True, "prefer_reduce_scatter": True},
            {"force_batch_dim_to_mesh_dim": 0, "prefer_reduce_scatter": True},
            {"force_data_parallel": True, "prefer_reduce_scatter": True},
        ],
    }


def test_plans_of_one_stage_and_of_several_nodes_and_none_have_their_own_options() -> None:
    method = method_of(a_layout(4, 4, 4, node_rank=1), a_plan((2, 1), (8, 1), (1, 2)))
    assert method["stage_option"]["submesh_physical_shapes"] == [[1, 2], [2, 4], [1, 2]]
    again = method_of(a_layout(4, 4), a_plan((4, 2), recomputation=Recomputation.FULL))
    assert again["kind"] == "PipeshardParallel"  # a pipeline of one stage
    assert again["layer_option"] == {"remat_layer": True}
    assert again["stage_option"]["submesh_physical_shapes"] == [[2, 4]]
    assert again["stage_option"]["submesh_logical_shapes"] == [[4, 2]]
    zero_3 = method_of(a_layout(4), a_plan((4, 1), zero=ZeroStage.PARAMETERS))
    assert zero_3["auto_sharding_option"] == {"force_zero_stage_3": True}
    document = alpa_document(a_layout(4, 4), None)
    assert document["plan"] is None
    assert document["method"]["kind"] == "ShardParallel"  # Alpa chooses
    assert document["method"]["auto_sharding_option"] == {}


@examples(300)
@given(execution_plans(), st.sampled_from([1, 2, 4]))
def test_every_plan_is_refused_or_stated_in_options_that_alpa_takes(
    plan: ExecutionPlan, nodes: int
) -> None:
    gpus = plan.gpus
    if RUNTIMES[ALPA].refuse_plan(plan) or gpus % nodes:
        return
    layout = a_layout(*[gpus // nodes] * nodes)
    sizes = [stage.gpus for stage in plan.stages]
    if slice_nodes(sizes, nodes, gpus // nodes) is None:
        assert nodes > 1  # parts of one node always fit
        with pytest.raises(InvalidInput, match="largest stage first"):
            alpa_arguments(layout, (SCRIPT,), plan, plan.global_batch)
        return
    arguments = alpa_arguments(layout, (SCRIPT,), plan, plan.global_batch)
    method = json.loads(arguments.stdin)["method"]
    options = method.get("stage_option", {}).get("submesh_autosharding_option_dicts", [])
    for values in (*options, method.get("auto_sharding_option", {})):
        signature_of("AutoShardingOption").bind(**values)
    if method["kind"] == "ShardParallel":
        assert method["logical_shape"] == [plan.stages[0].dp, plan.stages[0].tp]
        return
    signature_of("ManualLayerOption").bind(**method["layer_option"])
    signature_of("ManualStageOption").bind(**method["stage_option"])
    stages = method["stage_option"]
    assert list(chain(*stages["forward_stage_layer_ids"])) == list(range(plan.layers))
    shapes = zip(stages["submesh_physical_shapes"], stages["submesh_logical_shapes"], strict=True)
    for (hosts, devices), (dp, tp) in shapes:
        assert hosts * devices == dp * tp


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        (a_plan((2, 2), zero=ZeroStage.PARAMETERS), "ZeRO stage 3 and divides tensors"),
        (a_plan((4, 1), recomputation=Recomputation.SELECTIVE), "recomputes attention alone"),
        (a_plan((4, 1), precision=Precision.FP8), "fp8"),
        (a_plan(*4 * [(1, 1)], schedule=Schedule.INTERLEAVED, chunks=2), "interleaved"),
        (a_plan((4, 1), (2, 1), shape=(4, 2)), "different numbers of GPUs"),
        (a_plan((2, 3), (2, 1), shape=(4, 4)), "stages of 6, 2 GPUs on 2 nodes of 4"),
        (
            ExecutionPlan(stages=(PlanStage(start=0, end=3, tp=2, sp=True),), micro_batch=2),
            "which Alpa decides itself",
        ),
    ],
)
def test_a_plan_that_alpa_cannot_run_is_refused(plan: ExecutionPlan, problem: str) -> None:
    assert problem in RUNTIMES[ALPA].refuse_plan(plan)


@pytest.mark.parametrize(
    ("gpus", "plan", "problem"),
    [
        ((4, 2), None, "different numbers of GPUs"),
        ((2, 2), a_plan((3, 1), (1, 1), micro_batch=24), "stages of 3, 1 GPUs on 2 nodes of 2"),
        ((8,), a_plan((4, 1)), "is for 4 GPUs, but the gang has 8"),
    ],
)
def test_a_gang_that_does_not_fit_is_refused(
    gpus: Sequence[int], plan: ExecutionPlan | None, problem: str
) -> None:
    with pytest.raises(InvalidInput, match=problem):
        alpa_arguments(a_layout(*gpus), (SCRIPT,), plan, plan.global_batch if plan else 16)


@pytest.fixture
def replayed(bench: ProgramBench, monkeypatch: pytest.MonkeyPatch) -> ProgramBench:
    """Return a bench whose jobs repeat a conversation instead of running Alpa."""
    monkeypatch.setattr(alpa, "RUNNER", str(write_replay(bench.root)))
    return bench


async def run(
    bench: ProgramBench, *parts: str, end: str = "0", **fields: Any
) -> tuple[MemberExit, pb.ObservedGang]:
    """Return how a job that says ``parts`` ended, and its progress."""
    write_conversation(bench.root, *parts, end=end)
    handle = bench.start(an_alpa_gang(bench, **fields))
    return await end_of(handle), observed(handle)


async def test_the_recorded_conversation_is_the_runners_and_is_understood(
    bench: ProgramBench,
) -> None:
    handle = bench.start(an_alpa_gang(bench, iterations_total=4))
    assert await end_of(handle) == SUCCESS
    assert bench.output() == CLEAN
    assert (observed(handle).iterations_done, observed(handle).loss) == (4, 0.3525390625)
    assert observed(handle).remark == ""


RUBBISH = (
    "Compiling...\n",
    '{"iterations": 9}\n',
    f"{REPORT}\n",
    f"{REPORT}nonsense\n",
    f"{REPORT}[9]\n",
    f"{REPORT}9\n",
    f"{REPORT}{'[' * 3000}\n",
    f'{REPORT}{{"iterations": 9, "loss": 0.5\n',
    f'{REPORT}{{"steps": 9}}\n',
    f'{REPORT}{{"checkpoint": 9}}\n',
    f'{REPORT}{{"failure": "bad"}}\n',
    "\xff\xfe\x00\r\n",
    "x" * 20_000 + "\n",
    5_000 * "a line\n",
    20_000 * "progress ",
    "progress without an end of the line ",
)


async def test_rubbish_between_reports_is_left_out(replayed: ProgramBench) -> None:
    parts = [part for k, text in enumerate(RUBBISH, 1) for part in (reported(k), text)]
    last = reported(len(RUBBISH) + 1, 0.25)
    end, progress = await run(
        replayed, *parts, last[:20], last[20:], iterations_total=len(RUBBISH) + 1
    )
    assert end == SUCCESS
    assert (progress.iterations_done, progress.loss) == (len(RUBBISH) + 1, 0.25)
    assert progress.remark == ""


@pytest.mark.parametrize(
    "report",
    [
        reported(3, "nan"),
        reported(3, 10.0**301),
        reported(3, [1]),
        reported(1),
        reported(11),
        reported([2]),
    ],
)
async def test_numbers_that_cannot_be_are_named_and_the_others_count(
    replayed: ProgramBench, report: str
) -> None:
    _, progress = await run(replayed, reported(2), report)
    assert progress.iterations_done == (3 if '"iterations": 3' in report else 2)
    assert progress.loss == 0.5
    assert "that was ignored" in progress.remark


def losses(iterations: int) -> list[float]:
    """Return the losses of the program, computed here."""
    weight, found = 1.0, []
    for iteration in range(iterations):
        error = weight - iteration % 3 / 4
        weight -= 0.25 * error
        found.append(error * error)
    return found


@pytest.mark.parametrize("plan", [None, two_stages()])
async def test_a_job_trains_by_the_plan_in_alpas_options_or_leaves_the_choice_to_alpa(
    bench: ProgramBench, plan: ExecutionPlan | None
) -> None:
    handle = bench.start(an_alpa_gang(bench, plan=plan))
    assert await end_of(handle) == SUCCESS
    progress = observed(handle)
    assert (progress.iterations_done, progress.runtime, progress.remark) == (10, "alpa", "")
    assert progress.loss == losses(10)[-1]
    if plan is None:
        (method,) = calls_of(bench, "ShardParallel")
        assert method == {"devices": None, "num_micro_batches": None, "auto_sharding_option": {}}
        return
    (method,) = calls_of(bench, "PipeshardParallel")
    assert (method["num_micro_batches"], method["pipeline_schedule"]) == (2, "1f1b")
    assert method["stage_option"]["forward_stage_layer_ids"] == [[0, 1], [2]]
    assert method["stage_option"]["submesh_physical_shapes"] == [[1, 1], [1, 1]]
    (cluster,) = calls_of(bench, "init")
    assert cluster == {"cluster": "ray", "num_nodes": 1, "num_devices_per_node": 2}
    stages = "[{'end': 2, 'start': 0}, {'end': 3, 'start': 2}]"
    assert f"plan of {stages} with ['--lr', '0.25']" in bench.output()


async def test_a_stopped_job_goes_on_from_its_checkpoint(bench: ProgramBench) -> None:
    first = bench.start(
        an_alpa_gang(bench, step=SLOWLY, iterations_total=ENDLESS, plan=two_stages())
    )
    await first.begun()
    first.request_checkpoint()
    asked = await until(lambda: observed(first).checkpoint_iterations)
    await until(lambda: observed(first).iterations_done > asked)
    assert len(calls_of(bench, "save_checkpoint")) == 1
    await stop(first)
    done = int(observed(first).checkpoint_iterations)
    assert done == observed(first).iterations_done > asked
    second = bench.start(an_alpa_gang(bench, 2, iterations_total=done + 3))
    assert await end_of(second) == SUCCESS
    assert observed(second).resumed_iterations == done
    assert observed(second).loss == pytest.approx(losses(done + 3)[-1], abs=1e-12)
    assert len(calls_of(bench, "restore_checkpoint")) == 1


async def test_a_checkpoint_that_a_worker_did_not_write_is_not_reported(
    bench: ProgramBench,
) -> None:
    gang = an_alpa_gang(
        bench, step=SLOWLY, iterations_total=ENDLESS, environment={"FAKE_ALPA": "loses parts"}
    )
    handle = bench.start(gang)
    await handle.begun()
    handle.request_checkpoint()
    end = await handle.ended()
    assert (end.outcome, end.reason) == (ExitOutcome.FAILED, ExitReason.ERROR)
    assert "no worker wrote" in end.error
    assert not observed(handle).HasField("checkpoint_iterations")


async def test_output_of_the_program_does_not_disturb_reports(bench: ProgramBench) -> None:
    step = (
        """print('{"iterations": 9999}'); print("half a line", end=""); os.write(1, b"\\xff@tes")"""
    )
    handle = bench.start(an_alpa_gang(bench, step=step))
    assert await end_of(handle) == SUCCESS
    assert (observed(handle).iterations_done, observed(handle).remark) == (10, "")


@pytest.mark.parametrize("head", ["", "STOP_IF_NOT_FINITE = False"])
async def test_a_loss_that_is_not_a_number_ends_the_job_unless_it_wants_to_go_on(
    bench: ProgramBench, head: str
) -> None:
    handle = bench.start(an_alpa_gang(bench, head=head, step="batch = float('nan')"))
    end = await end_of(handle)
    assert end.reason is (None if head else ExitReason.LOSS_NOT_FINITE)
    assert end.error == ("" if head else "the loss of iteration 1 is nan")
    assert observed(handle).iterations_done == (10 if head else 1)
    assert not observed(handle).HasField("loss")
    assert "nan" in observed(handle).remark


@pytest.mark.parametrize(
    ("program", "environment", "reason", "error"),
    [
        ("1 / 0", {}, ExitReason.ERROR, "ZeroDivisionError: division by zero"),
        ("import absent", {}, ExitReason.NOT_STARTED, "No module named 'absent'"),
        ("def train(): ...", {}, ExitReason.REFUSED, "defines no function build(plan)"),
        ("", {"FAKE_RAY": "fails"}, ExitReason.ERROR, "Ray did not start on this node"),
        ("", {"PYTHONPATH": ""}, ExitReason.NOT_STARTED, "No module named 'alpa'"),
    ],
)
async def test_a_program_that_cannot_begin_fails_with_its_reason(
    bench: ProgramBench,
    program: str,
    environment: dict[str, str],
    reason: ExitReason,
    error: str,
) -> None:
    gang = an_alpa_gang(bench, environment=environment)
    if program:
        (bench.root / "train-1.py").write_text(program)
    end = await end_of(bench.start(gang))
    assert (end.outcome, end.reason) == (ExitOutcome.FAILED, reason)
    assert error in end.error


@pytest.mark.parametrize(
    ("environment", "error"),
    [
        ({}, "no checkpoint of the job is intact"),
        ({"FAKE_ALPA": "cannot restore"}, "cannot be restored: ValueError('another model')"),
    ],
)
async def test_a_checkpoint_with_a_missing_part_or_of_another_model_is_bad(
    bench: ProgramBench, environment: dict[str, str], error: str
) -> None:
    first = bench.start(an_alpa_gang(bench, step=SLOWLY, iterations_total=ENDLESS))
    await first.begun()
    await until(lambda: observed(first).iterations_done > 0)
    await stop(first)
    if not environment:
        (part,) = bench.store.glob("generation-1/iteration-*/state.w/metadata_0")
        part.unlink()
    gang = an_alpa_gang(bench, 2, iterations_total=ENDLESS, environment=environment)
    end = await end_of(bench.start(gang))
    assert (end.outcome, end.reason) == (ExitOutcome.FAILED, ExitReason.BAD_CHECKPOINT)
    assert error in end.error


async def test_nodes_join_the_first_one_and_stay_until_it_has_ended(bench: ProgramBench) -> None:
    gang = an_alpa_gang(bench, step=SLOWLY, iterations_total=ENDLESS, **TWO_NODES)
    leader, follower = bench.start(gang, "n0"), bench.start(gang, "n1")
    await leader.begun()
    await until(lambda: observed(leader).iterations_done > 0)
    follower.stop()
    await stop(leader)
    assert await follower.ended() == STOPPED
    assert observed(leader).checkpoint_iterations
    starts = (bench.store / "files" / "ray-starts.jsonl").read_text().splitlines()
    (head, *joined) = map(json.loads, starts)
    assert head == [True, None, "1"]
    assert [[is_head, gpus] for is_head, _, gpus in joined] == [[False, "1"]]
    assert calls_of(bench, "init")[0]["num_nodes"] == 2


ROOT: Final = Path(__file__).parents[3]


RUNNER_FILE: Final = ROOT / "service" / "agent" / "programs" / "alpa_runner.py"


METHODS: Final = {
    "get_logical_mesh": ("PhysicalDeviceMesh.get_logical_mesh",),
    "get_executable": ("ParallelizedFunc.get_executable",),
    "get_last_executable": ("ParallelizedFunc.get_last_executable",),
    "get_input_placement_specs": (
        "MeshDriverExecutable.get_input_placement_specs",
        "PipeshardDriverExecutable.get_input_placement_specs",
    ),
    "sync": ("MeshDriverExecutable.sync", "PipeshardDriverExecutable.sync"),
}
"""The methods of Alpa's objects that the runner calls, and where they are recorded."""


def parse_runner() -> ast.Module:
    return ast.parse(RUNNER_FILE.read_text(), feature_version=(3, 8))


def calls_of_alpa(tree: ast.Module) -> list[tuple[str, ast.Call]]:
    """Return the calls of Alpa's functions and methods, with their names in the record."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(function := node.func, ast.Attribute):
            continue
        if isinstance(function.value, ast.Name) and function.value.id == "alpa":
            found.append((function.attr, node))
        else:
            found += [(name, node) for name in METHODS.get(function.attr, ())]
    return found


def bind(name: str, call: ast.Call) -> None:
    """Raise TypeError unless Alpa takes the arguments of ``call``."""
    keywords = {k.arg: None for k in call.keywords if k.arg is not None}
    signature_of(name).bind(*call.args, **keywords)


def test_the_runner_has_the_syntax_of_python_3_8_and_needs_nothing_but_alpa() -> None:
    imported = {
        name.partition(".")[0]
        for node in ast.walk(parse_runner())
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
        )
    }
    assert imported - set(sys.stdlib_module_names) == {"alpa"}


def test_alpa_takes_every_call_that_the_runner_makes() -> None:
    calls = calls_of_alpa(parse_runner())
    for name, call in calls:
        assert "." in name or name in RECORD["exported"], name
        bind(name, call)
    names = {name for name, _ in calls}
    assert names == set(RECORD["parameters"]) - {
        "ParallelizedFunc.__call__",  # a call of what parallelize returns
        *("grad", "value_and_grad", "mark_pipeline_boundary"),  # of users' programs
    }


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("init", "alpa.init(cluster='ray', nodes=2)"),
        ("restore_checkpoint", "alpa.restore_checkpoint('path', 3)"),
        ("ManualLayerOption", "alpa.ManualLayerOption(False, (), 3)"),
    ],
)
def test_a_call_that_alpa_does_not_take_is_found(name: str, call: str) -> None:
    ((found, node),) = calls_of_alpa(ast.parse(call))
    assert found == name
    with pytest.raises(TypeError):
        bind(found, node)


def test_the_runner_begins_its_reports_with_the_prefix_and_the_record_is_small() -> None:
    assert f'REPORT = "{REPORT_PREFIX}"' in RUNNER_FILE.read_text()
    for name, pairs in RECORD["parameters"].items():
        assert all(isinstance(text, str) and len(text) < 60 for text, _ in pairs), name
    assert signature_of("restore_checkpoint").parameters["step"].default is Parameter.empty


@pytest.mark.skipif(
    "TESSERA_ALPA_WHEEL" not in os.environ,
    reason="TESSERA_ALPA_WHEEL names no wheel of Alpa (pip download alpa==0.2.3 --no-deps)",
)
def test_the_record_is_that_of_the_real_package() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "alpa_signatures.py"), "--check"]
    subprocess.run([*command, os.environ["TESSERA_ALPA_WHEEL"]], check=True)
