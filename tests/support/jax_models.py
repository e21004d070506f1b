"""Tiny models for programs that train with JAX: a GPT, and a GPT with experts or with dropout."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from tessera.jax.layouts import constrain
from tessera.jax.models import EXPERT, TENSOR, Layer, Model

WIDTH, HEADS, VOCABULARY, SEQUENCE, EXPERTS = 32, 4, 64, 8, 4


def make_gpt(blocks: int = 2) -> Model:
    """Return an embedding, some blocks and a head, with four kinds of cuts."""
    return _join([_block(index, _apply_block) for index in range(blocks)])


def make_random_gpt() -> Model:
    """Return a GPT whose second block has dropout."""
    dropped = Layer(
        name="dropped",
        init=_init_block,
        apply=_apply_dropped,
        divisions=_BLOCK_DIVISIONS,
        is_random=True,
    )
    return _join([_block(0, _apply_block), dropped])


def make_expert_gpt() -> Model:
    """Return a GPT whose second block has experts, with a router that looks at one token at a time."""
    divisions = {
        "up": PartitionSpec(EXPERT, None, TENSOR),
        "down": PartitionSpec(EXPERT, TENSOR, None),
    }
    experts = Layer(name="experts", init=_init_experts, apply=_apply_experts, divisions=divisions)
    return _join([_block(0, _apply_block), experts])


def make_batches(count: int, samples: int) -> list[tuple[Any, Any]]:
    """Return batches of tokens and of the tokens that follow them."""
    draw = np.random.default_rng(5)
    batches = []
    for _ in range(count):
        tokens = draw.integers(0, VOCABULARY, (samples, SEQUENCE + 1), dtype=np.int32)
        batches.append((tokens[:, :-1], tokens[:, 1:]))
    return batches


def _join(middle: list[Layer]) -> Model:
    embedding = Layer(
        name="embedding",
        init=_init_embedding,
        apply=_apply_embedding,
        divisions={"tokens": PartitionSpec(None, TENSOR)},
    )
    head = Layer(
        name="head",
        init=_init_head,
        apply=_apply_head,
        divisions={"kernel": PartitionSpec(None, TENSOR)},
    )
    return Model(layers=(embedding, *middle, head), loss=_measure, sequence_axis=1)


def _block(index: int, apply: Any) -> Layer:
    return Layer(name=f"block-{index}", init=_init_block, apply=apply, divisions=_BLOCK_DIVISIONS)


_BLOCK_DIVISIONS = {
    "attention/in": PartitionSpec(None, None, TENSOR, None),
    "attention/out": PartitionSpec(TENSOR, None, None),
    "up/kernel": PartitionSpec(None, TENSOR),
    "up/bias": PartitionSpec(TENSOR),
    "down/kernel": PartitionSpec(TENSOR, None),
}


def _draw(key: jax.Array, *shape: int) -> jax.Array:
    return jax.random.normal(key, shape, jnp.float32) * 0.05


def _init_embedding(key: jax.Array) -> Any:
    first, second = jax.random.split(key)
    return {"tokens": _draw(first, VOCABULARY, WIDTH), "places": _draw(second, SEQUENCE, WIDTH)}


def _apply_embedding(params: Any, tokens: jax.Array) -> jax.Array:
    return jnp.add(params["tokens"][tokens], params["places"])


def _init_block(key: jax.Array) -> Any:
    keys = jax.random.split(key, 4)
    return {
        "scale": jnp.ones(WIDTH),
        "attention": {
            "in": _draw(keys[0], WIDTH, 3, HEADS, WIDTH // HEADS),
            "out": _draw(keys[1], HEADS, WIDTH // HEADS, WIDTH),
        },
        "up": {"kernel": _draw(keys[2], WIDTH, 4 * WIDTH), "bias": jnp.zeros(4 * WIDTH)},
        "down": {"kernel": _draw(keys[3], 4 * WIDTH, WIDTH)},
    }


def _attend(params: Any, values: jax.Array) -> jax.Array:
    normal = _normalize(values) * params["scale"]
    query, key, value = jnp.einsum("bsw,wthd->tbhsd", normal, params["attention"]["in"])
    scores = jnp.einsum("bhqd,bhkd->bhqk", query, key) / math.sqrt(WIDTH // HEADS)
    seen = jnp.tril(jnp.ones((SEQUENCE, SEQUENCE), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e9), axis=-1)
    mixed = jnp.einsum("bhqk,bhkd->bqhd", weights, value)
    return jnp.add(values, jnp.einsum("bqhd,hdw->bqw", mixed, params["attention"]["out"]))


def _apply_block(params: Any, values: jax.Array) -> jax.Array:
    values = _attend(params, values)
    hidden = jax.nn.gelu(_normalize(values) @ params["up"]["kernel"] + params["up"]["bias"])
    return jnp.add(values, hidden @ params["down"]["kernel"])


def _apply_dropped(params: Any, values: jax.Array, keys: jax.Array | None) -> jax.Array:
    results = _apply_block(params, values)
    if keys is None:
        return results
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.75, (SEQUENCE, WIDTH)))(keys)
    return jnp.where(kept, results / 0.75, 0).astype(results.dtype)


def _init_experts(key: jax.Array) -> Any:
    keys = jax.random.split(key, 3)
    return {
        "router": _draw(keys[0], WIDTH, EXPERTS),
        "up": _draw(keys[1], EXPERTS, WIDTH, 2 * WIDTH),
        "down": _draw(keys[2], EXPERTS, 2 * WIDTH, WIDTH),
    }


def _apply_experts(params: Any, values: jax.Array) -> jax.Array:
    weights = jax.nn.softmax(values @ params["router"], axis=-1)
    best = weights * jax.nn.one_hot(jnp.argmax(weights, axis=-1), EXPERTS, dtype=weights.dtype)
    tokens = constrain(jnp.einsum("bse,bsw->ebsw", best, values), EXPERT, None, None, None)
    hidden = jax.nn.gelu(jnp.einsum("ebsw,ewh->ebsh", tokens, params["up"]))
    return jnp.add(values, jnp.einsum("ebsh,ehw->bsw", hidden, params["down"]))


def _init_head(key: jax.Array) -> Any:
    return {"kernel": _draw(key, WIDTH, VOCABULARY)}


def _apply_head(params: Any, values: jax.Array) -> jax.Array:
    logits: jax.Array = _normalize(values) @ params["kernel"]
    return logits


def _normalize(values: jax.Array) -> jax.Array:
    mean = values.mean(-1, keepdims=True)
    return (values - mean) * jax.lax.rsqrt(values.var(-1, keepdims=True) + 1e-5)


def _measure(logits: jax.Array, targets: jax.Array) -> jax.Array:
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    loss: jax.Array = -jnp.mean(chosen)
    return loss
