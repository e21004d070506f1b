"""Runs of the examples in JAX that change their execution plan, in a process of their own.

This process never imports JAX.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from tessera.formulation.job.execution_plan import (
    ExecutionPlan,
    PlanStage,
    Precision,
    Recomputation,
    ZeroStage,
)
from tests.support.jax_programs import FAST_COMPILATION, ROOT

EXAMPLES: Final = ROOT / "docs" / "examples"
PROGRAM: Final = Path(__file__).with_name("plan_change_program.py")
GPT: Final = "train_jax_gpt"
RESNET: Final = "train_jax_resnet"
LEARNING_RATE: Final = 3e-3
LEARNING_RATES: Final = MappingProxyType({RESNET: 0.05})
NO_SIZES: Final[Mapping[str, float]] = MappingProxyType({})
DEVICES: Final = 4
BATCH: Final = 16
"""Samples of an iteration."""
LAYERS: Final = 6
"""An embedding, four blocks and a head."""
ONE_DEVICE: Final = "one device"
"""The name of the plan that divides nothing. It is compared with, and is not one of the nine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Iterations of a run under one plan. If it ``forgets``, its optimizer begins again."""

    plan: str
    iterations: int
    forgets: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Parts that follow each other, each from the checkpoint of the one before."""

    name: str
    seed: int
    parts: tuple[Stretch, ...]


def train_runs(
    plans: Mapping[str, ExecutionPlan],
    runs: Sequence[Run],
    *,
    example: str = GPT,
    sizes: Mapping[str, float] = NO_SIZES,
) -> dict[str, list[float]]:
    """Train the runs on virtual devices of the processor. Return each one's losses by its name.

    ``example`` is a module of ``docs/examples``, and ``sizes`` are those of its model that are not as
    usual. The first plan makes the initial state.
    """
    wanted = {
        "example": example,
        "sizes": dict(sizes),
        "batch": BATCH,
        "learning_rate": LEARNING_RATES.get(example, LEARNING_RATE),
        "plans": {name: json.loads(plan.to_json()) for name, plan in plans.items()},
        "runs": [asdict(run) for run in runs],
    }
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        input=json.dumps(wanted),
        capture_output=True,
        text=True,
        env=_environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results = [json.loads(line) for line in done.stdout.splitlines()]
    return {result["name"]: result["losses"] for result in results}


def _environment() -> dict[str, str]:
    """Return the variables of a program that trains on ``DEVICES`` virtual devices."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TESSERA_")}
    paths = filter(None, [str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
    return {
        **kept,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES} {FAST_COMPILATION}",
        "PYTHONPATH": os.pathsep.join(paths),
    }


def largest_difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """Return the largest absolute difference between the losses of the same iteration."""
    return max(abs(own - other) for own, other in zip(losses, others, strict=True))


def make_plans() -> dict[str, ExecutionPlan]:
    """Return the nine plans by name. All but one use four devices."""
    return {
        "DP": _whole(dp=4),
        "TP": _whole(tp=4),
        "PP": _piped([(2, 1, 1), (1, 1, 1), (1, 1, 1), (2, 1, 1)], parts=4),
        "unequal PP": _piped([(3, 2, 1), (2, 1, 1), (1, 1, 1)], parts=4),
        "mixed": _piped([(3, 2, 1), (3, 1, 2)], parts=2),
        "ZeRO-1": _whole(dp=4, zero=ZeroStage.OPTIMIZER),
        "ZeRO-3": _whole(dp=4, zero=ZeroStage.PARAMETERS),
        "recomputation": _whole(dp=2, tp=2, recomputation=Recomputation.FULL),
        "accumulation": _whole(dp=2, parts=8),
    }


def plan_of_one_device() -> ExecutionPlan:
    """Return the plan that divides nothing."""
    return _whole()


def _whole(
    *,
    dp: int = 1,
    tp: int = 1,
    parts: int = 1,
    zero: ZeroStage = ZeroStage.NONE,
    recomputation: Recomputation = Recomputation.NONE,
) -> ExecutionPlan:
    """Return a plan of one stage with ``parts`` micro-batches."""
    return ExecutionPlan(
        stages=(PlanStage(start=0, end=LAYERS, dp=dp, tp=tp),),
        micro_batch=BATCH // parts,
        accumulation=parts,
        zero=zero,
        recomputation=recomputation,
        precision=Precision.F32,
    )


def _piped(stages: Sequence[tuple[int, int, int]], *, parts: int) -> ExecutionPlan:
    """Return a pipeline of stages, each with its number of layers, dp and tp."""
    placed, first = list[PlanStage](), 0
    for layers, dp, tp in stages:
        placed.append(PlanStage(start=first, end=first + layers, dp=dp, tp=tp, sp=tp > 1))
        first += layers
    return ExecutionPlan(
        stages=tuple(placed),
        micro_batch=BATCH // parts,
        accumulation=parts,
        precision=Precision.F32,
    )
