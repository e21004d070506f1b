"""The engine of a plan."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import optax

from tessera.jax.engines import Engine
from tessera.jax.models import Model
from tessera.jax.pipelines import PipelineEngine
from tessera.jax.plans import Plan
from tessera.jax.whole import WholeEngine


def build_engine(
    model: Model,
    optimizer: optax.GradientTransformation,
    plan: Plan,
    devices: Sequence[jax.Device],
    *,
    clip_norm: float | None = None,
    seed: int = 0,
) -> Engine:
    """Return the engine that runs a plan on the first of these devices.

    ``optimizer`` is applied to each layer by itself. If ``clip_norm`` is not None, gradients are
    scaled down before, so that their norm over all layers is at most this. ``seed`` decides the keys
    of random layers.

    Raises:
        ModelRefused: the model cannot be trained.
        PlanRefused: the plan does not fit the model or the devices.
    """
    model.check_plan(plan, len(devices), plan.global_batch)
    if len(plan.stages) > 1:
        return PipelineEngine(model, optimizer, plan, devices, clip_norm=clip_norm, seed=seed)
    return WholeEngine(model, optimizer, plan, devices, clip_norm=clip_norm, seed=seed)
