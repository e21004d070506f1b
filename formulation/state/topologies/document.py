"""Topologies as plain dictionaries, as in files and the database.

A dictionary has a kind and its numbers, or all links. ``docs/network.md`` has
examples. Speeds are bytes/s or a text with a unit. Delays are seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, Final

import numpy as np

from tessera.formulation.base.cancellation import never_cancelled, require_caller
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.state.topologies import builders
from tessera.formulation.state.topologies.drafts import MAX_NAME, TopologyDraft
from tessera.formulation.state.topologies.fields import (
    Fields,
    list_items,
    read_text,
    show_value,
    similar_word_hint,
    to_float,
)
from tessera.formulation.state.topologies.shapes import SHAPES, HostShape
from tessera.formulation.state.topologies.topology import NO_HOST, Links, Tier, Topology, Vertices

MAX_HOSTS: Final = 100_000
MAX_SWITCHES: Final = 100_000
MAX_IN_HOST: Final = 64
MAX_CABLES: Final = 1_024

TIERS: Final = {"tor": Tier.TOR, "aggregation": Tier.AGGREGATION, "core": Tier.CORE}
"""Tiers of switches, as documents write them."""

_ANY: Final = ("kind", "adaptive")
_NAMES: Final = ("hosts", "nodes", "host")
_SPEEDS: Final = ("nic_bytes_per_s", "pcie_bytes_per_s", "nvlink_bytes_per_s")
_DELAYS: Final = ("nic_delay_s", "pcie_delay_s", "nvlink_delay_s")
_SHAPE: Final = (
    "like",
    "gpus",
    "nics",
    "pcie_switches",
    "gpu_pcie",
    "nic_pcie",
    *_SPEEDS,
    *_DELAYS,
)
_LINK: Final = ("from", "to", "bytes_per_s", "delay_s", "cables", "one_way")


def build_topology(document: object, cancelled: Callable[[], bool] = never_cancelled) -> Topology:
    """Return the topology that a document describes.

    Raises:
        InvalidInput: a field is wrong. The error names it by its path and says what is allowed.
        DeadlineTooShort: the call was cancelled.
    """
    if not isinstance(document, dict):
        raise InvalidInput(
            "topology", f"must be a mapping of keys to values, not {show_value(document)}"
        )
    kind = document.get("kind", "explicit" if "links" in document else None)
    if not isinstance(kind, str) or kind not in KINDS:
        problem = (
            "must be given"
            if kind is None
            else f"unknown kind {show_value(kind)}{similar_word_hint(kind, KINDS)}"
        )
        raise InvalidInput("kind", f"{problem}; choose from {', '.join(KINDS)}")
    return KINDS[kind](document, cancelled)


def list_assumptions(document: object) -> list[str]:
    """Return the assumptions of a document's kind, as sentences for people."""
    kind = document.get("kind") if isinstance(document, dict) else None
    return list(_ASSUMED.get(str(kind), ()))


def _clos(document: object, cancelled: Callable[[], bool]) -> Topology:
    f = Fields(
        "",
        document,
        (
            *_ANY,
            *_NAMES,
            "tors",
            "hosts_per_tor",
            "aggregations",
            "cables",
            "tor_bytes_per_s",
            "tor_delay_s",
        ),
    )
    hosts = _hosts(f)
    if ("tors" in f) == ("hosts_per_tor" in f):
        raise InvalidInput("tors, hosts_per_tor", "give exactly one of them")
    if "tors" in f:
        tors = f.whole("tors", 1, MAX_SWITCHES)
    else:
        tors = -(-len(hosts) // f.whole("hosts_per_tor", 1, MAX_HOSTS))
    return builders.build_clos(
        hosts,
        _shape(f),
        tors=tors,
        aggregations=f.whole("aggregations", 1, MAX_SWITCHES),
        tor_bytes_per_s=f.speed("tor_bytes_per_s"),
        tor_delay_s=f.delay("tor_delay_s"),
        cables=f.whole("cables", 1, MAX_CABLES, 1),
        adaptive=f.flag("adaptive"),
        cancelled=cancelled,
    )


def _double_sided(document: object, cancelled: Callable[[], bool]) -> Topology:
    f = Fields(
        "",
        document,
        (
            *_ANY,
            *_NAMES,
            "tors",
            "aggregations",
            "cores",
            "pods",
            "tor_bytes_per_s",
            "tor_delay_s",
            "aggregation_bytes_per_s",
            "aggregation_delay_s",
        ),
    )
    return builders.build_double_sided(
        _hosts(f),
        _shape(f),
        tors=f.whole("tors", 2, MAX_SWITCHES),
        aggregations=f.whole("aggregations", 1, MAX_SWITCHES),
        cores=f.whole("cores", 1, MAX_SWITCHES),
        pods=f.whole("pods", 1, MAX_SWITCHES) if "pods" in f else None,
        tor_bytes_per_s=f.speed("tor_bytes_per_s"),
        tor_delay_s=f.delay("tor_delay_s"),
        aggregation_bytes_per_s=f.speed("aggregation_bytes_per_s"),
        aggregation_delay_s=f.delay("aggregation_delay_s"),
        adaptive=f.flag("adaptive"),
        cancelled=cancelled,
    )


def _torus(document: object, cancelled: Callable[[], bool]) -> Topology:
    f = Fields("", document, (*_ANY, *_NAMES, "sizes", "link_bytes_per_s", "link_delay_s"))
    f.raw("sizes")
    return builders.build_torus(
        _hosts(f),
        _shape(f),
        sizes=f.wholes("sizes", 1, MAX_HOSTS),
        link_bytes_per_s=f.speed("link_bytes_per_s"),
        link_delay_s=f.delay("link_delay_s"),
        adaptive=f.flag("adaptive"),
        cancelled=cancelled,
    )


def _lingjun(document: object, cancelled: Callable[[], bool]) -> Topology:
    f = Fields(
        "",
        document,
        (
            *_ANY,
            "host",
            "rows",
            "ports_per_nic",
            "asw_cables",
            "asw_bytes_per_s",
            "asw_delay_s",
            "psw_cables",
            "psw_bytes_per_s",
            "psw_delay_s",
        ),
    )
    return builders.build_lingjun(
        list(_rows(f)),
        _shape(f),
        ports_per_nic=f.whole("ports_per_nic", 1, MAX_IN_HOST),
        asw_cables=f.whole("asw_cables", 1, MAX_CABLES),
        psw_cables=f.whole("psw_cables", 1, MAX_CABLES),
        asw_bytes_per_s=f.speed("asw_bytes_per_s"),
        psw_bytes_per_s=f.speed("psw_bytes_per_s"),
        asw_delay_s=f.delay("asw_delay_s"),
        psw_delay_s=f.delay("psw_delay_s"),
        adaptive=f.flag("adaptive"),
        cancelled=cancelled,
    )


def _rows(f: Fields) -> Iterator[tuple[str, str, str, str]]:
    for where, row in f.items("rows"):
        values = [read_text(at, value) for at, value in list_items(where, row)]
        if len(values) != 4:
            raise InvalidInput(where, f"has {len(values)} values; it must be [host, dsw, psw, asw]")
        yield values[0], values[1], values[2], values[3]


def _hosts(f: Fields) -> list[str]:
    """Return the names of hosts: a count (host-0 and on), or a list. ``nodes`` means ``hosts``."""
    if ("hosts" in f) == ("nodes" in f):
        raise InvalidInput("hosts, nodes", "give exactly one of them")
    key = "hosts" if "hosts" in f else "nodes"
    if isinstance(f.raw(key), int):
        return [f"host-{i}" for i in range(f.whole(key, 1, MAX_HOSTS))]
    every = (name for at, item in f.items(key) for name in _named(at, item))
    names = list(islice(every, MAX_HOSTS + 1))  # an entry alone may have MAX_HOSTS names
    if not 1 <= len(names) <= MAX_HOSTS:
        have = "no hosts" if not names else f"more than {MAX_HOSTS:,} hosts"
        raise InvalidInput(f.at(key), f"has {have}; there must be 1 to {MAX_HOSTS:,}")
    return names


def _named(where: str, item: object) -> list[str]:
    """Return the names of one entry: a text, or a count and a name with ``{}`` for the number."""
    if not isinstance(item, dict):
        return [read_text(where, item)]
    entry = Fields(where, item, ("name", "count"))
    name, count = entry.text("name"), entry.whole("count", 1, MAX_HOSTS, 1)
    if count > 1 and "{}" not in name:
        raise InvalidInput(
            entry.at("name"), f"must contain {{}} for the number, e.g. '{name}-{{}}'"
        )
    if len(name.replace("{}", str(count))) > MAX_NAME:
        raise InvalidInput(entry.at("name"), f"must make names of at most {MAX_NAME} characters")
    return [name.replace("{}", str(i)) for i in range(count)]


def _shape(f: Fields) -> HostShape:
    """Return the shape of hosts: by name, by numbers, or ``like`` a named one with some changes."""
    value = f.raw("host")
    if isinstance(value, str):
        return SHAPES[f.one_of("host", SHAPES)]
    s = Fields(f.at("host"), value, _SHAPE)
    changed: dict[str, Any] = {
        name: s.whole(name, 1, MAX_IN_HOST)
        for name in ("gpus", "nics", "pcie_switches")
        if name in s
    }
    changed |= {
        name: s.wholes(name, 0, MAX_IN_HOST) for name in ("gpu_pcie", "nic_pcie") if name in s
    }
    if "nvlink_bytes_per_s" in s and s.raw("nvlink_bytes_per_s") == 0:  # PCIe only
        changed["nvlink_bytes_per_s"] = 0.0
    changed |= {name: s.speed(name) for name in _SPEEDS if name in s and name not in changed}
    changed |= {name: s.delay(name) for name in _DELAYS if name in s}
    try:
        if "like" in s:
            return replace(SHAPES[s.one_of("like", SHAPES)], **changed)
        for name in ("gpus", "nics", "pcie_switches", *_SPEEDS[:2]):
            s.raw(name)  # it is required
        return HostShape(**changed)
    except InvalidInput as wrong:
        if wrong.field.startswith(s.where):
            raise
        raise InvalidInput(s.at(wrong.field), wrong.problem) from wrong


def _explicit(document: object, cancelled: Callable[[], bool]) -> Topology:
    """Return the network that is listed link by link. Hosts have the insides of a shape."""
    f = Fields("", document, (*_ANY, *_NAMES, "switches", "links"))
    draft = TopologyDraft(cancelled)
    shape, hosts = _shape(f), _hosts(f)
    known = set(hosts)
    listed = [Fields(where, item, _LINK) for where, item in f.items("links")]
    counts = (_count_links(link, known, shape.nics) for link in listed)
    draft.expect(len(hosts) * shape.links + sum(counts))
    nics = {name: shape.build(draft, name) for name in hosts}
    for where, item in f.items("switches"):
        switch = Fields(where, item, ("name", "tier"))
        draft.vertex(switch.text("name"), TIERS[switch.one_of("tier", TIERS)])
    ends = {name: [vertex] for vertex, name in enumerate(draft.names)} | nics
    for link in listed:
        _link(draft, link, ends)
    return draft.topology(adaptive=f.flag("adaptive"))


def _count_links(link: Fields, hosts: Collection[str], nics: int) -> int:
    """Return the number of links that ``_link`` adds, if hosts have ``nics``."""
    ends = [nics if link.text(key) in hosts else 1 for key in ("from", "to")]
    cables = link.whole("cables", 1, MAX_CABLES, 1)
    return ends[0] * ends[1] * cables * (1 if link.flag("one_way") else 2)


def _link(draft: TopologyDraft, link: Fields, ends: dict[str, list[int]]) -> None:
    """Add a cable. A host means each of its NICs."""
    sides = []
    for key in ("from", "to"):
        name = link.text(key)
        if name not in ends:
            raise InvalidInput(
                link.at(key),
                f"{name!r} is not a switch, a host or a part of one{similar_word_hint(name, ends)}",
            )
        sides.append(ends[name])
    speed, delay_s = link.speed("bytes_per_s"), link.delay("delay_s")
    cables = link.whole("cables", 1, MAX_CABLES, 1)
    one_way = link.flag("one_way")
    for a in sides[0]:
        for b in sides[1]:
            if NO_HOST not in (draft.host_of(a), draft.host_of(b)) and draft.host_of(
                a
            ) != draft.host_of(b):
                raise InvalidInput(
                    link.where,
                    "joins two hosts, which pass no traffic on; put a switch between them",
                )
            if one_way:
                for _ in range(cables):
                    draft.link(a, b, speed, delay_s)
            else:
                draft.cable(a, b, speed, delay_s, cables)


_COLUMNS: Final = ("source", "target", "bytes_per_s", "delay_s")


def _columns(document: object, cancelled: Callable[[], bool]) -> Topology:
    f = Fields("", document, (*_ANY, "hosts", "vertices", "links"))
    v = Fields("vertices", f.raw("vertices"), ("name", "tier", "host"))
    e = Fields("links", f.raw("links"), _COLUMNS)
    speed = _numbers(e, "bytes_per_s", cancelled)
    if len(wrong := np.flatnonzero(~((speed >= 1e6) & (speed <= 1e14)))):
        raise InvalidInput(f"links.bytes_per_s[{wrong[0]}]", "must be from 1e6 to 1e14")
    return Topology(
        hosts=tuple(read_text(at, name) for at, name in f.items("hosts")),
        vertices=Vertices(
            name=tuple(read_text(at, name) for at, name in v.items("name")),
            tier=_whole_numbers(v, "tier"),
            host=_whole_numbers(v, "host"),
        ),
        links=Links(
            source=_whole_numbers(e, "source"),
            target=_whole_numbers(e, "target"),
            bytes_per_s=speed,
            delay_s=_numbers(e, "delay_s", cancelled),
        ),
        adaptive=f.flag("adaptive"),
    )


def _numbers(
    f: Fields, key: str, cancelled: Callable[[], bool]
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    values = []
    for where, value in f.items(key):
        require_caller(cancelled)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidInput(where, f"must be a number, not {show_value(value)}")
        values.append(to_float(value))
    return np.array(values, dtype=np.float64)


def _whole_numbers(f: Fields, key: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(f.wholes(key, NO_HOST, 2**53), dtype=np.int64)


KINDS: Final[dict[str, Callable[[object, Callable[[], bool]], Topology]]] = {
    "clos": _clos,
    "double-sided": _double_sided,
    "torus": _torus,
    "lingjun": _lingjun,
    "explicit": _explicit,
    "columns": _columns,
}
"""Readers by the ``kind`` of a document."""

_ASSUMED: Final = {
    "double-sided": (
        "the wiring of pods and planes is assumed, because the paper gives only the numbers of switches",
    ),
    "lingjun": (
        "the numbers and speeds of cables and the insides of hosts are assumed, because the data set says"
        " only which host is in which groups of switches",
        "a group of switches is modeled as one switch",
    ),
}
