"""NVIDIA (Mellanox) NICs by ``mlnx_qos``: trust the DSCP, and map it (MLNX_OFED manual, QoS)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from formulation.errors import Unavailable
from service.agent.network.backend import Change, Tool

_ROW = re.compile(r"^\s*prio:(\d) dscp:([\d,]*)", re.MULTILINE)
_TRUST = re.compile(r"^Priority trust state:\s*(\w+)", re.MULTILINE)
_PFC = re.compile(r"^\s*enabled((?:\s+[01]){8})\s*$", re.MULTILINE)
_CLASS = re.compile(r"^tc:\s*(\d+)\s.*?tsa:\s*(\w+)", re.MULTILINE)
_MEMBER = re.compile(r"^\s*priority:\s+(\d)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What ``mlnx_qos -i`` prints of an interface."""

    trust: str
    priorities: dict[int, int] = field(default_factory=dict)  # empty unless the DSCP is trusted
    lossless: frozenset[int] = frozenset()  # priorities with flow control
    schedule: dict[int, tuple[int, str]] = field(
        default_factory=dict
    )  # priority -> (class, algorithm)


class MlnxQos(Tool):
    """Trust and map of a ConnectX interface."""

    def read(self) -> dict[int, int]:
        """Return the map; empty where the interface does not trust the DSCP, as no entry is in force then."""
        return self._state().priorities

    def commands(self, changes: Sequence[Change]) -> list[list[str]]:
        """Return two commands, as the tool refuses trust and map in one; all entries in the second."""
        if not changes:
            return []
        base = ["mlnx_qos", "-i", self.interface]
        entries = [word for c in changes for word in ("--dscp2prio", f"set,{c.tag},{c.after}")]
        trusted = self._state().trust == "dscp"
        return [*([] if trusted else [[*base, "--trust", "dscp"]]), [*base, *entries]]

    def findings(self) -> tuple[str, ...]:
        """Report what is not strict, shares a class, or is not lossless."""
        return tuple(f"{self.interface}: {text}" for text in shortcomings(self._state()))

    def _state(self) -> State:
        return parse(self._run(["mlnx_qos", "-i", self.interface]))


def parse(text: str) -> State:
    """Return what the text says. Raises Unavailable: it is not what ``mlnx_qos -i`` prints."""
    trust = _TRUST.search(text)
    if trust is None:
        raise Unavailable(f"`mlnx_qos` printed no trust state: {text[:200]!r}")
    found = {
        int(tag): int(row[1]) for row in _ROW.finditer(text) for tag in row[2].split(",") if tag
    }
    pfc = _PFC.search(text)
    lossless = {p for p, on in enumerate(pfc[1].split()) if on == "1"} if pfc else set()
    return State(
        trust=trust[1], priorities=found if trust[1] == "dscp" else {},
        lossless=frozenset(lossless), schedule=_schedule(text),
    )  # fmt: skip


def shortcomings(state: State) -> list[str]:
    """Return in sentences what keeps the priorities in use from being strict and safe."""
    found = []
    if state.trust != "dscp":
        found.append(f"trusts {state.trust}, so DSCP tags have no effect yet")
    used = sorted(set(state.priorities.values()))
    by_class: dict[int, list[int]] = {}
    for priority in used:
        number, algorithm = state.schedule.get(priority, (priority, "strict"))
        by_class.setdefault(number, []).append(priority)
        if algorithm not in ("strict", "vendor"):  # vendor: strict, unless changed by other tools
            found.append(f"priority {priority} is scheduled by {algorithm}, not strictly")
    for number, members in by_class.items():
        if len(members) > 1:
            found.append(f"priorities {members} share traffic class {number} and are served alike")
    lossy = [priority for priority in used if priority not in state.lossless]
    if lossy and state.lossless:
        found.append(f"priorities {lossy} have no flow control: RoCE there must tolerate loss")
    return found


def _schedule(text: str) -> dict[int, tuple[int, str]]:
    found: dict[int, tuple[int, str]] = {}
    heads = list(_CLASS.finditer(text))
    for head, after in zip(heads, [*heads[1:], None], strict=True):
        part = text[head.end() : after.start() if after else len(text)]
        for member in _MEMBER.finditer(part):
            found[int(member[1])] = (int(head[1]), head[2])
    return found
