"""Parameter counts against published ones, and FLOPs and activations against formulas of papers."""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.estimator.architectures.moe import MixtureOfExperts, mixture_graph
from tessera.estimator.architectures.published import find_published, published_models
from tessera.estimator.architectures.resnet import WideResNet, wide_resnet
from tessera.estimator.architectures.transformer import Transformer, transformer_graph
from tessera.estimator.graph import Graph, layer_of, merge_layers
from tessera.formulation.base.errors import InvalidInput
from tessera.simulator.data import data_dir
from tests.support.laws import examples


def a_decoder(**changes: Any) -> Transformer:
    usual = Transformer(
        name="small", layers=4, hidden=64, heads=4, sequence=32, vocabulary=1000, dtype="f16"
    )
    return replace(usual, **changes)


def a_llama(**changes: Any) -> Transformer:
    return a_decoder(
        **{
            "positions": "rotary",
            "norm": "rms",
            "bias": False,
            "gated": True,
            "activation": "silu",
            "tied": False,
            "sequence": 2048,
            "vocabulary": 32_000,
        }
        | changes
    )


def an_encoder(**changes: Any) -> Transformer:
    return a_decoder(
        **{
            "layers": 24,
            "hidden": 1024,
            "heads": 16,
            "sequence": 512,
            "causal": False,
            "norm_first": False,
            "head_bias": True,
        }
        | changes
    )


def a_t5(**changes: Any) -> Transformer:
    return a_decoder(
        **{
            "hidden": 1024,
            "sequence": 512,
            "vocabulary": 32_128,
            "positions": "relative",
            "norm": "rms",
            "bias": False,
            "activation": "relu",
        }
        | changes
    )


def a_mixture(**changes: Any) -> MixtureOfExperts:
    usual = MixtureOfExperts(
        name="mixture",
        layers=4,
        hidden=64,
        heads=4,
        sequence=32,
        vocabulary=1000,
        dtype="f16",
        experts=8,
    )
    return replace(usual, **changes)


COUNTS = {  # as published by the models' authors and libraries
    "GPT-2 XL": (
        transformer_graph(
            a_decoder(layers=48, hidden=1600, heads=25, sequence=1024, vocabulary=50_257)
        ),
        1_557_611_200,
    ),
    "LLaMA-2-7B": (
        transformer_graph(a_llama(layers=32, hidden=4096, heads=32, intermediate=11_008)),
        6_738_415_616,
    ),
    "LLaMA-2-70B": (
        transformer_graph(
            a_llama(layers=80, hidden=8192, heads=64, kv_heads=8, intermediate=28_672)
        ),
        68_976_648_192,
    ),
    "LLaMA-30B": (
        transformer_graph(a_llama(layers=60, hidden=6656, heads=52, intermediate=17_920)),
        32_528_943_616,
    ),
    "BERT-large, both heads": (
        transformer_graph(an_encoder(vocabulary=30_522, token_types=2, head="pretraining")),
        336_226_108,
    ),
    "RoBERTa-large": (
        transformer_graph(
            an_encoder(vocabulary=50_265, token_types=1, max_positions=514, head="mlm")
        ),
        355_412_057,
    ),
    "ViT-B/16": (
        transformer_graph(
            an_encoder(
                layers=12,
                hidden=768,
                heads=12,
                sequence=0,
                vocabulary=0,
                image=224,
                head="classes",
                classes=1000,
                norm_first=True,
            )
        ),
        86_567_656,
    ),
    "T5-large": (transformer_graph(a_t5(layers=24, decoder_layers=24, heads=16)), 737_668_096),
    "T5-3B": (
        transformer_graph(
            a_t5(layers=24, decoder_layers=24, heads=32, head_dim=128, intermediate=16_384)
        ),
        2_851_598_336,
    ),
    "Mixtral-8x7B": (
        mixture_graph(
            a_mixture(
                layers=32,
                hidden=4096,
                heads=32,
                kv_heads=8,
                intermediate=14_336,
                vocabulary=32_000,
                positions="rotary",
                norm="rms",
                bias=False,
                gated=True,
                activation="silu",
                tied=False,
            )
        ),
        46_702_792_704,
    ),
    "ResNet-50": (wide_resnet(WideResNet(name="resnet")), 25_557_032),
    "ResNet-101": (wide_resnet(WideResNet(name="resnet", depth=101)), 44_549_160),
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_known_model_has_exactly_its_published_number_of_parameters(name: str) -> None:
    graph, count = COUNTS[name]
    assert graph.parameters == count


def a_table(folder: str, name: str) -> Path:
    """Return the path of a data set's file, or skip the test if the file does not exist."""
    root = data_dir()
    if root is None or not (root / folder / name).exists():
        pytest.skip(f"{folder}/{name} is not here; set TESSERA_DATA")
    return root / folder / name


ARENA = [key for key, model in published_models().items() if model.training.micro_batches == 16]


@pytest.mark.parametrize(("model", "params"), ARENA)
def test_a_model_of_arena_has_about_as_many_parameters_as_its_name_says(
    model: str, params: str
) -> None:
    """Alpa's names count one tied embedding; the models have two, which matters most in the smallest."""
    size = float(params[:-1]) * {"M": 1e6, "B": 1e9}[params[-1]]
    assert find_published(model, params).graph.parameters == pytest.approx(size, rel=0.11)


def test_morphlings_models_have_the_parameters_of_its_artifact() -> None:
    path = a_table("morphling", "models.csv")
    with path.open(encoding="utf-8") as file:
        rows = {row["model"]: row for row in csv.DictReader(file)}
    off = {
        name: find_published(name, row["paper_size"]).graph.parameters / int(row["param_count"]) - 1
        for name, row in rows.items()
    }
    assert {name for name, share in off.items() if share == 0} == {
        "vit",
        "roberta",
        "bert",
        "gpt2",
        "llama7",
    }
    assert off["t5"] == pytest.approx(0, abs=1e-5)
    assert off["llama30"] == pytest.approx(0, abs=0.02)  # of the public shape


def test_every_batch_of_the_measured_optima_is_published() -> None:
    path = a_table("arena", "alpa_optimal.csv")
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            assert int(row["global_batch"]) in find_published(row["model"], row["params"]).batches


@examples(30)
@given(
    heads=st.sampled_from([1, 4, 16]),
    hidden=st.sampled_from([64, 256]),
    sequence=st.integers(1, 4096),
)
def test_a_block_keeps_the_activations_of_korthikanti_et_al(
    heads: int, hidden: int, sequence: int
) -> None:
    """Equations (1) and (2) give 34 s h + 5 a s^2 bytes, of which 10 s h are not divided."""
    graph = transformer_graph(
        a_decoder(hidden=hidden, heads=heads, sequence=sequence, dropout=True, dtype="f16")
    )
    block = layer_of(graph, 1)
    area = sequence * hidden
    assert 2 * (block.boundary + block.kept) == 34 * area + 5 * heads * sequence**2
    assert 2 * (block.boundary + block.unsplit) == 10 * area


def test_without_dropout_and_with_a_fused_kernel_fewer_activations_are_kept() -> None:
    def kept(**changes: Any) -> float:
        return float(transformer_graph(a_decoder(sequence=1024, **changes)).kept[1])

    scores = 4 * 1024**2
    assert kept(dropout=True) - kept() == 1024 * 64 + 1.5 * scores  # two masks of a byte; scores
    assert kept() - kept(flash=True) == scores - 4 * 1024


def test_the_flops_of_a_block_match_alpas_formula() -> None:
    """A forward pass takes 24 s h^2 (1 + s / 6 h) with full scores, and 2 s h V for the output."""
    graph = transformer_graph(a_decoder(hidden=256, sequence=128))
    assert graph.flops[1] == 24 * 128 * 256**2 * (1 + 128 / (6 * 256))
    assert graph.flops[-1] == 2 * 128 * 256 * 1000
    assert graph.flops[0] == 0


def test_only_a_fused_causal_kernel_skips_half_of_the_scores() -> None:
    full = transformer_graph(a_decoder()).flops[1]
    products = 4 * 32**2 * 64
    assert full - transformer_graph(a_decoder(flash=True)).flops[1] == products / 2
    assert full == transformer_graph(a_decoder(flash=True, causal=False)).flops[1]


def test_known_networks_compute_their_published_multiply_adds() -> None:
    """ResNet-50 with strided 3x3 convolutions has 4.09 G multiply-adds, ViT-B/16 has 17.6 G."""
    assert COUNTS["ResNet-50"][0].flops.sum() / 2 == pytest.approx(4.09e9, rel=0.005)
    assert COUNTS["ViT-B/16"][0].flops.sum() / 2 == pytest.approx(17.6e9, rel=0.005)


def test_the_flops_of_a_gshard_block_match_alpas_formula() -> None:
    """A block has attention, a gate, two expert slots a token, and dispatch and combination by 2,048."""
    h, s, group, experts = 64, 1024, 2048, 8
    graph = mixture_graph(
        a_mixture(
            hidden=h, sequence=s, intermediate=8 * h, every=2, capacity_factor=1.0, group=group
        )
    )
    attention = s * h**2 * 8 + 4 * s**2 * h
    masks = 2 * s * h * 2 * group * 2 + 2 * 2 * s * 2 * group  # multiply by masks, build masks
    expected = attention + 8 * s * h**2 * 8 + 2 * s * h * experts + masks
    assert graph.flops[1] == expected
    assert graph.flops[2] == attention + s * h**2 * 4 * 8


def test_experts_alternate_with_dense_blocks_and_are_counted_apart() -> None:
    graph = mixture_graph(a_mixture(every=2, capacity_factor=1.0, intermediate=512))
    assert graph.experts.tolist() == [1, 8, 1, 8, 1, 1]
    assert graph.expert_weights.tolist() == [0, 8 * 2 * 64 * 512, 0, 8 * 2 * 64 * 512, 0, 0]
    assert graph.exchanged.tolist() == [0, 4 * 32 * 64, 0, 4 * 32 * 64, 0, 0]


def test_more_slots_make_everything_that_experts_do_more_expensive() -> None:
    tight, loose = (mixture_graph(a_mixture(capacity_factor=factor)) for factor in (1.0, 1.25))
    for amount in ("flops", "touched", "kept", "exchanged"):
        assert getattr(loose, amount)[1] > getattr(tight, amount)[1]
    assert loose.parameters == tight.parameters


def test_a_tensor_group_reduces_twice_a_block_and_once_between_both_ends() -> None:
    """The embedding is reduced only in the forward pass, the output only in the backward pass."""
    size = 32 * 64
    assert transformer_graph(a_decoder(layers=2)).reduced.tolist() == [
        size / 2,
        2 * size,
        2 * size,
        size / 2,
    ]
    assert mixture_graph(a_mixture(layers=1)).reduced.tolist() == [size / 2, 2 * size, size / 2]
    t5 = transformer_graph(a_t5(layers=1, decoder_layers=1, heads=16, decoder_sequence=128))
    source, target = 512 * 1024, 128 * 1024
    assert t5.reduced.tolist() == [
        source / 2,
        2 * source,
        target / 2,
        3 * target,
        target / 2,
    ]


def test_a_tensor_group_is_no_larger_than_the_key_heads_or_channels() -> None:
    assert transformer_graph(a_decoder(kv_heads=2)).tensor_limit[1] == 2
    assert transformer_graph(a_decoder()).tensor_limit[1] == 4
    assert wide_resnet(WideResNet(name="w", channels=64)).tensor_limit[[1, -2]].tolist() == [
        64,
        512,
    ]


def test_activation_functions_keep_what_their_gradients_need() -> None:
    """At width 4 h, GELU keeps its input and result, and ReLU keeps only its result.

    A gated function keeps both inputs, the result and the product.
    """
    inner = 32 * 4 * 64

    def kept(**changes: Any) -> float:
        return float(transformer_graph(a_decoder(**changes)).kept[1])

    assert kept() - kept(activation="relu") == inner
    assert kept(activation="silu", gated=True) - kept() == 2 * inner


def test_a_bottleneck_keeps_convolution_and_activation_outputs_and_reduces_the_cheaper_pair() -> (
    None
):
    """Outputs have sizes a and 2a or 16a inside, and 4a at the end, where a = 64 x 56^2 (64 channels)."""
    a = 64 * 56**2
    for width, reduced in ((2, 2 + 4 / 2), (16, 4 + 1 / 2)):
        block = layer_of(wide_resnet(WideResNet(name="w", channels=64, width=width)), 2)
        assert block.kept == (2 + 2 * width + 4) * a
        assert block.reduced == reduced * a
        assert block.boundary == 4 * a


def test_equal_blocks_have_one_kind_and_different_blocks_do_not() -> None:
    kinds = Counter(transformer_graph(a_decoder()).kind)
    assert sorted(kinds.values()) == [1, 1, 4]
    changes: list[dict[str, Any]] = [
        {"hidden": 128},
        {"heads": 2},
        {"sequence": 64},
        {"intermediate": 100},
        {"flash": True},
        {"causal": False},
        {"gated": True},
        {"dropout": True},
        {"kv_heads": 2},
        {"norm": "rms"},
        {"positions": "rotary"},
        {"bias": False},
        {"activation": "relu"},
        {"head_dim": 8},
    ]
    blocks = {transformer_graph(a_decoder(**change)).kind[1] for change in changes}
    assert len(blocks | set(kinds)) == len(changes) + 3


@pytest.mark.parametrize("key", published_models())
def test_layers_of_one_kind_have_the_same_amounts(key: tuple[str, str]) -> None:
    graph = find_published(*key).graph
    first: dict[str, int] = {}
    for index, kind in enumerate(graph.kind):
        assert layer_of(graph, index) == layer_of(graph, first.setdefault(kind, index))


def test_a_tied_embedding_is_counted_once_and_in_the_head() -> None:
    tied, free = transformer_graph(a_decoder()), transformer_graph(a_decoder(tied=False))
    assert free.parameters - tied.parameters == 64 * 1000
    assert (tied.weights[0], tied.weights[-1]) == (0, 64 * 1000)


def test_a_decoder_after_an_encoder_passes_both_outputs_on() -> None:
    graph = transformer_graph(a_t5(layers=2, decoder_layers=3, heads=16, decoder_sequence=128))
    size, target = 512 * 1024, 128 * 1024
    assert graph.boundary.tolist() == [size] * 3 + [size + target] * 4 + [0]


def test_the_decoder_attends_to_the_encoder() -> None:
    """Cross-attention adds 4 s k (heads x width) FLOPs of scores, and the projections of keys and values."""
    graph = transformer_graph(a_t5(layers=1, decoder_layers=1, heads=16))
    encoder, decoder = graph.flops[1], graph.flops[3]
    assert decoder - encoder == 2 * 512 * 4 * 1024**2 + 4 * 512**2 * 1024


def test_the_first_block_of_a_bottleneck_stage_computes_its_first_convolution_before_the_stride() -> (
    None
):
    graph = wide_resnet(WideResNet(name="w", channels=64, width=2))
    weights = 256 * 128 * 56**2 + 9 * 128 * 256 * 28**2 + 256 * 512 * 28**2 + 256 * 512 * 28**2
    assert graph.flops[4] == 2 * weights


def _graphs() -> list[Graph]:
    return [model.graph for model in published_models().values()]


@pytest.mark.parametrize("graph", _graphs(), ids=lambda g: g.name)
def test_coarse_layers_have_the_work_and_weights_of_the_fine_ones(graph: Graph) -> None:
    coarse = merge_layers(graph, 16)
    assert len(coarse) <= 16
    for amount in ("flops", "touched", "weights", "expert_weights", "reduced", "exchanged"):
        assert getattr(coarse, amount).sum() == pytest.approx(getattr(graph, amount).sum())
    assert coarse.kept.sum() + coarse.boundary.sum() == pytest.approx(
        graph.kept.sum() + graph.boundary.sum()
    )


@pytest.mark.parametrize("graph", _graphs(), ids=lambda g: g.name)
def test_amounts_are_consistent_in_every_published_model(graph: Graph) -> None:
    assert np.all(graph.unsplit <= graph.kept)
    assert np.all(graph.kernels >= 1)
    assert np.all(graph.touched >= graph.boundary)
    assert np.all(graph.experts >= 1)
    assert np.all(graph.tensor_limit >= 1)
    assert graph.boundary[-1] == 0
    assert np.all(graph.boundary[:-1] > 0)


def test_arenas_models_are_trained_as_by_its_trainers() -> None:
    state = {"wide_resnet": 12, "bert": 16, "moe": 8}
    for model, params in ARENA:
        one = find_published(model, params)
        assert one.training.checkpointing
        assert one.zero == 1
        assert one.training.state_bytes == state[model]
        assert one.graph.dtype == ("f32" if model == "wide_resnet" else "f16")


def test_state_bytes_match_alpas_measured_memory_without_activations() -> None:
    """On one GPU, peak memory is linear in the micro-batch; its intercept is the state bytes."""
    runs: dict[tuple[str, str], dict[int, float]] = {}
    with a_table("arena/history", "alpa_search.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if (row["variant"], row["num_nodes"], row["gpus_per_node"]) != ("full", "1", "1"):
                continue
            if row["mem_per_gpu_gib"]:
                sizes = runs.setdefault((row["model"], row["params"]), {})
                sizes[int(row["global_batch"]) // 16] = float(row["mem_per_gpu_gib"])
    lines = {key: np.polyfit(list(v), list(v.values()), 1) for key, v in runs.items() if len(v) > 1}
    assert set(lines) == {("bert", "760M"), ("moe", "690M"), ("moe", "1.3B")}
    for key, (_, states_gib) in lines.items():
        one = find_published(*key)
        states = one.graph.parameters * one.training.state_bytes / 2**30
        assert states == pytest.approx(states_gib, rel=0.002)


def test_a_batch_smaller_than_its_micro_batch_count_has_fewer_micro_batches() -> None:
    assert find_published("bert", "1.3B").at(8).micro_batches == 8
    assert find_published("bert", "1.3B").at(512).micro_batch == 32


def test_an_unknown_model_is_refused_with_the_list_of_known_ones() -> None:
    with pytest.raises(InvalidInput, match=r"bert 2B; use one of .*bert 1\.3B.*llama30 30B"):
        find_published("bert", "2B")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"layers": 0}, "layers"),
        ({"layers": 10**9}, "layers"),
        ({"hidden": 0}, "hidden"),
        ({"heads": 3}, "heads"),
        ({"kv_heads": 3}, "kv_heads"),
        ({"sequence": 0}, "sequence"),
        ({"vocabulary": 0}, "vocabulary"),
        ({"dtype": "f8"}, "dtype"),
        ({"max_positions": 16}, "sequence"),
        ({"head": "classes"}, "classes"),
        ({"image": 224}, "image"),
        ({"intermediate": -1}, "intermediate"),
        ({"image": 225, "vocabulary": 0, "head": "classes", "classes": 2}, "patch"),
        ({"decoder_layers": -1}, "decoder_layers"),
    ],
)
def test_impossible_dimensions_are_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as error:
        a_decoder(**changes)
    assert error.value.field == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"experts": 0}, "experts"),
        ({"top_k": 9}, "top_k"),
        ({"every": 0}, "every"),
        ({"first": 4}, "first"),
        ({"capacity_factor": float("nan")}, "capacity_factor"),
        ({"decoder_layers": 2}, "experts"),
        ({"group": 0}, "group"),
    ],
)
def test_impossible_experts_are_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as error:
        a_mixture(**changes)
    assert error.value.field == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"depth": 34}, "depth"), ({"width": 0}, "width"), ({"image": 100}, "image")],
)
def test_impossible_networks_are_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as error:
        replace(WideResNet(name="w"), **changes)
    assert error.value.field == field
