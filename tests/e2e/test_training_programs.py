"""The example programs: they really train, are stopped and killed, and go on elsewhere."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tessera.formulation.job.execution_plan import ExecutionPlan, PlanStage, ZeroStage
from tessera.service.agent.runtimes.arguments.layout import RankLayout
from tessera.service.agent.runtimes.arguments.torchrun import torchrun_arguments
from tests.support.program_runs import NOTE_RANK, ProgramRun, free_port
from tests.support.torch_python import find_torch_python
from tests.support.waiting import until

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
GPT = str(EXAMPLES / "train_gpt.py")
PLAIN = str(EXAMPLES / "train_plain.py")
BATCH = 16
ENDLESS = 1_000_000
"""Iterations that no test waits for."""

TOLERANCE = 1e-5
"""The largest difference of losses between world sizes, at float32."""


def torchrun(python: str, world: int, plan: ExecutionPlan | None, *options: str) -> tuple[str, ...]:
    """Return the command of torchrun for the GPT, as an agent starts it."""
    layout = RankLayout(
        node_rank=0,
        member_gpus=(world,),
        address="127.0.0.1",
        port=str(free_port()),
        python=python,
        rank_program=NOTE_RANK,
    )
    return torchrun_arguments(layout, (GPT, *options), plan, BATCH).argv


def divided_plan(zero: ZeroStage, accumulation: int) -> ExecutionPlan:
    """Return a plan of two replicas that divide states."""
    stages = (PlanStage(start=0, end=4, dp=2),)
    return ExecutionPlan(
        stages=stages, micro_batch=BATCH // accumulation, accumulation=accumulation, zero=zero
    )


def in_file(plan: ExecutionPlan, folder: Path) -> dict[str, str]:
    """Write a plan where the program finds it. Return the variable that says so."""
    path = folder / f"{plan.digest}.json"
    path.write_text(plan.to_json())
    return {"TESSERA_PLAN_FILE": str(path)}


def last_executions(job: Path, total: int) -> dict[int, tuple[set[int], float]]:
    """Return the samples and the loss of each iteration, as it was executed last.

    A line that a kill cut off is left out. The iteration was executed again later.
    """
    done: dict[int, tuple[int, list[int], float]] = {}
    for path in (job / "ledger").iterdir():
        generation = int(path.name.partition("-")[0])
        for line in path.read_text().splitlines(keepends=True):
            if not line.endswith("\n"):
                continue
            entry = json.loads(line)
            number, samples, loss = entry["iteration"], entry["samples"], entry["loss"]
            last, others, _ = done.get(number, (-1, [], 0.0))
            if generation == last:
                done[number] = (generation, others + samples, loss)
            elif generation > last:
                done[number] = (generation, samples, loss)
    for number, (_, samples, _) in done.items():
        assert number >= total or len(samples) == len(set(samples)) == BATCH, number
    return {n: (set(samples), loss) for n, (_, samples, loss) in done.items() if n < total}


def checkpoint_of(run: ProgramRun, least: int) -> dict[str, Any] | None:
    """Return the last checkpoint if it is of at least ``least`` iterations, else None."""
    checkpoint: dict[str, Any] | None = run.progress.get("checkpoint")
    return checkpoint if checkpoint and checkpoint["iterations"] >= least else None


def test_a_gpt_goes_on_with_other_world_sizes_as_if_nothing_had_happened(tmp_path: Path) -> None:
    python = find_torch_python("numpy")
    job, alone = tmp_path / "job", tmp_path / "alone"
    for folder in (job, alone):
        folder.mkdir()

    plan = divided_plan(ZeroStage.PARAMETERS, accumulation=2)
    argv, variables = torchrun(python, 2, plan, "--pause-s", "0.02"), in_file(plan, tmp_path)
    with ProgramRun(job, 1, argv, ENDLESS, environment=variables) as run:
        until(lambda: run.progress.get("iterations", 0) >= 5, "5 iterations on 2 ranks")
        run.stop_ranks()
        run.wait()
        stopped = run.progress["checkpoint"]
        assert stopped["iterations"] == run.progress["iterations"]

    argv = torchrun(python, 1, None, "--pause-s", "0.02", "--every", "7")
    with ProgramRun(job, 2, argv, ENDLESS, resume=stopped) as run:
        killed = until(lambda: checkpoint_of(run, stopped["iterations"] + 1), "a checkpoint")
        until(lambda: run.progress["iterations"] > killed["iterations"], "a lost iteration")
        run.kill()

    total = killed["iterations"] + 10
    plan = divided_plan(ZeroStage.GRADIENTS, accumulation=1)
    variables = in_file(plan, tmp_path)
    with ProgramRun(
        job, 3, torchrun(python, 2, plan), total, resume=killed, environment=variables
    ) as run:
        run.wait()
        assert run.progress["checkpoint"]["iterations"] == run.progress["iterations"] == total

    with ProgramRun(alone, 1, (python, GPT), total) as run:
        run.wait()

    ours, undisturbed = (last_executions(folder, total) for folder in (job, alone))
    assert sorted(ours) == sorted(undisturbed) == list(range(total))
    for number, (samples, loss) in undisturbed.items():
        assert ours[number][0] == samples
        assert ours[number][1] == pytest.approx(loss, abs=TOLERANCE)
    seen = Counter(sample for samples, _ in ours.values() for sample in samples)
    assert max(seen.values()) - min(seen[sample] for sample in range(4096)) <= 1
    assert undisturbed[total - 1][1] < undisturbed[0][1]


def test_a_gpt_writes_a_checkpoint_when_one_is_requested_and_trains_on(tmp_path: Path) -> None:
    python = find_torch_python("numpy")
    argv = (python, GPT, "--every", str(ENDLESS), "--pause-s", "0.02")
    with ProgramRun(tmp_path, 1, argv, ENDLESS) as run:
        until(lambda: run.progress.get("iterations", 0) >= 3, "3 iterations")
        assert "checkpoint" not in run.progress
        run.request_checkpoint()
        done = until(lambda: checkpoint_of(run, 3), "a checkpoint")["iterations"]
        until(lambda: run.progress["iterations"] > done, "an iteration after the checkpoint")
        run.stop()
        run.wait()


LINE = re.compile(r"iteration (?P<iteration>[0-9]+) loss (?P<loss>[0-9.]+)")
"""The pattern that the program's text recommends."""


def lines_of(run: ProgramRun) -> dict[int, str]:
    return {int(m["iteration"]): m["loss"] for m in LINE.finditer(run.output)}


def test_a_program_without_a_framework_is_stopped_and_killed_and_prints_the_same_numbers(
    tmp_path: Path,
) -> None:
    endless = (sys.executable, PLAIN, "--every", "10", "--pause-s", "0.002")
    losses: dict[int, str] = {}
    with ProgramRun(tmp_path, 1, endless, ENDLESS) as run:
        until(lambda: len(lines_of(run)) >= 15, "15 iterations")
        run.stop()
        run.wait()
        stopped = run.progress["checkpoint"]
        losses |= lines_of(run)
        assert stopped["iterations"] == max(losses)
    with ProgramRun(tmp_path, 2, endless, ENDLESS, resume=stopped) as run:
        killed = until(lambda: checkpoint_of(run, stopped["iterations"] + 1), "a checkpoint")
        run.kill()
        again = {n: loss for n, loss in lines_of(run).items() if n <= killed["iterations"]}
        assert min(again) == stopped["iterations"] + 1
        losses |= again
    total = killed["iterations"] + 5
    with ProgramRun(tmp_path, 3, endless, total, resume=killed) as run:
        run.wait()
        losses |= lines_of(run)
    with ProgramRun(tmp_path, 4, (sys.executable, PLAIN), total) as run:
        run.wait()
        assert lines_of(run) == losses
        assert sorted(losses) == list(range(1, total + 1))
        assert float(losses[total]) < float(losses[1])
