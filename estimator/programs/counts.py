"""FLOPs of a primitive from its shapes: exact for products, by the number of elements otherwise.

Names are those of JAX's primitives, with some of ours for operators of PyTorch. They are
``attention`` (a fused kernel that does not store scores), ``pick`` (a few elements by index),
``clone`` (a copy in another layout), and views of the same memory: ``permuted``, ``expanded``,
``part`` (a slice) and ``headed`` (a hidden axis viewed as heads; ``headed_clone`` copies).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Dims = tuple[int, ...]

HEAVY_PRIMITIVES = frozenset(
    {"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general", "scan", "attention"}
)
"""Products, which are separate kernels with nearly all the work."""

ALIAS_PRIMITIVES = frozenset(
    {
        "reshape",
        "squeeze",
        "expand_dims",
        "stop_gradient",
        "slice_of",
        "stack_of",
        "copy_p",
        "copy",
        "optimization_barrier",
        "sharding_constraint",
        "permuted",
        "expanded",
        "part",
        "headed",
    }
)
"""Views of the same data, which need no kernel."""

MOVING_PRIMITIVES = frozenset(
    {
        "transpose",
        "broadcast_in_dim",
        "slice",
        "pad",
        "concatenate",
        "rev",
        "iota",
        "convert_element_type",
        "bitcast_convert_type",
        "split",
        "dynamic_slice",
        "dynamic_update_slice",
        "gather",
        "select_n",
        "random_wrap",
        "random_unwrap",
        "tile",
        "empty",
        "real",
        "imag",
        "clone",
        "headed_clone",
        "pick",
    }
    | ALIAS_PRIMITIVES
)
"""Data movement without arithmetic."""

UNFUSED_PRIMITIVES = HEAVY_PRIMITIVES | frozenset(
    {
        "gather",
        "pick",
        "scatter",
        "scatter-add",
        "scatter_add",
        "sort",
        "top_k",
        "approx_top_k",
        "cumsum",
        "cumprod",
        "cummax",
        "cumlogsumexp",
        "reduce_window",
        "reduce_window_sum",
        "reduce_window_max",
        "reduce_window_min",
        "select_and_scatter_add",
        "select_and_gather_add",
        "fft",
        "rng_bit_generator",
        "random_bits",
        "threefry2x32",
    }
)
"""Kernels that no compiler fuses with their neighbours."""


def is_reduction(name: str) -> bool:
    """Return whether a primitive reduces whole axes."""
    return (
        name.startswith("reduce_") and name not in UNFUSED_PRIMITIVES and name != "reduce_precision"
    ) or name in ("argmax", "argmin")


def flops_of(name: str, ins: Sequence[Dims], outs: Sequence[Dims], params: dict[str, Any]) -> float:
    """Return the FLOPs of a primitive without a jaxpr, two per multiply-add."""
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2.0 * math.prod(outs[0]) * float(math.prod(ins[0][d] for d in contracted))
    if name in ("ragged_dot", "ragged_dot_general"):  # (m, k) with a group's (k, n)
        return 2.0 * math.prod(outs[0]) * ins[0][-1]
    if name == "attention":  # queries (.., s, d) over keys (.., t, d) and values (.., t, e)
        scores = math.prod(ins[0][:-1]) * ins[1][-2] * (0.5 if params["causal"] else 1.0)
        return 2.0 * scores * (ins[0][-1] + ins[2][-1])
    if name == "conv_general_dilated":
        kernel = ins[1]
        taps: float = math.prod(kernel) / kernel[params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * math.prod(outs[0]) * taps / float(math.prod(params["lhs_dilation"]))
    if name in MOVING_PRIMITIVES:
        return 0.0
    if name.startswith("reduce_window"):
        return float(math.prod(outs[0]) * math.prod(params["window_dimensions"]))
    if name in ("sort", "top_k", "approx_top_k"):
        length = max(ins[0][-1:], default=1)
        return float(math.prod(ins[0]) * math.log2(max(2, length)))
    if is_reduction(name):
        return float(math.prod(ins[0]))
    return float(max((math.prod(o) for o in outs), default=0))
