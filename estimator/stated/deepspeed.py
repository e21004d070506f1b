"""Reader of DeepSpeed's configuration in JSON.

The names are those of DeepSpeed's documentation (``docs/_pages/config-json.md``) and configuration
classes. A value of "auto" is taken as not stated: the training script decides it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tessera.estimator.stated.statement import (
    StatedPlan,
    name_set,
    quote_value,
    read_choice,
    read_count,
    read_flag,
    refuse_all,
)
from tessera.formulation.errors import InvalidInput
from tessera.formulation.execution_plan import Offload, Precision, Recomputation, ZeroStage

_COUNTS: Final = {
    "train_batch_size": "global_batch",
    "train_micro_batch_size_per_gpu": "micro_batch",
    "gradient_accumulation_steps": "accumulation",
    "sequence_parallel_size": "cp",
}
READ: Final = _COUNTS.keys() | name_set("""
    zero_optimization bf16 bfloat16 fp16 activation_checkpointing tensor_parallel pipeline
    torch_autocast
""")
IGNORED: Final = name_set("""
    optimizer scheduler gradient_clipping prescale_gradients gradient_predivide_factor
    sparse_gradients communication_data_type seq_parallel_communication_data_type fp32_allreduce
    disable_allgather steps_per_print wall_clock_breakdown dump_state memory_breakdown
    flops_profiler tensorboard wandb comet csv_monitor comms_logger monitor_config autotuning
    checkpoint load_universal_checkpoint data_efficiency curriculum_learning data_types aio
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer compile nebula timers
    dataloader_drop_last use_node_local_storage graph_harvesting managed_gradient_accumulation
    use_data_before_expert_parallelism vocabulary_size check_grad_overflow
""")
"""Fields on which no plan depends: the optimizer, learning rates, data, logs, checkpoints, kernels."""

REFUSED: Final[Mapping[str, str]] = {
    "amp": "is Apex's mixed precision, whose products are not known; use bf16 or fp16",
    "elasticity": "changes the batch and the GPUs during training, but a plan has one of each; remove it",
    "progressive_layer_drop": "leaves out layers during training; remove it",
    "compression_training": "changes the model during training; remove it",
    "sparse_attention": "changes the operators of the model; remove it",
    "hybrid_engine": "alternates training with inference, which a plan cannot express; remove it",
    "quantize_training": "changes the model during training; remove it",
}
"""Sections that a plan cannot express, unless they say ``"enabled": false``."""

KNOWN: Final = READ | IGNORED | frozenset(REFUSED)

MARKS: Final = frozenset(
    {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"}
)
"""Fields by which a file is recognised: only DeepSpeed has them, and they are about a plan."""
_SECTION_MARKS: Final = frozenset(
    {"bf16", "fp16", "bfloat16", "pipeline", "tensor_parallel", "activation_checkpointing"}
)
"""Fields that are marks if they are sections."""

_DEVICES: Final = {"none": False, "cpu": True}
_ZERO_IGNORED: Final = name_set("""
    allgather_partitions allgather_bucket_size overlap_comm reduce_scatter reduce_bucket_size
    contiguous_gradients load_from_fp32_weights elastic_checkpoint round_robin_gradients
    sub_group_size stage3_prefetch_bucket_size prefetch_bucket_size
    stage3_param_persistence_threshold param_persistence_threshold
    stage3_model_persistence_threshold model_persistence_threshold stage3_max_live_parameters
    max_live_parameters stage3_max_reuse_distance max_reuse_distance
    stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save
    stage3_gather_fp16_weights_on_model_save stage3_module_granularity_threshold
    stage3_use_all_reduce_for_fetch_params ignore_unused_parameters legacy_stage1
    use_multi_rank_bucket_allreduce override_module_apply memory_efficient_linear
    pipeline_loading_checkpoint cpu_offload_use_pin_memory log_trace_cache_warnings
    allgather_sequential leaf_module save_muon_momentum_buffer_in_memory
""")
_ZERO_REFUSED: Final[Mapping[str, str]] = {
    "zero_hpz_partition_size": "keeps a second copy of weights in each node (ZeRO++)",
    "zero_quantized_weights": "sends quantized weights (ZeRO++)",
    "zero_quantized_nontrainable_weights": "sends quantized weights (ZeRO++)",
    "zero_quantized_gradients": "sends quantized gradients (ZeRO++)",
    "mics_shard_size": "divides states among some of the replicas (MiCS)",
    "mics_hierarchical_params_gather": "divides states among some of the replicas (MiCS)",
}
_ZERO_READ: Final = name_set("""
    stage offload_optimizer offload_param cpu_offload cpu_offload_params
""")


def is_deepspeed(plain: Mapping[str, Any]) -> bool:
    """Return whether a mapping is DeepSpeed's: some fields are about plans, most are known."""
    sections = {name for name, value in plain.items() if isinstance(value, Mapping)}
    if not (plain.keys() & MARKS or sections & _SECTION_MARKS):
        return False
    return 2 * len(plain.keys() & KNOWN) >= len(plain)


def read_deepspeed(field: str, plain: Mapping[str, Any]) -> StatedPlan:
    """Return what a configuration states.

    Raises:
        InvalidInput: a field is unknown, has a bad value, or cannot be expressed by a plan; names
            it.
    """
    config = {name: value for name, value in plain.items() if value not in ("auto", None)}
    if not config.keys() & READ:
        raise InvalidInput(
            field,
            f"has no field of DeepSpeed that states a plan, such as {', '.join(sorted(MARKS))}",
        )
    refuse_all(
        field, [(n, text) for n, value in config.items() if (text := _problem_of(n, value, field))]
    )
    stated: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name, target in _COUNTS.items():
        if name in config:
            stated[target] = read_count(name, config[name])
            names[target] = name
    notes: list[str] = []
    if stated.get("cp", 1) > 1:
        notes.append("sequence_parallel_size is priced as a ring (cp), not as all-to-all (Ulysses)")
    readers = (_read_zero, _read_precision, _read_activations, _read_tensor, _read_pipeline)
    for reader in readers:
        for target, (name, value) in reader(config, notes).items():
            stated[target] = value
            names[target] = name
    return StatedPlan(
        **stated,
        names=names,
        usual={"zero": ZeroStage.NONE, "offload": Offload.NONE, "sp": False},
        notes=tuple(notes),
    )


Fields = dict[str, tuple[str, Any]]
"""Values of the fields of a stated plan, with the configuration's names of them."""


def _problem_of(name: str, value: object, field: str) -> str:
    """Return what is wrong with a field of the configuration, or ""."""
    if name in REFUSED:
        disabled = isinstance(value, Mapping) and value.get("enabled") is False
        return "" if disabled else REFUSED[name]
    if name not in KNOWN:
        return (
            f"is not a field of DeepSpeed that is known here ({field}); remove it if it does not change"
            " how the model is divided among GPUs"
        )
    if name == "optimizer" and isinstance(value, Mapping):
        kind = str(value.get("type", ""))
        if kind.lower() in ("onebitadam", "zerooneadam", "onebitlamb"):
            raise InvalidInput(
                "optimizer.type", f"is {kind}, which sends compressed gradients; use Adam or AdamW"
            )
    return ""


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name, {})
    if not isinstance(value, Mapping):
        raise InvalidInput(name, f"must be an object, not {quote_value(value)}")
    return {k: v for k, v in value.items() if v not in ("auto", None)}


def _read_zero(config: Mapping[str, Any], notes: list[str]) -> Fields:
    place = "zero_optimization"
    if isinstance(config.get(place), bool):  # an old form: stage 1
        return {"zero": (place, ZeroStage.OPTIMIZER)} if config[place] else {}
    zero = _section(config, place)
    for name, value in zero.items():
        if name in _ZERO_REFUSED:
            if value is True or value not in (0, 1, -1):
                raise InvalidInput(
                    f"{place}.{name}",
                    f"{_ZERO_REFUSED[name]}, which a plan cannot express; remove it",
                )
        elif name not in _ZERO_READ and name not in _ZERO_IGNORED:
            raise InvalidInput(
                f"{place}.{name[:80]}", "is not a field that is known here; remove it"
            )
    found: Fields = {}
    if "stage" in zero:
        name = f"{place}.stage"
        stage = read_count(name, zero["stage"], least=0)
        if stage > 3:
            raise InvalidInput(name, f"must be from 0 to 3, not {stage}")
        found["zero"] = (name, ZeroStage(stage))
    if offloaded := _offload(zero, place):
        found["offload"] = offloaded
    return found


def _offload(zero: Mapping[str, Any], place: str) -> tuple[str, Offload] | None:
    for section, old, kind in (
        ("offload_param", "cpu_offload_params", Offload.PARAMETERS),
        ("offload_optimizer", "cpu_offload", Offload.OPTIMIZER),
    ):
        if old in zero and read_flag(f"{place}.{old}", zero[old]):
            return f"{place}.{old}", kind
        if section not in zero:
            continue
        device = _section(zero, section).get("device", "cpu")
        name = f"{place}.{section}.device"
        if device == "nvme":
            raise InvalidInput(
                name, "is nvme, but a plan keeps states on GPUs or in the host's memory; use cpu"
            )
        if read_choice(name, device, _DEVICES):
            return name, kind
    return None


def _is_on(config: Mapping[str, Any], name: str) -> bool:
    return read_flag(f"{name}.enabled", _section(config, name).get("enabled", False))


def _read_precision(config: Mapping[str, Any], notes: list[str]) -> Fields:
    kinds = {"bf16": Precision.BF16, "bfloat16": Precision.BF16, "fp16": Precision.F16}
    on = [name for name in kinds if _is_on(config, name)]
    if len({kinds[name] for name in on}) > 1:
        raise InvalidInput(f"{on[-1]}.enabled", f"contradicts {on[0]}.enabled; enable one of them")
    if on:
        return {"precision": (f"{on[0]}.enabled", kinds[on[0]])}
    autocast = "torch_autocast"
    if not _is_on(config, autocast):
        return {}
    name = f"{autocast}.dtype"
    types = {"bfloat16": Precision.BF16, "float16": Precision.F16, "float32": Precision.F32}
    dtype = _section(config, autocast).get("dtype", "bfloat16")
    return {"precision": (name, read_choice(name, dtype, types))}


def _read_activations(config: Mapping[str, Any], notes: list[str]) -> Fields:
    place = "activation_checkpointing"
    section = _section(config, place)
    known = name_set("""
        partition_activations cpu_checkpointing contiguous_memory_optimization number_checkpoints
        synchronize_checkpoint_boundary profile
    """)
    for name, value in section.items():
        if name not in known:
            raise InvalidInput(
                f"{place}.{name[:80]}", "is not a field that is known here; remove it"
            )
        if name in ("partition_activations", "cpu_checkpointing") and read_flag(
            f"{place}.{name}", value
        ):
            raise InvalidInput(
                f"{place}.{name}",
                "moves kept activations, which a plan cannot express; set it to false",
            )
    if section.get("number_checkpoints"):
        return {"recomputation": (f"{place}.number_checkpoints", Recomputation.FULL)}
    if section:
        notes.append(f"{place} does not say whether activations are recomputed: state --recompute")
    return {}


def _read_tensor(config: Mapping[str, Any], notes: list[str]) -> Fields:
    place = "tensor_parallel"
    section = _section(config, place)
    sizes = {
        f"{place}.{name}": section[name] for name in ("autotp_size", "tp_size") if name in section
    }
    inner = section.get("tp", {})
    if isinstance(inner, Mapping) and "tp_size" in inner:
        sizes[f"{place}.tp.tp_size"] = inner["tp_size"]
    for name, value in sizes.items():
        if size := read_count(name, value, least=0):
            return {"tp": (name, size)}
    return {}


def _read_pipeline(config: Mapping[str, Any], notes: list[str]) -> Fields:
    section = _section(config, "pipeline")
    found: Fields = {}
    if "stages" in section:
        found["pp"] = ("pipeline.stages", read_count("pipeline.stages", section["stages"]))
    interval = "pipeline.activation_checkpoint_interval"
    if every := read_count(interval, section.get("activation_checkpoint_interval", 0), least=0):
        if every > 1:
            raise InvalidInput(
                interval, f"is {every}, but a plan recomputes every layer on its own; state 1 or 0"
            )
        found["recomputation"] = (interval, Recomputation.FULL)
    return found
