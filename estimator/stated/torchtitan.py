"""Reader of torchtitan's configuration in TOML.

The names are those of ``torchtitan/config/job_config.py`` and its successors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tessera.estimator.stated.statement import (
    Division,
    Reader,
    StatedPlan,
    choice_of,
    count_of,
    name_set,
    quote_value,
    read_choice,
    read_count,
    read_flag,
    refuse_all,
)
from tessera.formulation.errors import InvalidInput
from tessera.formulation.execution_plan import (
    Offload,
    Precision,
    Recomputation,
    Schedule,
    ZeroStage,
)

_TYPES: Final = {"bfloat16": Precision.BF16, "float32": Precision.F32, "float16": Precision.F16}
_SCHEDULES: Final = {
    "1f1b": Schedule.ONE_F_ONE_B,
    "gpipe": Schedule.GPIPE,
    "interleaved1f1b": Schedule.INTERLEAVED,
}
_READ: Final[Mapping[str, Mapping[str, Reader]]] = {
    "parallelism": {
        "tensor_parallel_degree": count_of("tp"),
        "pipeline_parallel_degree": count_of("pp"),
        "pipeline_parallel_layers_per_stage": count_of("blocks_per_chunk"),
        "pipeline_parallel_first_stage_less_layers": count_of("embedding_blocks", 0),
        "pipeline_parallel_last_stage_less_layers": count_of("head_blocks", 0),
        "context_parallel_degree": count_of("cp"),
        "expert_parallel_degree": count_of("ep"),
        "expert_tensor_parallel_degree": count_of("expert_tp"),
    },
    "training": {
        "global_batch_size": lambda name, value: _unless_negative("global_batch", name, value),
        "seq_len": count_of("sequence"),
        "mixed_precision_param": choice_of("precision", _TYPES),
    },
}
_BY_RULE: Final[Mapping[str, frozenset[str]]] = {
    "parallelism": name_set("""
        data_parallel_replicate_degree data_parallel_shard_degree fsdp_reshard_after_forward
        pipeline_parallel_schedule pipeline_parallel_microbatch_size enable_sequence_parallel
        context_parallel_rotate_method
    """),
    "training": name_set("local_batch_size batch_size enable_cpu_offload dtype"),
    "activation_checkpoint": name_set("mode selective_ac_option"),
    "model": name_set("converters"),
}
_REFUSED: Final[Mapping[str, str]] = {
    "parallelism.pipeline_parallel_split_points": "is not read; state"
    " pipeline_parallel_layers_per_stage, or give the plan as JSON",
    "parallelism.module_fqns_per_model_part": "is not read; state"
    " pipeline_parallel_layers_per_stage, or give the plan as JSON",
    "parallelism.pipeline_parallel_schedule_csv": "is not read; state a pipeline_parallel_schedule",
    "fault_tolerance.enable": "changes the replicas during training, which a plan cannot express; remove"
    " it",
    "float8.emulate": "computes in other types than it says; set it to false",
    "quantize.linear.float8.emulate": "computes in other types than it says; set it to false",
    "experimental.custom_args_module": "adds fields that are not known here; remove it",
}
_IGNORED_SECTIONS: Final = name_set("""
    job profiling metrics optimizer lr_scheduler checkpoint comm memory_estimation fault_tolerance
    experimental validation compile debug dataloader hf_assets tokenizer mx float8 quantize
    evaluation profiler loss activation_offload_debug
""")
_IGNORED: Final[Mapping[str, frozenset[str]]] = {
    "model": name_set("""
        name flavor tokenizer_path hf_assets_path print_after_conversion norm_type
        use_flex_attn attn_mask_type
"""),
    "training": name_set("""
        dataset dataset_path max_norm steps mixed_precision_reduce compile gc_freq gc_debug seed
        deterministic data_parallel_degree_note disable_cuda_graphs debug_moe_force_load_balance
"""),
    "parallelism": name_set("""
        enable_compiled_autograd disable_loss_parallel enable_async_tensor_parallel
        context_parallel_load_balancer context_parallel_ptrr_mask_key enable_fsdp_symm_mem
        spmd_backend pipeline_parallel_expert_parallel_overlap
"""),
    "activation_checkpoint": name_set("""
        per_op_sac_force_recompute_mm_shapes_by_fqns early_stop preserve_rng_state
        determinism_check debug visualize_memory_budget_pareto
"""),
}
SECTIONS: Final = frozenset(_READ) | frozenset(_BY_RULE) | _IGNORED_SECTIONS

_PLAN_SECTIONS: Final = ("parallelism.", "activation_checkpoint.")
_PLAN_FIELDS: Final = frozenset(
    f"training.{name}"
    for name in ("global_batch_size", "local_batch_size", "batch_size", "seq_len")
)

_Values = Mapping[str, Any]
"""Values by ``section.field``."""


def _unless_negative(target: str, name: str, value: object) -> dict[str, Any]:
    """Return the count of a field in which -1 means that it follows from others."""
    return {} if value == -1 else {target: read_count(name, value)}


def read_torchtitan(field: str, plain: Mapping[str, Any]) -> StatedPlan:
    """Return what a configuration states.

    Raises:
        InvalidInput: a field is unknown, has a bad value, contradicts another one, or cannot be
            expressed by a plan; names it.
    """
    values = _flattened(field, plain)
    stated: dict[str, Any] = {}
    names: dict[str, str] = {}
    for section, readers in _READ.items():
        for name, reader in readers.items():
            place = f"{section}.{name}"
            if place in values:
                found = reader(place, values[place])
                stated |= found
                names |= dict.fromkeys(found, place)
    notes: list[str] = []
    for rule in (_replicas, _sharding, _schedule, _batches, _recomputation, _precision, _offload):
        for place, found in rule(values, stated, notes):
            stated |= found
            names |= dict.fromkeys(found, place)
    if stated.get("tp", 1) > 1:
        place = "parallelism.enable_sequence_parallel"
        stated["sp"] = read_flag(place, values.get(place, True))
        names["sp"] = place
    stated.setdefault("embedding_blocks", 1)
    stated.setdefault("head_blocks", 1)
    return StatedPlan(**stated, division=Division.SPREAD, names=names, notes=tuple(notes))


def _flattened(field: str, plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values by ``section.field``, after unknown and refused fields were refused."""
    values: dict[str, Any] = {}
    problems: list[tuple[str, str]] = []
    for section, content in plain.items():
        if section not in SECTIONS:
            problems.append(
                (
                    section,
                    f"is not a section of torchtitan that is known here ({field}); remove it if it does"
                    " not change how the model is divided among GPUs",
                )
            )
            continue
        if not isinstance(content, Mapping):
            raise InvalidInput(section, f"must be a section, not {quote_value(content)}")
        values |= {f"{section}.{name}": value for name, value in content.items()}
    linear = values.get("quantize.linear")
    if isinstance(linear, Mapping):
        inner = linear.get("float8", {})
        values |= {f"quantize.linear.float8.{k}": v for k, v in dict(inner).items()}
    if not any(place.startswith(_PLAN_SECTIONS) or place in _PLAN_FIELDS for place in values):
        raise InvalidInput(
            field, "has no field of torchtitan that states a plan, such as [parallelism]"
        )
    problems += [(place, text) for place in values if (text := _problem_of(place, values[place]))]
    refuse_all(field, problems)
    return values


def _problem_of(place: str, value: object) -> str:
    """Return what is wrong with a field, or ""."""
    section, _, name = place.partition(".")
    if place in _REFUSED:
        return "" if value in (False, None, "", [], 0) else _REFUSED[place]
    known = (
        _READ.get(section, {}),
        _BY_RULE.get(section, ()),
        _IGNORED.get(section, ()),
    )
    if section in _IGNORED_SECTIONS or any(name in names for names in known):
        return ""
    return (
        "is not a field of torchtitan that is known here; remove it if it does not change how the"
        " model is divided among GPUs"
    )


_Found = list[tuple[str, dict[str, Any]]]
"""Places with the fields that they state."""


def _degree(values: _Values, name: str, default: int) -> int:
    place = f"parallelism.{name}"
    value = values.get(place, default)
    return -1 if value == -1 else read_count(place, value)


def _replicas(values: _Values, stated: _Values, notes: list[str]) -> _Found:
    place = "parallelism.data_parallel_shard_degree"
    shards = _degree(values, "data_parallel_shard_degree", -1)
    copies = _degree(values, "data_parallel_replicate_degree", 1)
    if copies != 1 and shards != 1:
        raise InvalidInput(
            "parallelism.data_parallel_replicate_degree",
            f"is {copies}, so states are divided among some of the replicas (HSDP), which a plan cannot"
            " express; set it to 1, or data_parallel_shard_degree to 1",
        )
    if shards == 1:
        return [(place, {"dp": copies})]
    return [] if shards == -1 else [(place, {"dp": shards})]


def _sharding(values: _Values, stated: _Values, notes: list[str]) -> _Found:
    if _degree(values, "data_parallel_shard_degree", -1) == 1:
        return [("parallelism.data_parallel_shard_degree", {"zero": ZeroStage.NONE})]
    place = "parallelism.fsdp_reshard_after_forward"
    again = read_choice(
        place, values.get(place, "default"), {k: k for k in ("default", "always", "never")}
    )
    # By default, weights stay gathered between the passes of a pipeline's micro-batches.
    keeps = again == "never" or (again == "default" and stated.get("pp", 1) > 1)
    return [(place, {"zero": ZeroStage.GRADIENTS if keeps else ZeroStage.PARAMETERS})]


def _schedule(values: _Values, stated: _Values, notes: list[str]) -> _Found:
    if stated.get("pp", 1) == 1:
        return []
    place = "parallelism.pipeline_parallel_schedule"
    name = values.get(place, "1F1B")
    schedule = _SCHEDULES.get(str(name).lower())
    if schedule is None:
        raise InvalidInput(
            place,
            f"is {quote_value(name)}, but the schedules of plans are 1F1B, GPipe and Interleaved1F1B",
        )
    found: dict[str, Any] = {"schedule": schedule}
    if schedule is Schedule.INTERLEAVED and "blocks_per_chunk" not in stated:
        found["chunks"] = 2
    return [(place, found)]


def _batches(values: _Values, stated: _Values, notes: list[str]) -> _Found:
    place = next(
        (p for p in ("training.local_batch_size", "training.batch_size") if p in values), ""
    )
    if not place:
        return []
    local = read_count(place, values[place])
    if stated.get("pp", 1) == 1:
        return [(place, {"micro_batch": local})]
    size_place = "parallelism.pipeline_parallel_microbatch_size"
    size = read_count(size_place, values.get(size_place, 1))
    if local % size:
        raise InvalidInput(size_place, f"is {size}, but must divide {place} ({local})")
    return [(size_place, {"micro_batch": size}), (place, {"accumulation": local // size})]


def _recomputation(values: _Values, stated: _Values, notes: list[str]) -> _Found:
    place = "activation_checkpoint.mode"
    if place not in values:
        notes.append(
            f"{place} is not stated, and torchtitan's default depends on its release: the option"
            " --recompute states it"
        )
        return []
    kinds = {kind.value: kind for kind in Recomputation}
    kind = read_choice(place, values[place], kinds)
    if kind is Recomputation.SELECTIVE:
        option_place = "activation_checkpoint.selective_ac_option"
        option = str(values.get(option_place, "op"))
        if option == "1":
            kind = Recomputation.FULL
        elif option == "op":
            notes.append(
                f"{option_place} op is priced as if attention alone were recomputed; torchtitan also"
                " recomputes other operators and every second product"
            )
        else:
            raise InvalidInput(
                option_place,
                f"is {quote_value(option)}, but a plan recomputes every layer alike; state op, or"
                " the mode full",
            )
    return [(place, {"recomputation": kind})]


def _precision(values: _Values, stated: _Values, notes: list[str]) -> _Found:
    place = "model.converters"
    converters = values.get(place, [])
    if isinstance(converters, str):
        converters = converters.split(",")
    if not isinstance(converters, list):
        raise InvalidInput(place, f"must be a list, not {quote_value(converters)}")
    if any("float8" in str(name) or "mx" in str(name) for name in converters):
        return [(place, {"precision": Precision.FP8})]
    whole = "training.dtype"
    if values.get(whole, "float32") != "float32":
        raise InvalidInput(
            whole, "must be float32: the price assumes weights and optimizer states of 32 bits"
        )
    return []


def _offload(values: _Values, stated: _Values, notes: list[str]) -> _Found:
    place = "training.enable_cpu_offload"
    if not read_flag(place, values.get(place, False)):
        return []
    return [(place, {"offload": Offload.PARAMETERS})]
