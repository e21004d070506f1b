"""The plan that a shell script states by the training that it starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from tessera.estimator.documents import read_document
from tessera.estimator.stated import deepspeed, megatron
from tessera.estimator.stated.shell.commands import Launch
from tessera.estimator.stated.shell.script import Script, read_script
from tessera.estimator.stated.shell.values import ShellWord
from tessera.estimator.stated.statement import StatedPlan, combine
from tessera.formulation.documents import STATED_PLAN
from tessera.formulation.errors import InvalidInput

Arguments = dict[str, object]

_MAX_SHOWN: Final = 10
"""Names that a note shows at most."""
_FACTORS: Final[Mapping[str, tuple[str, str]]] = {
    "torchrun": ("--nproc-per-node", "--nnodes"),
    "deepspeed": ("--num-gpus", "--num-nodes"),
    "accelerate": ("--num-processes", ""),
}
"""The options of launchers that state GPUs of a node and nodes, or all GPUs."""
_CONFIGURATION: Final = "--deepspeed-config"


def read_megatron_script(field: str, text: str) -> StatedPlan:
    """Return what the training states that a script, a command line or a list of arguments starts.

    Raises:
        InvalidInput: the text starts no training by Megatron-LM, or the training states what a plan
            cannot be read from.
    """
    script = read_script(field, text)
    trainings = _trainings(field, script)
    if trainings:
        arguments, left_out = _joined(trainings)
        launch = trainings[-1][0]
        gpus = _gpus_of_all([launch for launch, _, _ in trainings])
    else:
        arguments, left_out = megatron.parse_arguments(field, script.listed)
        launch, gpus = None, StatedPlan()
    recognised = megatron.is_megatron(arguments)
    if not recognised and not (script.listed and megatron.may_be_megatron(arguments)):
        raise InvalidInput(field, _explain_nothing(script, arguments))
    configuration = _configuration(field, arguments, script) if launch is not None else StatedPlan()
    stated = megatron.read_megatron(field, arguments)
    if "zero" in configuration.unknown and stated.zero is None:
        usual = {
            name: value for name, value in stated.usual.items() if name not in ("zero", "offload")
        }
        stated = replace(stated, usual=usual)
    whole = combine([stated, gpus, configuration])
    return replace(whole, notes=(*whole.notes, *_notes(script, left_out)))


_Training = tuple[Launch, Arguments, list[str]]


def _trainings(field: str, script: Script) -> list[_Training]:
    """Return the launches whose arguments are those of Megatron-LM."""
    trainings = []
    for launch in script.launches:
        arguments, left_out = megatron.parse_arguments(field, launch.words)
        options, others = megatron.parse_arguments(field, _options(launch))
        options = {name: value for name, value in options.items() if name not in megatron.READ}
        if megatron.is_megatron(arguments):
            trainings.append((launch, options | arguments, others + left_out))
    return trainings


def _options(launch: Launch) -> Sequence[ShellWord]:
    """Return the options of a launcher, without those of Python before them."""
    first = next((i for i, word in enumerate(launch.options) if word.startswith("--")), 0)
    return launch.options[first:] if launch.launcher in _FACTORS else ()


def _joined(trainings: Sequence[_Training]) -> tuple[Arguments, list[str]]:
    """Return the arguments of all launches. Those that differ are unknown."""
    arguments: Arguments = {}
    *_, (last, _, _) = trainings
    megatron.add_differing(arguments, [found for _, found, _ in trainings], last.line)
    return arguments, list(dict.fromkeys(text for _, _, texts in trainings for text in texts))


def _gpus_of_all(launches: Iterable[Launch]) -> StatedPlan:
    """Return the GPUs of the launchers, if they agree."""
    stated = [_gpus_of(launch) for launch in launches]
    return stated[0] if all(other == stated[0] for other in stated) else StatedPlan()


def _gpus_of(launch: Launch) -> StatedPlan:
    """Return the GPUs that a launcher states. One node is its default, which may be replaced."""
    if launch.launcher not in _FACTORS:
        return StatedPlan()
    options, _ = megatron.parse_arguments("", _options(launch))
    each, nodes = _FACTORS[launch.launcher]
    count, default = options.get(each), options.get(nodes) if nodes else "1"
    name = f"{each} x {nodes}" if nodes else each
    unknown = [v.unknown[0] for v in (count, default) if isinstance(v, ShellWord) and v.unknown]
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


def _configuration(field: str, arguments: Arguments, script: Script) -> StatedPlan:
    """Return what DeepSpeed's configuration states, which the script may write itself."""
    place = arguments.get(_CONFIGURATION)
    if place is None or "--deepspeed" not in arguments:
        return StatedPlan()
    text = script.files.get(str(place))
    if text is not None and "$" not in text:
        plain = read_document(str(place), text, STATED_PLAN)
        if isinstance(plain, Mapping):
            return deepspeed.read_deepspeed(str(place), plain)
    reason = f"is in {str(place)[:80]!r}, a file that is not read here"
    return StatedPlan(
        unknown={} if "--zero-stage" in arguments else {"zero": reason},
        names={} if "--zero-stage" in arguments else {"zero": _CONFIGURATION},
        notes=(
            f"{_CONFIGURATION} {str(place)[:80]} is not read: what it states is not in the plan",
        ),
    )


def _notes(script: Script, left_out: Sequence[str]) -> list[str]:
    notes = []
    if left_out:
        notes.append(f"left out, because only a run decides them: {_shown(left_out)}")
    if script.assumed:
        notes.append(f"taken as not set: {_shown(script.assumed)}")
    if script.others:
        notes.append(f"not read, with what they set or start: {_shown(script.others)}")
    return notes


def _shown(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _MAX_SHOWN} more" if len(texts) > _MAX_SHOWN else ""
    return f"{', '.join(text[:60] for text in texts[:_MAX_SHOWN])}{more}"


def _explain_nothing(script: Script, arguments: Mapping[str, object]) -> str:
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
    return f"has no {wanted}, and starts no training; give the script that has them"
