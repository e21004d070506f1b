"""The DCB tables by iproute2's ``dcb``: any NIC whose driver has them (man pages dcb-app(8), dcb-ets(8))."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from tessera.formulation.errors import Unavailable
from tessera.service.agent.network.backend import Change, Tool
from tessera.service.agent.network.scheduling import Scheduling, shortcomings


class Dcb(Tool):
    """Entries dscp-prio of the APP table."""

    def read(self) -> dict[int, int]:
        """Return the table; a tag with several priorities counts as not mapped, so that it is replaced."""
        return parse(self._run(["dcb", "-j", "app", "show", "dev", self.interface]))

    def commands(self, changes: Sequence[Change]) -> list[list[str]]:
        """Return one command: ``replace`` adds the new entries, then removes the old ones of these tags."""
        if not changes:
            return []
        entries = [f"{c.tag}:{c.after}" for c in changes]
        return [["dcb", "app", "replace", "dev", self.interface, "dscp-prio", *entries]]

    def findings(self) -> tuple[str, ...]:
        """Report what is not strict, in order or lossless, and how to set it."""
        used = self.read().values()
        ets = self._run(["dcb", "-j", "ets", "show", "dev", self.interface])
        pfc = self._run(["dcb", "-j", "pfc", "show", "dev", self.interface])
        found = shortcomings(used, parse_scheduling(ets, pfc))
        if found:
            found.append(
                f"`dcb ets set dev {self.interface} prio-tc 0:0 1:1 2:2 3:3 4:4 5:5 6:6 7:7"
                " tc-tsa all:strict tc-bw all:0` makes all strict and in order"
            )
        return tuple(f"{self.interface}: {text}" for text in found)


def parse(text: str) -> dict[int, int]:
    """Return DSCP -> priority of what ``dcb -j app show`` prints. Raises Unavailable: not that."""
    try:
        found: defaultdict[int, set[int]] = defaultdict(set)
        for tag, priority in _table(text).get("dscp_prio", ()):
            found[int(tag)].add(int(priority))
    except (ValueError, TypeError) as error:
        raise _unreadable("app", text) from error
    return {tag: min(all_of) for tag, all_of in found.items() if len(all_of) == 1}


def parse_scheduling(ets: str, pfc: str) -> Scheduling:
    """Return what ``dcb -j ets show`` and ``dcb -j pfc show`` print. Raises Unavailable: not that."""
    try:
        table, flags = _table(ets), _table(pfc).get("prio_pfc", ())
        return Scheduling(
            class_of={p: int(number) for p, number in enumerate(table.get("prio_tc", ()))},
            algorithm={number: str(name) for number, name in enumerate(table.get("tc_tsa", ()))},
            lossless=frozenset(p for p, flag in enumerate(flags) if flag in (True, "on", 1)),
        )
    except (ValueError, TypeError) as error:
        raise _unreadable("ets", ets + pfc) from error


def _table(text: str) -> dict[str, Any]:
    found = json.loads(text) if text.strip() else {}
    if not isinstance(found, dict):
        raise TypeError("not an object")
    return found


def _unreadable(table: str, text: str) -> Unavailable:
    return Unavailable(f"`dcb -j {table} show` printed what this cannot read: {text[:200]!r}")
