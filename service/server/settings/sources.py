"""The sources of settings: one TOML file, and the environment, which goes before it.

Unknown keys are errors.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, get_type_hints

from tessera.client.settings import VARIABLES as CLIENT_VARIABLES
from tessera.estimator.files.schemas import check_fields
from tessera.estimator.files.userfiles import read_text
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.suggestions import suggest_name
from tessera.service.server.settings.config import Config
from tessera.service.server.settings.values import SettingValue

VARIABLE_PREFIX: Final = "TESSERA_"
"""Prefix of the environment variables: ``listen`` is TESSERA_LISTEN."""

OTHER_VARIABLES: Final = frozenset(
    {
        "TESSERA_CLUSTER",
        "TESSERA_DATA",
        "TESSERA_HOME",
        "TESSERA_SERVER",
        "TESSERA_TORCH_PYTHON",
        *CLIENT_VARIABLES,
    }
)
"""Variables that the command line, agents, the benchmarks and the demonstrations read.

Any other unknown TESSERA_ variable is an error: a mistyped TESSERA_DATABASE_URL must not start an
empty database.
"""

_TYPES: Final[dict[str, type[SettingValue]]] = get_type_hints(Config)


def load_config(file: Path | None, environment: Mapping[str, str]) -> Config:
    """Return the settings from ``file``, overridden by ``environment``.

    If ``file`` is None, only the defaults and the environment count.

    Raises:
        InvalidInput: the file cannot be read, a key is unknown, or a value has the wrong type or
            range.
    """
    values = read_setting_file(file) if file is not None else {}
    return Config(**(values | read_setting_variables(environment)))


def read_setting_file(file: Path) -> dict[str, Any]:
    """Return the settings that a TOML file names. Raises InvalidInput."""
    try:
        settings = tomllib.loads(read_text(file))
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput(str(file), f"is not TOML: {error}") from error
    return check_fields(Config, str(file), settings)


def read_setting_variables(environment: Mapping[str, str]) -> dict[str, SettingValue]:
    """Return the settings that environment variables name. Raises InvalidInput."""
    values: dict[str, SettingValue] = {}
    for variable, text in environment.items():
        if variable.startswith(VARIABLE_PREFIX) and variable not in OTHER_VARIABLES:
            key = variable.removeprefix(VARIABLE_PREFIX).lower()
            if key not in _TYPES:
                known = [
                    *(VARIABLE_PREFIX + setting.upper() for setting in _TYPES),
                    *sorted(OTHER_VARIABLES),
                ]
                meant = suggest_name(variable, known) or "."
                raise InvalidInput(
                    variable, f"unknown setting{meant} The settings are {', '.join(known)}"
                )
            values[key] = _parsed(variable, text, _TYPES[key])
    return values


def _parsed(place: str, text: str, kind: type[SettingValue]) -> SettingValue:
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise InvalidInput(place, "must be true or false")
        return text.lower() == "true"
    try:
        return kind(text)
    except ValueError:
        raise InvalidInput(place, f"must be {_type_in_words(kind)}") from None


def _type_in_words(kind: type[SettingValue]) -> str:
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind]
