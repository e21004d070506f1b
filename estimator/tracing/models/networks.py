"""The papers' models: GPT, BERT, LLaMA, GShard MoE, T5, ViT and Wide-ResNet.

The first three are decoders, and T5 is an encoder-decoder. Each is called with a batch of samples
and returns logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from tessera.estimator.graph import Untraceable
from tessera.estimator.tracing.models.parts import (
    DTYPES,
    Attention,
    Convolution,
    Experts,
    FeedForward,
    Norm,
    normal_weights,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a transformer.

    If ``experts`` is above 0, every second block has experts (GShard, section 2.2).
    """

    hidden: int
    layers: int
    heads: int
    vocabulary: int
    sequence: int
    inner: int = 0  # width of the feed-forward net; if 0, four times hidden
    head_width: int = 0  # if 0, hidden / heads
    groups: int = 0  # of keys and values; if 0, as many as heads
    experts: int = 0
    expert_group: int = 2048  # tokens routed together
    causal: bool = True
    # RMS norms, rotary positions, gated feed-forward nets, output separate from input.
    llama: bool = False
    dtype: str = "bf16"

    def divided(self, degree: int) -> Sizes:
        """Return the sizes on one GPU of a tensor group, with whole ``hidden`` and divided experts.

        Raises:
            Untraceable: ``degree`` does not divide a size.
        """
        sizes = {
            "heads": self.heads,
            "groups": self.groups or self.heads,
            "inner": self.inner or 4 * self.hidden,
            "vocabulary": self.vocabulary,
        }
        bad = [f"{name} {size}" for name, size in sizes.items() if size % degree]
        if bad:
            raise Untraceable(f"{' and '.join(bad)} cannot be divided by {degree}")
        part = {name: size // degree for name, size in sizes.items()}
        own = {f: getattr(self, f) for f in self.__dataclass_fields__} | part
        return Sizes(**own | {"head_width": self.head_width or self.hidden // self.heads})


class Block(eqx.Module):
    """A block of attention, over its input and possibly over a memory, and a feed-forward net."""

    norms: list[Norm]
    attention: Attention
    across: Attention | None
    forward: FeedForward | Experts

    def __init__(
        self, s: Sizes, *, key: PRNGKeyArray, experts: bool = False, memory: bool = False
    ) -> None:
        keys, dtype = jax.random.split(key, 3), DTYPES[s.dtype]
        inner = s.inner or 4 * s.hidden
        self.norms = [Norm(s.hidden, dtype, rms=s.llama) for _ in range(3 if memory else 2)]
        shared: dict[str, Any] = {"groups": s.groups or None, "head_width": s.head_width or None}
        self.attention = Attention(
            s.hidden, s.heads, dtype, key=keys[0], causal=s.causal, rotary=s.llama, **shared
        )
        self.across = (
            Attention(s.hidden, s.heads, dtype, key=keys[1], causal=False, **shared)
            if memory
            else None
        )
        self.forward = (
            Experts(s.hidden, inner, s.experts, dtype, key=keys[2], group=s.expert_group)
            if experts
            else FeedForward(s.hidden, inner, dtype, key=keys[2], gated=s.llama)
        )

    def __call__(
        self, x: Float[Array, "b s h"], memory: Array | None = None, bias: Array | None = None
    ) -> Float[Array, "b s h"]:
        """Return the block's output."""
        x = x + self.attention(self.norms[0](x), bias=bias)
        if self.across is not None:
            x = x + self.across(self.norms[2](x), memory)
        return x + self.forward(self.norms[1](x))


class Decoder(eqx.Module):
    """GPT and BERT (learned positions, tied output), LLaMA, and GShard MoE if there are experts."""

    table: Array
    positions: Array | None
    blocks: list[Block]
    norm: Norm
    out: Array | None

    def __init__(self, s: Sizes, *, key: PRNGKeyArray) -> None:
        first, second, third, *keys = jax.random.split(key, 3 + s.layers)
        dtype = DTYPES[s.dtype]
        self.table = normal_weights(first, (s.vocabulary, s.hidden), s.hidden, dtype)
        self.positions = (
            None if s.llama else normal_weights(second, (s.sequence, s.hidden), s.hidden, dtype)
        )
        self.blocks = [
            Block(s, key=k, experts=s.experts > 0 and i % 2 == 1) for i, k in enumerate(keys)
        ]
        self.norm = Norm(s.hidden, dtype, rms=s.llama)
        self.out = (
            normal_weights(third, (s.vocabulary, s.hidden), s.hidden, dtype) if s.llama else None
        )

    def __call__(self, tokens: Int[Array, "b s"]) -> Float[Array, "b s v"]:
        """Return the logits of every token."""
        x = self.table[tokens]
        if self.positions is not None:
            x = x + self.positions
        for block in self.blocks:
            x = block(x)
        out = self.table if self.out is None else self.out
        return jnp.einsum("bsh,vh->bsv", self.norm(x), out)


class EncoderDecoder(eqx.Module):
    """T5, with relative positions shared by all blocks of a side, tied output and RMS norms."""

    table: Array
    relative: list[Array]
    encoder: list[Block]
    decoder: list[Block]
    norms: list[Norm]
    buckets: Int[Array, "s s"]

    def __init__(self, s: Sizes, *, key: PRNGKeyArray) -> None:
        first, second, third, *keys = jax.random.split(key, 3 + 2 * s.layers)
        dtype = DTYPES[s.dtype]
        self.table = normal_weights(first, (s.vocabulary, s.hidden), s.hidden, dtype)
        self.relative = [normal_weights(k, (32, s.heads), 32, dtype) for k in (second, third)]
        both = Sizes(**{f: getattr(s, f) for f in s.__dataclass_fields__} | {"causal": False})
        self.encoder = [Block(both, key=k) for k in keys[: s.layers]]
        self.decoder = [Block(s, key=k, memory=True) for k in keys[s.layers :]]
        self.norms = [Norm(s.hidden, dtype, rms=True) for _ in range(2)]
        far = jnp.abs(jnp.arange(s.sequence)[:, None] - jnp.arange(s.sequence))
        self.buckets = jnp.minimum(31, far)

    def __call__(
        self, source: Int[Array, "b s"], target: Int[Array, "b s"]
    ) -> Float[Array, "b s v"]:
        """Return the logits of the target's tokens."""
        biases = [jnp.moveaxis(table[self.buckets], -1, 0) for table in self.relative]
        x = self.table[source]
        for block in self.encoder:
            x = block(x, bias=biases[0])
        memory, y = self.norms[0](x), self.table[target]
        for block in self.decoder:
            y = block(y, memory, biases[1])
        return jnp.einsum("bsh,vh->bsv", self.norms[1](y), self.table)


class VisionTransformer(eqx.Module):
    """ViT, with square patches as tokens.

    It has no class token. The mean of the tokens after the last block is classified.
    """

    patches: Array
    positions: Array
    blocks: list[Block]
    norm: Norm
    out: Array

    def __init__(self, s: Sizes, *, patch: int, classes: int, key: PRNGKeyArray) -> None:
        first, second, third, *keys = jax.random.split(key, 3 + s.layers)
        dtype = DTYPES[s.dtype]
        self.patches = normal_weights(first, (patch, patch, 3, s.hidden), 3 * patch**2, dtype)
        self.positions = normal_weights(second, (s.sequence, s.hidden), s.hidden, dtype)
        self.blocks = [Block(s, key=k) for k in keys]
        self.norm = Norm(s.hidden, dtype)
        self.out = normal_weights(third, (s.hidden, classes), s.hidden, dtype)

    def __call__(self, pictures: Float[Array, "b y x 3"]) -> Float[Array, "b c"]:
        """Return the logits of the classes."""
        patch = self.patches.shape[0]
        x = jax.lax.conv_general_dilated(
            pictures,
            self.patches,
            (patch, patch),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        x = x.reshape(x.shape[0], -1, x.shape[-1]) + self.positions
        for block in self.blocks:
            x = block(x)
        return jnp.mean(self.norm(x), axis=1) @ self.out


class Bottleneck(eqx.Module):
    """A bottleneck block whose result is added to its input.

    It has a 1x1 convolution, a 3x3 convolution with ``width`` times the outputs, and a 1x1
    convolution to four times the channels.
    """

    steps: list[Convolution]
    shortcut: Convolution | None

    def __init__(
        self,
        into: int,
        channels: int,
        width: int,
        dtype: Any,
        *,
        key: PRNGKeyArray,
        stride: int,
        project: bool,
    ) -> None:
        keys = jax.random.split(key, 4)
        wide, out = channels * width, 4 * channels
        self.steps = [
            Convolution(into, channels, 1, dtype, key=keys[0]),
            Convolution(channels, wide, 3, dtype, key=keys[1], stride=stride),
            Convolution(wide, out, 1, dtype, key=keys[2]),
        ]
        self.shortcut = (
            Convolution(into, out, 1, dtype, key=keys[3], stride=stride) if project else None
        )

    def __call__(self, x: Float[Array, "b y x c"]) -> Float[Array, "b y x c"]:
        """Return the block's output."""
        y = jax.nn.relu(self.steps[0](x))
        y = jax.nn.relu(self.steps[1](y))
        y = self.steps[2](y)
        return jax.nn.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class WideResNet(eqx.Module):
    """A residual network of 50 layers (Alpa, section 8).

    Its 3x3 convolutions are ``width`` times as wide.
    """

    stem: Convolution
    blocks: list[Bottleneck]
    out: Array

    def __init__(
        self,
        base: int,
        width: int,
        classes: int,
        dtype: Any,
        *,
        key: PRNGKeyArray,
        depths: tuple[int, ...] = (3, 4, 6, 3),
    ) -> None:
        first, last, *keys = jax.random.split(key, 2 + sum(depths))
        self.stem = Convolution(3, base, 7, dtype, key=first, stride=2)
        into, blocks, left = base, [], iter(keys)
        for stage, depth in enumerate(depths):
            channels = base * 2**stage
            for block in range(depth):
                blocks.append(
                    Bottleneck(
                        into,
                        channels,
                        width,
                        dtype,
                        key=next(left),
                        project=block == 0,
                        stride=2 if block == 0 and stage > 0 else 1,
                    )
                )
                into = 4 * channels
        self.blocks = blocks
        self.out = normal_weights(last, (into, classes), into, dtype)

    def __call__(self, pictures: Float[Array, "b y x 3"]) -> Float[Array, "b c"]:
        """Return the logits of the classes."""
        x = jax.nn.relu(self.stem(pictures))
        x = jax.lax.reduce_window(x, -np.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for block in self.blocks:
            x = block(x)
        return jnp.mean(x, axis=(1, 2)) @ self.out
