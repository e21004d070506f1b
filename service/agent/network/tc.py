"""Linux queueing of an interface's outgoing traffic by ``tc``, for TCP between hosts and tests.

It does not apply to RDMA. There is a root discipline with a class for each priority, and u32
filters put a DSCP tag into its class. ``prio`` is strict and needs no rate. ``htb`` needs the
link's rate. It lends free bandwidth to the class that is served first and guarantees every class a
small share, so that none starves (man pages tc-prio(8), tc-htb(8)).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tessera.formulation.answer.network.tags import PRIORITIES
from tessera.formulation.base.errors import InvalidInput, NotAllowed, Unavailable
from tessera.service.agent.network.backend import MapChange, ToolBackend
from tessera.service.agent.network.commands import RunCommand, run_command

ROOT_HANDLE = "7e5:"
"""The discipline's handle, by which it is recognised as ours."""

MIN_CLASS_SHARE = 0.001
"""The share of the link that htb guarantees each class."""

_DEFAULTS = frozenset({"noqueue", "pfifo_fast", "fq_codel", "fq", "mq", "pfifo"})
_ROOT = "ff"
_PROTOCOLS: Mapping[
    str, tuple[str, str, str, int]
] = {  # preference, table, u32 match, shift of the ToS byte
    "ip": ("10", "800", "ip dsfield", 16),
    "ipv6": ("11", "801", "ip6 priority", 20),
}

Discipline = Literal["htb", "prio"]


class TcBackend(ToolBackend):
    """Priorities of the traffic that leaves one interface.

    ``unmarked`` is the priority of traffic with any other DSCP. This traffic carries ssh and the
    agent's own stream, so it is served first by default. An existing discipline of ours is not
    changed: remove it to change its rate or kind.
    """

    def __init__(
        self,
        interface: str,
        *,
        discipline: Discipline = "htb",
        link_bit_per_s: int = 0,
        unmarked: int = PRIORITIES - 1,
        run: RunCommand = run_command,
        dry_run: bool = True,
    ) -> None:
        super().__init__(interface, run=run, dry_run=dry_run)
        if discipline not in ("htb", "prio"):
            raise InvalidInput("discipline", f"must be htb or prio, not {discipline!r}")
        if discipline == "htb" and link_bit_per_s < 1_000_000:
            raise InvalidInput("link_bit_per_s", "htb needs the link's rate, at least 1,000,000")
        if not 0 <= unmarked < PRIORITIES:
            raise InvalidInput("unmarked", f"must be 0 to {PRIORITIES - 1}, not {unmarked}")
        self._discipline = discipline
        self._link_bit_per_s = link_bit_per_s
        self._unmarked = unmarked

    def read(self) -> dict[int, int]:
        """Return the map of both IP versions. A tag mapped for only one of them is left out."""
        if not self._is_ours():
            return {}
        shown = ["tc", "-j", "filter", "show", "dev", self.interface, "parent", ROOT_HANDLE]
        return parse_filters(self._run(shown))

    def commands(self, changes: Sequence[MapChange]) -> list[list[str]]:
        """Return commands that complete the discipline, then two filters for each change."""
        if not changes:
            return []
        found = self._setting_up()
        for change in changes:
            for protocol in _PROTOCOLS:
                found.append(self._filter(protocol, change.tag, change.after))
        return found

    def removal(self) -> list[list[str]]:
        """Return the command that removes the discipline and its filters; [] if it is not there."""
        return [["tc", "qdisc", "del", "dev", self.interface, "root"]] if self._is_ours() else []

    def _is_ours(self) -> bool:
        """Return whether our discipline is there. Raises NotAllowed: someone else's is."""
        shown = self._run(["tc", "-j", "qdisc", "show", "dev", self.interface])
        roots = [q for q in _json(shown, "tc -j qdisc show") if q.get("root")]
        if any(q["kind"] == self._discipline and q["handle"] == ROOT_HANDLE for q in roots):
            return True
        foreign = [q["kind"] for q in roots if q["kind"] not in _DEFAULTS]
        if foreign:
            raise NotAllowed(
                f"{self.interface} has a root discipline {foreign[0]} that Tessera did not make (or that"
                f" is of another kind); remove it with `tc qdisc del dev {self.interface} root`, or use"
                " another back end"
            )
        return False

    def _setting_up(self) -> list[list[str]]:
        """Return commands that make the discipline, or classes missing after an aborted start."""
        kind, there = self._discipline, self._is_ours()
        root = [
            "tc",
            "qdisc",
            "replace",
            "dev",
            self.interface,
            "root",
            "handle",
            ROOT_HANDLE,
            kind,
        ]
        if kind == "prio":
            band = str(PRIORITIES - 1 - self._unmarked)
            made = [*root, "bands", str(PRIORITIES), "priomap", *[band] * 16]
            return [] if there else [made]
        shown = self._run(["tc", "class", "show", "dev", self.interface]) if there else ""
        if set(_classes(shown)) >= {_minor(priority) for priority in range(PRIORITIES)}:
            return []
        rate = self._link_bit_per_s
        each = max(8, int(rate * MIN_CLASS_SHARE))
        commands = [] if there else [[*root, "default", _minor(self._unmarked)]]
        commands.append(self._class(_ROOT, "", rate, rate, 0))
        for priority in range(PRIORITIES):
            order = PRIORITIES - 1 - priority
            commands.append(self._class(_minor(priority), _ROOT, each, rate, order))
        return commands

    def _class(self, minor: str, parent: str, rate: int, ceiling: int, order: int) -> list[str]:
        """Return the command that makes an htb class. Rates are in bit/s; order 0 goes first."""
        return [
            "tc",
            "class",
            "replace",
            "dev",
            self.interface,
            "parent",
            f"{ROOT_HANDLE}{parent}",
            "classid",
            f"{ROOT_HANDLE}{minor}",
            "htb",
            "rate",
            f"{rate}bit",
            "ceil",
            f"{ceiling}bit",
            "prio",
            str(order),
            "quantum",
            "3000",
        ]

    def _filter(self, protocol: str, tag: int, priority: int) -> list[str]:
        preference, table, field, _ = _PROTOCOLS[protocol]
        return [
            "tc",
            "filter",
            "replace",
            "dev",
            self.interface,
            "parent",
            ROOT_HANDLE,
            "protocol",
            protocol,
            "pref",
            preference,
            "handle",
            f"{table}::{tag + 1:x}",
            "u32",
            "match",
            *field.split(),
            hex(tag << 2),
            "0xfc",
            "flowid",
            f"{ROOT_HANDLE}{_minor(priority)}",
        ]


def parse_filters(text: str) -> dict[int, int]:
    """Return DSCP -> priority from ``tc -j filter show`` of our discipline. Raises Unavailable."""
    tags: dict[str, dict[int, int]] = {protocol: {} for protocol in _PROTOCOLS}
    for row in _json(text, "tc -j filter show"):
        options = row.get("options") or {}
        match, flow = options.get("match"), options.get("flowid")
        if row.get("protocol") not in tags or not match or not flow:
            continue
        shift = _PROTOCOLS[row["protocol"]][3]
        if int(match["mask"], 16) != 0xFC << shift:
            continue
        tag = int(match["value"], 16) >> shift + 2
        tags[row["protocol"]][tag] = PRIORITIES - int(flow.partition(":")[2], 16)
    both = tags["ip"]
    return {tag: p for tag, p in both.items() if tags["ipv6"].get(tag) == p}


def _json(text: str, command: str) -> list[dict[str, Any]]:
    try:
        found = json.loads(text) if text.strip() else []
    except ValueError as error:
        raise Unavailable(
            f"`{command}` printed no JSON: {text[:200]!r}; iproute2 is too old"
        ) from error
    if not isinstance(found, list):
        raise Unavailable(f"`{command}` printed no list: {text[:200]!r}")
    return found


def _classes(text: str) -> list[str]:
    """Return our classes' minor numbers, hexadecimal (``tc class show`` has no JSON in 6.1)."""
    return re.findall(rf"^class \w+ {ROOT_HANDLE}(\w+) ", text, flags=re.MULTILINE)


def _minor(priority: int) -> str:
    """Return the class of a priority. Class 1 is served first."""
    return f"{PRIORITIES - priority:x}"
