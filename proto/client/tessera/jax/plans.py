"""Execution plans of programs in JAX: the plan of a start, and what JAX programs cannot run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from tessera import progress
from tessera.jax.errors import PlanRefused
from tessera.plans import (
    ExecutionPlan,
    InvalidPlan,
    PlanStage,
    Precision,
    plan_from_plain,
)

PRECISIONS: Final = (Precision.F32, Precision.BF16)


def read_plan(plain: Mapping[str, Any]) -> ExecutionPlan:
    """Return the plan of JSON's plain values, as ``progress.plan()`` returns them.

    Raises:
        PlanRefused: this release cannot run such a plan.
    """
    try:
        return plan_from_plain("plan", dict(plain))
    except InvalidPlan as error:
        raise PlanRefused(f"the plan cannot be read: {error}; update tessera-client") from error


def current_plan(
    layers: int, devices: int, global_batch: int, default: ExecutionPlan | None = None
) -> ExecutionPlan:
    """Return the plan of this start, or the default, or data parallelism on all devices.

    Raises:
        PlanRefused: the plan cannot be run.
    """
    plain = progress.plan()
    if plain is not None:
        return read_plan(plain)
    if default is not None:
        return default
    dp = next(n for n in range(min(devices, global_batch), 0, -1) if global_batch % n == 0)
    return ExecutionPlan(stages=(PlanStage(start=0, end=layers, dp=dp),), micro_batch=global_batch)


def set_precision(plan: ExecutionPlan, precision: str | None) -> ExecutionPlan:
    """Return the plan with this precision, or as it is if that is None. Raises PlanRefused."""
    try:
        return replace(plan, precision=Precision(precision)) if precision else plan
    except ValueError as error:
        raise PlanRefused(f"{error}; use {' or '.join(PRECISIONS)}") from error


def require_supported(plan: ExecutionPlan) -> None:
    """Check that programs in JAX have all that a plan asks for. Raises PlanRefused."""
    if any(stage.cp > 1 for stage in plan.stages):
        raise PlanRefused("the plan divides sequences (cp), which tessera.jax cannot; use sp")
    if plan.precision not in PRECISIONS:
        raise PlanRefused(
            f"the plan's precision is {plan.precision}; tessera.jax knows {', '.join(PRECISIONS)}"
        )
