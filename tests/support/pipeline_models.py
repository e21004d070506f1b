"""A tiny language model for pipelines, and training of it by plain JAX to compare with."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from tessera.jax.models import EXPERT, TENSOR, Layer, Model

WIDTH = 8
WORDS = 11
SEQUENCE = 6
BATCH = 16


def _draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    values: jax.Array = jax.random.uniform(key, shape, minval=-0.5, maxval=0.5)
    return values  # compiled sooner than those of a normal distribution


def _init_words(key: jax.Array) -> Any:
    return {"table": _draw(key, (WORDS, WIDTH))}


def _embed(params: Any, words: jax.Array) -> Any:
    return {"hidden": params["table"][words], "words": words}  # integers flow through stages, too


def _init_block(key: jax.Array) -> Any:
    up, down = jax.random.split(key)
    return {
        "up": _draw(up, (WIDTH, 2 * WIDTH)),
        "down": {"kernel": _draw(down, (2 * WIDTH, WIDTH))},
    }


def _mix(params: Any, values: Any) -> jax.Array:
    mixed = jnp.tanh(values["hidden"] @ params["up"]) @ params["down"]["kernel"]
    scaled: jax.Array = mixed * (1 + values["words"][..., None] / WORDS)
    return scaled


def _block(params: Any, values: Any) -> Any:
    return {**values, "hidden": values["hidden"] + _mix(params, values)}


def _random_block(params: Any, values: Any, keys: jax.Array | None) -> Any:
    if keys is None:  # an evaluation
        return _block(params, values)
    shape = values["hidden"].shape[1:]
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, shape))(keys)
    return {**values, "hidden": values["hidden"] + jnp.where(kept, _mix(params, values), 0.0)}


def _init_experts(key: jax.Array) -> Any:
    return {"experts": _draw(key, (4, WIDTH, WIDTH))}


def _experts(params: Any, values: Any) -> Any:
    each = jnp.einsum("bsw,ewv->ebsv", values["hidden"], params["experts"])
    return {**values, "hidden": values["hidden"] + jnp.tanh(each).mean(axis=0)}


def _init_nothing(key: jax.Array) -> Any:
    return {}


def _bend(params: Any, values: Any) -> Any:
    return {**values, "hidden": jnp.tanh(values["hidden"])}


def _init_head(key: jax.Array) -> Any:
    return {"kernel": _draw(key, (WIDTH, WORDS))}


def _head(params: Any, values: Any) -> jax.Array:
    scores: jax.Array = values["hidden"] @ params["kernel"]
    return scores


def _loss(scores: jax.Array, words: jax.Array) -> jax.Array:
    losses: jax.Array = optax.softmax_cross_entropy_with_integer_labels(scores, words)
    return losses.mean()


_DIVISIONS = {
    "up": PartitionSpec(None, TENSOR),
    "down/kernel": PartitionSpec(TENSOR, None),
}


def a_language_model(blocks: int, kind: str = "plain") -> Model:
    """Return an embedding, blocks and a head. The kinds are plain, random, bare and experts."""
    divisions: dict[str, PartitionSpec]
    functions: dict[str, Any]
    if kind == "bare":  # without parameters
        divisions = {}
        functions = {"init": _init_nothing, "apply": _bend}
    elif kind == "experts":
        divisions = {"experts": PartitionSpec(EXPERT)}
        functions = {"init": _init_experts, "apply": _experts}
    else:
        divisions = _DIVISIONS
        apply = _random_block if kind == "random" else _block
        functions = {"init": _init_block, "apply": apply, "is_random": kind == "random"}
    middle = tuple(
        Layer(name=f"block{index}", divisions=divisions, **functions) for index in range(blocks)
    )
    first = Layer(name="words", init=_init_words, apply=_embed)
    last = Layer(name="head", init=_init_head, apply=_head)
    return Model(layers=(first, *middle, last), loss=_loss, sequence_axis=1)


def some_batches(count: int) -> list[np.ndarray[Any, Any]]:
    """Return global batches of words, each of shape (BATCH, SEQUENCE)."""
    numbers = np.random.default_rng(7)
    return [numbers.integers(0, WORDS, (BATCH, SEQUENCE)).astype(np.int32) for _ in range(count)]


def train_plainly(
    model: Model,
    optimizer: Any,
    parameters: dict[str, Any],
    batches: list[np.ndarray[Any, Any]],
) -> list[float]:
    """Return the losses of training by JAX and Optax alone, on one device."""

    def loss(own: dict[str, Any], words: jax.Array) -> jax.Array:
        values: Any = words
        for layer in model.layers:
            values = layer.apply(own[layer.name], values)
        return model.loss(values, words)

    @jax.jit
    def step(own: Any, states: Any, words: jax.Array) -> tuple[Any, Any, jax.Array]:
        mean, gradients = jax.value_and_grad(loss)(own, words)
        changes, states = optimizer.update(gradients, states, own)
        return optax.apply_updates(own, changes), states, mean

    states, losses = optimizer.init(parameters), []
    for words in batches:
        parameters, states, mean = step(parameters, states, jnp.asarray(words))
        losses.append(float(mean))
    return losses
