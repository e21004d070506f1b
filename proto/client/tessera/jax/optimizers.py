"""Optimizers: an optax transformation for each layer by itself, and clipping over all layers.

A transformation that looks at several layers together, such as ``optax.clip_by_global_norm``, sees
only one layer at a time. So clipping is a step of its own: each engine adds up squares where its
layers are, and multiplies gradients by one factor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tessera.jax.engines import OptimizerState
from tessera.jax.layouts import StageLayout
from tessera.jax.models import Layer, Params


def lay_parameters(layer: Layer, shapes: Params, layout: StageLayout) -> Params:
    """Return a layer's parameters as ``jax.ShapeDtypeStruct`` with shardings.

    Raises:
        PlanRefused: an axis cannot be divided equally.
    """
    return lay(shapes, layout.parameters(layer, shapes))


def lay_states(
    optimizer: optax.GradientTransformation, layer: Layer, shapes: Params, layout: StageLayout
) -> OptimizerState:
    """Return a layer's optimizer state as ``jax.ShapeDtypeStruct`` with shardings.

    What has the shape of a parameter lies as the layout says of states. The rest, e.g. counts, is
    whole on each device.
    """
    whole = layout.whole()

    def find_place(leaf: Any, shape: Any, place: Any) -> Any:
        return place if leaf.shape == shape.shape else whole

    states = jax.eval_shape(optimizer.init, shapes)
    places = optax.tree_utils.tree_map_params(
        optimizer,
        find_place,
        states,
        shapes,
        layout.states(layer, shapes),
        transform_non_params=lambda _: whole,
    )
    return lay(states, places)


def lay(shapes: Any, places: Any) -> Any:
    """Return a tree of shapes with the shardings of another."""
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        shapes,
        places,
    )


def update_layer(
    optimizer: optax.GradientTransformation,
    parameters: Params,
    gradients: Params,
    state: OptimizerState,
    factor: jax.Array | None = None,
) -> tuple[Params, OptimizerState]:
    """Return a layer's new parameters and state. ``factor`` multiplies the gradients first."""
    if factor is not None:
        gradients = jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), gradients)
    changes, new_state = optimizer.update(gradients, state, parameters)
    return optax.apply_updates(parameters, changes), new_state


def add_squares(gradients: Any) -> jax.Array:
    """Return the sum of the squares of all elements, a float32 scalar."""
    squares = (jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(gradients))
    return sum(squares, jnp.zeros((), jnp.float32))


def clip_factor(squares: Iterable[jax.Array], clip_norm: float) -> jax.Array:
    """Return what multiplies gradients with these sums of squares, as a float32 scalar.

    It is 1 while their norm is below ``clip_norm``, and brings it down to ``clip_norm`` otherwise.
    """
    norm = jnp.sqrt(sum(squares, jnp.zeros((), jnp.float32)))
    return jnp.where(norm < clip_norm, 1.0, clip_norm / norm)
