"""The plan that a shell script states by the training that it starts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from tessera.estimator.stated import megatron
from tessera.estimator.stated.shell.script import Launch, Script, read_script
from tessera.estimator.stated.shell.variables import ShellWord
from tessera.estimator.stated.statement import StatedPlan, combine
from tessera.formulation.errors import InvalidInput

Arguments = dict[str, object]

_MAX_SHOWN: Final = 10
"""Names that a note shows at most."""
_FACTORS: Final = {
    "torchrun": ("--nproc-per-node", "--nnodes"),
    "deepspeed": ("--num-gpus", "--num-nodes"),
    "accelerate": ("--num-processes", ""),
}
"""The options of launchers that state GPUs of a node and nodes, or all GPUs."""
_OF_LAUNCHERS: Final = frozenset({"--nproc-per-node", "--nnodes"})
_CONFIGURATION: Final = "--deepspeed-config"
_REMEDY: Final = (
    "give the command line that it starts, for example as `bash -x` or `ps -ww` shows it"
)


def read_megatron_script(field: str, text: str) -> StatedPlan:
    """Return what the training states that a script, a command line or a list of arguments starts.

    Raises:
        InvalidInput: the text starts no training by Megatron-LM, starts it where commands are not
            followed, or the training states what a plan cannot be read from.
    """
    script = read_script(field, text)
    for place, word in script.unread:
        if megatron.is_megatron(megatron.parse_arguments(field, [word])[0]):
            raise InvalidInput(
                field, f"starts a training inside {place}, which is not followed; {_REMEDY}"
            )
    trainings = _trainings(field, script)
    if trainings:
        launch, arguments, left_out = trainings[-1]
        _check_alike(field, trainings)
        gpus = _gpus_of(launch)
    else:
        arguments, left_out = megatron.parse_arguments(field, script.listed)
        gpus = StatedPlan()
    recognised = megatron.is_megatron(arguments)
    if not recognised and not (script.listed and megatron.may_be_megatron(arguments)):
        raise InvalidInput(field, _explain_nothing(script))
    stated = megatron.read_megatron(field, arguments)
    if trainings and "--deepspeed" in arguments and _CONFIGURATION in arguments:
        stated = _without_configuration(stated, str(arguments[_CONFIGURATION])[:80])
    whole = combine([stated, gpus])
    return replace(whole, notes=(*whole.notes, *_notes(script, left_out)))


_Training = tuple[Launch, Arguments, list[str]]


def _trainings(field: str, script: Script) -> list[_Training]:
    """Return the launches whose arguments are those of Megatron-LM."""
    trainings = []
    for launch in script.launches:
        arguments, left_out = megatron.parse_arguments(field, launch.words)
        options, others = megatron.parse_arguments(field, _options(launch))
        options = {name: value for name, value in options.items() if name not in _OF_LAUNCHERS}
        if megatron.is_megatron(arguments):
            trainings.append((launch, options | arguments, others + left_out))
    return trainings


def _options(launch: Launch) -> Sequence[ShellWord]:
    """Return the options of a launcher, without those of Python before them."""
    words = launch.options
    first = next((i for i, w in enumerate(words) if w.startswith("--") or w.options), len(words))
    return words[first:]


def _check_alike(field: str, trainings: Sequence[_Training]) -> None:
    """Refuse trainings of one script whose plans differ."""
    launch, arguments, _ = trainings[-1]
    for other, others_arguments, _ in trainings:
        names = sorted((megatron.READ | megatron.MARKS) & {*arguments, *others_arguments})
        if name := next((n for n in names if arguments.get(n) != others_arguments.get(n)), ""):
            raise InvalidInput(
                field,
                f"starts trainings with different {name} (lines {other.line} and {launch.line});"
                " give the command line of one",
            )


def _gpus_of(launch: Launch) -> StatedPlan:
    """Return the GPUs that a launcher states. One node is its default, which may be replaced."""
    if launch.launcher not in _FACTORS:
        return StatedPlan()
    options, _ = megatron.parse_arguments("", _options(launch))
    each, nodes = _FACTORS[launch.launcher]
    count, default = options.get(each), options.get(nodes) if nodes else "1"
    name = f"{each} x {nodes}" if nodes else each
    unknown = [v.unknown for v in (count, default) if isinstance(v, ShellWord) and v.unknown]
    if unknown:
        return StatedPlan(unknown={"gpus": f"is {unknown[0]}"}, names={"gpus": name})
    texts = [str(value) for value in (count, default or "1")]
    if not all(text.isdigit() and len(text) < 7 and int(text) for text in texts):
        return StatedPlan()
    if any(isinstance(value, ShellWord) and value.assumed for value in (count, default)):
        return StatedPlan()  # the environment decides it
    gpus = int(texts[0]) * int(texts[1])
    has_default = default is None and "--standalone" not in options
    return StatedPlan(
        gpus=gpus, names={"gpus": name}, assumed=frozenset({"gpus"} if has_default else ())
    )


def _without_configuration(stated: StatedPlan, place: str) -> StatedPlan:
    """Return what arguments state next to a configuration of DeepSpeed that is not read."""
    note = f"{_CONFIGURATION} {place} is not read: what it states is not in the plan"
    stated = replace(stated, notes=(*stated.notes, note))
    if stated.zero is not None:
        return stated
    usual = {name: kind for name, kind in stated.usual.items() if name not in ("zero", "offload")}
    unknown = {"zero": f"is in {place!r}, a file that is not read here", **stated.unknown}
    names = {"zero": _CONFIGURATION, **stated.names}
    return replace(stated, usual=usual, unknown=unknown, names=names)


def _notes(script: Script, left_out: Sequence[str]) -> list[str]:
    notes = []
    if left_out:
        notes.append(f"left out, because only a run decides them: {_shown(left_out)}")
    if script.assumed:
        notes.append(f"taken as not set: {_shown(script.assumed)}")
    if script.others:
        notes.append(f"not read, with what they set or start: {_shown(script.others)}")
    return notes


def _shown(texts: Iterable[str]) -> str:
    first, rest = [*texts][:_MAX_SHOWN], [*texts][_MAX_SHOWN:]
    more = f" and {len(rest)} more" if rest else ""
    return f"{', '.join(text[:60] for text in first)}{more}"


def _explain_nothing(script: Script) -> str:
    """Return a sentence for a script that states no plan."""
    wanted = "arguments of Megatron-LM such as --tensor-model-parallel-size"
    for launch in script.launches:
        names = {megatron.canonical_name(word.partition("=")[0]) for word in launch.words}
        if "--per-device-train-batch-size" in names:
            return (
                f"starts {launch.program} with Hugging Face's Trainer (line {launch.line}), whose arguments"
                f" are not read; give DeepSpeed's JSON as --plan, or state options such as --tp"
            )
    if script.launches:
        starts = ", ".join(f"{one.program} (line {one.line})" for one in script.launches[:3])
        return (
            f"starts {starts} without {wanted}; give the script that has them, or state options such as"
            " --tp"
        )
    if script.others:
        return f"has no {wanted}, but starts or reads {_shown(script.others)}; give that file"
    return f"has no {wanted}, and starts no training; {_REMEDY}"
