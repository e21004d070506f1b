"""A model as a chain of layers, as the planner, the cost model and the profiler use it.

A configuration, a JAX function and a PyTorch module all become a :class:`Graph`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Final

import numpy as np

from tessera.formulation.base.cancellation import never_cancelled, require_caller
from tessera.formulation.base.errors import TesseraError
from tessera.formulation.base.tables import Floats, Ints

DTYPE_BYTES = {"f32": 4, "bf16": 2, "f16": 2}
"""Data types of weights and activations in compute, with the bytes of a scalar."""


class Untraceable(TesseraError):
    """An error for a model that cannot be converted to a graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The costs of one sample in one layer. Counts are of scalars, not bytes.

    ``kind`` is the same for layers with the same operators at the same shapes. They are profiled
    once.
    """

    kind: str
    flops: float  # of the forward pass, two per multiply-add; a tensor group divides them
    touched: float  # activations read and written by its kernels in a forward pass
    kernels: float  # number of kernels launched in a forward pass
    weights: float  # divided within a tensor group
    expert_weights: float = 0.0  # divided within an expert group
    shared_weights: float = 0.0  # kept whole by every GPU
    boundary: float  # activations handed to the next layer
    # Further activations kept for the backward pass, divided within a tensor group.
    kept: float = 0.0
    # The part of ``kept`` that is divided only if activations are divided by sequence.
    unsplit: float = 0.0
    # Activations alive only while this layer is computed, divided within a tensor group.
    working: float = 0.0
    # Further ones that are alive then unless a compiler fuses the layer's kernels.
    unfused: float = 0.0
    reduced: float = 0.0  # activations all-reduced over a tensor group in a forward pass
    # Activations that move between the GPUs of an expert group (all-to-all) in a forward pass.
    exchanged: float = 0.0
    tensor_limit: float = 2.0**30  # largest tensor degree (attention heads, channels)
    experts: float = 1.0  # must be a multiple of the expert degree
    # The parts of ``flops``, ``touched``, ``kernels`` and ``kept`` that are the scores of attention
    # and their product with the values. They are 0 if the layer's operators are not known apart.
    attention_flops: float = 0.0
    attention_touched: float = 0.0
    attention_kernels: float = 0.0
    attention_kept: float = 0.0
    keys_values: float = 0.0  # activations that attention reads of every position of a sequence
    # Activations that products with weights read and write in a forward pass.
    product_touched: float = 0.0
    heads: float = 0.0  # of keys and values, which a tensor group divides; 0 if not known


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Graph:
    """The layers of a model in order, as arrays of shape (L,) with the fields of :class:`Layer`."""

    name: str
    dtype: str
    kind: tuple[str, ...]
    flops: Floats
    touched: Floats
    kernels: Floats
    weights: Floats
    expert_weights: Floats
    shared_weights: Floats
    boundary: Floats
    kept: Floats
    unsplit: Floats
    working: Floats
    unfused: Floats
    reduced: Floats
    exchanged: Floats
    tensor_limit: Floats
    experts: Floats
    attention_flops: Floats
    attention_touched: Floats
    attention_kernels: Floats
    attention_kept: Floats
    keys_values: Floats
    product_touched: Floats
    heads: Floats

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def parameters(self) -> float:
        """Return the number of parameters."""
        return float((self.weights + self.expert_weights + self.shared_weights).sum())

    @property
    def element_bytes(self) -> int:
        """Return the bytes of an activation or weight in compute."""
        return DTYPE_BYTES[self.dtype]


_AMOUNTS = tuple(f.name for f in fields(Layer) if f.name != "kind")


def graph_of(name: str, dtype: str, layers: Sequence[Layer]) -> Graph:
    """Return the graph of the given layers.

    Raises:
        Untraceable: there is no layer, the data type is unknown, or an amount is negative or not
            finite.
    """
    if not layers:
        raise Untraceable(f"{name} has no layers; give at least one")
    if dtype not in DTYPE_BYTES:
        raise Untraceable(
            f"{name}: unknown data type {dtype!r}; use one of {', '.join(DTYPE_BYTES)}"
        )
    columns = {f: np.array([getattr(x, f) for x in layers], dtype=np.float64) for f in _AMOUNTS}
    for field, column in columns.items():
        if bad := np.flatnonzero(~np.isfinite(column) | (column < 0)).tolist():
            raise Untraceable(
                f"{name}: layer {bad[0]} has {field} {column[bad[0]]}; it must be finite and not negative"
            )
    return Graph(name=name, dtype=dtype, kind=tuple(x.kind for x in layers), **columns)


def layer_of(graph: Graph, index: int) -> Layer:
    """Return one layer of the graph."""
    return Layer(kind=graph.kind[index], **{f: float(getattr(graph, f)[index]) for f in _AMOUNTS})


def merge_layers(graph: Graph, most: int, cancelled: Callable[[], bool] = never_cancelled) -> Graph:
    """Return the graph with neighbours joined into at most ``most`` layers of about equal work.

    Planners work on a bounded number of coarse layers (Alpa, section 5; the Arena artifact uses
    16). Dynamic programming finds the cut whose heaviest coarse layer is lightest.

    Raises:
        DeadlineTooShort: it was cancelled.
    """
    return join_layers(graph, merged_ends(graph, most, cancelled))


def merged_ends(graph: Graph, most: int, cancelled: Callable[[], bool] = never_cancelled) -> Ints:
    """Return the ends of the layers that :func:`merge_layers` joins, at most ``most``.

    Raises:
        DeadlineTooShort: it was cancelled.
    """
    if len(graph) <= most:
        return np.arange(1, len(graph) + 1, dtype=np.int64)
    return balanced_ends(graph.flops + 1e-9 * graph.flops.sum(), most, cancelled)


def join_layers(graph: Graph, ends: Ints) -> Graph:
    """Return the graph with the layers up to each of ``ends`` joined into one."""
    if len(ends) == len(graph):
        return graph
    starts = np.concatenate([[0], ends[:-1]])
    joined = [_joined(graph, int(a), int(b)) for a, b in zip(starts, ends, strict=True)]
    return graph_of(graph.name, graph.dtype, joined)


def _joined(graph: Graph, start: int, end: int) -> Layer:
    """Return the layers ``start`` to ``end`` (exclusive) as one.

    Inner boundaries count as kept and unsplit. With checkpointing, only the last boundary is kept.
    """
    part = {f: getattr(graph, f)[start:end] for f in _AMOUNTS}
    amounts = {f: float(column.sum()) for f, column in part.items()}
    amounts["kept"] += float(part["boundary"][:-1].sum())
    amounts["unsplit"] += float(part["boundary"][:-1].sum())
    amounts["boundary"] = float(part["boundary"][-1])
    amounts["working"] = float(part["working"].max())
    amounts["unfused"] = float(part["unfused"].max())
    amounts["tensor_limit"] = float(part["tensor_limit"].min())
    amounts["experts"] = float(part["experts"].max())
    amounts["heads"] = float(part["heads"].max())
    return Layer(kind="+".join(graph.kind[start:end]), **amounts)


_MOST_CUTS: Final = 100_000
"""The number of cuts that are compared in one step, so that a long graph takes little memory."""


def balanced_ends(
    load: Floats, parts: int, cancelled: Callable[[], bool] = never_cancelled
) -> Ints:
    """Return the ends, shape (parts,), of contiguous non-empty parts whose heaviest is lightest.

    Raises:
        Untraceable: there are fewer layers than parts.
        DeadlineTooShort: it was cancelled.
    """
    count = len(load)
    if parts > count:
        raise Untraceable(
            f"{count} layers cannot be divided into {parts} parts; ask for at most {count}"
        )
    total = np.concatenate([[0.0], np.cumsum(load)])
    best = np.full((parts + 1, count + 1), np.inf)
    cut = np.zeros((parts + 1, count + 1), dtype=np.int64)
    best[0, 0] = 0.0
    at_once = max(1, _MOST_CUTS // count)
    for k in range(1, parts + 1):
        for first in range(k, count - (parts - k) + 1, at_once):
            require_caller(cancelled)
            ends = np.arange(first, min(first + at_once, count - (parts - k) + 1))
            starts = np.arange(k - 1, ends[-1])
            worst = np.maximum(best[k - 1, starts], total[ends, None] - total[starts])
            worst[starts >= ends[:, None]] = np.inf
            least = worst.argmin(axis=1)
            cut[k, ends] = starts[least]
            best[k, ends] = worst[np.arange(len(ends)), least]
    chosen = [count]
    for k in range(parts, 1, -1):
        chosen.append(int(cut[k, chosen[-1]]))
    return np.array(chosen[::-1], dtype=np.int64)
