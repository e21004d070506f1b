"""The common parts of the models. Each weight has one axis of heads, channels or experts to divide.

Activations are (samples, tokens, width) for sequences and (samples, height, width, channels) for
pictures.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

DTYPES: dict[str, Any] = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}


def normal_weights(key: PRNGKeyArray, shape: tuple[int, ...], fan_in: int, dtype: Any) -> Array:
    """Return normal weights of variance 1 / ``fan_in``."""
    return jnp.asarray(jax.random.normal(key, shape, dtype) * fan_in**-0.5)


@jax.custom_jvp
def softmax(x: Array) -> Array:
    """Return the softmax over the last axis.

    Its derivative only needs the result, as in PyTorch.
    """
    return jax.nn.softmax(x, axis=-1)


@softmax.defjvp
def _softmax_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    y = softmax(primals[0])
    dot = y * tangents[0]
    return y, dot - y * jnp.sum(dot, axis=-1, keepdims=True)


class Norm(eqx.Module):
    """A normalisation of the last axis.

    Without ``bias``, it only divides by the RMS (LLaMA, T5).
    """

    scale: Array
    bias: Array | None

    def __init__(self, width: int, dtype: Any, *, rms: bool = False) -> None:
        self.scale = jnp.ones((width,), dtype)
        self.bias = None if rms else jnp.zeros((width,), dtype)

    def __call__(self, x: Array) -> Array:
        """Return the normalised activations, computed in f32."""
        y = x.astype(jnp.float32)
        if self.bias is not None:
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)
        y = y.astype(x.dtype) * self.scale
        return y if self.bias is None else y + self.bias


class Attention(eqx.Module):
    """Attention of ``heads`` queries over ``groups`` keys and values, by default as many."""

    query: Array
    key: Array
    value: Array
    out: Array
    causal: bool = eqx.field(static=True)
    rotary: bool = eqx.field(static=True)

    def __init__(
        self,
        width: int,
        heads: int,
        dtype: Any,
        *,
        key: PRNGKeyArray,
        groups: int | None = None,
        head_width: int | None = None,
        causal: bool = True,
        rotary: bool = False,
    ) -> None:
        groups, size = groups or heads, head_width or width // heads
        keys = jax.random.split(key, 4)
        self.query = normal_weights(keys[0], (width, heads, size), width, dtype)
        self.key = normal_weights(keys[1], (width, groups, size), width, dtype)
        self.value = normal_weights(keys[2], (width, groups, size), width, dtype)
        self.out = normal_weights(keys[3], (heads, size, width), heads * size, dtype)
        self.causal, self.rotary = causal, rotary

    def __call__(
        self, x: Float[Array, "b s h"], memory: Array | None = None, bias: Array | None = None
    ) -> Float[Array, "b s h"]:
        """Return attention within ``x``, or over ``memory``. ``bias`` is added to the scores."""
        over = x if memory is None else memory
        q = jnp.einsum("bsh,hnd->bsnd", x, self.query)
        k = jnp.einsum("bth,hnd->btnd", over, self.key)
        v = jnp.einsum("bth,hnd->btnd", over, self.value)
        if self.rotary:
            q, k = _rotated(q), _rotated(k)
        share = q.shape[2] // k.shape[2]
        q = q.reshape(*q.shape[:2], k.shape[2], share, q.shape[3])
        scores = jnp.einsum("bsngd,btnd->bngst", q, k) * (q.shape[-1] ** -0.5)
        if bias is not None:
            scores = scores + bias.reshape(1, k.shape[2], share, *bias.shape[-2:])
        if self.causal:
            mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
            scores = jnp.where(mask, scores, jnp.asarray(-1e4, scores.dtype))
        mixed = jnp.einsum("bngst,btnd->bsngd", softmax(scores), v)
        mixed = mixed.reshape(*mixed.shape[:2], -1, mixed.shape[-1])
        return jnp.einsum("bsnd,ndh->bsh", mixed, self.out)


def _rotated(x: Float[Array, "b s n d"]) -> Float[Array, "b s n d"]:
    """Return the input with rotary positions (Su et al. 2021), with halves paired as in LLaMA."""
    half = x.shape[-1] // 2
    rate = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * rate
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class FeedForward(eqx.Module):
    """Two products with a GELU between them.

    ``gated`` adds a third product (SwiGLU, Shazeer 2020).
    """

    into: Array
    gate: Array | None
    out: Array

    def __init__(
        self, width: int, inner: int, dtype: Any, *, key: PRNGKeyArray, gated: bool = False
    ) -> None:
        keys = jax.random.split(key, 3)
        self.into = normal_weights(keys[0], (width, inner), width, dtype)
        self.gate = normal_weights(keys[1], (width, inner), width, dtype) if gated else None
        self.out = normal_weights(keys[2], (inner, width), inner, dtype)

    def __call__(self, x: Float[Array, "b s h"]) -> Float[Array, "b s h"]:
        """Return the block's output, without the residual."""
        y = x @ self.into
        y = jax.nn.gelu(y) if self.gate is None else jax.nn.silu(x @ self.gate) * y
        return y @ self.out


class Experts(eqx.Module):
    """The top 2 of several feed-forward nets (GShard, section 2.2).

    The masks of dispatch and combination are dense.
    """

    router: Array
    into: Array
    out: Array
    group: int = eqx.field(static=True)

    def __init__(
        self, width: int, inner: int, experts: int, dtype: Any, *, key: PRNGKeyArray, group: int
    ) -> None:
        keys = jax.random.split(key, 3)
        self.router = normal_weights(keys[0], (width, experts), width, dtype)
        self.into = normal_weights(keys[1], (experts, width, inner), width, dtype)
        self.out = normal_weights(keys[2], (experts, inner, width), inner, dtype)
        self.group = group

    def __call__(self, x: Float[Array, "b s h"]) -> Float[Array, "b s h"]:
        """Return the experts' output.

        Each group of tokens is routed separately. An expert's capacity is twice its even share.
        """
        tokens = x.shape[0] * x.shape[1]
        size = min(self.group, tokens)
        y = x.reshape(tokens // size, size, x.shape[-1])
        experts = self.router.shape[1]
        combine = _routes(y @ self.router, capacity=max(1, 2 * size // experts))
        dispatch = (combine > 0).astype(x.dtype)
        inputs = jnp.einsum("gsec,gsh->egch", dispatch, y)
        hidden = jax.nn.gelu(jnp.einsum("egch,ehf->egcf", inputs, self.into))
        outputs = jnp.einsum("egcf,efh->egch", hidden, self.out)
        return jnp.einsum("gsec,egch->gsh", combine, outputs).reshape(x.shape)


def _routes(scores: Float[Array, "g s e"], capacity: int) -> Float[Array, "g s e c"]:
    """Return the weight of each token in each expert's slot.

    Tokens beyond the capacity are dropped.
    """
    chances = softmax(scores)
    first = jax.nn.one_hot(jnp.argmax(chances, axis=-1), scores.shape[-1], dtype=scores.dtype)
    second = jax.nn.one_hot(
        jnp.argmax(chances * (1 - first), axis=-1), scores.shape[-1], dtype=scores.dtype
    )
    taken = jnp.sum(first, axis=1, keepdims=True)
    places = (jnp.cumsum(first, axis=1) - 1, jnp.cumsum(second, axis=1) - 1 + taken)
    combine = jnp.zeros((*scores.shape, capacity), scores.dtype)
    for chosen, place in zip((first, second), places, strict=True):
        slot = jnp.sum(place * chosen, axis=-1).astype(jnp.int32)
        share = jnp.sum(chances * chosen, axis=-1)
        where = jax.nn.one_hot(slot, capacity, dtype=scores.dtype)  # zero beyond the capacity
        combine = combine + (share[..., None] * chosen)[..., None] * where[:, :, None, :]
    return combine


class Convolution(eqx.Module):
    """A convolution with batch normalisation by the batch's own statistics, as in training."""

    kernel: Array
    scale: Array
    bias: Array
    stride: int = eqx.field(static=True)

    def __init__(
        self, into: int, out: int, size: int, dtype: Any, *, key: PRNGKeyArray, stride: int = 1
    ) -> None:
        self.kernel = normal_weights(key, (size, size, into, out), size * size * into, dtype)
        self.scale, self.bias = jnp.ones((out,), dtype), jnp.zeros((out,), dtype)
        self.stride = stride

    def __call__(self, x: Float[Array, "b y x c"]) -> Float[Array, "b y x c"]:
        """Return the normalised result, before any non-linearity."""
        y = jax.lax.conv_general_dilated(
            x,
            self.kernel,
            (self.stride, self.stride),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        centred = y - jnp.mean(y, axis=(0, 1, 2))
        variance = jnp.mean(centred * centred, axis=(0, 1, 2))
        return centred * jax.lax.rsqrt(variance + 1e-5) * self.scale + self.bias
