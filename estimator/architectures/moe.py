"""Transformers whose feed-forward nets are mixtures of experts in some or all blocks."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.estimator.architectures.parts import Activation, Part, feed_forward_part, linear_part
from tessera.estimator.architectures.transformer import (
    Transformer,
    block_layer,
    block_part,
    embedding_layer,
    head_layer,
    shape_name,
    stack_layers,
    tensor_limit,
)
from tessera.estimator.graph import Graph, Layer, graph_of
from tessera.formulation.base.errors import InvalidInput

MAX_CAPACITY = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureOfExperts(Transformer):
    """A transformer with experts in the blocks ``first``, ``first + every``, and so on."""

    experts: int
    top_k: int = 2
    """Number of experts for each token."""
    every: int = 1
    first: int = 0
    expert_intermediate: int = 0
    """Width of an expert. If it is 0, it is that of the other blocks."""
    expert_activation: Activation | None = None
    """Activation of experts. If it is None, it is ``activation``."""
    expert_bias: bool = False
    capacity_factor: float = 0.0
    """Slots of all experts together, relative to tokens times ``top_k``. Tokens beyond the capacity
    are dropped (GShard, Lepikhin et al. 2021, section 2.2). If it is 0, the capacity is unlimited
    and every token gets its slots (Mixtral)."""
    group: int = 2048
    """Number of tokens that share slots. With a capacity, they are routed by products with masks of
    ``group`` x slots."""

    def __post_init__(self) -> None:
        """Refuse impossible dimensions."""
        Transformer.__post_init__(self)
        for field in ("experts", "top_k", "every", "group"):
            if getattr(self, field) < 1:
                raise InvalidInput(field, "must be at least 1")
        if self.top_k > self.experts:
            raise InvalidInput("top_k", f"must be at most experts ({self.experts})")
        if not 0 <= self.first < self.layers:
            raise InvalidInput("first", f"must be from 0 to {self.layers - 1}")
        if self.expert_intermediate < 0:
            raise InvalidInput("expert_intermediate", "must not be negative")
        if not 0 <= self.capacity_factor <= MAX_CAPACITY:
            raise InvalidInput(
                "capacity_factor", f"must be a number from 0 (no capacity) to {MAX_CAPACITY:,}"
            )
        if self.decoder_layers or self.image:
            raise InvalidInput(
                "experts", "need a single stack of tokens; remove decoder_layers and image"
            )

    @property
    def slots(self) -> float:
        """Return the slots of all experts together, per token."""
        return self.top_k * (self.capacity_factor or 1.0)


def mixture_graph(c: MixtureOfExperts) -> Graph:
    """Return the graph: embedding, one layer per block, head."""
    dense, expert = block_layer(c, causal=c.causal), _expert_layer(c)
    places = range(c.first, c.layers, c.every)
    blocks = [expert if index in places else dense for index in range(c.layers)]
    return graph_of(c.name, c.dtype, [embedding_layer(c), *stack_layers(c, blocks), head_layer(c)])


def _expert_layer(c: MixtureOfExperts) -> Layer:
    return block_part(c, causal=c.causal, feed=expert_part(c)).layer(
        f"expert block {shape_name(c)} s{c.tokens} e{c.experts} k{c.top_k} x{_inner(c)}"
        f" {c.expert_activation or c.activation} c{c.capacity_factor:g}/{c.group}",
        boundary=c.tokens * c.hidden,
        tensor_limit=tensor_limit(c),
        experts=c.experts,
        heads=c.kv_heads or c.heads,
    )


def _inner(c: MixtureOfExperts) -> int:
    return c.expert_intermediate or c.inner


def expert_part(c: MixtureOfExperts) -> Part:
    """Return the gate, the dispatch, the experts and the combination of their results.

    A token's copies go to their experts and come back: ``2 x slots`` exchanges of ``hidden``. If
    experts are not divided, the tensor group reduces their sum like that of a dense net.
    """
    places = c.slots * c.tokens
    one = feed_forward_part(
        places,
        c.hidden,
        _inner(c),
        activation=c.expert_activation or c.activation,
        gated=c.gated,
        biased=c.expert_bias,
    )
    experts = Part(
        flops=one.flops,
        touched=one.touched,
        product_touched=one.product_touched,
        kernels=one.kernels,
        kept=one.kept,
        working=one.working,
        expert_weights=c.experts * (one.weights + one.shared_weights),
    )
    exchanged = 2 * places * c.hidden
    return (
        gate_part(c)
        + experts
        + routing_part(c, places)
        + Part(exchanged=exchanged, reduced=c.tokens * c.hidden)
    )


def gate_part(c: MixtureOfExperts) -> Part:
    """Return the choice of experts: a small product, a softmax and top k. Weights are not divided."""
    scores = c.tokens * c.experts
    product = linear_part(c.tokens, c.hidden, c.experts, bias="none", keeps=False)
    return Part(
        flops=product.flops,
        touched=product.touched + 4 * scores,
        kernels=3,
        shared_weights=product.weights,
        kept=scores,
    )


def routing_part(c: MixtureOfExperts, places: float) -> Part:
    """Return the routing of tokens to experts and back. Both results are kept.

    With a capacity, routing is products with one-hot masks of ``group`` tokens x their slots. The
    masks are built as outer products of expert and slot for each of ``top_k`` choices. Without a
    capacity, routing is a sort and two copies.
    """
    size = places * c.hidden
    if not c.capacity_factor:
        return Part(touched=3 * size + c.tokens * c.hidden, kernels=4, kept=2 * size)
    mask = c.tokens * c.slots * c.group
    product = 2 * mask * c.hidden
    tensors = c.tokens * c.hidden + mask + size  # input, mask and output of either product
    return Part(
        flops=2 * product + 2 * c.top_k * mask,
        touched=2 * tensors + 2 * (c.top_k + 1) * mask,
        kernels=4 + c.top_k,
        kept=2 * mask + 2 * size,
        working=mask,
    )
