"""Values of a configuration file, checked one by one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, get_args, get_origin, get_type_hints

from tessera.formulation.errors import InvalidInput

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")

_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


MOST: Final[Mapping[str, int]] = {
    "hidden": 2**20, "heads": 2**16, "kv_heads": 2**16, "head_dim": 2**16, "intermediate": 2**24,
    "sequence": 10**7, "decoder_sequence": 10**7, "max_positions": 10**7, "position_buckets": 2**20,
    "vocabulary": 10**8, "token_types": 2**20, "classes": 10**8, "image": 2**16, "patch": 2**16,
    "channels": 2**20, "experts": 2**16, "top_k": 2**16, "expert_intermediate": 2**24, "group": 10**7,
    "width": 2**10,
}  # fmt: skip
"""Dimensions, at most: ten times the largest that anybody has trained, or more. Beyond, one is a mistake."""

MAX_NAME: Final = 1000
"""Characters of a model's name."""


def check_sizes(config: DataclassInstance) -> None:
    """Refuse dimensions that no model has.

    Raises:
        InvalidInput: names the field.
    """
    for name in (f.name for f in fields(config)):
        value = getattr(config, name)
        if name in MOST and value > MOST[name]:
            raise InvalidInput(name, f"must be at most {MOST[name]:,}")
        if name == "name" and len(value) > MAX_NAME:
            raise InvalidInput(name, f"must be at most {MAX_NAME:,} characters")


def build(config: type[Config], values: Mapping[str, Any]) -> Config:
    """Return the dataclass ``config`` with these values.

    Raises:
        InvalidInput: a field is unknown, missing, of another type or out of range; names the field.
    """
    hints = get_type_hints(config)
    known = {f.name: f.default is MISSING for f in fields(config)}
    for name, value in values.items():
        if name not in known:
            raise InvalidInput(name, f"unknown; fields are {', '.join(known)}")
        check_type(name, value, hints[name])
    for name, required in known.items():
        if required and name not in values:
            raise InvalidInput(name, f"is missing; it must be {wanted(hints[name])}")
    return config(**values)


def check_type(name: str, value: object, hint: object) -> None:
    """Raise InvalidInput if the value is not of the type that the field's annotation names."""
    if not _fits(value, hint):
        raise InvalidInput(name, f"must be {wanted(hint)}, not {repr(value)[:200]}")


def _fits(value: object, hint: object) -> bool:
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if isinstance(hint, UnionType):
        return any(_fits(value, part) for part in get_args(hint))
    if hint is NoneType:
        return value is None
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53
    if hint is float:
        return (
            isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        )
    return isinstance(hint, type) and isinstance(value, hint)


def wanted(hint: object) -> str:
    """Return the type in words."""
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(get_args(hint))
    if isinstance(hint, UnionType):
        return " or ".join(wanted(part) for part in get_args(hint) if part is not NoneType)
    return next((words for t, words in _NAMES.items() if t is hint), "valid")
