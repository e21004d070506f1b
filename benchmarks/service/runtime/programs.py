"""The programs of the benchmark's jobs, with descriptions of their models."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from tessera.formulation.execution_plan import ExecutionPlan, PlanStage, Precision, ZeroStage
from tessera.formulation.runtimes import COMMAND, TORCHRUN
from tessera.formulation.values import Workload

ROOT: Final = Path(__file__).resolve().parents[3]
GPT: Final = ROOT / "docs" / "examples" / "train_gpt.py"
MADE_PYTHON: Final = ROOT / "build" / "torch" / "bin" / "python"
"""The interpreter that ``scripts/torch_env.py`` makes."""

PLAIN_BATCH: Final = 8
LAYERS: Final = 4
"""Layers of the described models: an embedding, two blocks and a head."""

ARCHITECTURE: Final = (
    '{"architecture": "transformer", "layers": 2, "hidden": 32, "heads": 2,'
    ' "sequence": 32, "vocabulary": 64, "dtype": "f32"}'
)
"""The sizes of ``train_gpt.py``. The plain program, which is no transformer, is described as one of
them, too: it stands for a user's model whose description is inexact."""

STEADY: Final = """
import sys, time
from tessera import progress
progress.catch_stop()
done, pause_s, stops = progress.resume_iterations(), float(sys.argv[1]), False
while done < progress.iterations_total(1) and not stops:
    time.sleep(pause_s)
    done += 1
    progress.report(done, loss=1 / done)
    stops = progress.stop_requested()  # once, so that every stop has its checkpoint
    if stops or progress.checkpoint_requested():
        path = progress.checkpoint_path(done)
        path.write_text(str(done))
        progress.report_checkpoint(done, path)
    print("iteration", done, flush=True)
"""
"""A program that waits in each iteration, for measuring what Tessera itself costs."""

PLANNED: Final = """
import json
from tessera import progress

WEIGHTS, HALF = 12_000, 6_000
progress.catch_stop()
plan = progress.plan() or {}
count, zero = plan.get("accumulation", 1), plan.get("zero", 0)
stages = len(plan.get("stages", [0]))
batch, done, stops = progress.global_batch(8), progress.resume_iterations(), False
weights = [0.0] * WEIGHTS
if done:
    weights = json.loads(progress.resume_path().read_text())
while done < progress.iterations_total(1) and not stops:
    total, loss = [0.0] * WEIGHTS, 0.0
    for part in range(count):
        held = weights
        if zero:  # each half is gathered from its owner
            held = [float(value) for value in weights[:HALF]] + [float(v) for v in weights[HALF:]]
        gradient = [0.0] * WEIGHTS
        for sample in range(batch // count):
            x = ((done * batch + part * (batch // count) + sample) * 37 % 100) / 100 - 0.5
            inputs = [x + k % 7 for k in range(WEIGHTS)]
            for _ in range(stages - 1):  # a stage hands its activations to the next
                inputs = [float(value) for value in inputs]
            error = sum(w * i for w, i in zip(held, inputs)) - x
            loss += error * error / batch
            gradient = [g + error * i for g, i in zip(gradient, inputs)]
        norm = sum(g * g for g in gradient) ** 0.5  # each micro-batch is clipped and added
        scale = 1.0 / max(1.0, norm)
        total = [t + scale * g / count for t, g in zip(total, gradient)]
    weights = [w - 1e-4 * t for w, t in zip(weights, total)]
    done += 1
    progress.report(done, loss=loss)
    print("iteration", done, "loss", loss, flush=True)
    stops = progress.stop_requested()
    if stops or progress.checkpoint_requested():
        path = progress.checkpoint_path(done)
        path.write_text(json.dumps(weights))
        progress.report_checkpoint(done, path)
"""
"""A program that fits a line in pure Python, micro-batch by micro-batch, as its plan says."""


_LOOK: Final = """
import importlib.util, sys
sys.exit(not all(importlib.util.find_spec(name) for name in ("torch", "numpy")))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program whose work depends on its plan, with its workload."""

    runtime: str
    command: tuple[str, ...]
    workload: Workload


def write_programs(folder: Path) -> tuple[Path, Path]:
    """Write the two programs in Python, and return their paths: the steady and the planned one."""
    paths = folder / "steady.py", folder / "planned.py"
    for path, text in zip(paths, (STEADY, PLANNED), strict=True):
        path.write_text(text, encoding="utf-8")
    return paths


def steady_program(script: Path) -> Program:
    """Return the program that waits. The service knows nothing of its model."""
    return Program(
        runtime=COMMAND,
        command=(sys.executable, str(script)),
        workload=Workload(model="steady", params="", global_batch=PLAIN_BATCH),
    )


def plain_program(script: Path) -> Program:
    """Return the program that needs only Python."""
    return Program(
        runtime=COMMAND,
        command=(sys.executable, str(script)),
        workload=Workload(model="line", params="small", global_batch=PLAIN_BATCH),
    )


def torch_program() -> Program:
    """Return the GPT in PyTorch, which each GPU runs in a process of its own by torchrun."""
    return Program(
        runtime=TORCHRUN,
        command=(str(GPT), "--every", "1000000"),
        workload=Workload(model="gpt", params="small", global_batch=16),
    )


def stated_plans(program: Program, gpus: int, count: int) -> list[ExecutionPlan]:
    """Return ``count`` plans for a program: DDP or divided states, with 1, 2 or 4 micro-batches."""
    choices = [
        (zero, parts) for parts in (1, 2, 4) for zero in (ZeroStage.NONE, ZeroStage.PARAMETERS)
    ]
    batch = program.workload.global_batch
    return [
        ExecutionPlan(
            stages=(PlanStage(start=0, end=LAYERS, dp=gpus),),
            micro_batch=batch // parts,
            accumulation=parts,
            zero=zero,
            precision=Precision.F32,
        )
        for zero, parts in choices[:count]
    ]


@cache
def find_torch_python() -> str:
    """Return an interpreter that has PyTorch and NumPy, or "" if nothing has both.

    It is the one of TESSERA_TORCH_PYTHON, or this one, or the one that ``scripts/torch_env.py`` made.
    """
    if not GPT.exists():  # an installed package has no examples
        return ""
    named = os.environ.get("TESSERA_TORCH_PYTHON")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    for python in [named] if named else [sys.executable, str(MADE_PYTHON)]:
        if not Path(python).exists():
            continue
        done = subprocess.run([python, "-c", _LOOK], env=environment, check=False)
        if done.returncode == 0:
            return python
    return ""
