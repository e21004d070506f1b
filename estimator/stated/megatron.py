"""Reader of the command-line arguments of Megatron-LM and Megatron-DeepSpeed.

The names are those of ``megatron/training/arguments.py``, and of earlier releases. Each known
argument is read, belongs to the model, is ignored because no plan depends on it, or is refused
because no plan can express it. An unknown one is reported as ignored, unless its name says that it
may change the plan.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from tessera.estimator.stated.megatron_names import IGNORED, MODEL, NOT_PRICED, OFF, REFUSED
from tessera.estimator.stated.statement import (
    Reader,
    StatedPlan,
    count_of,
    name_set,
    quote_value,
    read_choice,
    read_count,
    read_flag,
    refuse_all,
)
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.suggestions import suggest_name
from tessera.formulation.job.execution_plan import Offload, Precision, Recomputation, ZeroStage

Arguments = Mapping[str, object]
"""Arguments by name, with ``--``. The value of a flag is True."""

_COUNTS: Final[Mapping[str, Reader]] = {
    "--tensor-model-parallel-size": count_of("tp"),
    "--pipeline-model-parallel-size": count_of("pp"),
    "--num-virtual-stages-per-pipeline-rank": count_of("chunks"),
    "--num-layers-per-virtual-pipeline-stage": count_of("blocks_per_chunk"),
    "--context-parallel-size": count_of("cp"),
    "--expert-model-parallel-size": count_of("ep"),
    "--expert-tensor-parallel-size": count_of("expert_tp"),
    "--micro-batch-size": count_of("micro_batch"),
    "--global-batch-size": count_of("global_batch"),
    "--decoder-first-pipeline-num-layers": count_of("first_blocks"),
    "--decoder-last-pipeline-num-layers": count_of("last_blocks"),
    "--num-layers": count_of("blocks"),
    "--num-attention-heads": count_of("heads"),
    "--num-experts": count_of("experts"),
    "--seq-length": count_of("sequence"),
    "--world-size": count_of("gpus"),
    "--model-parallel-size": count_of("tp"),
    "--batch-size": count_of("micro_batch"),
    "--moe-expert-parallel-size": count_of("ep"),
    "--ds-sequence-parallel-size": count_of("cp"),
}
LAUNCHER: Final = ("--nproc-per-node", "--nnodes")
"""The arguments of torchrun that state the GPUs of a node, and the nodes."""
_EVERY_LAYER: Final = "a plan recomputes every layer on its own"
_STRATEGIES: Final = {
    "no_shard": ZeroStage.NONE,
    "optim": ZeroStage.OPTIMIZER,
    "optim_grads": ZeroStage.GRADIENTS,
    "optim_grads_params": ZeroStage.PARAMETERS,
}
_FSDP: Final = ("--use-megatron-fsdp", "--use-custom-fsdp")
_SWITCHES: Final[Mapping[str, frozenset[str]]] = {
    "sp": name_set("--sequence-parallel"),
    "zero": name_set("""
        --use-distributed-optimizer --use-megatron-fsdp --use-custom-fsdp
        --data-parallel-sharding-strategy --use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward
        --zero-stage
    """),
    "recomputation": name_set("""
        --recompute-activations --checkpoint-activations --recompute-granularity
        --recompute-method --recompute-num-layers --recompute-modules --checkpoint-num-layers
        --activations-checkpoint-method --activations-checkpoint-num-layers
    """),
    "precision": name_set("--bf16 --fp16 --fp8-format --fp8-hybrid --fp8-e4m3"),
    "offload": name_set("--optimizer-cpu-offload --optimizer-offload-fraction --cpu-optimizer"),
    "pp": name_set("--no-pipeline-parallel"),
    "embedding_blocks": name_set("--account-for-embedding-in-pipeline-split"),
    "head_blocks": name_set("--account-for-loss-in-pipeline-split"),
    "gpus": name_set("--nproc-per-node --nnodes"),
    "": name_set("""
        --cp-comm-type --num-distributed-optimizer-instances
        --microbatch-group-size-per-virtual-pipeline-stage
    """),
}
"""Other arguments by the field that they decide. Those of no field are only checked."""
READ: Final = frozenset(_COUNTS).union(*_SWITCHES.values())
KNOWN: Final = READ | MODEL | IGNORED | REFUSED.keys() | NOT_PRICED.keys()
MARKS: Final = (READ | REFUSED.keys() | NOT_PRICED.keys()) - name_set("""
    --num-layers --num-attention-heads --num-experts --seq-length --world-size --batch-size --bf16
    --fp16 --nproc-per-node --nnodes --zero-stage
""")
"""Arguments by which a file is recognised: only Megatron-LM has them, and they are about a plan."""
_MODEL_OF_OLD: Final = frozenset({"--num-layers", "--num-attention-heads", "--hidden-size"})
"""Arguments that together mark a script of an old release."""
_FLAGS: Final = name_set("""
    --sequence-parallel --use-distributed-optimizer --use-megatron-fsdp --use-custom-fsdp
    --use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward --recompute-activations
    --checkpoint-activations --no-pipeline-parallel --cpu-optimizer --bf16 --fp16 --fp8-hybrid
    --fp8-e4m3 --optimizer-cpu-offload --account-for-embedding-in-pipeline-split
    --account-for-loss-in-pipeline-split
""")
_LISTS: Final = name_set("""
    --data-path --train-data-path --valid-data-path --test-data-path --spec
""")
"""Arguments that may have any number of values."""
_USUAL_FLAGS: Final = re.compile(
    r"--(?:no|use|disable|enable|overlap|swiglu|untie|log-.*-to|apply|moe-grouped|finetune"
    r"|exit-on|mock|add|qk-l|squared|reset|eod|manual-gc$|test-mode|lazy|async|accumulate).*"
)
"""Names of flags, which have no value."""
_OF_A_PLAN: Final = re.compile(
    r"parallel|pipeline|virtual|shard|zero|fsdp|offload|recompute|activation-ckpt|checkpoint-act"
    r"|activations-checkpoint|micro-?batch|global-?batch|fp8|fp4|precision"
)
"""Names of arguments that may change a plan, if they are not known."""


def parse_arguments(words: Iterable[str]) -> dict[str, object]:
    """Return the arguments among the words of a command. Later ones replace earlier ones.

    Raises:
        InvalidInput: an argument lacks its dashes.
    """
    arguments: dict[str, object] = {}
    name = ""
    values: list[str] = []

    def finish() -> None:
        if name:
            arguments[name] = True if not values else values[0] if len(values) == 1 else values[:]

    for word in words:
        if word.startswith("--") or (word.startswith("-") and not _is_number(word)):
            finish()
            bare, equals, value = word.partition("=")
            name = canonical_name(bare)
            values = [value] if equals else []
        elif canonical_name(word) in READ:
            raise InvalidInput(word[:120], f"lacks its dashes; write --{word}")
        else:
            values.append(word)
    finish()
    return arguments


def canonical_name(name: str) -> str:
    """Return an argument's name with ``--`` and dashes, as Megatron-LM's help shows it."""
    bare = name.lstrip("-").replace("_", "-")
    return f"--{bare}"


def _is_number(word: str) -> bool:
    return word[1:].replace(".", "", 1).replace("e", "", 1).replace("-", "", 1).isdigit()


def is_megatron(arguments: Arguments) -> bool:
    """Return whether arguments are those of Megatron-LM: some are about plans, most are known.

    A list of nothing but known arguments is enough, and so is a misspelt one about plans.
    """
    names = frozenset(arguments)
    if names & READ and names <= KNOWN:
        return True
    misspelt = sum(map(_is_misspelt, names - KNOWN))
    is_about_plans = bool(names & MARKS) or names >= _MODEL_OF_OLD or misspelt > 0
    return is_about_plans and 2 * (len(names & KNOWN) + misspelt) >= len(names)


def read_megatron(field: str, arguments: Arguments) -> StatedPlan:
    """Return what Megatron-LM's arguments state.

    Raises:
        InvalidInput: arguments have bad values, contradict each other, cannot be expressed by a
            plan, or are not known and may change the plan; names all of them.
    """
    ignored = _check_known(field, arguments)
    stated: dict[str, Any] = {}
    names: dict[str, str] = {}
    notes = [
        f"{name} is not priced: {NOT_PRICED[name]}"
        for name, value in arguments.items()
        if name in NOT_PRICED and not _is_off(name, value)
    ]
    if ignored:
        notes.append(f"not understood, and ignored: {', '.join(ignored)}")

    def state(found: Mapping[str, Any], name: str) -> None:
        stated.update(found)
        names.update(dict.fromkeys(found, name))

    for name, reader in _COUNTS.items():
        if arguments.get(name) is True:
            raise InvalidInput(name, "lacks its value; write it after the name")
        if name in arguments:
            state(reader(name, _last(name, arguments[name])), name)
    for read in (_zero, _recomputation, _precision, _offload, _division, _gpus, _groups):
        for name, found in read(arguments, notes):
            state(found, name)
    if _flag(arguments, "--no-pipeline-parallel"):
        state({"pp": 1}, "--no-pipeline-parallel")
    if stated.get("cp", 1) > 1 and names["cp"] == "--ds-sequence-parallel-size":
        notes.append(
            "--ds-sequence-parallel-size is priced as a ring (cp), not as all-to-all (Ulysses)"
        )
    if _flag(arguments, "--sequence-parallel") and stated.get("tp", 2) > 1:
        state({"sp": True}, "--sequence-parallel")
    has_experts = stated.get("experts", 1) > 1
    if has_experts and names.get("ep") != "--moe-expert-parallel-size" and stated.get("tp", 1) > 1:
        stated.setdefault("expert_tp", stated["tp"])
        names.setdefault("expert_tp", "--expert-tensor-parallel-size")
    if not has_experts:
        stated.pop("experts", None)
    if "--deepspeed-config" in arguments:
        if "zero" not in stated:
            raise InvalidInput(
                "--deepspeed-config", "names a file that is not read; state --zero-stage as well"
            )
        notes.append("--deepspeed-config is not read, so its settings are not in the plan")
    if "blocks_per_chunk" in stated and "chunks" in stated:
        raise InvalidInput(
            "--num-virtual-stages-per-pipeline-rank",
            "cannot be combined with --num-layers-per-virtual-pipeline-stage; state one of them",
        )
    usual = {
        "zero": ZeroStage.NONE,
        "offload": Offload.NONE,
        "recomputation": Recomputation.NONE,
        "sp": False,
    }
    return StatedPlan(
        **stated,
        equal_parts=True,
        names=names,
        usual=usual,
        notes=tuple(notes),
    )


Statements = Iterable[tuple[str, dict[str, Any]]]
"""Names of arguments with the fields that they state."""


def _last(name: str, value: object) -> object:
    """Return a value, or the only one of a list that repeats it."""
    if isinstance(value, list) and name == "--num-experts":
        return max(value, key=lambda text: int(text) if str(text).isdigit() else 0)
    return value


def _is_misspelt(name: str) -> bool:
    return bool(difflib.get_close_matches(name, MARKS, n=1, cutoff=0.85))


def _check_known(field: str, arguments: Arguments) -> list[str]:
    """Refuse arguments that a plan cannot express. Return unknown ones with their values."""
    problems: list[tuple[str, str]] = []
    ignored: list[str] = []
    for name, value in arguments.items():
        if name in REFUSED:
            if not _is_off(name, value):
                problems.append((name, REFUSED[name]))
        elif name not in KNOWN and (_OF_A_PLAN.search(name) or _is_misspelt(name)):
            problems.append(
                (
                    name,
                    "is not an argument of Megatron-LM that is known here, and its name says that it may"
                    f" change the plan{suggest_name(name, READ)}; remove it if it does not",
                )
            )
        elif name not in KNOWN:
            values = [] if value is True else value if isinstance(value, list) else [value]
            ignored.append(" ".join((name, *(str(v)[:40] for v in values[:3]))))
    refuse_all(field, problems)
    return ignored


def _is_off(name: str, value: object) -> bool:
    """Return whether a refused argument has the value that changes nothing."""
    return str(value).lower() in {"false", "none", "null"} | OFF.get(name, frozenset())


def _flag(arguments: Arguments, name: str) -> bool:
    return name in arguments and read_flag(name, arguments[name])


def _zero(arguments: Arguments, notes: list[str]) -> Statements:
    fsdp = next((name for name in _FSDP if _flag(arguments, name)), "")
    strategy = "--data-parallel-sharding-strategy"
    if fsdp and strategy in arguments:
        yield strategy, {"zero": read_choice(strategy, arguments[strategy], _STRATEGIES)}
    elif fsdp:
        yield fsdp, {"zero": ZeroStage.NONE}  # the parser's default is no_shard
    elif _flag(arguments, "--use-torch-fsdp2"):
        kept = _flag(arguments, "--torch-fsdp2-no-reshard-after-forward")
        stage = ZeroStage.GRADIENTS if kept else ZeroStage.PARAMETERS
        yield "--use-torch-fsdp2", {"zero": stage}
    elif _flag(arguments, "--use-distributed-optimizer"):
        yield "--use-distributed-optimizer", {"zero": ZeroStage.OPTIMIZER}
    elif "--zero-stage" in arguments:
        text = str(arguments["--zero-stage"]).removesuffix(".0")
        kinds = {str(int(stage)): stage for stage in ZeroStage}
        yield "--zero-stage", {"zero": read_choice("--zero-stage", text, kinds)}


def _recomputation(arguments: Arguments, notes: list[str]) -> Statements:
    name = "--recompute-granularity"
    if name not in arguments:
        for flag, kind in (
            ("--recompute-activations", Recomputation.SELECTIVE),
            ("--checkpoint-activations", Recomputation.FULL),
        ):
            if _flag(arguments, flag):
                yield flag, {"recomputation": kind}
        old = "--activations-checkpoint-method"
        if old in arguments:
            yield old, {"recomputation": Recomputation.FULL}
        for count in ("--checkpoint-num-layers", "--activations-checkpoint-num-layers"):
            if read_count(count, arguments.get(count, 1)) > 1:
                raise InvalidInput(count, f"must be 1, not {arguments[count]}: {_EVERY_LAYER}")
        return
    kind = read_choice(
        name,
        arguments[name],
        {"full": Recomputation.FULL, "selective": Recomputation.SELECTIVE},
    )
    if kind is Recomputation.SELECTIVE:
        _check_modules(arguments)
    else:
        _check_all_layers(arguments)
    yield name, {"recomputation": kind}


def _check_modules(arguments: Arguments) -> None:
    name = "--recompute-modules"
    modules = arguments.get(name, "core_attn")
    if modules not in ("core_attn", ["core_attn"]):
        raise InvalidInput(
            name,
            f"is {quote_value(modules)}, but a plan recomputes attention (core_attn) or whole layers; state"
            " core_attn, or --recompute-granularity full",
        )


def _check_all_layers(arguments: Arguments) -> None:
    """Refuse the recomputation of some layers, or of several as one."""
    method, count = "--recompute-method", "--recompute-num-layers"
    if count not in arguments:
        return
    layers = read_count(count, arguments[count])
    blocks, pp = arguments.get("--num-layers"), arguments.get("--pipeline-model-parallel-size", 1)
    uniform = arguments.get(method, "uniform") == "uniform"
    stage = -(-read_count("--num-layers", blocks) // read_count("pp", pp)) if blocks else None
    if (uniform and layers == 1) or (not uniform and stage is not None and layers >= stage):
        return
    raise InvalidInput(
        count,
        f"is {layers}, but {_EVERY_LAYER}; state --recompute-method uniform"
        f" with {count} 1, or leave full recomputation out",
    )


def _precision(arguments: Arguments, notes: list[str]) -> Statements:
    kinds = {"--bf16": Precision.BF16, "--fp16": Precision.F16}
    given = [name for name in kinds if _flag(arguments, name)]
    if len(given) == 2:
        raise InvalidInput("--fp16", "cannot be combined with --bf16; state one of them")
    for name in ("--fp8-format", "--fp8-hybrid", "--fp8-e4m3"):
        if arguments.get(name, False) not in (False, None, "none"):
            yield name, {"precision": Precision.FP8}
            return
    for name in given:
        yield name, {"precision": kinds[name]}
    if not given:
        notes.append(
            "neither --bf16 nor --fp16 is stated, with which Megatron-LM computes in f32; the model's data"
            " type is assumed"
        )


def _offload(arguments: Arguments, notes: list[str]) -> Statements:
    if _flag(arguments, "--cpu-optimizer"):
        yield "--cpu-optimizer", {"offload": Offload.OPTIMIZER}
    if not _flag(arguments, "--optimizer-cpu-offload"):
        return
    fraction = arguments.get("--optimizer-offload-fraction", 1.0)
    if str(fraction) not in ("1", "1.0"):
        raise InvalidInput(
            "--optimizer-offload-fraction",
            f"is {quote_value(fraction)}, but a plan keeps all optimizer states in the host's memory, or"
            " none; state 1.0",
        )
    yield "--optimizer-cpu-offload", {"offload": Offload.OPTIMIZER}


def _division(arguments: Arguments, notes: list[str]) -> Statements:
    for name, target in (
        ("--account-for-embedding-in-pipeline-split", "embedding_blocks"),
        ("--account-for-loss-in-pipeline-split", "head_blocks"),
    ):
        if _flag(arguments, name):
            yield name, {target: 1}


def _gpus(arguments: Arguments, notes: list[str]) -> Statements:
    """Yield the GPUs of the launcher, if both of their factors are stated as numbers."""
    each, nodes = (arguments.get(name) for name in LAUNCHER)
    if each is None or nodes is None:
        return
    try:
        gpus = read_count("--nproc-per-node", each) * read_count("--nnodes", nodes)
    except InvalidInput:
        return  # e.g. "gpu", or a range of nodes: the number is stated elsewhere
    yield "--nproc-per-node x --nnodes", {"gpus": gpus}


def _groups(arguments: Arguments, notes: list[str]) -> Statements:
    name = "--num-distributed-optimizer-instances"
    if name in arguments and read_count(name, arguments[name]) > 1:
        raise InvalidInput(name, "must be 1: a plan divides states among all replicas")
    name = "--microbatch-group-size-per-virtual-pipeline-stage"
    pp = arguments.get("--pipeline-model-parallel-size", 1)
    if name in arguments and read_count(name, arguments[name]) != read_count("pp", pp):
        raise InvalidInput(name, f"must be the pipeline degree ({pp}), which is its default")
    kind = arguments.get("--cp-comm-type", "p2p")
    if kind not in ("p2p", ["p2p"]):
        read_choice("--cp-comm-type", kind, dict.fromkeys(("p2p", "a2a", "allgather", "a2a+p2p")))
        notes.append(f"--cp-comm-type {kind} is priced like p2p, i.e. as a ring")
    return ()
