"""Programs of the runtime jax under keepers: their environment, their modules and their own ends."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tessera.formulation.errors import InvalidInput
from tessera.formulation.execution_plan import ExecutionPlan, PlanStage
from tessera.formulation.exit_reasons import ExitReason
from tessera.formulation.runtimes import JAX
from tessera.formulation.values import Cell
from tessera.service.agent.gangs import Gang
from tessera.service.agent.runtimes.protocol import ExitOutcome, MemberExit
from tests.support.programs import UNTIL_EXIT, ProgramBench, end_of

SUCCESS = MemberExit(outcome=ExitOutcome.SUCCEEDED)

SHOW = """
import importlib.util, json, os, sys
names = ("RANK", "TESSERA_NODES", "TESSERA_NODE_GPUS", "TESSERA_COORDINATOR", "XLA_FLAGS")
shown = {name: os.environ.get(name) for name in names}
shown["words"] = sys.argv[1:]
shown["module"] = os.path.dirname(importlib.util.find_spec("tessera.jax").origin)
shown["files"] = sorted(os.listdir(shown["module"]))
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

FAIL = """
from tessera import progress
progress.report(4, loss=float("nan"))
progress.fail("{reason}", "the loss of iteration 4 is nan; lower the learning rate")
"""


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[ProgramBench]:
    program_bench = ProgramBench(tmp_path)
    yield program_bench
    await program_bench.clean()


def a_jax_gang(bench: ProgramBench, program: str, *words: str, **fields: Any) -> Gang:
    """Return a gang of two GPUs whose command is a script."""
    script = bench.root / "train.py"
    script.write_text(program)
    return bench.gang((str(script), *words), runtime=JAX, **fields)


def a_pipeline(shape: tuple[int, ...] = ()) -> ExecutionPlan:
    """Return a plan of two stages on one GPU each."""
    stages = PlanStage(start=0, end=3), PlanStage(start=3, end=6)
    return ExecutionPlan(stages=stages, micro_batch=4, accumulation=2, shape=shape)


def two_nodes(gpus: int) -> dict[str, Any]:
    """Return the fields of a gang on the first GPUs of two nodes."""
    shares = tuple((node, tuple(range(gpus))) for node in ("n0", "n1"))
    cell = Cell(gpu_type="a100", gpus=2 * gpus, pipeline_degree=1, nodes=2)
    return {"cell": cell, "shares": shares, "members": ("n0", "n1"), "member_gpus": (gpus, gpus)}


def shown_by(bench: ProgramBench, node_rank: int = 0) -> dict[str, Any]:
    """Return what the script has shown on a node."""
    shown: dict[str, Any] = json.loads(bench.output(rank=f"rank-{node_rank}"))
    return shown


async def test_a_script_runs_once_on_its_node_and_finds_the_modules_of_the_client(
    bench: ProgramBench,
) -> None:
    fields: dict[str, Any] = {
        "execution_plan": a_pipeline().to_json(),
        "launch": {"environment": {"XLA_FLAGS": "--xla_own=1"}, **UNTIL_EXIT},
    }
    gang = a_jax_gang(bench, SHOW, "--pp={plan.pp}", **fields)
    assert await end_of(bench.start(gang)) == SUCCESS, bench.output()
    shown = shown_by(bench)
    assert shown["words"] == ["--pp=2"]
    assert shown["stages"] == 2
    assert (shown["TESSERA_NODES"], shown["TESSERA_COORDINATOR"]) == ("1", None)
    assert shown["XLA_FLAGS"] == "--xla_own=1", "the user's flags stay"
    site = Path(shown["module"])
    assert site.is_relative_to(bench.settings.data_dir)
    assert {"__init__.py", "training.py", "plans.py"} <= set(shown["files"])


async def test_the_scripts_of_several_nodes_get_the_address_and_port_of_the_first(
    bench: ProgramBench,
) -> None:
    gang = a_jax_gang(bench, SHOW + MEET, launch=UNTIL_EXIT, **two_nodes(2))
    handles = [bench.start(gang, node) for node in ("n0", "n1")]
    for handle in handles:
        assert await end_of(handle) == SUCCESS, bench.output()
    first, second = shown_by(bench), shown_by(bench, 1)
    host, _, port = first["TESSERA_COORDINATOR"].rpartition(":")
    assert host == bench.settings.address
    assert port.isdecimal()
    assert second["TESSERA_COORDINATOR"] == first["TESSERA_COORDINATOR"]
    assert (first["TESSERA_NODES"], second["TESSERA_NODE_GPUS"]) == ("2", "2")


@pytest.mark.parametrize("reason", ["loss_not_finite", "refused", "bad_checkpoint"])
async def test_the_end_that_a_program_states_is_the_jobs_error(
    bench: ProgramBench, reason: str
) -> None:
    handle = bench.start(a_jax_gang(bench, FAIL.format(reason=reason)))
    end = await end_of(handle)
    assert (end.outcome, end.reason) == (ExitOutcome.FAILED, ExitReason(reason))
    assert end.error == "the loss of iteration 4 is nan; lower the learning rate"


async def test_a_loss_that_is_no_number_does_not_hide_the_iterations(bench: ProgramBench) -> None:
    handle = bench.start(a_jax_gang(bench, FAIL.format(reason="loss_not_finite")))
    await end_of(handle)
    progress = handle.observe()
    assert progress is not None
    assert (progress.iterations, progress.loss) == (4.0, None)


@pytest.mark.parametrize("done", [10, 9])
async def test_the_end_that_a_program_states_counts_only_if_iterations_are_missing(
    bench: ProgramBench, done: int
) -> None:
    program = f"""
from tessera import progress
progress.report({done})
try:
    progress.fail("refused", "changed its mind")
except SystemExit:
    pass
"""
    end = await end_of(bench.start(a_jax_gang(bench, program)))
    refused = MemberExit(
        outcome=ExitOutcome.FAILED, error="changed its mind", reason=ExitReason.REFUSED
    )
    assert end == (SUCCESS if done == 10 else refused)


def test_a_pipeline_over_several_nodes_is_refused_before_anything_starts(
    bench: ProgramBench,
) -> None:
    for shape, problem in (((), "on 2 nodes"), ((1, 1), "on several nodes")):
        gang = a_jax_gang(
            bench,
            SHOW,
            **two_nodes(1),
            execution_plan=a_pipeline(shape).to_json(),
        )
        with pytest.raises(InvalidInput, match=problem):
            bench.start(gang)
