"""Counts of the parameters of Hugging Face's models, for variations of each configuration's fields.

A program for an interpreter that has transformers: it prints JSON to the standard output.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 160, "n_positions": 32},
    "gpt_neo": {
        "num_layers": 2,
        "hidden_size": 64,
        "num_heads": 4,
        "vocab_size": 160,
        "max_position_embeddings": 32,
        "attention_types": [[["global", "local"], 1]],
    },
    "t5": {
        "num_layers": 2,
        "d_model": 64,
        "num_heads": 4,
        "d_kv": 16,
        "d_ff": 96,
        "vocab_size": 160,
    },
    "vit": {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "image_size": 32,
        "patch_size": 8,
    },
    "opt": {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "word_embed_proj_dim": 64,
        "num_attention_heads": 4,
        "ffn_dim": 96,
        "vocab_size": 160,
        "max_position_embeddings": 32,
    },
}
SIZES["mt5"] = SIZES["t5"] | {"tie_word_embeddings": True}
USUAL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 160,
    "max_position_embeddings": 34,
}
"""Sizes of the types that are not in ``SIZES``."""
CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "gpt_neo": "GPTNeoForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "opt": "OPTForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "bert": "BertForMaskedLM",
    "roberta": "RobertaForMaskedLM",
    "xlm-roberta": "XLMRobertaForMaskedLM",
    "vit": "ViTForImageClassification",
    "t5": "T5ForConditionalGeneration",
    "mt5": "MT5ForConditionalGeneration",
}
MORE = {"n_inner": 96, "head_dim": 32, "num_key_value_heads": 2, "num_decoder_layers": 1}
"""Values of fields that are null in the library."""


def usual_values(kind: str) -> dict[str, Any]:
    values: dict[str, Any] = {
        "model_type": kind,
        "architectures": [CLASSES[kind]],
        **SIZES.get(kind, USUAL),
    }
    if kind in ("llama", "mistral", "qwen2", "gemma", "mixtral"):
        values["num_key_value_heads"] = 4
    if kind == "gemma":
        values["head_dim"] = 16
    if kind == "mixtral":
        values["num_local_experts"] = 4
    return values


SKIPPED = {
    ("t5", "tie_word_embeddings"),  # transformers 5 ties them in any case
    ("mt5", "tie_word_embeddings"),
    ("bert", "tie_word_embeddings"),  # transformers 5 has a second bias of the vocabulary then
    ("roberta", "tie_word_embeddings"),
    ("xlm-roberta", "tie_word_embeddings"),
}
"""Fields whose meaning depends on the library's release."""


def variations(values: dict[str, Any], known: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the fields of the library's class with another value each."""
    changes: list[dict[str, Any]] = [{}]
    for field, usual in known.items():
        if field in ("model_type", "architectures", "transformers_version") or field.startswith(
            "_"
        ):
            continue
        if field in MORE:
            changes.append({field: MORE[field]})
        elif isinstance(usual, bool):
            changes.append({field: not usual})
        elif isinstance(usual, int) and usual > 0:
            changes += [{field: usual * 2}, {field: max(usual // 2, 1)}]
        elif isinstance(usual, str):
            changes += [
                {field: text}
                for text in ("gated-gelu", "relu", "silu")
                if "proj" in field or "act" in field
            ]
    return changes


def main() -> None:
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    transformers.logging.set_verbosity_error()
    rows = []
    for kind in CLASSES:
        values = usual_values(kind)
        known = transformers.AutoConfig.for_model(**values).to_dict()
        for change in variations(values, known):
            if any((kind, field) in SKIPPED for field in change):
                continue
            given = values | change
            try:
                config = transformers.AutoConfig.for_model(**given)
                with torch.device("meta"):
                    model = getattr(transformers, CLASSES[kind])(config)
                    model.tie_weights()
                count = sum(p.numel() for p in model.parameters())
            except Exception:  # noqa: BLE001 - the library refuses a change in its own ways
                continue
            rows.append({"values": given, "change": change, "parameters": count})
    json.dump(rows, sys.stdout)


if __name__ == "__main__":
    main()
