"""The DCB application table by iproute2's ``dcb``: any NIC whose driver has it (man page dcb-app(8))."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence

from formulation.errors import Unavailable
from service.agent.network.backend import Change, Tool


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


def parse(text: str) -> dict[int, int]:
    """Return DSCP -> priority of what ``dcb -j app show`` prints. Raises Unavailable: not that."""
    try:
        table = json.loads(text) if text.strip() else {}
        found: defaultdict[int, set[int]] = defaultdict(set)
        for tag, priority in table.get("dscp_prio", ()):
            found[int(tag)].add(int(priority))
    except (ValueError, TypeError, AttributeError) as error:
        raise Unavailable(
            f"`dcb -j app show` printed what this cannot read: {text[:200]!r}"
        ) from error
    return {tag: min(all_of) for tag, all_of in found.items() if len(all_of) == 1}
