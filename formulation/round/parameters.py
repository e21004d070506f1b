"""The notation of a published scheduler's parameters in the options of a round."""

from __future__ import annotations

from typing import Final

from tessera.formulation.base.errors import InvalidInput

PARAMETERS_FIELD: Final = "scheduler_parameters"
"""The option of a round that has the parameters."""


def parse_parameters(text: str) -> dict[str, str]:
    """Return name -> value of parameters such as ``depth=5,breadth=8``. Spaces do not matter.

    Raises:
        InvalidInput: a part is not NAME=VALUE, or a name occurs twice.
    """
    values: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, equals, value = (p.strip() for p in part.partition("="))
        if not (name and equals and value):
            raise InvalidInput(
                PARAMETERS_FIELD, f"{part!r} must be NAME=VALUE, e.g. depth=5,breadth=8"
            )
        if name in values:
            raise InvalidInput(PARAMETERS_FIELD, f"sets {name!r} twice; set it once")
        values[name] = value
    return values
