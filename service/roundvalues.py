"""The options of a round: from the values that people write to the API's message, and its checks.

The server and the command line share this module, so that both refuse the same values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields as fields_of
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration

from tessera.estimator.files.documents import is_number, text_of
from tessera.formulation.base import limits
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.plugins import references_in
from tessera.formulation.base.suggestions import suggest_name
from tessera.formulation.round.parameters import parse_parameters
from tessera.formulation.round.policy import MAX_FAIRNESS_LEVELS, NETWORK_LEVELS, Policy
from tessera.service import durations, fields
from tessera.v1 import scheduler_pb2 as pb

OPTIONS: Final[Mapping[str, FieldDescriptor]] = pb.RoundOptions.DESCRIPTOR.fields_by_name
"""The options of a round by name."""

MIN_HORIZON_S, MAX_HORIZON_S = 1.0, 3.2e9  # a century
MAX_TEXT: Final = 1000

_SECONDS: Final = {
    "restart_horizon": (MIN_HORIZON_S, MAX_HORIZON_S),
    "fair_half_life": (MIN_HORIZON_S, MAX_HORIZON_S),
    "round": (MIN_HORIZON_S, MAX_HORIZON_S),
    "default_run": (MIN_HORIZON_S, MAX_HORIZON_S),
    "network_measure": (0.0, MAX_HORIZON_S),
}
"""Smallest and largest seconds of the durations that must be finite."""

_COUNTS: Final = {
    "seed": (0, limits.MAX_SEED),
    "defragment_every_rounds": (0, limits.MAX_DEFRAGMENT_EVERY),
    "max_changes": (-1, limits.MAX_CHANGES),
    "fairness_levels": (1, MAX_FAIRNESS_LEVELS),
    "network_levels": (1, NETWORK_LEVELS),
}
"""Smallest and largest values of the options that are whole numbers."""

_EMPTY_IS_UNSET: Final = frozenset({"objective", "solver", "gap", "cost_of", "fairness_levels"})
"""Fields whose zero value means that they are not set."""

_BY_JSON_NAME: Final = {option.json_name: option for option in OPTIONS.values()}

Place = Callable[[str], str]
"""A function from the name of an option to what errors call it, e.g. ``policy.seed``."""


def make_message(values: Mapping[Any, Any], place: Place) -> pb.RoundOptions:
    """Return the options with ``values``, by the API's names of fields. None stands for no value.

    Values are as YAML has them, or their texts. Durations are texts: ``2h``, ``1h30m`` or ``never``.

    Raises:
        InvalidInput: a name is unknown, or a value has another type.
    """
    message = pb.RoundOptions()
    for name, value in values.items():
        option = OPTIONS.get(name) or _BY_JSON_NAME.get(name)
        if option is None:
            hint = suggest_name(name, OPTIONS) or f"; the options are {', '.join(OPTIONS)}"
            raise InvalidInput(place(str(name)), f"is not an option of a round{hint}")
        if value is None:
            continue
        content = _READERS[option.cpp_type](place(option.name), option.name, value)
        if isinstance(content, Duration):
            getattr(message, option.name).CopyFrom(content)
        else:
            setattr(message, option.name, content)
    return message


def read_attributes(message: pb.RoundOptions, place: Place) -> dict[str, Any]:
    """Return the fields of ``Policy`` and of ``RoundOptions`` that a message sets.

    Raises:
        InvalidInput: a value is beyond the API's limits.
    """
    return {
        attribute_of(option): _check_value(place(option.name), option.name, value)
        for option, value in message.ListFields()
        if value or option.name not in _EMPTY_IS_UNSET
    }


def check_message(message: pb.RoundOptions, place: Place) -> None:
    """Refuse options that no round may have.

    The names of solvers, of schedulers with their parameters, and of plug-ins are not looked up:
    they are known to those who decide the round.

    Raises:
        InvalidInput: a value is out of range, or is not in its notation.
    """
    attributes = read_attributes(message, place)
    if references_in(message.objective):
        del attributes["objective"]
    try:
        parse_parameters(message.scheduler_parameters)
        names = attributes.keys() & {field.name for field in fields_of(Policy)}
        Policy(**{name: attributes[name] for name in names}).require_bounded()
    except InvalidInput as wrong:
        raise name_option(wrong, place) from wrong


def name_option(wrong: InvalidInput, place: Place) -> InvalidInput:
    """Return the error of a field of ``Policy`` or ``RoundOptions`` with the place of its option."""
    return InvalidInput(place(wrong.field.removesuffix("_s")), wrong.problem)


def attribute_of(option: FieldDescriptor) -> str:
    """Return the name of the field of ``RoundOptions`` for an option."""
    return f"{option.name}_s" if option.message_type is not None else option.name


def _check_value(place: str, name: str, value: Any) -> Any:
    """Return the value of an option as a field of ``RoundOptions``. Raises InvalidInput."""
    if isinstance(value, Duration):
        length_s = fields.seconds_of_duration(place, value)
        length_s = length_s if length_s < limits.MAX_DURATION_S else math.inf
        return (
            fields.require_real(place, length_s, *_SECONDS[name]) if name in _SECONDS else length_s
        )
    if isinstance(value, str):
        return fields.require_text(place, value, MAX_TEXT)
    return fields.require_whole(place, value, *_COUNTS[name]) if name in _COUNTS else value


def _read_flag(place: str, _name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if value in ("true", "false"):
        return bool(value == "true")
    raise InvalidInput(place, f"must be true or false, not {value!r}")


def _read_text(place: str, _name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidInput(place, f"must be a text, not {text_of(value)!r}")
    return value


def _read_number(place: str, _name: str, value: Any) -> float:
    """Return a number of YAML or its text.

    Texts such as ``010`` are refused. Python reads them, but not as YAML and JSON do.
    """
    is_text = isinstance(value, str) and is_number(value)
    if isinstance(value, bool) or not (is_text or isinstance(value, int | float)):
        raise InvalidInput(place, f"must be a number, not {value!r}")
    return float(value)


def _read_whole(place: str, name: str, value: Any) -> int:
    number = _read_number(place, name, value)
    if not (math.isfinite(number) and number == int(number)):
        raise InvalidInput(place, f"must be a whole number, not {text_of(value)}")
    if number == 0 and name in _EMPTY_IS_UNSET:
        return 0
    return fields.require_whole(place, int(number), *_COUNTS[name])


def _read_duration(place: str, _name: str, value: Any) -> Duration:
    text = text_of(value)
    if not isinstance(text, str):
        raise InvalidInput(place, f"must be a duration, e.g. 90s or 2h, not {value!r}")
    if text == durations.NEVER:
        return Duration(seconds=limits.MAX_DURATION_S)
    return fields.duration_of(durations.parse_duration_s(place, text))


_READERS: Final[Mapping[int, Callable[[str, str, Any], Any]]] = {
    FieldDescriptor.CPPTYPE_BOOL: _read_flag,
    FieldDescriptor.CPPTYPE_STRING: _read_text,
    FieldDescriptor.CPPTYPE_DOUBLE: _read_number,
    FieldDescriptor.CPPTYPE_INT32: _read_whole,
    FieldDescriptor.CPPTYPE_INT64: _read_whole,
    FieldDescriptor.CPPTYPE_MESSAGE: _read_duration,
}
"""The readers of values of each type."""
