"""The execution plans between which the benchmark's jobs change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tessera.formulation.execution_plan import (
    ExecutionPlan,
    PlanStage,
    Precision,
    Recomputation,
    ZeroStage,
)

DEVICES: Final = 4
BATCH: Final = 16
"""Samples of an iteration."""

LAYERS: Final = 6
"""An embedding, four blocks and a head."""

ONE_DEVICE: Final = "one device"
"""The name of the plan that divides nothing. It is compared with, and is not one of the nine."""


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
