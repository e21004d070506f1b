"""Reader of Megatron-LM's command-line arguments.

The names are those of ``megatron/training/arguments.py``. Each known argument is read, belongs to
the model, is ignored because no plan depends on it, or is refused because no plan can express it.
An unknown one is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from tessera.estimator.stated.megatron_names import IGNORED, MODEL, OFF, REFUSED
from tessera.estimator.stated.statement import (
    Division,
    Reader,
    StatedPlan,
    count_of,
    quote_value,
    read_choice,
    read_count,
    read_flag,
)
from tessera.formulation.errors import InvalidInput
from tessera.formulation.execution_plan import Offload, Precision, Recomputation, ZeroStage

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
}
_STRATEGIES: Final = {
    "no_shard": ZeroStage.NONE,
    "optim": ZeroStage.OPTIMIZER,
    "optim_grads": ZeroStage.GRADIENTS,
    "optim_grads_params": ZeroStage.PARAMETERS,
}
_FSDP: Final = ("--use-megatron-fsdp", "--use-custom-fsdp")
_SWITCHES: Final = (
    "--sequence-parallel",
    "--use-distributed-optimizer",
    *_FSDP,
    "--data-parallel-sharding-strategy",
    "--use-torch-fsdp2",
    "--torch-fsdp2-no-reshard-after-forward",
    "--recompute-activations",
    "--checkpoint-activations",
    "--recompute-granularity",
    "--recompute-method",
    "--recompute-num-layers",
    "--recompute-modules",
    "--bf16",
    "--fp16",
    "--fp8-format",
    "--fp8-hybrid",
    "--fp8-e4m3",
    "--optimizer-cpu-offload",
    "--optimizer-offload-fraction",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
    "--cp-comm-type",
    "--num-distributed-optimizer-instances",
    "--microbatch-group-size-per-virtual-pipeline-stage",
    "--nproc-per-node",
    "--nnodes",
)
READ: Final = frozenset((*_COUNTS, *_SWITCHES))
KNOWN: Final = READ | MODEL | IGNORED | frozenset(REFUSED)


def parse_arguments(field: str, words: Iterable[str]) -> dict[str, object]:
    """Return the arguments among the words of a command. Later ones replace earlier ones.

    Raises:
        InvalidInput: a word is no value of an argument, or an argument lacks its value.
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
            name, equals, value = word.partition("=")
            name, values = canonical_name(name), [value] if equals else []
        elif canonical_name(word) in READ:
            raise InvalidInput(field, f"{quote_value(word)} lacks its dashes; write --{word}")
        elif not name:
            raise InvalidInput(field, f"{quote_value(word)} follows no argument; remove it")
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


def read_megatron(field: str, arguments: Arguments) -> StatedPlan:
    """Return what Megatron-LM's arguments state.

    Raises:
        InvalidInput: an argument is unknown, has a bad value, contradicts another one, or cannot be
            expressed by a plan; names it.
    """
    for name, value in arguments.items():
        _check_known(field, name, value)
    stated: dict[str, Any] = {}
    names: dict[str, str] = {}

    def state(found: Mapping[str, Any], name: str) -> None:
        stated.update(found)
        names.update(dict.fromkeys(found, name))

    for name, reader in _COUNTS.items():
        if name in arguments:
            state(reader(name, arguments[name]), name)
    notes: list[str] = []
    for read in (_zero, _recomputation, _precision, _offload, _division, _gpus, _groups):
        for name, found in read(arguments, notes):
            state(found, name)
    if _flag(arguments, "--sequence-parallel") and stated.get("tp", 2) > 1:
        state({"sp": True}, "--sequence-parallel")
    if stated.get("experts") and stated.get("tp", 1) > 1 and "expert_tp" not in stated:
        state({"expert_tp": stated["tp"]}, "--expert-tensor-parallel-size")
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
        **stated, division=Division.EQUAL, names=names, usual=usual, notes=tuple(notes)
    )


Statements = Iterable[tuple[str, dict[str, Any]]]
"""Names of arguments with the fields that they state."""


def _check_known(field: str, name: str, value: object) -> None:
    if name in REFUSED:
        if not _is_off(name, value):
            raise InvalidInput(name, REFUSED[name])
    elif name not in READ and name not in MODEL and name not in IGNORED:
        raise InvalidInput(
            name,
            f"is not an argument of Megatron-LM that is known here ({field}); remove it if it does not"
            " change how the model is divided among GPUs",
        )


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


def _recomputation(arguments: Arguments, notes: list[str]) -> Statements:
    name = "--recompute-granularity"
    if name not in arguments:
        for flag, kind in (
            ("--recompute-activations", Recomputation.SELECTIVE),
            ("--checkpoint-activations", Recomputation.FULL),
        ):
            if _flag(arguments, flag):
                yield flag, {"recomputation": kind}
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
        f"is {layers}, but a plan recomputes every layer on its own; state --recompute-method uniform"
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
    """Yield the GPUs of the launcher, if the file states both of their factors as numbers."""
    each, nodes = arguments.get("--nproc-per-node"), arguments.get("--nnodes")
    if each is not None and nodes is not None:
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
