"""Jobs of the runtime alpa under keepers, with a stand-in for the image."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from tessera.formulation.job.execution_plan import ExecutionPlan, PlanStage
from tessera.formulation.job.runtimes import ALPA
from tessera.v1 import agents_pb2 as pb
from tests.support.programs import ProgramBench

IMAGE: Final = Path(__file__).parent / "alpa_image"

PROGRAM: Final = """
import os, sys, time
import alpa
{head}
def build(plan):
    print("plan of", plan and plan["stages"], "with", sys.argv[1:])
    def train_step(state, batch):
        {step}
        error = state["w"] - batch
        return {{"w": state["w"] - 0.25 * error}}, error * error
    return train_step, {{"w": 1.0}}, lambda iteration: iteration % 3 / 4
"""
"""A program of a user. ``head`` comes before ``build``, and ``step`` in each step of training."""


def two_stages(**changes: Any) -> ExecutionPlan:
    """Return a plan of two stages on one GPU each, for a batch of 8."""
    stages = PlanStage(start=0, end=2), PlanStage(start=2, end=3)
    values: dict[str, Any] = {"stages": stages, "micro_batch": 4, "accumulation": 2}
    return ExecutionPlan(**(values | changes))


def an_alpa_gang(
    bench: ProgramBench,
    generation: int = 1,
    *,
    step: str = "pass",
    head: str = "",
    plan: ExecutionPlan | None = None,
    environment: dict[str, str] | None = None,
    launch: dict[str, Any] | None = None,
    **fields: Any,
) -> pb.DesiredGang:
    """Return a gang that runs a program in the image."""
    script = bench.root / f"train-{generation}.py"
    script.write_text(PROGRAM.format(step=step, head=head))
    return bench.gang(
        (str(script), "--lr", "0.25"),
        generation,
        {"env": {"PYTHONPATH": str(IMAGE), **(environment or {})}, **(launch or {})},
        runtime=ALPA,
        execution_plan="" if plan is None else plan.to_json(),
        **fields,
    )


def calls_of(bench: ProgramBench, name: str, file: str = "alpa-calls.jsonl") -> list[Any]:
    """Return the arguments of each call of Alpa's ``name``."""
    lines = (bench.store / "files" / file).read_text().splitlines()
    return [values for called, values in map(json.loads, lines) if called == name]
