"""Signatures of Alpa 0.2.3, from the record that ``scripts/alpa_signatures.py`` wrote."""

from __future__ import annotations

import inspect
import json
from inspect import Parameter
from pathlib import Path

RECORD = json.loads(
    Path(__file__).parents[1].joinpath("alpa_signatures.json").read_text(encoding="utf-8")
)


def signature_of(name: str) -> inspect.Signature:
    """Return the signature of a function, method or class of Alpa. Defaults are source texts."""
    return inspect.Signature([_parameter(*pair) for pair in RECORD["parameters"][name]])


def _parameter(name: str, default: str | None) -> Parameter:
    if name.startswith("**"):
        return Parameter(name[2:], Parameter.VAR_KEYWORD)
    if name.startswith("*"):
        return Parameter(name[1:], Parameter.VAR_POSITIONAL)
    return Parameter(
        name,
        Parameter.POSITIONAL_OR_KEYWORD,
        default=Parameter.empty if default is None else default,
    )
