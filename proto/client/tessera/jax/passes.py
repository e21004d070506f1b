"""The forward pass of some layers under a plan, as a pure function that JAX can differentiate."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp

from tessera.jax.layouts import StageLayout, tracing_on
from tessera.jax.models import Layer, Params, Values
from tessera.plans import ExecutionPlan

_INITIAL, _SAMPLES = 0, 1
"""What keys are for: the initial parameters, and random layers."""

SELECTIVE: Final = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
"""The policy of selective recomputation. It keeps products with weights, and computes the products
within attention again (Korthikanti et al., MLSys 2023, section 5)."""


class Draws(NamedTuple):
    """What the keys of random layers follow from, besides the seed: uint32 values.

    ``numbers`` are the places of the layers in the model, of shape (layers,).
    """

    iteration: jax.Array
    first_sample: jax.Array  # place of the micro-batch's first sample in the global batch
    numbers: jax.Array


Pass = Callable[[Sequence[Params], Values, Draws | None], Values]
"""A function of the parameters of some layers, values, and draws (None: nothing is random)."""


def trace_layers(
    layers: Sequence[Layer],
    layout: StageLayout,
    plan: ExecutionPlan,
    seed: int,
    *,
    frees_results: bool = False,
) -> Pass:
    """Return the forward pass of these layers on a micro-batch.

    It casts to the plan's precision, and marks what the backward pass computes again. Values are
    divided between layers as the layout says, and parameters that ZeRO divides are collected for
    the layer that uses them. If it ``frees_results``, XLA decides how the last values are divided:
    a loss need not collect logits that are divided by vocabulary.
    """
    gathered = replace(layout, zero=0) if layout.zero >= 3 else None

    def run(parameters: Sequence[Params], values: Values, draws: Draws | None) -> Values:
        functions: dict[Hashable, Callable[..., Values]] = {}
        with tracing_on(layout):
            for place, (layer, own) in enumerate(zip(layers, parameters, strict=True)):
                values = jax.lax.with_sharding_constraint(values, layout.values(values))
                keys = None
                if layer.is_random and draws is not None:
                    keys = _sample_keys(seed, draws, place, _count_samples(values))
                if layer.kind not in functions:
                    functions[layer.kind] = _prepare(layer, gathered, plan)
                values = functions[layer.kind](own, values, keys)
            if frees_results:
                return values
            return jax.lax.with_sharding_constraint(values, layout.values(values))

    return run


def mean_loss(
    loss: Callable[[Values, Values], jax.Array], values: Values, targets: Values
) -> jax.Array:
    """Return the loss of the last layer's values in float32."""
    return loss(_cast(values, jnp.float32), targets).astype(jnp.float32)


def initial_key(seed: jax.Array | int, number: jax.Array | int) -> jax.Array:
    """Return the key of the initial parameters of the layer with this place in the model."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), _INITIAL), number)


def _sample_keys(seed: int, draws: Draws, place: int, samples: int) -> jax.Array:
    """Return a key for each sample. They follow from its place in the global batch alone."""
    key = jax.random.fold_in(jax.random.key(seed), _SAMPLES)
    key = jax.random.fold_in(jax.random.fold_in(key, draws.iteration), draws.numbers[place])
    places = draws.first_sample + jnp.arange(samples, dtype=jnp.uint32)
    return jax.vmap(lambda sample: jax.random.fold_in(key, sample))(places)


def _prepare(
    layer: Layer, gathered: StageLayout | None, plan: ExecutionPlan
) -> Callable[..., Values]:
    """Return the function of a layer with the plan's precision and recomputation.

    It is a new one for each trace. JAX keeps what it traced of old ones, perhaps for another layout.
    Parameters are collected after the cast, so that fewer bytes are sent.
    """

    collected: set[Any] = set()

    def may_be_kept(*_: Any, sharding: Any = None, **__: Any) -> bool:
        return sharding not in collected

    def apply(own: Params, values: Values, keys: jax.Array | None) -> Values:
        if plan.precision == "bf16":
            own, values = _cast(own, jnp.bfloat16), _cast(values, jnp.bfloat16)
        if gathered is not None:
            places = gathered.parameters(layer, own)
            collected.update(jax.tree.leaves(places))
            own = jax.lax.with_sharding_constraint(own, places)
        return layer.apply(own, values, keys) if layer.is_random else layer.apply(own, values)

    if plan.recomputation == "full":
        return jax.checkpoint(apply)
    if plan.recomputation == "selective":
        return jax.checkpoint(apply, policy=SELECTIVE)
    if gathered is not None:  # a backward pass collects again: copies would undo the division
        return jax.checkpoint(apply, policy=may_be_kept)
    return apply


def _cast(tree: Any, dtype: Any) -> Any:
    """Return the tree with its floating-point arrays in ``dtype``."""
    return jax.tree.map(
        lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree
    )


def _count_samples(values: Values) -> int:
    return int(jax.tree.leaves(values)[0].shape[0])
