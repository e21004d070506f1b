"""The user's own GPU types, from a YAML file.

    hardware:
      - name: h100-lab
        like: h100              # optional: fields left out are those of this catalogue entry
        memory_gib: 80
        flops: {f32: 67e12, tf32: 494e12, bf16: 989e12, f16: 989e12}
        memory_bytes_per_s: 3.35e12
        gpus_per_node: 8
        link: nvlink            # or xgmi, pcie
        link_bytes_per_s: 450e9       # of one GPU, one direction
        network_bytes_per_s: 400e9    # of one node, one direction, all its ports

Without ``like`` every field is required but ``tf32`` (absent: the type has none) and ``bf16`` (absent: as
f16). A name of the catalogue replaces that entry. Numbers may be written 450e9: YAML 1.1 reads that as a
text, so texts that are numbers are taken.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tessera.estimator.documents import read_document
from tessera.estimator.hardware.catalogue import CATALOGUE
from tessera.estimator.hardware.types import GIB, Hardware, Link
from tessera.formulation.documents import HARDWARE
from tessera.formulation.errors import InvalidInput

_LIMITS: Final = {
    "memory_gib": (1.0, 4096.0),
    "memory_bytes_per_s": (1e9, 1e15),
    "gpus_per_node": (1.0, 1024.0),
    "link_bytes_per_s": (1e8, 1e14),
    "network_bytes_per_s": (1e7, 1e14),
}
"""Outside of these a number is taken for a slip of units; today's hardware is a hundredfold inside."""

_FLOPS: Final = {
    "f32": "fp32_flops",
    "tf32": "tf32_flops",
    "bf16": "bf16_flops",
    "f16": "fp16_flops",
}
_FLOPS_LIMITS: Final = (1e11, 1e17)
_KEYS: Final = ("name", "like", "flops", "link", *_LIMITS)


def read_hardware(path: Path, known: Iterable[Hardware] = CATALOGUE) -> tuple[Hardware, ...]:
    """Return ``known`` with the types of a YAML file added or replaced, by name.

    Raises:
        InvalidInput: the file, a field or a number is wrong; the message says where and what is allowed.
    """
    entries = _entries(path)
    found = {kind.name: kind for kind in known}
    own: set[str] = set()
    for index, entry in enumerate(entries):
        kind = _hardware(f"{path.name}: hardware[{index}]", entry, found)
        if kind.name in own:
            raise InvalidInput(f"{path.name}: hardware[{index}]", f"{kind.name!r} is given twice")
        own.add(kind.name)
        found[kind.name] = kind
    return tuple(found.values())


def _entries(path: Path) -> list[Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(path.name, f"cannot be read: {error}") from error
    document = read_document(path.name, text, HARDWARE)
    _check_mapping(path.name, document, ("hardware",))
    entries = document.get("hardware")
    if not isinstance(entries, list) or not entries:
        raise InvalidInput(f"{path.name}: hardware", "must be a list of GPU types, at least one")
    return entries


def _hardware(where: str, entry: Any, known: Mapping[str, Hardware]) -> Hardware:
    _check_mapping(where, entry, _KEYS)
    name = entry.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidInput(f"{where}: name", f"must be a name such as h100-lab, not {name!r}")
    values = _flops(where, entry.get("flops", {}))
    for key, (low, high) in _LIMITS.items():
        if key in entry:
            values[key] = _number(f"{where}: {key}", entry[key], low, high)
    fields: dict[str, Any] = dict(values)
    if "memory_gib" in fields:
        fields["memory_bytes"] = round(fields.pop("memory_gib") * GIB)
    if "gpus_per_node" in fields:
        if fields["gpus_per_node"] % 1:
            raise InvalidInput(f"{where}: gpus_per_node", "must be a whole number")
        fields["gpus_per_node"] = int(fields["gpus_per_node"])
    if "link" in entry:
        fields["link"] = _one_of(f"{where}: link", entry["link"], [link.value for link in Link])
        fields["link"] = Link(fields["link"])
    if "like" in entry:
        base = known[_one_of(f"{where}: like", entry["like"], known)]
        return replace(base, name=name, **fields)
    _check_complete(where, entry)
    return Hardware(name=name, **fields)


def _flops(where: str, value: Any) -> dict[str, float]:
    _check_mapping(f"{where}: flops", value, tuple(_FLOPS))
    low, high = _FLOPS_LIMITS
    return {_FLOPS[k]: _number(f"{where}: flops.{k}", v, low, high) for k, v in value.items()}


def _check_complete(where: str, entry: Mapping[str, Any]) -> None:
    missing = [key for key in ("link", "flops", *_LIMITS) if key not in entry]
    missing += [f"flops.{key}" for key in ("f32", "f16") if key not in entry.get("flops", {})]
    if missing:
        raise InvalidInput(
            where,
            f"lacks {', '.join(missing)}; give them, or name a type to take them from by like",
        )


def _check_mapping(where: str, value: Any, allowed: Collection[str]) -> None:
    if not isinstance(value, dict):
        raise InvalidInput(where, f"must be a mapping with {', '.join(allowed)}, not {value!r}")
    for key in value:
        if key not in allowed:
            raise InvalidInput(
                where, f"unknown key {key!r}{_hint(key, allowed)} (allowed: {', '.join(allowed)})"
            )


def _one_of(where: str, value: Any, allowed: Collection[str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise InvalidInput(
            where, f"must be one of {', '.join(allowed)}{_hint(value, allowed)}, not {value!r}"
        )
    return value


def _hint(value: object, allowed: Collection[str]) -> str:
    near = difflib.get_close_matches(str(value), allowed, n=1, cutoff=0.75)
    return f"; did you mean {near[0]!r}?" if near else ""


def _number(where: str, value: Any, low: float, high: float) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not low <= number <= high:
        raise InvalidInput(where, f"must be a number from {low:g} to {high:g}, not {value!r}")
    return number
