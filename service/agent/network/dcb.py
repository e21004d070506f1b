"""The DCB tables through iproute2's ``dcb``, for any NIC whose driver supports them.

See the man pages dcb-app(8) and dcb-ets(8).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from tessera.formulation.base.errors import Unavailable
from tessera.service.agent.network.backend import MapChange, ToolBackend
from tessera.service.agent.network.scheduling import TransmissionSelection, find_shortcomings


class DcbBackend(ToolBackend):
    """A back end for the dscp-prio entries of the APP table."""

    def read(self) -> dict[int, int]:
        """Return the table. A tag with several priorities counts as unmapped, to be replaced."""
        return parse_priorities(self._run(["dcb", "-j", "app", "show", "dev", self.interface]))

    def commands(self, changes: Sequence[MapChange]) -> list[list[str]]:
        """Return one command: ``replace`` adds new entries, then removes these tags' old ones."""
        if not changes:
            return []
        entries = [f"{c.tag}:{c.after}" for c in changes]
        return [["dcb", "app", "replace", "dev", self.interface, "dscp-prio", *entries]]

    def findings(self) -> tuple[str, ...]:
        """Report what is not strict, in order or lossless, and how to set it."""
        used = self.read().values()
        ets = self._run(["dcb", "-j", "ets", "show", "dev", self.interface])
        pfc = self._run(["dcb", "-j", "pfc", "show", "dev", self.interface])
        sentences = find_shortcomings(used, parse_scheduling(ets, pfc))
        if sentences:
            sentences.append(
                f"`dcb ets set dev {self.interface} prio-tc 0:0 1:1 2:2 3:3 4:4 5:5 6:6 7:7"
                " tc-tsa all:strict tc-bw all:0` makes all strict and in order"
            )
        return tuple(f"{self.interface}: {text}" for text in sentences)


def parse_priorities(text: str) -> dict[int, int]:
    """Return DSCP -> priority from the output of ``dcb -j app show``. Raises Unavailable."""
    try:
        priorities: defaultdict[int, set[int]] = defaultdict(set)
        for tag, priority in _table(text).get("dscp_prio", ()):
            priorities[int(tag)].add(int(priority))
    except (ValueError, TypeError) as error:
        raise _unreadable("app", text) from error
    return {tag: min(all_of) for tag, all_of in priorities.items() if len(all_of) == 1}


def parse_scheduling(ets: str, pfc: str) -> TransmissionSelection:
    """Parse the output of ``dcb -j ets show`` and ``dcb -j pfc show``. Raises Unavailable."""
    try:
        table, flags = _table(ets), _table(pfc).get("prio_pfc", ())
        return TransmissionSelection(
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
