"""Models read from Hugging Face configurations and from our own architecture files."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tessera.estimator.architectures.files import architecture_graph, load_graph, parse_architecture
from tessera.estimator.architectures.huggingface import SUPPORTED
from tessera.formulation.base.errors import InvalidInput
from tests.support.patience import PATIENCE_S
from tests.support.torch_python import find_torch_python
from tests.support.transformers_counts import usual_values

BERT = {
    "model_type": "bert",
    "num_hidden_layers": 24,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "vocab_size": 30_522,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
}
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "intermediate_size": 11_008,
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
GPT2 = {
    "model_type": "gpt2",
    "n_layer": 12,
    "n_embd": 768,
    "n_head": 12,
    "n_positions": 1024,
    "n_inner": None,
    "vocab_size": 50_257,
    "activation_function": "gelu_new",
}
T5 = {
    "model_type": "t5",
    "num_layers": 12,
    "d_model": 768,
    "num_heads": 12,
    "d_kv": 64,
    "d_ff": 3072,
    "vocab_size": 32_128,
    "n_positions": 512,
    "architectures": ["T5ForConditionalGeneration"],
}

KNOWN: dict[str, tuple[dict[str, Any], int]] = {  # published configurations and parameter counts
    "gpt2": (GPT2, 124_439_808),
    "gpt-neo-125m": (
        {
            "model_type": "gpt_neo",
            "num_layers": 12,
            "hidden_size": 768,
            "num_heads": 12,
            "intermediate_size": None,
            "vocab_size": 50_257,
            "max_position_embeddings": 2048,
        },
        125_198_592,
    ),
    "pythia-160m": (
        {
            "model_type": "gpt_neox",
            "num_hidden_layers": 12,
            "hidden_size": 768,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "vocab_size": 50_304,
            "max_position_embeddings": 2048,
        },
        162_322_944,
    ),
    "opt-1.3b": (
        {
            "model_type": "opt",
            "num_hidden_layers": 24,
            "hidden_size": 2048,
            "ffn_dim": 8192,
            "num_attention_heads": 32,
            "vocab_size": 50_272,
            "max_position_embeddings": 2048,
            "word_embed_proj_dim": 2048,
        },
        1_315_758_080,
    ),
    "llama-2-7b": (LLAMA, 6_738_415_616),
    "mistral-7b": (
        {
            **LLAMA,
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "num_key_value_heads": 8,
            "intermediate_size": 14_336,
        },
        7_241_732_096,
    ),
    "qwen2-7b": (
        {
            **LLAMA,
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
            "num_hidden_layers": 28,
            "hidden_size": 3584,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "intermediate_size": 18_944,
            "vocab_size": 152_064,
        },
        7_615_616_512,
    ),
    "gemma-2b": (
        {
            **LLAMA,
            "model_type": "gemma",
            "architectures": ["GemmaForCausalLM"],
            "num_hidden_layers": 18,
            "hidden_size": 2048,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "intermediate_size": 16_384,
            "vocab_size": 256_000,
            "tie_word_embeddings": True,
        },
        2_506_172_416,
    ),
    "mixtral-8x7b": (
        {
            **LLAMA,
            "model_type": "mixtral",
            "architectures": ["MixtralForCausalLM"],
            "num_key_value_heads": 8,
            "intermediate_size": 14_336,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        46_702_792_704,
    ),
    "bert-large, both heads": ({**BERT, "architectures": ["BertForPreTraining"]}, 336_226_108),
    "bert-large, masked": ({**BERT, "architectures": ["BertForMaskedLM"]}, 335_174_458),
    "bert-large, two classes": (
        {**BERT, "architectures": ["BertForSequenceClassification"]},
        335_143_938,
    ),
    "roberta-base": (
        {
            **BERT,
            "model_type": "roberta",
            "num_hidden_layers": 12,
            "hidden_size": 768,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "vocab_size": 50_265,
            "max_position_embeddings": 514,
            "type_vocab_size": 1,
        },
        124_697_433,
    ),
    "vit-base": (
        {
            "model_type": "vit",
            "num_hidden_layers": 12,
            "hidden_size": 768,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "image_size": 224,
            "patch_size": 16,
            "id2label": {str(index): "" for index in range(1000)},
        },
        86_567_656,
    ),
    "t5-base": (T5, 222_903_552),
    "mt5-small": (
        {
            "model_type": "mt5",
            "num_layers": 8,
            "d_model": 512,
            "num_heads": 6,
            "d_kv": 64,
            "d_ff": 1024,
            "vocab_size": 250_112,
            "n_positions": 512,
        },
        300_176_768,
    ),
}


def a_file(folder: Path, values: dict[str, Any] | str, name: str = "config.json") -> Path:
    path = folder / name
    path.write_text(values if isinstance(values, str) else json.dumps(values), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", KNOWN)
def test_a_hugging_face_file_gives_the_published_number_of_parameters(
    name: str, tmp_path: Path
) -> None:
    values, count = KNOWN[name]
    assert load_graph(a_file(tmp_path, values)).parameters == count


def test_every_supported_type_is_tested_here() -> None:
    assert {values["model_type"] for values, _ in KNOWN.values()} | {"xlm-roberta"} == set(
        SUPPORTED
    )


def test_the_callers_sequence_and_type_replace_the_files(tmp_path: Path) -> None:
    path = a_file(tmp_path, LLAMA)
    usual, short = load_graph(path), load_graph(path, sequence=512, dtype="f32")
    assert (usual.dtype, short.dtype) == ("f16", "f32")
    assert (usual.boundary[0], short.boundary[0]) == (4096 * 4096, 512 * 4096)


def test_a_separate_head_width_is_read(tmp_path: Path) -> None:
    usual, narrow = (load_graph(a_file(tmp_path, v)) for v in (LLAMA, {**LLAMA, "head_dim": 64}))
    assert usual.parameters - narrow.parameters == 32 * 4 * 4096 * 32 * 64


def test_a_model_is_named_after_its_folder(tmp_path: Path) -> None:
    (tmp_path / "my-llama").mkdir()
    assert load_graph(a_file(tmp_path / "my-llama", LLAMA)).name == "my-llama"


def without_field(values: dict[str, Any], field: str) -> dict[str, Any]:
    return {k: v for k, v in values.items() if k != field}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"model_type": "mamba"},
            r"model_type: 'mamba' is not supported; use one of gpt2.*archit",
        ),
        (without_field(GPT2, "n_layer"), "n_layer: is missing"),
        ({**GPT2, "n_embd": "768"}, "n_embd: must be a whole number, not '768'"),
        ({**GPT2, "n_head": 0}, "n_head: must be at least 1"),
        ({**GPT2, "n_head": 7}, "heads: must divide hidden"),
        ({**GPT2, "activation_function": "snake"}, "activation_function: unknown activation"),
        (
            {**GPT2, "architectures": ["GPT2ForTokenClassification"]},
            "architectures: unknown class 'GPT2ForToken",
        ),
        (
            without_field(T5, "n_positions"),
            "sequence: is missing; the configuration has no n_positions",
        ),
        ({**LLAMA, "tie_word_embeddings": "no"}, "tie_word_embeddings: must be true or false"),
        ({**LLAMA, "hidden_size": 10**39}, "hidden_size: must be less than 9007199254740992"),
        ({**LLAMA, "num_hidden_layers": 10**10}, "layers: must be from 1 to 10,000"),
    ],
)
def test_a_wrong_field_of_a_configuration_is_named(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput, match=message):
        load_graph(a_file(tmp_path, values))


def test_a_sequence_longer_than_the_position_table_is_refused(tmp_path: Path) -> None:
    roberta = {**BERT, "model_type": "roberta", "max_position_embeddings": 514}
    assert load_graph(a_file(tmp_path, roberta)).boundary[0] == 512 * 1024
    for values, sequence in ((BERT, 513), (roberta, 513)):
        with pytest.raises(InvalidInput, match="sequence: must be at most"):
            load_graph(a_file(tmp_path, values), sequence=sequence)


OURS = """
architecture: transformer
layers: 32
hidden: 4096
heads: 32
intermediate: 11008
gated: true
activation: silu
positions: rotary
norm: rms
bias: false
tied: false
sequence: 4096
vocabulary: 32000
dtype: f16
"""


def test_an_architecture_file_gives_the_same_graph_as_the_models_configuration(
    tmp_path: Path,
) -> None:
    ours = load_graph(a_file(tmp_path, OURS, "llama.yaml"))
    theirs = load_graph(a_file(tmp_path, LLAMA))
    assert ours.name == "llama"
    assert ours.kind == theirs.kind
    assert ours.flops.tolist() == theirs.flops.tolist()
    assert ours.parameters == theirs.parameters


def test_an_architecture_file_may_be_json_without_a_sequence() -> None:
    values = {
        "architecture": "moe",
        "layers": 2,
        "hidden": 64,
        "heads": 4,
        "vocabulary": 100,
        "experts": 4,
    }
    graph = architecture_graph(parse_architecture(values, name="small", sequence=16, flash=True))
    assert graph.boundary[0] == 16 * 64
    assert graph.experts.max() == 4
    assert "flash" in graph.kind[1]


def test_a_wide_resnet_can_be_given_as_a_file(tmp_path: Path) -> None:
    text = "architecture: wide_resnet\nname: wide\nchannels: 224\nwidth: 2\nclasses: 1024\n"
    graph = load_graph(a_file(tmp_path, text, "any.yaml"), sequence=128)
    assert graph.name == "wide"
    assert graph.parameters == pytest.approx(500e6, rel=0.02)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layers: 2", "broken.yaml: architecture: is missing; it must be one of transformer, moe"),
        ("architecture: gan", "architecture: unknown 'gan'"),
        (OURS + "width: 2", r"broken.yaml: width: unknown key 'width' \(allowed: name, layers"),
        (OURS.replace("layers: 32", "layers: many"), "layers: must be a whole number, not 'many'"),
        (OURS.replace("layers: 32\n", ""), "broken.yaml: layers: is missing"),
        (OURS.replace("norm: rms", "norm: batch"), "norm: must be one of layer, rms, not 'batch'"),
        (OURS.replace("bias: false", "bias: 0"), "bias: must be true or false"),
        (OURS.replace("heads: 32", "heads: 31"), "heads: must divide hidden"),
        (
            "architecture: moe\nexperts: 2\ncapacity_factor: 1e999",
            "line 3: capacity_factor: must be a finite",
        ),
        ("a: [", "is neither JSON nor YAML"),
        ("", "must map fields to values"),
    ],
)
def test_a_wrong_line_of_an_architecture_file_is_named(
    text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput, match=message):
        load_graph(a_file(tmp_path, text, "broken.yaml"))


def test_a_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be read"):
        load_graph(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidInput, match="cannot be read"):
        load_graph(tmp_path / "binary.yaml")


COUNTS = Path(__file__).parents[2] / "support" / "transformers_counts.py"


def parameters_of(values: Mapping[str, Any], sequence: int | None = 16) -> int:
    architecture = parse_architecture(
        values, name="model", sequence=sequence, dtype=None, flash=False
    )
    return int(architecture_graph(architecture).parameters)


def test_parameters_are_those_of_transformers_whatever_field_changes() -> None:
    python = find_torch_python("transformers")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [python, str(COUNTS)],
        env=environment | {"HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        timeout=4 * PATIENCE_S,
        check=True,
    )
    rows = json.loads(done.stdout)
    assert {row["values"]["model_type"] for row in rows} == set(SUPPORTED)
    wrong = []
    for row in rows:
        try:
            ours = parameters_of(row["values"])
        except InvalidInput:
            assert row["change"], row  # the usual values of a type can be read
            continue
        if ours != row["parameters"]:
            wrong.append((row["values"]["model_type"], row["change"], ours, row["parameters"]))
    assert wrong == []


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("gpt2", {"add_cross_attention": True}, "adds attention to the states of an encoder"),
        ("gpt2", {"pruned_heads": {"0": [1]}}, "different numbers of heads"),
        ("bert", {"is_decoder": True}, "makes attention causal"),
        ("bert", {"position_embedding_type": "relative_key"}, "only absolute is known"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantised weights"),
        ("llama", {"num_experts": 8}, "num_experts: is not a field that is known here"),
        ("llama", {"vision_config": {"hidden_size": 8}}, "vision_config: is not a field"),
        ("mistral", {"sliding_window": 8}, "a sequence of at most 8"),
        ("opt", {"do_layer_norm_before": False}, "only true is known"),
        ("t5", {"is_gated_act": True}, "contradicts feed_forward_proj"),
        (
            "llama",
            {"conv_kernel": 4, "num_experts": 8},
            "conv_kernel is not .*; num_experts is not",
        ),
    ],
)
def test_a_field_that_changes_the_model_is_refused_with_a_sentence(
    kind: str, change: dict[str, Any], said: str
) -> None:
    values = usual_values(kind)
    assert parameters_of(values) > 0
    with pytest.raises(InvalidInput, match=said):
        parameters_of(values | change)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("gpt2", {"add_cross_attention": False, "n_ctx": 32, "task_specific_params": {"a": 1}}),
        ("mistral", {"sliding_window": 16}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 1}),
        ("qwen2", {"sliding_window": 8, "layer_types": ["full_attention", "full_attention"]}),
        ("llama", {"rope_scaling": {"factor": 2.0}, "unsloth_version": "1", "my_note": "text"}),
        ("t5", {"is_encoder_decoder": True}),
    ],
)
def test_a_field_that_changes_nothing_is_accepted(kind: str, change: dict[str, Any]) -> None:
    assert parameters_of(usual_values(kind) | change) == parameters_of(usual_values(kind))
