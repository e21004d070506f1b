"""The three model families of the papers as lists of layers: work, weights, activations, exchange.

Sizes are those published with Alpa (OSDI 2022), which the papers reuse under the same names; the
parameter counts below come out within a few percent of the names (``tests/unit/test_roofline.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

SEQUENCE = 1024
"""Tokens a sample of the language models (Arena section 5.1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What one sample costs in one layer. Counts are of scalars, not bytes."""

    flops: float  # of the forward pass, two a multiply-add
    weights: float  # divided among the GPUs of a tensor (or expert) group
    shared_weights: float = 0.0  # kept whole by every GPU of the group
    boundary: float  # activations handed to the next layer
    kept: float = 0.0  # further activations kept for the backward pass
    working: float  # activations alive only while this layer is computed
    reduced: float = 0.0  # activations all-reduced over a tensor group in a forward pass
    exchanged: float = 0.0  # activations that change GPU (all-to-all) in a forward pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What all sizes of a model have in common."""

    name: str
    element_bytes: int  # of weights and activations in compute
    state_bytes: int  # a weight: itself, its gradient, Adam's moments, fp32 master copy if fp16
    recomputes: bool  # forward pass repeated in the backward pass; only boundaries are kept
    splits_batch: bool  # the inner group splits samples and exchanges tokens (expert parallelism)
    utilisation: float  # share of the data sheet's peak that large kernels reach
    batches: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One size of a family."""

    family: Family
    params: str
    layers: tuple[Layer, ...]

    @property
    def weights(self) -> float:
        """Return the number of parameters."""
        return sum(layer.weights + layer.shared_weights for layer in self.layers)


# Mixed precision Adam: 2 + 2 + 4 + 4 + 4 bytes a weight (ZeRO, SC 2020, section 3.1); fp32: 4 x 4.
WIDE_RESNET = Family(
    name="wide_resnet", element_bytes=4, state_bytes=16, recomputes=False, splits_batch=False,
    utilisation=0.3, batches=(256, 512, 1024),
)  # fmt: skip
BERT = Family(
    name="bert", element_bytes=2, state_bytes=16, recomputes=True, splits_batch=False,
    utilisation=0.5, batches=(128, 256, 512),
)  # fmt: skip
MOE = Family(
    name="moe", element_bytes=2, state_bytes=16, recomputes=True, splits_batch=True,
    utilisation=0.35, batches=(256, 512, 1024),
)  # fmt: skip

_BERT_SIZES = {  # name: (hidden size, layers, heads); vocabulary of 51,200
    "760M": (1536, 24, 16), "1.3B": (2048, 24, 32), "2.6B": (2560, 32, 32),
    "6.7B": (4096, 32, 32), "15B": (5120, 48, 40),
}  # fmt: skip
_MOE_SIZES = {  # name: (hidden size, layers, experts); 16 heads, vocabulary of 32,000
    "690M": (768, 8, 16), "1.3B": (768, 16, 16), "2.4B": (1024, 16, 16),
    "10B": (1536, 16, 32), "27B": (2048, 16, 48),
}  # fmt: skip
_WIDE_RESNET_SIZES = {  # name: (base channels, width of the 3x3 convolution); 50 layers, 224 x 224
    "500M": (224, 2), "1B": (320, 2), "2B": (448, 2), "4B": (640, 2), "6.8B": (320, 16),
}  # fmt: skip


def _head(hidden: int, vocabulary: int) -> Layer:
    """Return the output projection; its weights are the input embedding's too (counted once)."""
    return Layer(
        flops=2 * SEQUENCE * hidden * vocabulary, weights=hidden * vocabulary, boundary=0.0,
        working=2 * SEQUENCE * vocabulary, reduced=SEQUENCE * hidden,
    )  # fmt: skip


def _attention_flops(hidden: int) -> float:
    """Return forward FLOPs of projections (4 h^2 weights) and of the two sequence-squared products."""
    return 2 * SEQUENCE * (4 * hidden**2) + 4 * SEQUENCE**2 * hidden


def _transformer(hidden: int, heads: int) -> Layer:
    """Return a decoder block: 12 h^2 weights; activations of Korthikanti et al. 2022, eq. (1).

    That equation's 34 s h + 5 a s^2 bytes are half as many fp16 scalars. Under tensor parallelism the
    block all-reduces its output twice a pass (Megatron-LM).
    """
    return Layer(
        flops=_attention_flops(hidden) + 2 * SEQUENCE * (8 * hidden**2),
        weights=12 * hidden**2,
        boundary=SEQUENCE * hidden,
        working=17 * SEQUENCE * hidden + 2.5 * heads * SEQUENCE**2,
        reduced=2 * SEQUENCE * hidden,
    )


def _bert(hidden: int, layers: int, heads: int) -> tuple[Layer, ...]:
    return (_transformer(hidden, heads),) * layers + (_head(hidden, 51_200),)


def _expert_block(hidden: int, experts: int) -> Layer:
    """Return a GShard block: attention and top-2 of ``experts`` feed-forward nets of width 8 h.

    Dispatch and combine are dense products with one-hot masks over groups of 2,048 tokens, each
    2 x 2,048 slots wide (capacity factor 2, GShard section 2.2). Each token goes to two experts
    and comes back: four exchanges of h a token.
    """
    mask = 2 * (2 * 2 * 2048 * hidden)
    return Layer(
        flops=_attention_flops(hidden) + SEQUENCE * (2 * 2 * 16 * hidden**2 + mask),
        weights=experts * 16 * hidden**2,
        shared_weights=4 * hidden**2,
        boundary=SEQUENCE * hidden,
        working=33 * SEQUENCE * hidden + 2.5 * 16 * SEQUENCE**2 + 2 * SEQUENCE * 2 * 2048,
        exchanged=4 * SEQUENCE * hidden,
    )


def _dense_block(hidden: int) -> Layer:
    """Return a block without experts, whose feed-forward net is 8 h wide."""
    return Layer(
        flops=_attention_flops(hidden) + 2 * SEQUENCE * (16 * hidden**2),
        weights=0.0,
        shared_weights=20 * hidden**2,
        boundary=SEQUENCE * hidden,
        working=25 * SEQUENCE * hidden + 2.5 * 16 * SEQUENCE**2,
    )


def _moe(hidden: int, layers: int, experts: int) -> tuple[Layer, ...]:
    """Return alternating dense and expert blocks (GShard section 2.2)."""
    head = Layer(
        flops=2 * SEQUENCE * hidden * 32_000, weights=0.0, shared_weights=hidden * 32_000,
        boundary=0.0, working=2 * SEQUENCE * 32_000,
    )  # fmt: skip
    pair = (_dense_block(hidden), _expert_block(hidden, experts))
    return pair * (layers // 2) + (head,)


def _bottleneck(into: int, channels: int, width: int, side: int, *, first: bool) -> Layer:
    """Return a residual block: 1x1, 3x3 (``width`` times as many outputs), 1x1 to four times.

    Each convolution's output and its normalised form are kept. ``side`` is that of the output.
    """
    weights = into * channels + 9 * channels * channels * width + 4 * channels * width * channels
    if first:
        weights += into * 4 * channels  # projection of the shortcut
    area, out = side**2, 4 * channels
    return Layer(
        flops=2 * area * weights,
        weights=weights,
        boundary=area * out,
        kept=area * (2 * channels + 2 * channels * width + out),
        working=area * out,
        reduced=area * out,
    )


def _wide_resnet(base: int, width: int) -> tuple[Layer, ...]:
    """Return the 16 blocks of a 50-layer network; stem and classifier (under 2 %) are left out."""
    layers: list[Layer] = []
    into = base
    for stage, (blocks, side) in enumerate(((3, 56), (4, 28), (6, 14), (3, 7))):
        channels = base * 2**stage
        for block in range(blocks):
            layers.append(_bottleneck(into, channels, width, side, first=block == 0))
            into = 4 * channels
    return tuple(layers)


@cache
def models() -> tuple[Model, ...]:
    """Return every size of every family, smallest first in each."""
    sizes: list[tuple[Family, str, tuple[Layer, ...]]] = []
    sizes += [(WIDE_RESNET, name, _wide_resnet(*s)) for name, s in _WIDE_RESNET_SIZES.items()]
    sizes += [(BERT, name, _bert(*s)) for name, s in _BERT_SIZES.items()]
    sizes += [(MOE, name, _moe(*s)) for name, s in _MOE_SIZES.items()]
    return tuple(Model(family=f, params=name, layers=layers) for f, name, layers in sizes)
