"""Validation of untyped values against types by pydantic, with errors that name the place.

Documents come from :mod:`estimator.files.documents`, which has already refused duplicate keys and
documents that are too large or too deep. Nothing is converted: ``"3"`` is not a number, 1 is not
true, and numbers are finite. The only exception is a whole number where any number is allowed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from dataclasses import MISSING, fields
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    create_model,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.suggestions import suggest_name

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Checked = TypeVar("Checked", bound=BaseModel)

STRICT: Final = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, hide_input_in_errors=True)
"""Inputs are hidden in pydantic's messages, which logs may contain, as settings hold passwords."""

_KINDS: Final = {
    "bool_type": "true or false",
    "dict_type": "a mapping of keys to values",
    "float_type": "a number",
    "int_type": "a whole number",
    "list_type": "a list",
    "model_type": "a mapping of keys to values",
    "string_type": "a text",
}
"""Descriptions of the required value, by pydantic's type of error."""

_QUOTED: Final = re.compile(r"'([^']*)'")


class Entry(BaseModel):
    """A mapping whose keys and types are all known."""

    model_config = STRICT

    null_is_absent: ClassVar[bool] = False
    """Whether a key without a value counts as absent."""
    shown: ClassVar[Collection[str]] = ()
    """Keys that are accepted but not listed as allowed. Files may contain them, because commands
    print them."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        allowed = [key for key in cls.model_fields if key not in cls.shown]
        for key in value:
            if key not in allowed and key not in cls.shown:
                problem = f"unknown key {key!r}{suggest_name(key, allowed)} (allowed: {', '.join(allowed)})"
                raise PydanticCustomError(
                    "unknown_key", "{problem}", {"problem": problem, "key": str(key)}
                )
        if not cls.null_is_absent:
            return value
        return {key: given for key, given in value.items() if given is not None}


def check_value(kind: type[Checked], where: str, value: object) -> Checked:
    """Return ``value`` as a ``kind``. ``where`` names it in errors, e.g. ``jobs.yaml: jobs[2]``.

    Raises:
        InvalidInput: a value is wrong; the message names its place and what is allowed there.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _first_error(where, error) from error


def check_fields(kind: type[DataclassInstance], where: str, value: object) -> dict[str, Any]:
    """Return the given fields of a dataclass from a mapping, checked against the annotations.

    Raises:
        InvalidInput: as in :func:`check_value`.
    """
    return check_value(entry_of(kind), where, value).model_dump(exclude_unset=True)


@cache
def entry_of(kind: type[DataclassInstance]) -> type[Entry]:
    """Return the entry with the fields of a dataclass."""
    hints = get_type_hints(kind, include_extras=True)
    definitions: dict[str, Any] = {
        f.name: (hints[f.name], ... if f.default is MISSING else f.default) for f in fields(kind)
    }
    return create_model(kind.__name__, __base__=Entry, **definitions)


def whole_between(low: int, high: int) -> WrapValidator:
    """Return the annotation for whole numbers in [low, high]."""
    return _within(low, high, f"a whole number from {low:,} to {high:,}")


def number_between(low: float, high: float) -> WrapValidator:
    """Return the annotation for numbers in [low, high]."""
    return _within(low, high, f"a number from {low:g} to {high:,g}")


def described_as(words: str) -> WrapValidator:
    """Return the annotation for a value that ``words`` describe in errors: ``must be ...``."""

    def checked(value: object, inner: ValidatorFunctionWrapHandler) -> object:
        try:
            return inner(value)
        except ValidationError as error:
            if any(inside["loc"] for inside in error.errors(include_url=False)):
                raise
            raise _wrong(f"{words}, not {describe_value(value)}") from error

    return WrapValidator(checked)


def converted_by(read: Callable[[str, Any], object]) -> BeforeValidator:
    """Return the annotation for values that ``read(place, value)`` converts.

    Its InvalidInput becomes the error of the value.
    """

    def converted(value: object) -> object:
        try:
            return read("", value)
        except InvalidInput as error:
            raise _wrong(error.problem) from error

    return BeforeValidator(converted)


def describe_value(value: object) -> str:
    """Return a value as text for a message."""
    match value:
        case dict():
            return "a mapping"
        case list():
            return "a list" if value else "an empty list"
        case None:
            return "nothing"
        case bool():
            return "true" if value else "false"
    return repr(value)[:200]


def _within(low: float, high: float, wanted: str) -> WrapValidator:
    def checked(value: object, inner: ValidatorFunctionWrapHandler) -> object:
        try:
            number = inner(value)
        except ValidationError:
            number = math.nan
        if not low <= number <= high:
            raise _wrong(f"must be {wanted}, not {describe_value(value)}")
        return number

    return WrapValidator(checked)


def _wrong(problem: str) -> PydanticCustomError:
    return PydanticCustomError("wrong", "{problem}", {"problem": problem})


def _first_error(where: str, error: ValidationError) -> InvalidInput:
    """Return the first error, together with all other missing keys of the same mapping.

    If a mapping has no place, the place is its unknown or missing key.
    """
    errors = error.errors(include_url=False)
    first = errors[0]
    if not where and first["loc"] == () and first["type"] == "unknown_key":
        return InvalidInput(first["ctx"]["key"], first["msg"])
    if not where and len(first["loc"]) == 1 and first["type"] == "missing":
        return InvalidInput(str(first["loc"][0]), "is missing")
    if first["type"] != "missing":
        return InvalidInput(_place(where, first["loc"]), _problem(first))
    inside = first["loc"][:-1]
    missing = [
        repr(e["loc"][-1]) for e in errors if e["type"] == "missing" and e["loc"][:-1] == inside
    ]
    return InvalidInput(_place(where, inside), f"needs {', '.join(missing)}")


def _problem(error: ErrorDetails) -> str:
    if error["type"] in ("unknown_key", "wrong"):
        return error["msg"]
    given = error["input"]
    if error["type"] in ("enum", "literal_error"):
        known = _QUOTED.findall(error["ctx"]["expected"])
        return f"must be one of {', '.join(known)}{suggest_name(given, known)}, not {describe_value(given)}"
    wanted = _KINDS.get(error["type"]) or error["msg"].removeprefix("Input should be ")
    return f"must be {wanted}, not {describe_value(given)}"


def _place(where: str, inside: tuple[int | str, ...]) -> str:
    for part in inside:
        if isinstance(part, int):
            where += f"[{part}]"
        elif part != "[key]":
            where = f"{where}: {part}" if where else part
    return where
