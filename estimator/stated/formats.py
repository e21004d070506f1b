"""The formats of files that state execution plans, and their recognition by content."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final

from tessera.estimator.documents import read_document
from tessera.estimator.stated import deepspeed, megatron, torchtitan
from tessera.estimator.stated.scripts import read_megatron_script
from tessera.estimator.stated.statement import StatedPlan, quote_value
from tessera.formulation.documents import (
    EXECUTION_PLAN,
    STATED_PLAN,
    check_counts,
    check_scalar,
    to_utf8,
)
from tessera.formulation.errors import InvalidInput
from tessera.formulation.execution_plan import ExecutionPlan, execution_plan_of
from tessera.formulation.suggestions import suggest_name

_SECTION: Final = re.compile(r"^\s*\[{1,2}([A-Za-z0-9_.\"' -]+)\]{1,2}\s*(?:#.*)?$", re.MULTILINE)

_FORMATS: Final = (
    "no known format: it has neither `stages` (Tessera's JSON), nor arguments of Megatron-LM such as"
    " --tensor-model-parallel-size, nor [parallelism] (TOML of torchtitan), nor `zero_optimization` or a"
    " batch size of DeepSpeed's JSON"
)
_INSTEAD: Final = "state options such as --tp and --micro-batch instead"
_FOREIGN: Final[Mapping[str, str]] = {
    "compute_environment distributed_type": "a configuration of Hugging Face's Accelerate, which is not"
    f" read; give DeepSpeed's JSON, or {_INSTEAD}",
    "per_device_train_batch_size": f"a file of Hugging Face's Trainer, which is not read; {_INSTEAD}",
    "architectures model_type": "a model's configuration and states no plan; describe the model by --hf",
    "trainer": f"a configuration of NeMo or Lightning, which is not read; {_INSTEAD}",
    "actor_rollout_ref": f"a configuration of verl, which is not read; {_INSTEAD}",
}
"""Fields by which files of other programs are known, and what to do instead."""
_ADVICE: Final = "; `tessera estimate --plan FILE --plan-format NAME` says what is wrong with it"


class PlanFormat(StrEnum):
    """The formats of files that state execution plans."""

    JSON = "json"  # Tessera's own
    MEGATRON = "megatron"
    TORCHTITAN = "torchtitan"
    DEEPSPEED = "deepspeed"


def read_stated_plan(
    field: str, text: str, plan_format: PlanFormat | None = None
) -> StatedPlan | ExecutionPlan:
    """Return the plan, or the part of one, that a text states.

    If ``plan_format`` is None, the text's content decides.

    Raises:
        InvalidInput: the format is not recognised, the text is too large or not valid, or a field
            cannot be read. The error names the text's own field.
    """
    to_utf8(field, text, STATED_PLAN)
    kind = recognise_format(field, text) if plan_format is None else plan_format
    if kind is PlanFormat.TORCHTITAN:
        return torchtitan.read_torchtitan(field, _read_toml(field, text))
    if kind is PlanFormat.MEGATRON and not _is_mapping(text):
        return read_megatron_script(field, text)
    limits = EXECUTION_PLAN if kind is PlanFormat.JSON else STATED_PLAN
    plain = read_document(field, text, limits)
    if kind is PlanFormat.JSON:
        return execution_plan_of(field, plain)
    if not isinstance(plain, Mapping):
        raise InvalidInput(field, f"must be a mapping of names to values, not {quote_value(plain)}")
    if kind is PlanFormat.DEEPSPEED:
        return deepspeed.read_deepspeed(field, plain)
    return megatron.read_megatron(field, _arguments_of(field, plain))


def recognise_format(field: str, text: str) -> PlanFormat:
    """Return the format of a text.

    Raises:
        InvalidInput: it has none of the formats' marks.
    """
    if _is_mapping(text):
        return _format_of_mapping(field, read_document(field, text, STATED_PLAN))
    sections = {name.split(".")[0].strip("\"' ") for name in _SECTION.findall(text)}
    if sections & torchtitan.SECTIONS:
        return PlanFormat.TORCHTITAN
    if re.search(r"(?:^|\s|['\"(=])--[A-Za-z]", text):
        return PlanFormat.MEGATRON
    raise InvalidInput(field, f"is in {_FORMATS}{_ADVICE}")


def _format_of_mapping(field: str, plain: object) -> PlanFormat:
    """Return the format of a mapping by the fields of plans that only this format has."""
    if not isinstance(plain, Mapping):
        raise InvalidInput(field, f"is in {_FORMATS}{_ADVICE}")
    names = {str(name) for name in plain}
    if "stages" in names:
        return PlanFormat.JSON
    inner = plain.get("MODEL_ARGS", plain)
    own = (
        {megatron.canonical_name(str(n)): v for n, v in inner.items()}
        if isinstance(inner, Mapping)
        else {}
    )
    if megatron.is_megatron(own):
        return PlanFormat.MEGATRON
    if deepspeed.is_deepspeed(plain):
        return PlanFormat.DEEPSPEED
    for marks, what in _FOREIGN.items():
        if names & frozenset(marks.split()):
            raise InvalidInput(field, f"is {what}")
    meant = {suggest_name(name, deepspeed.MARKS) for name in names}
    meant |= {suggest_name(name, megatron.READ) for name in own}
    raise InvalidInput(field, f"is in {_FORMATS}{max(meant, default='') or _ADVICE}")


def _is_mapping(text: str) -> bool:
    """Return whether a text is a mapping in JSON or YAML, and not a list of arguments."""
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith("#")), "")
    return first.startswith("{") or bool(re.match(r"(?:--)?[A-Za-z_][\w-]*:(?:\s|$)", first))


def _arguments_of(field: str, plain: Mapping[str, Any]) -> dict[str, object]:
    """Return the arguments of a mapping, which may be below ``MODEL_ARGS`` as in Megatron's tests."""
    inner = plain.get("MODEL_ARGS", plain)
    if not isinstance(inner, Mapping):
        raise InvalidInput(f"{field}: MODEL_ARGS", f"must be a mapping, not {quote_value(inner)}")
    arguments: dict[str, object] = {}
    for key, value in inner.items():
        name = megatron.canonical_name(str(key))
        if isinstance(value, Mapping):
            raise InvalidInput(name[:120], "must be a value or a list, not a mapping")
        if name in arguments:
            raise InvalidInput(
                name[:120], "occurs twice, with dashes and underscores; state it once"
            )
        if value is not None and value is not False:
            arguments[name] = value
    return arguments


def _read_toml(field: str, text: str) -> Mapping[str, Any]:
    """Return the value of a TOML text within the limits. Raises InvalidInput."""
    try:
        plain = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(field, f"is not valid TOML: {error}") from error
    nodes, left = 0, [("", 0, plain)]
    while left:
        place, depth, value = left.pop()
        nodes += 1
        check_counts(field, depth, nodes, STATED_PLAN)
        if isinstance(value, dict):
            left += [(f"{place}.{k}".lstrip(".")[:120], depth + 1, v) for k, v in value.items()]
        elif isinstance(value, list):
            left += [(place, depth + 1, one) for one in value]
        else:
            check_scalar(field, place, value, STATED_PLAN)
    return plain
