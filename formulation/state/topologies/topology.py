"""A cluster's network: vertices (GPUs, switches, NICs) joined by directed links."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import IntEnum
from typing import ClassVar

import numpy as np

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats, Ints, Table

NO_HOST = -1
"""Host of a vertex that is in no host, such as a switch of the fabric."""


class Tier(IntEnum):
    """The role of a vertex. Tiers up to NIC are inside a host; those above are the fabric."""

    GPU = 0
    NVSWITCH = 1  # direct connection of a host's GPUs: NVSwitch, or NVLink modeled as one
    PCIE = 2
    NIC = 3
    TOR = 4
    AGGREGATION = 5
    CORE = 6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Vertices(Table):
    """The vertices that links join."""

    INDEX: ClassVar[str] = "vertices"
    name: tuple[str, ...]
    tier: Ints  # Tier
    host: Ints  # index into Topology.hosts; NO_HOST if it is in no host


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Links(Table):
    """Directed links. A cable is two of them."""

    INDEX: ClassVar[str] = "links"
    source: Ints  # vertex
    target: Ints
    bytes_per_s: Floats
    delay_s: Floats  # of one message, without load


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Topology:
    """The network of a cluster. Hosts are named like the cluster's nodes.

    A host's GPUs are its vertices of tier GPU, in order of index. If ``adaptive`` is true, switches
    choose paths automatically, so that they cannot be chosen here.
    """

    hosts: tuple[str, ...]
    vertices: Vertices
    links: Links
    adaptive: bool = False
    _gpus: tuple[Ints, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse an invalid network, with the reason."""
        v, e = self.vertices, self.links
        _once("hosts", self.hosts)
        _once("vertices", v.name)
        _inside("vertices.tier", v.tier, 0, len(Tier))
        _inside("vertices.host", v.host, NO_HOST, len(self.hosts))
        _inside("links.source", e.source, 0, len(v))
        _inside("links.target", e.target, 0, len(v))
        if wrong := np.flatnonzero(~((e.bytes_per_s > 0) & np.isfinite(e.bytes_per_s))).tolist():
            raise InvalidInput(
                "links.bytes_per_s",
                f"of {self.link_name(wrong[0])} is {e.bytes_per_s[wrong[0]]}; it must be above 0"
                " (leave out a link that is down)",
            )
        if wrong := np.flatnonzero(~((e.delay_s >= 0) & np.isfinite(e.delay_s))).tolist():
            raise InvalidInput("links.delay_s", f"of {self.link_name(wrong[0])} must be at least 0")
        if wrong := np.flatnonzero(e.source == e.target).tolist():
            raise InvalidInput("links", f"{self.link_name(wrong[0])} joins a vertex to itself")
        gpus = np.flatnonzero(v.tier == Tier.GPU)
        gpus = gpus[np.argsort(v.host[gpus], kind="stable")]
        if len(gpus) and v.host[gpus[0]] == NO_HOST:
            raise InvalidInput("vertices.host", f"{v.name[gpus[0]]} is a GPU that is in no host")
        cuts = np.searchsorted(v.host[gpus], np.arange(1, len(self.hosts)))
        object.__setattr__(self, "_gpus", tuple(np.split(gpus, cuts)) if self.hosts else ())

    def gpus_of(self, host: int) -> Ints:
        """Return the vertices of the host's GPUs, int64[GPUs]."""
        return self._gpus[host]

    def link_name(self, link: int) -> str:
        """Return the link's name, e.g. ``tor-1 > agg-0``."""
        names, e = self.vertices.name, self.links
        return f"{names[e.source[link]]} > {names[e.target[link]]}"


def _once(what: str, names: tuple[str, ...]) -> None:
    if twice := sorted(name for name, times in Counter(names).items() if times > 1):
        raise InvalidInput(what, f"must have unique names; {', '.join(twice[:5])} repeat")


def _inside(what: str, values: Ints, low: int, high: int) -> None:
    if len(values) and not (values.min() >= low and values.max() < high):
        raise InvalidInput(what, f"must lie in [{low}, {high})")
