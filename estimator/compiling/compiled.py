"""What one device does in a compiled step."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from tessera.estimator.plans import Primitive
from tessera.formulation.errors import TesseraError


class Uncompilable(TesseraError):
    """A step that XLA cannot compile for the wanted devices, or whose compiled text cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective of the compiled step.

    ``payload_bytes`` is of the full tensor, as in :class:`tessera.estimator.plans.Network`; ``groups`` are of
    devices, numbered dp-major; ``times`` is how often it runs in a step. ``corrected`` names what the
    compiled text said otherwise: ``reduce-scatter`` (it was an all-reduce of which each device kept a part),
    ``dtype`` (it was of 32 bits).
    """

    primitive: Primitive
    payload_bytes: float
    groups: tuple[tuple[int, ...], ...]
    times: int = 1
    corrected: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Return the devices of a group."""
        return max(len(group) for group in self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one device as the compiler laid them out."""

    arguments: float
    outputs: float
    aliased: float  # outputs that take arguments' place
    temporaries: float

    @property
    def total(self) -> float:
        """Return the bytes held at the fullest moment, as far as the compiler says."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A step on one of ``dp * tp`` devices: totals of one step, loops counted by their turns."""

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
        """Return the payload bytes of a primitive in a step, of groups of ``size`` if given."""
        return math.fsum(
            c.payload_bytes * c.times
            for c in self.collectives
            if c.primitive is primitive and size in (None, c.size)
        )


def to_json(compiled: Compiled) -> str:
    """Return it as JSON."""
    return json.dumps(asdict(compiled))


def from_json(text: str, *, cached: bool) -> Compiled:
    """Return what :func:`to_json` wrote.

    Raises:
        ValueError: it is something else.
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
        made = Compiled(**raw | {"collectives": collectives, "memory": Memory(**raw["memory"])})
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no compiled step: {error}") from error
    return replace(made, cached=cached)
