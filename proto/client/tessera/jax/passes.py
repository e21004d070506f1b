"""Passes through consecutive layers under a layout: what all engines build their programs on.

A pass adds to the layers of a user what the plan says: places of values, precision, recomputation,
and random numbers that do not depend on the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from tessera.jax.layouts import StageLayout, tracing_on
from tessera.jax.models import Layer, Params, Values
from tessera.jax.plans import Plan

Draws: TypeAlias = tuple[Any, ...]
"""What random numbers of a micro-batch depend on, as unsigned 32-bit integers.

The iteration (a scalar), the place of the first sample in the global batch (a scalar), and the place
of each layer in the model. It is empty where no layer is random, and in an evaluation.
"""

_DRAW_STREAM = np.uint32(0xD2A35)
"""The number that sets the keys of samples apart from those that make parameters."""


class LayerPass(Protocol):
    """A pure function of layers' parameters, in the order of the layers."""

    def __call__(self, parameters: tuple[Params, ...], values: Values, draws: Draws) -> Values:
        """Return the values after the last layer."""
        ...


def trace_layers(
    layers: tuple[Layer, ...], layout: StageLayout, plan: Plan, seed: int
) -> LayerPass:
    """Return the pass through a stage's layers.

    Random layers get one key for each sample, or None if there are no draws. Nothing in the pass
    depends on names of layers, or on their places but by the draws.
    """

    def run(parameters: tuple[Params, ...], values: Values, draws: Draws) -> Values:
        functions: dict[Hashable, Callable[..., Values]] = {}
        with tracing_on(layout):
            for index, (layer, own) in enumerate(zip(layers, parameters, strict=True)):
                if layer.kind not in functions:
                    functions[layer.kind] = _wrap_layer(layer, layout, plan)
                values = place_values(values, layout)
                keys = _sample_keys(seed, draws, index, plan.micro_batch) if draws else None
                extra = (keys,) if layer.is_random else ()
                values = functions[layer.kind](own, values, *extra)
            return place_values(values, layout)

    return run


def measure_loss(
    loss: Callable[[Values, Values], jax.Array], values: Values, targets: Values
) -> jax.Array:
    """Return a micro-batch's mean loss as a float32 scalar, computed from float32 values."""
    return loss(_cast(values, jnp.float32), targets).astype(jnp.float32)


def make_parameters(layer: Layer, seed: Any, number: Any) -> Params:
    """Return the first parameters of the layer with this place in the model.

    They depend on nothing but the seed and the place. Both may be traced.
    """
    return layer.init(jax.random.fold_in(jax.random.key(seed), number))


def place_values(values: Values, layout: StageLayout) -> Values:
    """Return values between layers, with their samples (and sequences) where the layout says."""
    return jax.lax.with_sharding_constraint(values, layout.values(values))


def _wrap_layer(layer: Layer, layout: StageLayout, plan: Plan) -> Callable[..., Values]:
    """Return the layer's function with the plan's precision and recomputation.

    The function is a new one each time, because JAX keeps what it traced of old ones, and they may
    have been traced under another layout.
    """
    gathered: set[Any] = set()

    def may_be_kept(*_: Any, sharding: Any = None, **__: Any) -> bool:
        return sharding not in gathered

    def apply(own: Params, values: Values, *keys: jax.Array | None) -> Values:
        if plan.precision == "bf16":
            own, values = _cast(own, jnp.bfloat16), _cast(values, jnp.bfloat16)
        if plan.zero >= 3:
            places = layout.computing(layer, own)
            gathered.update(jax.tree.leaves(places))
            own = jax.lax.with_sharding_constraint(own, places)
        return layer.apply(own, values, *keys)

    if plan.recomputation == "full":
        return jax.checkpoint(apply)
    if plan.recomputation == "selective":
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        return jax.checkpoint(apply, policy=policy)
    if plan.zero >= 3:  # a backward pass gathers again, because kept copies would undo the division
        return jax.checkpoint(apply, policy=may_be_kept)
    return apply


def _sample_keys(seed: int, draws: Draws, index: int, samples: int) -> jax.Array:
    iteration, first, numbers = draws
    key = jax.random.fold_in(jax.random.key(seed), _DRAW_STREAM)
    key = jax.random.fold_in(jax.random.fold_in(key, iteration), numbers[index])
    places = first + jnp.arange(samples, dtype=jnp.uint32)
    return jax.vmap(lambda place: jax.random.fold_in(key, place))(places)


def _cast(tree: Any, dtype: Any) -> Any:
    """Return the tree with its real floating-point arrays of this type."""
    return jax.tree.map(
        lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree
    )
