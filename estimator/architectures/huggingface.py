"""Reader of Hugging Face ``config.json`` files, from each ``model_type`` to our dimensions.

Names and defaults are those of the library's configuration classes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any, Final

from tessera.estimator.architectures.fields import Scalar, build_config, read_scalar
from tessera.estimator.architectures.moe import MixtureOfExperts
from tessera.estimator.architectures.parts import Activation
from tessera.estimator.architectures.transformer import Transformer
from tessera.formulation.base.errors import InvalidInput

_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Configuration:
    """A configuration with the caller's settings."""

    values: Mapping[str, Any]
    name: str
    sequence: int | None
    read: set[str] = dataclass_field(default_factory=set)
    """The fields that were read."""

    def get(self, field: str, default: Scalar) -> Scalar:
        """Return a field. If it is absent or null, return the library's default."""
        self.read.add(field)
        value = self.values.get(field)
        if value is None:
            return default
        return read_scalar(field, value, type(default))

    def need(self, field: str) -> int:
        """Return a positive integer that is required."""
        if self.values.get(field) is None:
            raise InvalidInput(field, "is missing; it must be an integer")
        value = self.get(field, 0)
        if value < 1:
            raise InvalidInput(field, "must be at least 1")
        return value

    def length(self, field: str, offset: int = 0) -> int:
        """Return the number of tokens of a sample: the caller's, or else the model's maximum."""
        if self.sequence is not None:
            return self.sequence
        if self.values.get(field) is None:
            raise InvalidInput("sequence", f"is missing; the configuration has no {field} either")
        return self.need(field) - offset

    def activation(self, field: str, default: str) -> Activation:
        """Return the kind of activation."""
        name = self.get(field, default)
        kinds: tuple[tuple[str, Activation], ...] = (
            ("gelu", "gelu"),
            ("relu", "relu"),
            ("silu", "silu"),
            ("swish", "silu"),
        )
        for part, kind in kinds:
            if part in name:
                return kind
        raise InvalidInput(
            field, f"unknown activation {name!r}; use a variant of gelu, relu or silu"
        )

    def drops(self, *probabilities: str) -> bool:
        """Return whether training drops activations.

        The library's default of each probability is 0.1.
        """
        return any(self.get(field, 0.1) > 0 for field in probabilities)

    def purpose(self, known: Mapping[str, str]) -> str:
        """Return the value in ``known`` for the ending of the class in ``architectures``.

        If there is no class, return the first value.
        """
        classes = self.values.get("architectures") or []
        if not (isinstance(classes, list) and all(isinstance(c, str) for c in classes)):
            raise InvalidInput("architectures", "must be a list of class names")
        if not classes:
            return next(iter(known.values()))
        for ending, purpose in known.items():
            if classes[0].endswith(ending):
                return purpose
        raise InvalidInput(
            "architectures",
            f"unknown class {classes[0]!r}; use one whose name ends in {', '.join(known)}",
        )

    def labels(self) -> int:
        """Return the number of classes. The library's default is 2."""
        named = self.values.get("id2label")
        return len(named) if isinstance(named, Mapping) and named else self.get("num_labels", 2)


def read_dimensions(
    values: Mapping[str, Any],
    *,
    name: str | None = None,
    sequence: int | None = None,
    dtype: str | None = None,
    flash: bool = False,
) -> Transformer | MixtureOfExperts:
    """Return the dimensions that a configuration describes.

    ``sequence`` is the number of tokens of a sample (default: the longest that the configuration
    allows). ``dtype`` is the data type of compute (default: ``torch_dtype``, or bf16 without it).

    Raises:
        InvalidInput: the ``model_type`` is unknown, or a field is missing or wrong; names the
            field.
    """
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in _READERS:
        raise InvalidInput(
            "model_type",
            f"{kind!r} is not supported; use one of {', '.join(_READERS)}. Describe any other model"
            " in an architecture file (architecture: transformer, moe or wide_resnet; see"
            " docs/models.md)",
        )
    named = values.get("_name_or_path") or kind
    source = _Configuration(values=values, name=name or str(named), sequence=sequence)
    amounts = _READERS[kind](source) | {"name": source.name, "flash": flash}
    amounts["dtype"] = dtype or _dtype(source)
    _check_rest(source, int(amounts.get("sequence", 0)))
    return build_config(MixtureOfExperts if "experts" in amounts else Transformer, amounts)


_OFF: Final[tuple[object, ...]] = (None, False, 0, "", [], {}, 0.0)
"""Values with which a field of the library changes nothing."""
_CHANGING: Final[Mapping[str, str]] = {
    "add_cross_attention": "adds attention to the states of an encoder",
    "cross_attention_hidden_size": "adds attention to the states of an encoder",
    "is_decoder": "makes attention causal",
    "is_encoder_decoder": "has a second stack",
    "tie_encoder_decoder": "shares weights between two stacks",
    "pruned_heads": "has layers with different numbers of heads",
    "quantization_config": "has quantised weights",
}
"""Fields that change the model in a way that is not read, unless they are off."""
_NEUTRAL: Final[Mapping[str, object]] = {
    "position_embedding_type": "absolute",
    "do_layer_norm_before": True,
    "layer_norm_elementwise_affine": True,
    "use_bidirectional_attention": None,
}
"""Fields that change nothing with this value, and are not read with another one."""
_IRRELEVANT: Final = """
    architectures attention_dropout attention_layers attention_probs_dropout_prob attention_types
    attn_implementation attn_pdrop bos_token_id chunk_size_feed_forward classifier_dropout
    decoder_start_token_id dense_act_fn dropout embd_pdrop embed_dropout encoder_stride
    eos_token_id feed_forward_proj hidden_dropout hidden_dropout_prob id2label init_std
    initializer_factor initializer_range label2id language layer_norm_eps layer_norm_epsilon
    layerdrop max_window_layers model_type n_ctx output_attentions output_hidden_states
    output_past output_router_logits pad_token_id partial_rotary_factor pooler_act
    pooler_output_size prefix pretraining_tp problem_type relative_attention_max_distance
    reorder_and_upcast_attn resid_dropout resid_pdrop return_dict rms_norm_eps rope_parameters
    rope_scaling rope_theta rotary_emb_base rotary_pct router_aux_loss_coef router_jitter_noise
    scale_attn_by_inverse_layer_idx scale_attn_weights sep_token_id summary_activation
    summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    task_specific_params tokenizer_class torch_dtype transformers_version unk_token_id use_cache
    use_parallel_residual use_stable_embedding vocab_size window_size hidden_activation hidden_act
    directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers
    pooler_size_per_head pooler_type gradient_checkpointing finetuning_task is_gated_act
    num_labels num_hidden_layers embedding_size classifier_activation attention_probs_dropout
    use_sliding_window tie_word_embeddings n_positions max_position_embeddings d_model d_kv d_ff
    cls_token_id mask_token_id head_type _attn_implementation _attn_implementation_internal
    _name_or_path layer_types sliding_window dtype
"""
"""Fields that change neither the parameters nor the products of a model, or are read by a rule."""
_OF_ARCHITECTURE: Final = re.compile(
    r"layer|hidden|head|dim|size|expert|moe|norm|bias|attention|attn|embed|proj|cross|window|rotary"
    r"|parallel|mlp|gate|vocab|intermediate|ffn|inner|conv|lora|rank|share|block|adapter|vision|audio"
)
"""Names of fields that may change a model, if they are not known."""


def _check_rest(source: _Configuration, sequence: int) -> None:
    """Refuse fields that change the model and were not read.

    Raises:
        InvalidInput: there are such fields; names all of them.
    """
    problems: list[tuple[str, str]] = []
    known = source.read | frozenset(_IRRELEVANT.split()) | _CHANGING.keys() | _NEUTRAL.keys()
    for name, value in source.values.items():
        changes = name in _CHANGING and value not in _OFF
        if changes and not (name == "is_encoder_decoder" and "num_layers" in source.read):
            problems.append(
                (name, f"{_CHANGING[name]}, which models here do not have; set it to false")
            )
        elif name in _NEUTRAL and value not in (None, _NEUTRAL[name]):
            neutral = str(_NEUTRAL[name]).lower()
            problems.append((name, f"is {str(value)[:40]!r}, but only {neutral} is known here"))
        elif name not in known and _OF_ARCHITECTURE.search(str(name)) and value not in _OFF:
            problems.append(
                (name, "is not a field that is known here; remove it if it changes nothing")
            )
    window = source.values.get("sliding_window")
    if _slides(source) and isinstance(window, int) and 0 < window < sequence:
        problems.append(
            (
                "sliding_window",
                f"is {window}, less than the {sequence} tokens of a sample, and attention within windows is"
                f" not known here; state a sequence of at most {window}, or set it to null",
            )
        )
    if len(problems) == 1:
        raise InvalidInput(str(problems[0][0])[:80], problems[0][1])
    if problems:
        texts = "; ".join(f"{str(name)[:80]} {problem}" for name, problem in problems)
        raise InvalidInput("config.json", f"cannot be read: {texts}")


def _slides(source: _Configuration) -> bool:
    """Return whether some layers attend within windows."""
    if source.values.get("use_sliding_window") is False:
        return False
    kinds = source.values.get("layer_types")
    return not isinstance(kinds, list) or "sliding_attention" in kinds


def _dtype(source: _Configuration) -> str:
    field = "torch_dtype" if "torch_dtype" in source.values else "dtype"
    name = source.get(field, "bfloat16")
    if name not in _DTYPES:
        raise InvalidInput(field, f"unknown {name!r}; use one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


_CAUSAL = {"ForCausalLM": "lm", "LMHeadModel": "lm"}
_ENCODER = {
    "ForMaskedLM": "mlm",
    "ForPreTraining": "pretraining",
    "ForSequenceClassification": "classes",
}


def _gpt2(s: _Configuration) -> dict[str, Any]:
    return {
        "layers": s.need("n_layer"),
        "hidden": s.need("n_embd"),
        "heads": s.need("n_head"),
        "vocabulary": s.need("vocab_size"),
        "sequence": s.length("n_positions"),
        "max_positions": s.need("n_positions"),
        "intermediate": s.get("n_inner", 0),
        "activation": s.activation("activation_function", "gelu_new"),
        "tied": s.get("tie_word_embeddings", True),
        "head": s.purpose(_CAUSAL),
        "dropout": s.drops("attn_pdrop", "resid_pdrop"),
    }


def _gpt_neo(s: _Configuration) -> dict[str, Any]:
    """Return GPT-Neo. Its local attention is counted in full, as the library computes it."""
    return {
        "layers": s.need("num_layers"),
        "hidden": s.need("hidden_size"),
        "heads": s.need("num_heads"),
        "vocabulary": s.need("vocab_size"),
        "sequence": s.length("max_position_embeddings"),
        "max_positions": s.need("max_position_embeddings"),
        "intermediate": s.get("intermediate_size", 0),
        "qkv_bias": False,
        "activation": s.activation("activation_function", "gelu_new"),
        "tied": s.get("tie_word_embeddings", True),
        "head": s.purpose(_CAUSAL),
        "dropout": s.get("attention_dropout", 0.0) > 0 or s.get("resid_dropout", 0.0) > 0,
    }


def _dimensions(s: _Configuration) -> dict[str, Any]:
    """Return the fields whose names most configurations share."""
    return {
        "layers": s.need("num_hidden_layers"),
        "hidden": s.need("hidden_size"),
        "heads": s.need("num_attention_heads"),
    }


def _gpt_neox(s: _Configuration) -> dict[str, Any]:
    return _dimensions(s) | {
        "vocabulary": s.need("vocab_size"),
        "sequence": s.length("max_position_embeddings"),
        "intermediate": s.need("intermediate_size"),
        "positions": "rotary",
        "activation": s.activation("hidden_act", "gelu"),
        "qkv_bias": s.get("attention_bias", True),
        "attention_bias": s.get("attention_bias", True),
        "tied": s.get("tie_word_embeddings", False),
        "head": s.purpose(_CAUSAL),
        "dropout": s.get("attention_dropout", 0.0) > 0 or s.get("hidden_dropout", 0.0) > 0,
    }


def _opt(s: _Configuration) -> dict[str, Any]:
    """Return OPT. Its position table has two additional rows before the first position."""
    hidden = s.need("hidden_size")
    if s.get("word_embed_proj_dim", hidden) != hidden:
        raise InvalidInput("word_embed_proj_dim", f"must equal hidden_size ({hidden})")
    return _dimensions(s) | {
        "vocabulary": s.need("vocab_size"),
        "sequence": s.length("max_position_embeddings"),
        "max_positions": s.need("max_position_embeddings") + 2,
        "intermediate": s.need("ffn_dim"),
        "activation": s.activation("activation_function", "relu"),
        "bias": s.get("enable_bias", True),
        "tied": s.get("tie_word_embeddings", True),
        "head": s.purpose(_CAUSAL),
        "dropout": s.drops("dropout"),
    }


def _llama(s: _Configuration) -> dict[str, Any]:
    return _dimensions(s) | {
        "kv_heads": s.get("num_key_value_heads", s.need("num_attention_heads")),
        "head_dim": s.get("head_dim", 0),
        "intermediate": s.need("intermediate_size"),
        "vocabulary": s.need("vocab_size"),
        "sequence": s.length("max_position_embeddings"),
        "positions": "rotary",
        "norm": "rms",
        "gated": True,
        "activation": s.activation("hidden_act", "silu"),
        "bias": s.get("mlp_bias", False),
        "qkv_bias": s.get("attention_bias", False),
        "attention_bias": s.get("attention_bias", False),
        "tied": s.get("tie_word_embeddings", False),
        "head": s.purpose(_CAUSAL),
    }


def _qwen2(s: _Configuration) -> dict[str, Any]:
    return _llama(s) | {"qkv_bias": True, "attention_bias": False}


def _gemma(s: _Configuration) -> dict[str, Any]:
    return _llama(s) | {
        "activation": s.activation("hidden_activation", "gelu_pytorch_tanh"),
        "tied": s.get("tie_word_embeddings", True),
    }


def _mixtral(s: _Configuration) -> dict[str, Any]:
    return _llama(s) | {
        "experts": s.need("num_local_experts"),
        "top_k": s.get("num_experts_per_tok", 2),
    }


def _bert(s: _Configuration) -> dict[str, Any]:
    head = s.purpose(_ENCODER)
    return _dimensions(s) | {
        "vocabulary": s.need("vocab_size"),
        "sequence": s.length("max_position_embeddings"),
        "max_positions": s.need("max_position_embeddings"),
        "token_types": s.get("type_vocab_size", 2),
        "intermediate": s.need("intermediate_size"),
        "activation": s.activation("hidden_act", "gelu"),
        "causal": False,
        "norm_first": False,
        "head": head,
        "head_bias": True,
        "tied": s.get("tie_word_embeddings", True),
        "classes": s.labels() if head == "classes" else 0,
        "pooler": head == "classes",
        "dropout": s.drops("hidden_dropout_prob", "attention_probs_dropout_prob"),
    }


def _roberta(s: _Configuration) -> dict[str, Any]:
    """Return RoBERTa. Tokens of a sample do not use the first two rows of its position table."""
    length = s.length("max_position_embeddings", offset=2)
    if length > s.need("max_position_embeddings") - 2:
        raise InvalidInput("sequence", "must be at most max_position_embeddings - 2")
    return _bert(s) | {"sequence": length}


def _vit(s: _Configuration) -> dict[str, Any]:
    s.purpose({"ForImageClassification": "classes"})
    qkv = s.get("qkv_bias", True)
    return _dimensions(s) | {
        "intermediate": s.need("intermediate_size"),
        "image": s.get("image_size", 224),
        "patch": s.get("patch_size", 16),
        "channels": s.get("num_channels", 3),
        "causal": False,
        "activation": s.activation("hidden_act", "gelu"),
        "qkv_bias": qkv,
        "head": "classes",
        "classes": s.labels(),
        "dropout": s.get("hidden_dropout_prob", 0.0) > 0
        or s.get("attention_probs_dropout_prob", 0.0) > 0,
    }


def _t5_family(s: _Configuration, projection: str, *, tied: bool) -> dict[str, Any]:
    layers, form = s.need("num_layers"), s.get("feed_forward_proj", projection)
    if s.get("is_gated_act", form.startswith("gated-")) != form.startswith("gated-"):
        raise InvalidInput("is_gated_act", f"contradicts feed_forward_proj ({form!r}); remove it")
    values = {"feed_forward_proj": form.removeprefix("gated-")}
    activation = _Configuration(values=values, name=s.name, sequence=None).activation(
        "feed_forward_proj", "relu"
    )
    return {
        "layers": layers,
        "decoder_layers": s.get("num_decoder_layers", layers),
        "hidden": s.need("d_model"),
        "heads": s.need("num_heads"),
        "head_dim": s.need("d_kv"),
        "intermediate": s.need("d_ff"),
        "vocabulary": s.need("vocab_size"),
        "sequence": s.length("n_positions"),
        "positions": "relative",
        "norm": "rms",
        "bias": False,
        "position_buckets": s.get("relative_attention_num_buckets", 32),
        "activation": activation,
        "gated": form.startswith("gated-"),
        "tied": s.get("tie_word_embeddings", tied),
        "dropout": s.drops("dropout_rate"),
        "head": s.purpose({"ForConditionalGeneration": "lm", "WithLMHeadModel": "lm"}),
    }


def _t5(s: _Configuration) -> dict[str, Any]:
    return _t5_family(s, "relu", tied=True)


def _mt5(s: _Configuration) -> dict[str, Any]:
    return _t5_family(s, "gated-gelu", tied=False)


_READERS: Mapping[str, Callable[[_Configuration], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "gpt_neo": _gpt_neo,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _qwen2,
    "gemma": _gemma,
    "mixtral": _mixtral,
    "bert": _bert,
    "roberta": _roberta,
    "xlm-roberta": _roberta,
    "vit": _vit,
    "t5": _t5,
    "mt5": _mt5,
}

SUPPORTED = tuple(_READERS)
"""The values of ``model_type`` that can be read."""
