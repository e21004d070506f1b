"""Wide residual networks of bottleneck blocks, as in Alpa's evaluation (OSDI 2022, section 8.1)."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.estimator.architectures.fields import check_sizes
from tessera.estimator.architectures.parts import Part, linear_part, loss_part
from tessera.estimator.graph import DTYPE_BYTES, Graph, Layer, graph_of
from tessera.formulation.base.errors import InvalidInput

DEPTHS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3), 200: (3, 24, 36, 3)}
"""Blocks of the four stages, by number of layers (He et al. 2016, Table 1; for 200, their paper on
identity mappings)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WideResNet:
    """Dimensions of a network.

    Stage i has ``channels x 2^i`` channels, with ``width`` times as many inside its 3x3
    convolutions (Zagoruyko and Komodakis 2016) and four times as many at the ends of its blocks.
    """

    name: str
    depth: int = 50
    channels: int = 64
    width: int = 1
    image: int = 224
    classes: int = 1000
    dtype: str = "f32"

    def __post_init__(self) -> None:
        """Refuse impossible dimensions."""
        check_sizes(self)
        if self.depth not in DEPTHS:
            raise InvalidInput("depth", f"must be one of {', '.join(map(str, DEPTHS))}")
        for field in ("channels", "width", "classes"):
            if getattr(self, field) < 1:
                raise InvalidInput(field, "must be at least 1")
        if self.image < 32 or self.image % 32:
            raise InvalidInput("image", "must be a multiple of 32 pixels")
        if self.dtype not in DTYPE_BYTES:
            raise InvalidInput(
                "dtype", f"unknown {self.dtype!r}; use one of {', '.join(DTYPE_BYTES)}"
            )


def wide_resnet(c: WideResNet) -> Graph:
    """Return the graph: stem, one layer per residual block, classifier."""
    layers = [_stem(c)]
    into, before = c.channels, c.image // 4
    for stage, blocks in enumerate(DEPTHS[c.depth]):
        channels, side = c.channels * 2**stage, c.image // 4 // 2**stage
        for _ in range(blocks):
            layers.append(_block(into, channels, c.width, before, side))
            into, before = 4 * channels, side
    return graph_of(c.name, c.dtype, [*layers, _classifier(c, into, before)])


def convolution_part(into: int, out: int, kernel: int, before: int, side: int) -> Part:
    """Return a convolution from ``before`` x ``before`` to ``side`` x ``side``, which keeps its
    output."""
    weights = into * out * kernel**2
    size = side**2 * out
    return Part(
        flops=2 * side**2 * weights,
        touched=before**2 * into + size,
        kernels=1,
        weights=weights,
        kept=size,
        working=size,
    )


def batch_norm_part(channels: int, side: int, *, keeps: bool) -> Part:
    """Return a pass for statistics and one that normalises, fused with the next activation or sum.

    The result of the activation is kept, because its own gradient and that of the next convolution
    need it.
    """
    size = side**2 * channels
    return Part(
        touched=3 * size, kernels=2, weights=2 * channels, kept=size if keeps else 0.0, working=size
    )


def _block(into: int, channels: int, width: int, before: int, side: int) -> Layer:
    """Return a bottleneck: 1x1, 3x3 with the stride, 1x1, and a projection if the shape changes."""
    inner, out = channels * width, 4 * channels
    part = convolution_part(into, channels, 1, before, before) + batch_norm_part(
        channels, before, keeps=True
    )
    part += convolution_part(channels, inner, 3, before, side) + batch_norm_part(
        inner, side, keeps=True
    )
    part += convolution_part(inner, out, 1, side, side) + batch_norm_part(out, side, keeps=False)
    part += Part(touched=side**2 * out)  # the sum reads the shortcut
    projects = into != out or before != side
    if projects:
        part += convolution_part(into, out, 1, before, side) + batch_norm_part(
            out, side, keeps=False
        )
    part += Part(reduced=_reduced(channels, inner, out, before, side))
    return part.layer(
        f"bottleneck {into}-{channels}-{inner}-{out} {before}-{side}{' projection' * projects}",
        boundary=side**2 * out,
        tensor_limit=channels,
    )


def _reduced(channels: int, inner: int, out: int, before: int, side: int) -> float:
    """Return the all-reduced amount of a tensor group that divides channels.

    A convolution divided by output channels needs whole inputs, and one divided by input channels
    needs an all-reduce of its output. An all-gather moves half as much as an all-reduce. There are
    two ways to divide a block, and the cheaper one counts. In the first, the second and third
    convolutions are such a pair, and the output of the first is gathered. In the other, the first
    two are such a pair, and the output of the block is gathered.
    """
    last = side**2 * out + before**2 * channels / 2
    first = side**2 * inner + side**2 * out / 2
    return min(last, first)


def _stem(c: WideResNet) -> Layer:
    """Return the 7x7 convolution with the pooling that quarters its output."""
    half, quarter = c.image // 2, c.image // 4
    part = convolution_part(3, c.channels, 7, c.image, half) + batch_norm_part(
        c.channels, half, keeps=True
    )
    pooled = quarter**2 * c.channels
    part += Part(touched=half**2 * c.channels + pooled, kernels=1, kept=3 * c.image**2)
    part += Part(reduced=pooled / 2)  # gathered
    return part.layer(f"stem {c.image} c{c.channels}", boundary=pooled, tensor_limit=c.channels)


def _classifier(c: WideResNet, into: int, side: int) -> Layer:
    part = Part(touched=side**2 * into + into, kernels=1, kept=into)
    part += linear_part(1, into, c.classes, bias="split", keeps=True) + loss_part(
        1, c.classes, c.dtype
    )
    return part.layer(f"classifier {into}-{c.classes}", boundary=0.0, tensor_limit=c.classes)
