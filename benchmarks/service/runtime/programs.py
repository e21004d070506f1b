"""The programs of the benchmark's jobs."""

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
"""Layers of the GPT: an embedding, two blocks and a head."""

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

_LOOK: Final = """
import importlib.util, sys
sys.exit(not all(importlib.util.find_spec(name) for name in ("torch", "numpy")))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program with its workload."""

    runtime: str
    command: tuple[str, ...]
    workload: Workload


def write_program(folder: Path) -> Path:
    """Write the program that waits, and return its path."""
    path = folder / "steady.py"
    path.write_text(STEADY, encoding="utf-8")
    return path


def steady_program(script: Path) -> Program:
    """Return the program that waits. The service knows nothing of its model."""
    return Program(
        runtime=COMMAND,
        command=(sys.executable, str(script)),
        workload=Workload(model="steady", params="", global_batch=PLAIN_BATCH),
    )


def torch_program() -> Program:
    """Return the GPT in PyTorch, which each GPU runs in a process of its own by torchrun."""
    return Program(
        runtime=TORCHRUN,
        command=(str(GPT), "--every", "1000000"),
        workload=Workload(model="gpt", params="small", global_batch=16),
    )


def torch_plan(program: Program) -> ExecutionPlan:
    """Return the plan of the GPT: DDP on two GPUs, without micro-batches."""
    return ExecutionPlan(
        stages=(PlanStage(start=0, end=LAYERS, dp=2),),
        micro_batch=program.workload.global_batch,
        accumulation=1,
        zero=ZeroStage.NONE,
        precision=Precision.F32,
    )


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
