"""Steps of the models, as functions and as targets.

An example of a target is ``tessera.estimator.tracing.models.steps:decoder``.

Arguments are plain numbers and names, so that another process can make the same step. Nothing is
allocated: parameters and batches are shapes. ``samples`` is the batch. ``tp`` selects the part of
one GPU of a tensor group, between whose GPUs heads, feed-forward widths (also of experts) and
vocabulary are divided.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from tessera.estimator.tracing.models.networks import (
    Decoder,
    EncoderDecoder,
    Sizes,
    VisionTransformer,
    WideResNet,
)
from tessera.estimator.tracing.models.parts import DTYPES
from tessera.estimator.tracing.step import Step


def decoder(*, name: str = "decoder", samples: int = 1, tp: int = 1, **sizes: Any) -> Step:
    """Return a step of GPT, BERT, LLaMA or GShard MoE. ``sizes`` are those of :class:`Sizes`."""
    s = Sizes(**sizes).divided(tp)
    params, apply = _shapes(lambda key: Decoder(s, key=key))

    def loss(params: Any, batch: Any) -> Any:
        return cross_entropy(apply(params)(batch["tokens"]), batch["targets"])

    tokens = jax.ShapeDtypeStruct((samples, s.sequence), jnp.int32)
    return Step(name=name, loss=loss, params=params, batch={"tokens": tokens, "targets": tokens})


def encoder_decoder(*, name: str = "t5", samples: int = 1, tp: int = 1, **sizes: Any) -> Step:
    """Return a step of T5 with the same number of layers and tokens on both sides."""
    s = Sizes(**sizes).divided(tp)
    params, apply = _shapes(lambda key: EncoderDecoder(s, key=key))

    def loss(params: Any, batch: Any) -> Any:
        logits = apply(params)(batch["source"], batch["inputs"])
        return cross_entropy(logits, batch["targets"])

    tokens = jax.ShapeDtypeStruct((samples, s.sequence), jnp.int32)
    batch = dict.fromkeys(("source", "inputs", "targets"), tokens)
    return Step(name=name, loss=loss, params=params, batch=batch)


def vision(
    *,
    name: str = "vit",
    samples: int = 1,
    tp: int = 1,
    hidden: int = 768,
    layers: int = 12,
    heads: int = 12,
    side: int = 224,
    patch: int = 16,
    classes: int = 1000,
    dtype: str = "bf16",
) -> Step:
    """Return a step of ViT. The defaults are ViT-Base/16 (Dosovitskiy et al. 2021, Table 1)."""
    s = Sizes(
        hidden=hidden,
        layers=layers,
        heads=heads,
        vocabulary=tp,
        sequence=(side // patch) ** 2,
        causal=False,
        dtype=dtype,
    ).divided(tp)
    params, apply = _shapes(lambda key: VisionTransformer(s, patch=patch, classes=classes, key=key))
    return _pictures(name, params, apply, samples, side, dtype)


def wide_resnet(
    *,
    name: str = "wide_resnet",
    samples: int = 1,
    base: int = 224,
    width: int = 2,
    side: int = 224,
    classes: int = 1000,
    dtype: str = "f32",
) -> Step:
    """Return a step of a Wide-ResNet of 50 layers (Alpa, section 8)."""
    params, apply = _shapes(lambda key: WideResNet(base, width, classes, DTYPES[dtype], key=key))
    return _pictures(name, params, apply, samples, side, dtype)


def perceptron(
    *,
    name: str = "perceptron",
    samples: int = 1,
    tp: int = 1,
    width: int = 64,
    inner: int = 256,
    layers: int = 2,
    dtype: str = "f32",
) -> Step:
    """Return a step of ``layers`` pairs of products with a ReLU between them, for small tests."""
    shapes = {"into": (width, inner // tp), "out": (inner // tp, width)}
    params = [
        {k: jax.ShapeDtypeStruct(v, DTYPES[dtype]) for k, v in shapes.items()}
        for _ in range(layers)
    ]

    def loss(params: Any, batch: Any) -> Any:
        x = batch
        for layer in params:
            x = jax.nn.relu(x @ layer["into"]) @ layer["out"]
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    batch = jax.ShapeDtypeStruct((samples, width), DTYPES[dtype])
    return Step(name=name, loss=loss, params=params, batch=batch)


def cross_entropy(logits: Any, targets: Any) -> Any:
    """Return the mean cross entropy in f32. ``targets`` are indices into the last axis."""
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


def _pictures(
    name: str, params: Any, apply: Callable[[Any], Any], samples: int, side: int, dtype: str
) -> Step:
    def loss(params: Any, batch: Any) -> Any:
        return cross_entropy(apply(params)(batch["pictures"]), batch["classes"])

    batch = {
        "pictures": jax.ShapeDtypeStruct((samples, side, side, 3), DTYPES[dtype]),
        "classes": jax.ShapeDtypeStruct((samples,), jnp.int32),
    }
    return Step(name=name, loss=loss, params=params, batch=batch)


def _shapes(make: Callable[[Any], Any]) -> tuple[Any, Callable[[Any], Any]]:
    """Return the shapes of a model's arrays, and a function that puts arrays into the model."""
    model = eqx.filter_eval_shape(make, jax.random.key(0))
    params, rest = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    return params, lambda arrays: eqx.combine(arrays, rest)
