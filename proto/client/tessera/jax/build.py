"""The choice of the engine that runs a plan."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import optax

from tessera.jax.engines import Engine
from tessera.jax.models import Model
from tessera.jax.pipelines import PipelineEngine
from tessera.jax.whole import WholeEngine
from tessera.plans import ExecutionPlan


def build_engine(
    model: Model,
    optimizer: optax.GradientTransformation,
    plan: ExecutionPlan,
    devices: Sequence[jax.Device],
    *,
    seed: int,
    clip_norm: float | None = None,
) -> Engine:
    """Return the engine of a plan on the first of these devices. Nothing is compiled yet.

    ``seed`` is that of random layers. If ``clip_norm`` is given, the norm of all gradients together
    is at most that.

    Raises:
        PlanRefused: the plan cannot be run by this model or on these devices.
        ModelRefused: the parameters of a layer cannot be made.
    """
    model.check_plan(plan, len(devices), plan.global_batch)
    if len(plan.stages) == 1:
        return WholeEngine(model, optimizer, plan, devices, seed=seed, clip_norm=clip_norm)
    return PipelineEngine(model, optimizer, plan, devices, seed=seed, clip_norm=clip_norm)
