"""A step with its optimizer, divided over a dp x tp mesh and lowered from shapes alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tessera.estimator.compiling.compiled import Uncompilable
from tessera.estimator.tracing.step import Step
from tessera.estimator.tracing.trace import parameter_axes, trace_program

Axes = list[str | None]


def lowered_step(step: Step, dp: int, tp: int, *, zero: bool) -> Any:
    """Return the lowered training step: forward, backward and Adam with moments of 32 bits.

    Raises:
        Uncompilable: ``dp`` does not divide the batch, or there are fewer devices than needed.
        Untraceable: the step cannot be traced.
    """
    if len(jax.devices()) < dp * tp:
        raise Uncompilable(
            f"the step needs {dp * tp} devices, but this process has {len(jax.devices())}; use compile_step"
        )
    if step.samples % dp:
        raise Uncompilable(
            f"{step.name}: {step.samples} samples cannot be shared by {dp} devices; make the batch a"
            f" multiple of {dp}"
        )
    mesh = Mesh(np.array(jax.devices()[: dp * tp]).reshape(dp, tp), ("dp", "tp"))
    weights, moments = _placed(step, mesh, tp, None), _placed(step, mesh, tp, dp if zero else None)
    batch = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec("dp")), step.batch)
    whole = NamedSharding(mesh, PartitionSpec())

    def train(params: Any, state: Any, batch: Any) -> Any:
        return _train(step, params, state, batch, moments)

    floats = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), step.params)
    jitted = jax.jit(
        train,
        in_shardings=(weights, (moments, moments), batch),
        out_shardings=(weights, (moments, moments), whole),
        donate_argnums=(0, 1),
    )
    return jitted.lower(step.params, (floats, floats), step.batch)


def _train(step: Step, params: Any, state: Any, batch: Any, moments: Any) -> Any:
    """Return the parameters, Adam's moments and the loss.

    Adam is as in Kingma and Ba (2015), algorithm 1, without bias correction.
    """
    loss, gradients = jax.value_and_grad(step.loss, allow_int=True)(params, batch)
    gradients = jax.tree.map(
        lambda g, p, s: (
            jax.lax.with_sharding_constraint(g, s) if _is_floating(p) else jnp.zeros(p.shape)
        ),
        gradients,
        params,
        moments,
    )
    first, second = state
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g.astype(jnp.float32), first, gradients)
    second = jax.tree.map(
        lambda v, g: 0.95 * v + 0.05 * jnp.square(g.astype(jnp.float32)), second, gradients
    )

    def update(p: Any, m: Any, v: Any) -> Any:
        if not _is_floating(p):
            return p
        return (p.astype(jnp.float32) - 1e-4 * m * jax.lax.rsqrt(v + 1e-8)).astype(p.dtype)

    return jax.tree.map(update, params, first, second), (first, second), loss


def _placed(step: Step, mesh: Mesh, tp: int, dp: int | None) -> Any:
    """Return the sharding of each parameter.

    If ``dp`` is given, parameters are also divided over it, along the first axis that it divides.
    """
    leaves, tree = jax.tree.flatten(step.params)
    divided = parameter_axes(trace_program(step)) if tp > 1 else {}
    placed = []
    for number, leaf in enumerate(leaves):
        axes: Axes = [None] * len(leaf.shape)
        _, axis = divided.get(number, ("", -1))
        if axis >= 0 and leaf.shape[axis] % tp == 0:
            axes[axis] = "tp"
        free = [a for a, size in enumerate(leaf.shape) if axes[a] is None and dp and size % dp == 0]
        if free:
            axes[free[0]] = "dp"
        placed.append(NamedSharding(mesh, PartitionSpec(*axes)))
    return jax.tree.unflatten(tree, placed)


def _is_floating(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.floating))
