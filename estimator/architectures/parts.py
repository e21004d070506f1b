"""Operators of layers, with the cost of one sample in each.

The counts are matrix products (two FLOPs per multiply-add) and the scalars of activations that
kernels read and write. Values for a backward pass are kept as in Korthikanti et al. 2022, section
4.1. Each operator keeps its output if a later operator's gradient uses it, so an input counts for
the operator that made it. ``working`` is the largest tensor that is not kept. A backward pass also
has a gradient of similar size.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from tessera.estimator.graph import DTYPE_BYTES, Layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The cost of one sample in some operators. The fields are those of :class:`Layer`."""

    flops: float = 0.0
    touched: float = 0.0
    kernels: float = 0.0
    weights: float = 0.0
    expert_weights: float = 0.0
    shared_weights: float = 0.0
    kept: float = 0.0
    unsplit: float = 0.0
    working: float = 0.0
    unfused: float = 0.0
    reduced: float = 0.0
    exchanged: float = 0.0
    attention_flops: float = 0.0
    attention_touched: float = 0.0
    attention_kernels: float = 0.0
    attention_kept: float = 0.0
    keys_values: float = 0.0
    product_touched: float = 0.0

    def __add__(self, other: Part) -> Part:
        """Return both parts, one after the other."""
        total = {f: getattr(self, f) + getattr(other, f) for f in _FIELDS}
        total["working"] = max(self.working, other.working)
        total["unfused"] = max(self.unfused, other.unfused)
        return Part(**total)

    def layer(
        self,
        kind: str,
        *,
        boundary: float,
        tensor_limit: float,
        experts: float = 1.0,
        heads: float = 0.0,
    ) -> Layer:
        """Return the part as a layer."""
        amounts = {f: getattr(self, f) for f in _FIELDS}
        return Layer(
            kind=kind,
            boundary=boundary,
            tensor_limit=tensor_limit,
            experts=experts,
            heads=heads,
            **amounts,
        )


_FIELDS = tuple(f.name for f in fields(Part))

Bias = Literal["none", "split", "whole"]
"""The bias of a linear layer: split with its columns, or whole after a product split by rows."""


def linear_part(tokens: float, wide_in: float, wide_out: float, *, bias: Bias, keeps: bool) -> Part:
    """Return a product with a matrix of weights."""
    return Part(
        flops=2 * tokens * wide_in * wide_out,
        touched=tokens * (wide_in + wide_out),
        product_touched=tokens * (wide_in + wide_out),
        kernels=1,
        weights=wide_in * wide_out + (wide_out if bias == "split" else 0.0),
        shared_weights=wide_out if bias == "whole" else 0.0,
        kept=tokens * wide_out if keeps else 0.0,
    )


def norm_part(tokens: float, hidden: float, *, biased: bool) -> Part:
    """Return a normalisation (layer norm, or RMS norm without bias). Its output is kept."""
    size = tokens * hidden
    return Part(
        touched=2 * size,
        kernels=1,
        shared_weights=(2 if biased else 1) * hidden,
        kept=size,
        unsplit=size,
    )


def residual_part(tokens: float, hidden: float, *, dropped: bool, keeps: bool, dtype: str) -> Part:
    """Return a residual addition, fused with the dropout before it. Its mask has a byte per element."""
    size = tokens * hidden
    mask = size / DTYPE_BYTES[dtype] if dropped else 0.0
    kept = mask + (size if keeps else 0.0)
    return Part(touched=3 * size + mask, kernels=1, kept=kept, unsplit=kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Widths and options of multi-head attention."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    # One fused kernel (Dao et al. 2022) stores no matrix of scores, and skips half of it if causal.
    flash: bool
    rotary: bool
    dropout: bool
    dtype: str
    in_bias: bool
    out_bias: bool


def attention_part(a: Attention, queries: float, keys: float, *, cross: bool = False) -> Part:
    """Return projections, attention of ``queries`` tokens on ``keys`` tokens, and output.

    There is one all-reduce over a tensor group (Megatron-LM: Shoeybi et al. 2019, section 3).
    """
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    bias: Bias = "split" if a.in_bias else "none"
    if cross:
        into = linear_part(queries, a.hidden, q, bias=bias, keeps=True)
        into += linear_part(keys, a.hidden, 2 * kv, bias=bias, keeps=True)
    else:
        into = linear_part(queries, a.hidden, q + 2 * kv, bias=bias, keeps=True)
    if a.rotary:
        into += Part(touched=2 * (queries * q + keys * kv), kernels=1)
    out = linear_part(queries, q, a.hidden, bias="whole" if a.out_bias else "none", keeps=False)
    core = _scores(a, queries, keys)
    named = Part(
        attention_flops=core.flops,
        attention_touched=core.touched,
        attention_kernels=core.kernels,
        attention_kept=core.kept - queries * q,  # the output projection needs its input
        keys_values=2 * keys * kv,
    )
    return into + core + named + out + Part(reduced=queries * a.hidden)


def _scores(a: Attention, queries: float, keys: float) -> Part:
    """Return softmax(q k) v. Causal scores are computed in full unless the kernel is fused."""
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    scores = a.heads * queries * keys
    products = 4 * queries * keys * q
    context = queries * q
    if a.flash:
        return Part(
            flops=products * (0.5 if a.causal and queries == keys else 1.0),
            touched=2 * context + 2 * keys * kv,
            kernels=1,
            kept=context + a.heads * queries,
        )
    dropped = scores * (1 + 1 / DTYPE_BYTES[a.dtype]) if a.dropout else 0.0  # result and mask
    return Part(
        flops=products,
        touched=2 * context + 2 * keys * kv + 4 * scores + dropped,
        kernels=3,
        kept=scores + dropped + context,
        working=scores,
    )


Activation = Literal["gelu", "relu", "silu"]


def feed_forward_part(
    tokens: float, hidden: float, inner: float, *, activation: Activation, gated: bool, biased: bool
) -> Part:
    """Return two products (three if gated) and an activation, with one all-reduce of the tensor
    group."""
    wide = 2 * inner if gated else inner
    into = linear_part(tokens, hidden, wide, bias="split" if biased else "none", keeps=False)
    out = linear_part(tokens, inner, hidden, bias="whole" if biased else "none", keeps=False)
    return (
        into
        + activation_part(tokens, inner, activation, gated=gated)
        + out
        + Part(reduced=tokens * hidden)
    )


def activation_part(tokens: float, inner: float, activation: Activation, *, gated: bool) -> Part:
    """Return the activation between the two products of a feed-forward net.

    The input and output are kept, but only the output for ReLU. A gated activation keeps both
    inputs, the gate's activation and the product.
    """
    tensors = 4 if gated else 1 if activation == "relu" else 2
    size = tokens * inner
    return Part(touched=(3 if gated else 2) * size, kernels=1, kept=tensors * size, working=size)


def loss_part(tokens: float, classes: float, dtype: str) -> Part:
    """Return softmax cross-entropy, computed and kept in 32 bits.

    See Korthikanti et al. 2022, section 4.3. Without fusion, the gradients of its two steps are
    alive at the same time, in 32 bits, too.
    """
    size = tokens * classes
    wide = size * 4 / DTYPE_BYTES[dtype]
    return Part(touched=size + wide, kernels=2, kept=wide, working=size, unfused=wide - size)
