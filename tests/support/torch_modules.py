"""PyTorch modules as a user would write them, and functions that return them with arguments.

This module is imported only if PyTorch is installed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """A pre-norm transformer block. With ``fused``, attention is PyTorch's kernel."""

    def __init__(self, hidden: int, heads: int, *, fused: bool) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.heads, self.fused = heads, fused

    def forward(self, x: Any) -> Any:
        x = x + self.out(self.attend(self.qkv(self.before(x))))
        return x + self.down(F.gelu(self.up(self.between(x))))

    def attend(self, qkv: Any) -> Any:
        batch, length, wide = qkv.shape
        hidden = wide // 3
        shape = (batch, length, self.heads, hidden // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in qkv.chunk(3, -1))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
            scores = q @ k.transpose(-1, -2) * (hidden // self.heads) ** -0.5
            y = torch.where(mask, scores, -1e9).softmax(-1) @ v
        return y.transpose(1, 2).reshape(batch, length, hidden)


class Decoder(nn.Module):
    """GPT-2 with its loss, and with its head tied to the embedding."""

    def __init__(
        self, hidden: int, layers: int, heads: int, vocabulary: int, sequence: int, *, fused: bool
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, hidden), nn.Embedding(sequence, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, fused=fused) for _ in range(layers))
        self.last = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Any, targets: Any) -> Any:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.last(x)).flatten(0, 1), targets.flatten())


def decoder(
    samples: int = 2,
    *,
    hidden: int = 64,
    layers: int = 3,
    heads: int = 4,
    vocabulary: int = 512,
    sequence: int = 32,
    fused: int = 1,
) -> tuple[Any, tuple[Any, ...]]:
    ids = torch.zeros(samples, sequence, dtype=torch.long)
    module = Decoder(hidden, layers, heads, vocabulary, sequence, fused=bool(fused))
    return module, (ids, ids.clone())


class Encoder(nn.Module):
    """PyTorch's own encoder layers, followed by a classifier."""

    def __init__(self, hidden: int, layers: int, heads: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            hidden, heads, 4 * hidden, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.classes = nn.Linear(hidden, 10)

    def forward(self, x: Any) -> Any:
        return self.classes(self.layers(x).mean(1))


def encoder(
    samples: int = 2, *, hidden: int = 64, layers: int = 3, heads: int = 4, sequence: int = 16
) -> tuple[Any, tuple[Any, ...]]:
    return Encoder(hidden, layers, heads), (torch.zeros(samples, sequence, hidden),)


class Bottleneck(nn.Module):
    """A bottleneck of ResNet-50 (He et al. 2016), strided in its middle convolution."""

    def __init__(self, into: int, width: int, stride: int) -> None:
        super().__init__()
        wide = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(into, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
        )
        self.skip: Any = nn.Identity()
        if stride > 1 or into != wide:
            self.skip = nn.Sequential(
                nn.Conv2d(into, wide, 1, stride, bias=False), nn.BatchNorm2d(wide)
            )

    def forward(self, x: Any) -> Any:
        return F.relu(self.body(x) + self.skip(x), inplace=True)


class ResNet(nn.Module):
    """A ResNet of bottlenecks, for example ResNet-50."""

    def __init__(self, blocks: tuple[int, ...], base: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, base, 7, 2, 3, bias=False),
            nn.BatchNorm2d(base),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        parts, into = [], base
        for stage, count in enumerate(blocks):
            for n in range(count):
                parts.append(Bottleneck(into, base << stage, 2 if stage and n == 0 else 1))
                into = 4 * base << stage
        self.blocks = nn.Sequential(*parts)
        self.classes = nn.Linear(into, classes)

    def forward(self, x: Any) -> Any:
        return self.classes(self.blocks(self.stem(x)).mean((2, 3)))


def resnet(samples: int = 2, *, base: int = 64, size: int = 224, classes: int = 1000) -> Any:
    return ResNet((3, 4, 6, 3), base, classes), (torch.zeros(samples, 3, size, size),)


class Two(nn.Module):
    """Two linear layers, which are combined in the way named by ``how``."""

    rates: list[float]

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second, self.how = nn.Linear(8, 8), nn.Linear(8, 8), how

    def forward(self, x: Any) -> Any:
        y = self.first(x)
        match self.how:
            case "branches":
                y = y if x.sum() > 0 else -y
            case "selects":
                y = y[y > 0]
                return y.mean()
            case "conditional":
                y = torch.cond(x.sum() > 0, torch.sin, torch.cos, (y,))
            case "transforms":
                return torch.fft.rfft(y).abs()
            case "misfits":
                y = y[:, :3]
            case "checkpointed":
                y = checkpoint(lambda z: torch.relu(self.first(z)), x, use_reentrant=False)
            case "cast":
                y = F.linear(x.bfloat16(), self.first.weight.bfloat16()).relu().float()
            case "in place":
                y.relu_()
            case _:
                y = F.relu(y)
        return self.second(y)


def two(samples: int = 2, *, how: str = "") -> tuple[Any, tuple[Any, ...]]:
    return Two(how), (torch.zeros(samples, 8),)


def own_batch() -> tuple[Any, Any, dict[str, Any]]:
    return Two(""), (), {"x": torch.zeros(6, 8)}


def not_on_meta(samples: int = 2) -> tuple[Any, tuple[Any, ...]]:
    """Return a module that shares a weight and reads numbers while it is created."""
    module = Two("")
    module.rates = [rate.item() for rate in torch.linspace(0.0, 0.1, 2)]
    module.second.weight = module.first.weight
    return module, (torch.zeros(samples, 8),)


def no_module(samples: int = 2) -> int:
    return samples


def fails(samples: int = 2) -> Any:
    raise ZeroDivisionError(f"{samples} by nothing")
