"""The optimizer of a layer: its state's place, and its step with gradients that may be clipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from tessera.jax.engines import OptimizerState
from tessera.jax.errors import PlanRefused
from tessera.jax.layouts import StageLayout
from tessera.jax.models import Layer, Params
from tessera.plans import ExecutionPlan

HOST_MEMORY = "pinned_host"
"""The memory of a host to which states are offloaded, in JAX's words."""


def lay_parameters(
    layer: Layer, shapes: Params, layout: StageLayout, plan: ExecutionPlan
) -> Params:
    """Return the shapes of a layer's parameters with their shardings. Raises PlanRefused."""
    places = layout.parameters(layer, shapes)
    return place_shapes(shapes, _offload(places, layout, plan.offload == "parameters"))


def lay_optimizer(
    layer: Layer,
    shapes: Params,
    layout: StageLayout,
    optimizer: optax.GradientTransformation,
    plan: ExecutionPlan,
) -> OptimizerState:
    """Return the shapes of the optimizer's state for a layer, with their shardings.

    What has the shape of a parameter is divided as ``StageLayout.states`` says. The rest, e.g. a
    count, is whole on each device, also if the plan offloads.

    Raises:
        PlanRefused: an axis cannot be divided, or the devices cannot offload.
    """
    whole = layout.whole()
    divided = _offload(layout.states(layer, shapes), layout, plan.offload != "none")
    states = jax.eval_shape(optimizer.init, shapes)
    places = optax.tree_utils.tree_map_params(
        optimizer,
        lambda state, shape, place: place if state.shape == shape.shape else whole,
        states,
        shapes,
        divided,
        transform_non_params=lambda _: whole,
    )
    return place_shapes(states, places)


def place_shapes(shapes: Any, places: Any) -> Any:
    """Return shapes with shardings."""
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        shapes,
        places,
    )


def shardings_of(shapes: Any) -> Any:
    """Return the shardings of shapes."""
    return jax.tree.map(lambda leaf: leaf.sharding, shapes)


def take_steps(
    optimizer: optax.GradientTransformation,
    layers: Sequence[Layer],
    layout: StageLayout,
    parameters: Sequence[Params],
    states: Sequence[OptimizerState],
    gradients: Sequence[Params],
    factor: jax.Array | None = None,
) -> tuple[tuple[Params, ...], tuple[OptimizerState, ...]]:
    """Return the parameters and states of some layers after a step. It is traced by JAX.

    Gradients are multiplied by ``factor`` if it is given. Offloaded states must be on the device.
    Under ZeRO, each replica does its part.
    """
    if layout.zero:
        own = zip(layers, parameters, strict=True)
        places = tuple(layout.states(layer, leaves) for layer, leaves in own)
        parameters, gradients = jax.lax.with_sharding_constraint(
            (tuple(parameters), tuple(gradients)), (places, places)
        )
    results = []
    for own, state, gradient in zip(parameters, states, gradients, strict=True):
        if factor is not None:
            gradient = jax.tree.map(lambda leaf: leaf * factor, gradient)
        change, after = optimizer.update(gradient, state, own)
        results.append((optax.apply_updates(own, change), after))
    return tuple(own for own, _ in results), tuple(after for _, after in results)


def add_squares(gradients: Any) -> jax.Array:
    """Return the sum of the squares of gradients, a float32 scalar. It is traced by JAX."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(gradients)]
    return sum(squares, jnp.zeros((), jnp.float32))


def clip_factor(squares: jax.Array, clip_norm: float) -> jax.Array:
    """Return the factor by which the norm of all gradients becomes at most ``clip_norm``."""
    norm = jnp.sqrt(squares)
    return jnp.where(norm < clip_norm, 1.0, clip_norm / norm)


def fetch(tree: Any, shapes: Any) -> Any:
    """Return arrays in the devices' own memory, from the host's where they are offloaded."""
    return jax.tree.map(
        lambda leaf, shape: (
            leaf
            if shape.sharding.memory_kind in (None, "device")
            else jax.device_put(leaf, shape.sharding.with_memory_kind("device"))
        ),
        tree,
        shapes,
    )


def _offload(places: Any, layout: StageLayout, is_offloaded: bool) -> Any:
    """Return the same shardings in the host's memory, if they are offloaded."""
    if not is_offloaded:
        return places
    for device in layout.mesh.local_devices:  # each process can ask its own devices only
        if HOST_MEMORY not in {memory.kind for memory in device.addressable_memories()}:
            raise PlanRefused(
                f"the plan offloads, but {device.device_kind} has no memory {HOST_MEMORY!r}; use a"
                " plan without offload"
            )

    def move(place: NamedSharding) -> NamedSharding:
        return place.with_memory_kind(HOST_MEMORY)

    return jax.tree.map(move, places)
