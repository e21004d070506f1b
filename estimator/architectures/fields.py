"""Checks of the single values of a configuration file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

from pydantic import Field, RootModel

from tessera.estimator.files.schemas import STRICT, check_fields, check_value
from tessera.formulation.base.errors import InvalidInput

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")

Scalar = TypeVar("Scalar", int, float, bool, str)


class _Root(RootModel[Scalar]):
    model_config = STRICT


_SCALARS: Final[Mapping[type, type[RootModel[Any]]]] = {
    int: _Root[Annotated[int, Field(gt=-(2**53), lt=2**53)]],
    float: _Root[float],
    bool: _Root[bool],
    str: _Root[str],
}

MAX_DIMENSIONS: Final[Mapping[str, int]] = {
    "hidden": 2**20,
    "heads": 2**16,
    "kv_heads": 2**16,
    "head_dim": 2**16,
    "intermediate": 2**24,
    "sequence": 10**7,
    "decoder_sequence": 10**7,
    "max_positions": 10**7,
    "position_buckets": 2**20,
    "vocabulary": 10**8,
    "token_types": 2**20,
    "classes": 10**8,
    "image": 2**16,
    "patch": 2**16,
    "channels": 2**20,
    "experts": 2**16,
    "top_k": 2**16,
    "expert_intermediate": 2**24,
    "group": 10**7,
    "width": 2**10,
}
"""Largest accepted dimensions. They are at least ten times the largest ever trained, so that any
larger value is a mistake."""

MAX_NAME: Final = 1000
"""Largest number of characters in a model's name."""


def check_sizes(config: DataclassInstance) -> None:
    """Refuse dimensions that no model has.

    Raises:
        InvalidInput: a dimension is too large; names the field.
    """
    for name in (f.name for f in fields(config)):
        value = getattr(config, name)
        if name in MAX_DIMENSIONS and value > MAX_DIMENSIONS[name]:
            raise InvalidInput(name, f"must be at most {MAX_DIMENSIONS[name]:,}")
        if name == "name" and len(value) > MAX_NAME:
            raise InvalidInput(name, f"must be at most {MAX_NAME:,} characters")


def build_config(config: type[Config], values: Mapping[str, Any]) -> Config:
    """Return the dataclass ``config`` with these values.

    Raises:
        InvalidInput: a field is unknown, missing, of another type or out of range; names the field.
    """
    return config(**check_fields(config, "", values))


def read_scalar(name: str, value: object, kind: type[Scalar]) -> Scalar:
    """Return one value of a mapping whose other keys may be anything.

    Raises:
        InvalidInput: the value has another type; names it.
    """
    scalar: Scalar = check_value(_SCALARS[kind], name, value).root
    return scalar
