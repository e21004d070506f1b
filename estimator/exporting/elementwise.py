"""Rules of element-wise arithmetic, reductions and normalisations.

The rules record the values that the derivatives of PyTorch's ``derivatives.yaml`` need.
"""

from __future__ import annotations

from typing import Final

from tessera.estimator.exporting.layouts import same_rule
from tessera.estimator.exporting.lowering import ProgramBuilder, Rule
from tessera.estimator.exporting.nodes import Node, values_in, values_read

SAVES_RESULT: Final = frozenset(
    {
        "relu",
        "sigmoid",
        "tanh",
        "exp",
        "expm1",
        "sqrt",
        "rsqrt",
        "reciprocal",
        "_softmax",
        "_log_softmax",
        "softmax",
        "log_softmax",
        "tan",
    }
)

ACTIVATIONS: Final = frozenset(
    {
        "relu",
        "gelu",
        "silu",
        "sigmoid",
        "tanh",
        "hardtanh",
        "leaky_relu",
        "elu",
        "hardswish",
        "mish",
    }
)
"""Activations. They stay in the layer of their input, because they work in place and only their
result goes to the next layer."""

SAVES_NOTHING: Final = frozenset(
    {"add", "sub", "rsub", "neg", "floor", "ceil", "round", "trunc", "sign", "fill", "real", "imag"}
)

FACTORS: Final = frozenset({"mul", "div", "pow", "maximum", "minimum", "atan2"})
"""Operators of two tensors in which the gradient of each tensor needs the other, and sometimes the
tensor itself."""


def elementwise_rule(low: ProgramBuilder, node: Node) -> None:
    """Translate an element-wise operator, or one without a rule, to one operation per result."""
    values = values_read(node)
    writes = tuple(v for v in node.writes if v >= 0)
    low.emit(node.target, values, *writes)
    trained = [v for v in values if v in low.trained]
    if not trained or node.target in SAVES_NOTHING:
        return
    if node.target in SAVES_RESULT:
        low.save(writes[0])
    elif node.target == "where":
        low.save(values[0])
    elif node.target in FACTORS and len(values) == 2:
        low.save_factors(*values)
    elif node.target not in FACTORS or node.target == "pow":
        low.save(*values)


def reduction_rule(name: str, *, saves: bool = False) -> Rule:
    """Return the rule of a reduction of axes. If ``saves``, its gradient needs its input."""

    def rule(low: ProgramBuilder, node: Node) -> None:
        source = values_read(node)[0]
        shape = low.shape(source)
        named = node.arguments.get("dim")
        many = named if isinstance(named, list | tuple) else [] if named is None else [named]
        axes = tuple(sorted(int(a) % len(shape) for a in many)) or tuple(range(len(shape)))
        left = tuple(size for a, size in enumerate(shape) if a not in axes)
        for write in node.writes:
            if write < 0:
                continue
            kept = low.shape(write) != left
            result = low.temporary(write, left) if kept else write
            low.emit(name, (source,), result, axes=axes)
            if kept:
                low.emit("reshape", (result,), write)
        if saves and source in low.trained:
            low.save(source)

    return rule


def normalisation_rule(low: ProgramBuilder, node: Node) -> None:
    """Translate a normalisation over the last axes or groups: one pass, which keeps its input."""
    values = values_read(node)
    low.emit(node.target, values, node.writes[0])
    if any(v in low.trained for v in values):
        low.save(values[0])


def batch_normalisation_rule(low: ProgramBuilder, node: Node) -> None:
    """Translate a normalisation by channel: statistics over other axes, then element-wise work."""
    source = values_read(node)[0]
    values = [
        source,
        *values_in(node.arguments.get("weight")),
        *values_in(node.arguments.get("bias")),
    ]
    if node.arguments.get("training", node.arguments.get("train", True)):
        shape = low.shape(source)
        axes = (0, *range(2, len(shape)))
        moments = low.temporary(source, shape[1:2])
        low.emit("reduce_moments", (source,), moments, axes=axes)
        values.insert(1, moments)
    low.emit("batch_norm", values, node.writes[0])
    if node.writes[0] in low.trained:
        low.save(source)


def inference_normalisation_rule(low: ProgramBuilder, node: Node) -> None:
    """Translate a normalisation by channel with known statistics."""
    values = values_read(node)
    low.emit("batch_norm", values, node.writes[0])
    if node.writes[0] in low.trained:
        low.save(values[0])


def dropout_rule(low: ProgramBuilder, node: Node) -> None:
    """Translate dropout: a mask, which the backward pass needs, and a product (in training)."""
    source = values_read(node)[0]
    training = node.arguments.get("train", True)
    if training is False or node.arguments.get("p") == 0:
        same_rule(low, node)
        return
    if len(node.writes) > 1 and node.writes[1] >= 0:
        mask = node.writes[1]
    else:
        mask = low.temporary(source, low.shape(source))
    low.emit("random_bits", (source,), mask)
    low.emit("mul", (source, mask), node.writes[0])
    low.save(mask)


def axis_rule(name: str) -> Rule:
    """Return the rule of a scan, a sort or a selection along one axis."""

    def rule(low: ProgramBuilder, node: Node) -> None:
        source = values_read(node)[0]
        axis = int(node.arguments.get("dim", -1)) % max(1, len(low.shape(source)))
        writes = tuple(v for v in node.writes if v >= 0)
        low.emit(name, (source,), *writes, axis=axis)
        low.save(*(v for v in writes if not low.floating(v)))

    return rule


RULES: Final[dict[str, Rule]] = {
    **dict.fromkeys(("sum", "mean", "nansum"), reduction_rule("reduce_sum")),
    **dict.fromkeys(("amax", "max"), reduction_rule("reduce_max", saves=True)),
    **dict.fromkeys(("amin", "min"), reduction_rule("reduce_min", saves=True)),
    **dict.fromkeys(
        ("prod", "var", "var_mean", "std", "std_mean", "logsumexp", "linalg_vector_norm", "norm"),
        reduction_rule("reduce_sum", saves=True),
    ),
    **dict.fromkeys(("any", "all"), reduction_rule("reduce_or")),
    "argmax": reduction_rule("argmax"),
    "argmin": reduction_rule("argmin"),
    **dict.fromkeys(
        (
            "layer_norm",
            "native_layer_norm",
            "rms_norm",
            "_fused_rms_norm",
            "native_group_norm",
            "group_norm",
        ),
        normalisation_rule,
    ),
    **dict.fromkeys(
        (
            "_native_batch_norm_legit_functional",
            "_native_batch_norm_legit",
            "native_batch_norm",
            "batch_norm",
            "cudnn_batch_norm",
        ),
        batch_normalisation_rule,
    ),
    "_native_batch_norm_legit_no_training": inference_normalisation_rule,
    **dict.fromkeys(("native_dropout", "dropout"), dropout_rule),
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp"), axis_rule("cumsum")),
    "topk": axis_rule("top_k"),
    **dict.fromkeys(("sort", "argsort"), axis_rule("sort")),
}
