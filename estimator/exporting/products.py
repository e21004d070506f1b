"""Rules of matrix products, convolutions and attention. Each is one operator, including its bias."""

from __future__ import annotations

from typing import Final, NamedTuple

from tessera.estimator.exporting.lowering import ProgramBuilder, Rule
from tessera.estimator.exporting.nodes import Node, values_in, values_read

Axes = tuple[int, ...]


class ConvolutionAxes(NamedTuple):
    """Axes of batch (or output channels), channels and space, in this order, with JAX's names."""

    lhs_spec: Axes
    rhs_spec: Axes
    out_spec: Axes


def tensor_argument(node: Node, name: str) -> int:
    """Return the value of an argument that must be a tensor."""
    (value,) = values_in(node.arguments[name])
    return value


def optional_tensor(node: Node, name: str) -> int | None:
    """Return the value of an argument. If it is not a tensor, return None."""
    return next(values_in(node.arguments.get(name)), None)


def _product(
    low: ProgramBuilder,
    left: int,
    right: int,
    write: int,
    bias: int | None,
    contracted: tuple[Axes, Axes],
    batch: tuple[Axes, Axes] = ((), ()),
) -> None:
    reads = (left, right) if bias is None else (left, right, bias)
    low.emit("dot_general", reads, write, dimension_numbers=(contracted, batch))
    low.save_factors(left, right)


def linear_rule(low: ProgramBuilder, node: Node) -> None:
    """Translate ``linear_rule``, with weights (out, in)."""
    data, weight = tensor_argument(node, "input"), tensor_argument(node, "weight")
    contracted = ((len(low.shape(data)) - 1,), (len(low.shape(weight)) - 1,))
    _product(low, data, weight, node.writes[0], optional_tensor(node, "bias"), contracted)


def matrix_rule(left: str, right: str, bias: str = "") -> Rule:
    """Return the rule of a product of (.., m, k) with (.., k, n), or of vectors.

    The leading axes of both are a batch.
    """

    def rule(low: ProgramBuilder, node: Node) -> None:
        a, b = tensor_argument(node, left), tensor_argument(node, right)
        ranks = len(low.shape(a)), len(low.shape(b))
        place = max(ranks[1] - 2, 0)
        both = min(ranks) - 2 if min(ranks) > 2 else 0
        batch = tuple(range(ranks[0] - 2 - both, ranks[0] - 2)), tuple(range(place - both, place))
        added = optional_tensor(node, bias) if bias else None
        _product(low, a, b, node.writes[0], added, ((ranks[0] - 1,), (place,)), batch)

    return rule


def grouped_product_rule(low: ProgramBuilder, node: Node) -> None:
    """Translate the product of rows with the matrix of their group."""
    a, b = (next(values_in(v)) for v in list(node.arguments.values())[:2])
    low.emit("ragged_dot", (a, b), node.writes[0])
    low.save_factors(a, b)


def convolution_rule(low: ProgramBuilder, node: Node) -> None:
    """Translate a convolution of any rank with channels second, including a transposed one."""
    data, kernel, bias = (
        tensor_argument(node, "input"),
        tensor_argument(node, "weight"),
        optional_tensor(node, "bias"),
    )
    groups = int(node.arguments["groups"])
    axes = tuple(range(len(low.shape(data))))
    transposed = bool(node.arguments["transposed"])
    # A transposed kernel has shape (in, out / groups, ..). Each input element is multiplied once
    # with the kernel's part for its group.
    spec = ConvolutionAxes(axes, (1, 0, *axes[2:]) if transposed else axes, axes)
    spread = (*node.arguments["stride"], groups) if transposed else (1,)
    reads = (data, kernel) if bias is None else (data, kernel, bias)
    low.emit(
        "conv_general_dilated",
        reads,
        node.writes[0],
        dimension_numbers=spec,
        lhs_dilation=spread,
        feature_group_count=groups,
    )
    low.save_factors(data, kernel)


def attention_rule(low: ProgramBuilder, node: Node) -> None:
    """Translate fused attention. Scores are not stored, and only half are computed if causal."""
    whole = [tensor_argument(node, name) for name in ("query", "key", "value")]
    four = all(len(low.shape(v)) == 4 for v in whole)
    parts = [low.headed(v, low.shape(v)[1]) if four else v for v in whole]
    mask = next(
        (m for n in ("attn_mask", "attn_bias") if (m := optional_tensor(node, n)) is not None), None
    )
    reads = parts if mask is None else [*parts, mask]
    low.emit(
        "attention", reads, node.writes[0], causal=bool(node.arguments.get("is_causal", False))
    )
    low.attended.add(node.writes[0])
    if node.writes[0] in low.trained:
        low.save(*parts, node.writes[0])


def embedding_rule(low: ProgramBuilder, node: Node) -> None:
    """Translate a look-up of rows."""
    low.emit(
        "gather",
        (tensor_argument(node, "weight"), tensor_argument(node, "indices")),
        node.writes[0],
    )


def pool_rule(name: str) -> Rule:
    """Return the rule of a pooling. Its window is an argument or follows from the result's size."""

    def rule(low: ProgramBuilder, node: Node) -> None:
        data, write = values_read(node)[0], node.writes[0]
        shape, out = low.shape(data), low.shape(write)
        window = node.arguments.get("kernel_size")
        sizes = window or [-(-a // b) for a, b in zip(shape[2:], out[2:], strict=True)]
        taps = tuple(sizes) if len(sizes) > 1 else tuple(sizes) * (len(shape) - 2)
        low.emit(name, (data,), write, window_dimensions=taps)
        if name == "reduce_window_max" and data in low.trained:
            low.save(data)

    return rule


_ATTENTION: Final = (
    "scaled_dot_product_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_fused_attention_overrideable",
)

RULES: Final[dict[str, Rule]] = {
    "linear": linear_rule,
    "matmul": matrix_rule("self", "other"),
    "mm": matrix_rule("self", "mat2"),
    "bmm": matrix_rule("self", "mat2"),
    "mv": matrix_rule("self", "vec"),
    "dot": matrix_rule("self", "tensor"),
    "addmm": matrix_rule("mat1", "mat2", "self"),
    "baddbmm": matrix_rule("batch1", "batch2", "self"),
    "_grouped_mm": grouped_product_rule,
    "convolution": convolution_rule,
    "embedding": embedding_rule,
    "max_pool2d_with_indices": pool_rule("reduce_window_max"),
    "max_pool3d_with_indices": pool_rule("reduce_window_max"),
    "avg_pool1d": pool_rule("reduce_window_sum"),
    "avg_pool2d": pool_rule("reduce_window_sum"),
    "avg_pool3d": pool_rule("reduce_window_sum"),
    "_adaptive_avg_pool2d": pool_rule("reduce_window_sum"),
    "_adaptive_avg_pool3d": pool_rule("reduce_window_sum"),
    "adaptive_max_pool2d": pool_rule("reduce_window_max"),
} | dict.fromkeys(_ATTENTION, attention_rule)
