"""Fields of Hugging Face's configurations: each is read right or refused with a sentence."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tessera.estimator.architectures.files import architecture_graph, parse_architecture
from tessera.estimator.architectures.huggingface import SUPPORTED
from tessera.formulation.base.errors import InvalidInput
from tests.support.patience import PATIENCE_S
from tests.support.torch_python import find_torch_python
from tests.support.transformers_counts import usual_values

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
