"""Checks of the values that a problem is stated with. They name the value and what is allowed."""

from __future__ import annotations

import math
import re
from typing import Final

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.values import Cell

SpeedKey = tuple[str, int] | Cell
"""A Cell: a GPU type and a number of GPUs, or a ``Cell`` if more of it matters."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)


def require_name(field: str, name: str) -> None:
    """Refuse a name that a server would refuse. Raises InvalidInput."""
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise InvalidInput(
            field,
            f"{name!r} must be 1 to 100 letters, digits, '-', '_' or '.', the first a letter or digit",
        )


def require_count(field: str, count: int, least: int) -> None:
    """Refuse a number that is not whole, or below ``least``. Raises InvalidInput."""
    if isinstance(count, bool) or not isinstance(count, int) or count < least:
        raise InvalidInput(field, f"must be a whole number of at least {least}, not {count!r}")


def require_number(field: str, number: float, *, may_be_zero: bool = False) -> None:
    """Refuse a number that is not finite, negative, or zero where that has no meaning.

    Raises:
        InvalidInput: it is refused.
    """
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not (is_number and math.isfinite(number) and (number > 0 or (may_be_zero and number == 0))):
        least = "of at least 0" if may_be_zero else "above 0"
        raise InvalidInput(field, f"must be a finite number {least}, not {number!r}")


def read_cell(field: str, key: SpeedKey) -> Cell:
    """Return the Cell that a key of ``speeds`` means. Raises InvalidInput."""
    match key:
        case Cell():
            cell = key
        case (str(gpu_type), gpus):
            cell = Cell(gpu_type=gpu_type, gpus=gpus, pipeline_degree=1)
        case _:
            raise InvalidInput(
                field, f'{key!r} must be a GPU type and a number, e.g. ("h100", 8), or a Cell'
            )
    require_count(f"{field}[{key}]", cell.gpus, 1)
    require_count(f"{field}[{key}]", cell.pipeline_degree, 0)
    require_count(f"{field}[{key}]", cell.nodes, 0)
    return cell
