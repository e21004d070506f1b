"""The work of one device in a compiled step."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from tessera.estimator.plans import Primitive
from tessera.formulation.errors import TesseraError


class Uncompilable(TesseraError):
    """An error for a step that XLA cannot compile, or whose compiled text cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective of the compiled step.

    ``payload_bytes`` is the full tensor, as in :class:`tessera.estimator.plans.Network`. ``groups``
    are groups of devices, numbered dp-major. ``times`` is the number of runs in a step.
    ``corrected`` names differences from the compiled text: ``reduce-scatter`` (the text has an
    all-reduce of which each device keeps a part), ``dtype`` (the text has 32 bits) and ``sum`` (the
    text adds up several all-reduces).
    """

    primitive: Primitive
    payload_bytes: float
    groups: tuple[tuple[int, ...], ...]
    times: int = 1
    corrected: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Return the number of devices of a group."""
        return max(len(group) for group in self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one device, as the compiler laid them out."""

    arguments: float
    outputs: float
    aliased: float  # outputs that take the place of arguments
    temporaries: float

    @property
    def total(self) -> float:
        """Return the bytes held at the fullest moment, as far as the compiler reports them."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledStep:
    """A step on one of ``dp * tp`` devices: totals of one step, with all turns of loops."""

    name: str
    dp: int
    tp: int
    collectives: tuple[Collective, ...]
    flops: float
    bytes: float
    memory: Memory
    versions: Mapping[str, str]
    cached: bool = False

    def total(self, primitive: Primitive, size: int | None = None) -> float:
        """Return the payload bytes of a primitive in a step.

        If ``size`` is given, only groups of that size count.
        """
        return math.fsum(
            c.payload_bytes * c.times
            for c in self.collectives
            if c.primitive is primitive and size in (None, c.size)
        )


def to_json(compiled: CompiledStep) -> str:
    """Return the compiled step as JSON."""
    return json.dumps(asdict(compiled))


def from_json(text: str, *, cached: bool) -> CompiledStep:
    """Return the compiled step from the JSON of :func:`to_json`.

    Raises:
        ValueError: the text is not a compiled step.
    """
    raw: dict[str, Any] = json.loads(text)
    try:
        collectives = tuple(
            Collective(
                primitive=Primitive(c["primitive"]),
                payload_bytes=c["payload_bytes"],
                groups=tuple(tuple(g) for g in c["groups"]),
                times=c["times"],
                corrected=tuple(c["corrected"]),
            )
            for c in raw.pop("collectives")
        )
        made = CompiledStep(**raw | {"collectives": collectives, "memory": Memory(**raw["memory"])})
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the text is not a compiled step: {error}") from error
    return replace(made, cached=cached)
