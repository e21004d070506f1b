"""A small version of the tracing of layers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tessera.jax.layouts import StageLayout, tracing_on
from tessera.jax.models import Layer
from tessera.jax.plans import Plan


def trace_layers(layers: tuple[Layer, ...], layout: StageLayout, plan: Plan, seed: int) -> Any:
    """Return ``function(parameters, values, draws)`` of the layers."""

    def run(parameters: Any, values: Any, draws: Any) -> Any:
        with tracing_on(layout):
            for index, (layer, own) in enumerate(zip(layers, parameters, strict=True)):
                values = jax.lax.with_sharding_constraint(values, layout.values(values))
                extra: tuple[Any, ...] = ()
                if layer.is_random and not draws:
                    extra = (None,)
                elif layer.is_random:
                    iteration, first, numbers = draws
                    key = jax.random.fold_in(jax.random.key(seed), iteration)
                    key = jax.random.fold_in(key, numbers[index])
                    samples = first + jnp.arange(plan.micro_batch, dtype=jnp.uint32)
                    extra = (jax.vmap(lambda s, key=key: jax.random.fold_in(key, s))(samples),)
                apply = layer.apply
                if plan.recomputation == "full":
                    apply = jax.checkpoint(apply)
                values = apply(own, values, *extra)
        return values

    return run


def make_parameters(layer: Layer, seed: Any, number: Any) -> Any:
    """Return the first parameters of the layer with this place in the model."""
    return layer.init(jax.random.fold_in(jax.random.key(seed), number))
