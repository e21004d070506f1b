"""The models that the papers measured, with their sizes, batches and training.

Arena's models are those of Alpa (OSDI 2022, section 8.1). Their dimensions are from Alpa's public
benchmark suites, and their batches are from the data set. Optimizers, rematerialisation and numbers
of classes are from the trainers of Arena's public artifact. The names and sizes of Morphling's
models are from its Table 1. Their vocabularies and heads follow from the exact parameter counts of
its artifact (``models.csv``), see ``docs/estimator/architectures-and-graphs.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from tessera.estimator.architectures.moe import MixtureOfExperts, mixture_graph
from tessera.estimator.architectures.resnet import WideResNet, wide_resnet
from tessera.estimator.architectures.transformer import Transformer, transformer_graph
from tessera.estimator.graph import Graph
from tessera.estimator.plans import Training
from tessera.formulation.base.errors import InvalidInput

ADAM_MIXED = 16.0
"""Bytes per parameter: a weight and a gradient of 16 bits, and a copy of 32 bits with two moments
(ZeRO, SC 2020, section 3.1)."""
ADAFACTOR_MIXED = 8.0
"""The same without moments, which are factored (Shazeer and Stern 2018, section 3)."""
MOMENTUM_F32 = 12.0
"""Bytes per parameter: a weight, a gradient and a momentum of 32 bits (SGD)."""

ARENA_MICRO_BATCHES = 16
"""Micro-batches in the artifact's measurements. The papers specify 4 x stages (Crius) and as many
as stages (Arena)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PublishedModel:
    """A model at a size, with its training in the papers."""

    model: str
    params: str
    graph: Graph
    training: Training
    """Training at the smallest of ``batches``."""
    batches: tuple[int, ...]
    zero: int = 0
    """ZeRO stage in the papers' runs. Arena uses 1 (its trainers' ``prefer_reduce_scatter``, Alpa
    4.2)."""

    def at(self, global_batch: int) -> Training:
        """Return the training at another global batch, in no more micro-batches than it fills."""
        return self.training.at(global_batch)


def find_published(model: str, params: str) -> PublishedModel:
    """Return a published model.

    Raises:
        InvalidInput: no model has that name and size; the message lists the known ones.
    """
    known = published_models()
    if (model, params) not in known:
        names = ", ".join(f"{m} {p}" for m, p in known)
        raise InvalidInput("model", f"unknown published model {model} {params}; use one of {names}")
    return known[model, params]


@cache
def published_models() -> Mapping[tuple[str, str], PublishedModel]:
    """Return the models by name and size, as in the data sets."""
    models = [*_wide_resnets(), *_berts(), *_moes(), *_morphling()]
    return MappingProxyType({(p.model, p.params): p for p in models})


_WIDE_RESNETS = {  # channels, width
    "500M": (224, 2),
    "1B": (320, 2),
    "2B": (448, 2),
    "4B": (640, 2),
    "6.8B": (320, 16),
}
_BERTS = {  # hidden, layers, heads
    "760M": (1536, 24, 16),
    "1.3B": (2048, 24, 32),
    "2.6B": (2560, 32, 32),
    "6.7B": (4096, 32, 32),
    "15B": (5120, 48, 40),
}
_MOES = {  # hidden, layers, experts
    "690M": (768, 8, 16),
    "1.3B": (768, 16, 16),
    "2.4B": (1024, 16, 16),
    "10B": (1536, 16, 32),
    "27B": (2048, 16, 48),
}


def _arena(
    model: str, params: str, graph: Graph, batches: tuple[int, ...], state: float
) -> PublishedModel:
    """Return one of Arena's models. All three families rematerialise (the trainers' ``use_remat``)."""
    training = Training(
        global_batch=batches[0],
        micro_batches=ARENA_MICRO_BATCHES,
        state_bytes=state,
        checkpointing=True,
    )
    return PublishedModel(
        model=model, params=params, graph=graph, training=training, batches=batches, zero=1
    )


def _wide_resnets() -> list[PublishedModel]:
    """Return Wide-ResNets of 50 layers in 32 bits, on 224 x 224 pixels.

    They have 1,024 classes and are trained with SGD.
    """
    return [
        _arena(
            "wide_resnet",
            params,
            wide_resnet(
                WideResNet(name=f"wide_resnet {params}", channels=c, width=w, classes=1024)
            ),
            (256, 512, 1024),
            MOMENTUM_F32,
        )
        for params, (c, w) in _WIDE_RESNETS.items()
    ]


def _berts() -> list[PublishedModel]:
    """Return the models that are named "bert" in the data, and GPT-3 or BERT in the papers.

    They are BERT models with a masked-language head and the dimensions of GPT-3, with untied
    embeddings and without token types.
    """
    return [
        _arena(
            "bert",
            params,
            transformer_graph(
                Transformer(
                    name=f"bert {params}",
                    layers=layers,
                    hidden=hidden,
                    heads=heads,
                    sequence=1024,
                    vocabulary=51_200,
                    causal=False,
                    norm_first=False,
                    head="mlm",
                    head_bias=True,
                    tied=False,
                    dtype="f16",
                )
            ),
            (128, 256, 512),
            ADAM_MIXED,
        )
        for params, (hidden, layers, heads) in _BERTS.items()
    ]


def _moes() -> list[PublishedModel]:
    """Return GShard models with Adafactor.

    Every second block has experts, of which each token uses two. Groups of 2,048 tokens have two
    slots for each token. The nets are eight times as wide as the model, which has 16 heads.
    """
    return [
        _arena(
            "moe",
            params,
            mixture_graph(
                MixtureOfExperts(
                    name=f"moe {params}",
                    layers=layers,
                    hidden=hidden,
                    heads=16,
                    sequence=1024,
                    vocabulary=32_000,
                    intermediate=8 * hidden,
                    causal=False,
                    norm_first=False,
                    head_bias=True,
                    tied=False,
                    dtype="f16",
                    experts=experts,
                    every=2,
                    capacity_factor=1.0,
                    expert_activation="relu",
                )
            ),
            (256, 512, 1024),
            ADAFACTOR_MIXED,
        )
        for params, (hidden, layers, experts) in _MOES.items()
    ]


def _morphling() -> list[PublishedModel]:
    """Return Morphling's models, in 16 bits with Adam.

    The paper does not specify either. Both are usual with DeepSpeed.
    """
    graphs = {
        ("vit", "86M"): (64, _vit()),
        ("roberta", "355M"): (64, _roberta()),
        ("bert", "336M"): (32, _bert_large()),
        ("t5", "1.2B"): (
            16,
            _t5("1.2B", layers=16, head_dim=64, inner=8192, gated=True, rows=32_000),
        ),
        ("gpt2", "1.5B"): (16, _gpt2()),
        ("llama7", "7B"): (8, _llama("llama7 7B", 4096, 32, 32, 11_008, vocabulary=32_001)),
        ("llama30", "30B"): (4, _llama("llama30 30B", 6656, 60, 52, 17_920, vocabulary=32_000)),
        ("llama7b_bsz16", "7B"): (
            16,
            _llama("llama7b 7B", 4096, 32, 32, 11_008, vocabulary=32_001),
        ),
        ("t5_3B", "3B"): (
            4,
            _t5("3B", layers=24, head_dim=128, inner=16_384, gated=False, rows=32_128),
        ),
    }
    return [
        PublishedModel(
            model=model,
            params=params,
            graph=graph,
            batches=(batch,),
            training=Training(global_batch=batch, micro_batches=1, state_bytes=ADAM_MIXED),
        )
        for (model, params), (batch, graph) in graphs.items()
    ]


def _vit() -> Graph:
    """Return ViT-B/16 with 200 classes: 85,952,456 parameters."""
    return transformer_graph(
        Transformer(
            name="vit 86M",
            layers=12,
            hidden=768,
            heads=12,
            image=224,
            patch=16,
            causal=False,
            head="classes",
            classes=200,
            dtype="f16",
        )
    )


def _roberta() -> Graph:
    """Return RoBERTa-large with its masked-language head: 355,412,057 parameters."""
    return transformer_graph(
        Transformer(
            name="roberta 355M",
            layers=24,
            hidden=1024,
            heads=16,
            sequence=512,
            vocabulary=50_265,
            max_positions=514,
            token_types=1,
            causal=False,
            norm_first=False,
            head="mlm",
            head_bias=True,
            dropout=True,
            dtype="f16",
        )
    )


def _bert_large() -> Graph:
    """Return BERT-large with both pre-training heads, vocabulary padded: 336,297,858 parameters."""
    return transformer_graph(
        Transformer(
            name="bert 336M",
            layers=24,
            hidden=1024,
            heads=16,
            sequence=512,
            vocabulary=30_592,
            token_types=2,
            causal=False,
            norm_first=False,
            head="pretraining",
            head_bias=True,
            dropout=True,
            dtype="f16",
        )
    )


def _t5(params: str, *, layers: int, head_dim: int, inner: int, gated: bool, rows: int) -> Graph:
    """Return a T5 with 32 heads.

    The shape of 1.2B is not published. This one has its number of parameters, hidden size and 32
    layers in total (``models.csv``).
    """
    return transformer_graph(
        Transformer(
            name=f"t5 {params}",
            layers=layers,
            decoder_layers=layers,
            hidden=1024,
            heads=32,
            head_dim=head_dim,
            intermediate=inner,
            gated=gated,
            activation="gelu" if gated else "relu",
            sequence=512,
            vocabulary=rows,
            positions="relative",
            norm="rms",
            bias=False,
            dropout=True,
            dtype="f16",
        )
    )


def _gpt2() -> Graph:
    """Return GPT-2 XL, vocabulary padded: 1,557,686,400 parameters."""
    return transformer_graph(
        Transformer(
            name="gpt2 1.5B",
            layers=48,
            hidden=1600,
            heads=25,
            sequence=1024,
            vocabulary=50_304,
            dropout=True,
            dtype="f16",
        )
    )


def _llama(
    name: str, hidden: int, layers: int, heads: int, inner: int, *, vocabulary: int
) -> Graph:
    """Return a LLaMA. The smaller one has a padding token: 6,738,423,808 parameters."""
    return transformer_graph(
        Transformer(
            name=name,
            layers=layers,
            hidden=hidden,
            heads=heads,
            intermediate=inner,
            gated=True,
            activation="silu",
            sequence=2048,
            vocabulary=vocabulary,
            positions="rotary",
            norm="rms",
            bias=False,
            tied=False,
            dtype="f16",
        )
    )


def jax_step(model: str, params: str) -> tuple[str, Mapping[str, int | str]] | None:
    """Return the JAX step that profiles a published model: its ``module:function`` and arguments.

    The heads of BERT and RoBERTa differ a little from those of the graph. If there is no step of
    that shape, return None.
    """
    step = _jax_arguments(model, params)
    if step is None:
        return None
    function, arguments = step
    return f"tessera.estimator.tracing.models.steps:{function}", arguments


def _jax_arguments(model: str, params: str) -> tuple[str, dict[str, int | str]] | None:
    """Return the function of ``tessera.estimator.tracing.models.steps`` and its arguments."""
    if model == "wide_resnet" and params in _WIDE_RESNETS:
        channels, width = _WIDE_RESNETS[params]
        return "wide_resnet", {"base": channels, "width": width, "classes": 1024, "dtype": "f32"}
    if model == "bert" and params in _BERTS:
        hidden, layers, heads = _BERTS[params]
        return "decoder", _sizes(hidden, layers, heads, 51_200, 1024, causal=0)
    if model == "moe" and params in _MOES:
        hidden, layers, experts = _MOES[params]
        sizes = _sizes(hidden, layers, 16, 32_000, 1024, causal=0, inner=8 * hidden)
        return "decoder", sizes | {"experts": experts}
    return _JAX_MORPHLING.get((model, params))


def _sizes(
    hidden: int, layers: int, heads: int, vocabulary: int, sequence: int, **others: int
) -> dict[str, int | str]:
    return {
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "vocabulary": vocabulary,
        "sequence": sequence,
        "dtype": "f16",
        **others,
    }


_JAX_LLAMA_7B = _sizes(4096, 32, 32, 32_001, 2048, llama=1, inner=11_008)
_JAX_MORPHLING: Mapping[tuple[str, str], tuple[str, dict[str, int | str]]] = MappingProxyType(
    {
        ("vit", "86M"): ("vision", {"classes": 200, "dtype": "f16"}),
        ("roberta", "355M"): ("decoder", _sizes(1024, 24, 16, 50_265, 512, causal=0)),
        ("bert", "336M"): ("decoder", _sizes(1024, 24, 16, 30_592, 512, causal=0)),
        ("t5_3B", "3B"): (
            "encoder_decoder",
            _sizes(1024, 24, 32, 32_128, 512, inner=16_384, head_width=128),
        ),
        ("gpt2", "1.5B"): ("decoder", _sizes(1600, 48, 25, 50_304, 1024)),
        ("llama7", "7B"): ("decoder", _JAX_LLAMA_7B),
        ("llama7b_bsz16", "7B"): ("decoder", _JAX_LLAMA_7B),
        ("llama30", "30B"): ("decoder", _sizes(6656, 60, 52, 32_000, 2048, llama=1, inner=17_920)),
    }
)
"""Functions and arguments for Morphling's models. T5 1.2B is absent, because its nets are gated
without being LLaMA's."""
