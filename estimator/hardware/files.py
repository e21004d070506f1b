"""Users' own GPU types, from a YAML file.

    hardware:
      - name: h100-lab
        like: h100              # optional: the catalogue entry for missing fields
        memory_gib: 80
        flops: {f32: 67e12, tf32: 494e12, bf16: 989e12, f16: 989e12, fp8: 1979e12}
        memory_bytes_per_s: 3.35e12
        gpus_per_node: 8
        link: nvlink            # or xgmi, pcie
        link_bytes_per_s: 450e9       # of one GPU, one direction
        network_bytes_per_s: 400e9    # of one node, one direction, all its ports
        host_bytes_per_s: 64e9        # optional: between a GPU and its host, one direction
        host_update_bytes_per_s: 100e9  # optional: optimizer states that a node's processors update
        host_cores: 48                  # optional: the cores that this takes; fewer reach their share

Without ``like``, every field is required except those of the host, ``tf32``, ``bf16`` and ``fp8``.
A host that is not given has PCI Express 4.0. If ``tf32`` or
``fp8`` is absent, the type does not support it. If ``bf16`` is absent, it equals f16. An entry with a
name of the catalogue replaces that type.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field, Strict

from tessera.estimator.files.documents import read_document
from tessera.estimator.files.schemas import (
    Entry,
    check_value,
    described_as,
    number_between,
    whole_between,
)
from tessera.estimator.files.userfiles import read_text
from tessera.estimator.hardware.catalogue import CATALOGUE
from tessera.estimator.hardware.types import GIB, Hardware, Link
from tessera.formulation.base.documents import HARDWARE
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.suggestions import suggest_name

_Flops = Annotated[float, number_between(1e11, 1e17)]


class FlopsEntry(Entry):
    """FLOP/s by data type. If a value is 0, it was not given."""

    f32: _Flops = 0.0
    tf32: _Flops = 0.0
    bf16: _Flops = 0.0
    f16: _Flops = 0.0
    fp8: _Flops = 0.0


class HardwareEntry(Entry):
    """A GPU type. If a value is 0, it was not given.

    A number outside its limits is assumed to be in the wrong unit. Today's hardware is inside the
    limits by a factor of a hundred.
    """

    name: Annotated[str, Field(min_length=1), described_as("must be a name such as h100-lab")]
    like: str = ""
    flops: FlopsEntry = FlopsEntry()
    link: Annotated[Link, Strict(False)] = Link.NVLINK
    memory_gib: Annotated[float, number_between(1.0, 4096.0)] = 0.0
    memory_bytes_per_s: Annotated[float, number_between(1e9, 1e15)] = 0.0
    gpus_per_node: Annotated[int, whole_between(1, 1024)] = 0
    link_bytes_per_s: Annotated[float, number_between(1e8, 1e14)] = 0.0
    network_bytes_per_s: Annotated[float, number_between(1e7, 1e14)] = 0.0
    host_bytes_per_s: Annotated[float, number_between(1e8, 1e13)] = 0.0
    host_update_bytes_per_s: Annotated[float, number_between(1e8, 1e13)] = 0.0
    host_cores: Annotated[int, whole_between(1, 4096)] = 0


class HardwareFile(Entry):
    """The single document of a file."""

    hardware: Annotated[
        list[HardwareEntry],
        Field(min_length=1),
        described_as("must be a list of at least one GPU type"),
    ]


_OPTIONAL: Final = ("name", "like", "host_bytes_per_s", "host_update_bytes_per_s", "host_cores")
"""Fields that an entry need not have without ``like``, or that every entry has."""
_FLOPS: Final = {
    "f32": "fp32_flops",
    "tf32": "tf32_flops",
    "bf16": "bf16_flops",
    "f16": "fp16_flops",
    "fp8": "fp8_flops",
}


def read_hardware(path: Path, known: Iterable[Hardware] = CATALOGUE) -> tuple[Hardware, ...]:
    """Return ``known`` with the GPU types of a YAML file added or replaced, by name.

    Raises:
        InvalidInput: the file, a field or a number is wrong; the message says where and what is
            allowed.
    """
    text = read_text(path)
    entries = check_value(
        HardwareFile, path.name, read_document(path.name, text, HARDWARE)
    ).hardware
    types = {kind.name: kind for kind in known}
    own: set[str] = set()
    for index, entry in enumerate(entries):
        where = f"{path.name}: hardware[{index}]"
        kind = _hardware(where, entry, types)
        if kind.name in own:
            raise InvalidInput(where, f"the name {kind.name!r} occurs twice; name each type once")
        own.add(kind.name)
        types[kind.name] = kind
    return tuple(types.values())


def _hardware(where: str, entry: HardwareEntry, known: Mapping[str, Hardware]) -> Hardware:
    given: dict[str, Any] = entry.model_dump(exclude_unset=True, exclude={"like", "flops"})
    given |= {_FLOPS[k]: v for k, v in entry.flops.model_dump(exclude_unset=True).items()}
    if "memory_gib" in given:
        given["memory_bytes"] = round(given.pop("memory_gib") * GIB)
    if "like" not in entry.model_fields_set:
        _check_complete(where, entry)
        return Hardware(**given)
    if entry.like not in known:
        raise InvalidInput(
            f"{where}: like",
            f"must be one of {', '.join(known)}{suggest_name(entry.like, known)}, not {entry.like!r}",
        )
    return replace(known[entry.like], **given)


def _check_complete(where: str, entry: HardwareEntry) -> None:
    required = [key for key in HardwareEntry.model_fields if key not in _OPTIONAL]
    missing = [key for key in required if key not in entry.model_fields_set]
    missing += [f"flops.{key}" for key in ("f32", "f16") if key not in entry.flops.model_fields_set]
    if missing:
        raise InvalidInput(
            where,
            f"lacks {', '.join(missing)}; give them, or set like to the type to copy them from",
        )
