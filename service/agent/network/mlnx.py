"""NVIDIA (Mellanox) NICs through ``mlnx_qos``: trust and map the DSCP (MLNX_OFED manual, QoS)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from tessera.formulation.errors import Unavailable
from tessera.formulation.network.tags import PRIORITIES
from tessera.service.agent.network.backend import MapChange, ToolBackend
from tessera.service.agent.network.scheduling import TransmissionSelection, find_shortcomings

_ROW = re.compile(r"^\s*prio:(\d) dscp:([\d,]*)", re.MULTILINE)
_TRUST = re.compile(r"^Priority trust state:\s*(\w+)", re.MULTILINE)
_PFC = re.compile(r"^\s*enabled((?:\s+[01]){8})\s*$", re.MULTILINE)
_CLASS = re.compile(r"^tc:\s*(\d+)\s.*?tsa:\s*(\w+)", re.MULTILINE)
_MEMBER = re.compile(r"^\s*priority:\s+(\d)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceState:
    """An interface's state, as printed by ``mlnx_qos -i``."""

    trust: str
    priorities: dict[int, int] = field(default_factory=dict)  # empty unless the DSCP is trusted
    scheduling: TransmissionSelection = field(default_factory=TransmissionSelection)


class MlnxQosBackend(ToolBackend):
    """A back end for the trust state and the map of a ConnectX interface."""

    def read(self) -> dict[int, int]:
        """Return the map.

        It is empty if the interface does not trust the DSCP, because no entry is in force then.
        """
        return self._state().priorities

    def commands(self, changes: Sequence[MapChange]) -> list[list[str]]:
        """Return two commands, because the tool refuses trust and map in one.

        The second command holds all entries. If the interface trusts the DSCP already, it is the
        only one.
        """
        if not changes:
            return []
        base = ["mlnx_qos", "-i", self.interface]
        entries = [word for c in changes for word in ("--dscp2prio", f"set,{c.tag},{c.after}")]
        trusted = self._state().trust == "dscp"
        return [*([] if trusted else [[*base, "--trust", "dscp"]]), [*base, *entries]]

    def findings(self) -> tuple[str, ...]:
        """Report what is not trusted, strict, in order or lossless, and how to set it."""
        state = self._state()
        sentences = find_shortcomings(state.priorities.values(), state.scheduling)
        if state.trust != "dscp":
            sentences = [f"trusts {state.trust}, so DSCP tags have no effect yet"]
        elif sentences:
            strict = ",".join(["strict"] * PRIORITIES)
            sentences.append(
                f"`mlnx_qos -i {self.interface} -p 0,1,2,3,4,5,6,7 -s {strict}` makes all strict and in order"
            )
        return tuple(f"{self.interface}: {text}" for text in sentences)

    def _state(self) -> InterfaceState:
        return parse_state(self._run(["mlnx_qos", "-i", self.interface]))


def parse_state(text: str) -> InterfaceState:
    """Return the state in ``text``. Raises Unavailable if ``mlnx_qos -i`` did not print it."""
    trust = _TRUST.search(text)
    if trust is None:
        raise Unavailable(f"`mlnx_qos` printed no trust state: {text[:200]!r}")
    found = {
        int(tag): int(row[1]) for row in _ROW.finditer(text) for tag in row[2].split(",") if tag
    }
    return InterfaceState(
        trust=trust[1],
        priorities=found if trust[1] == "dscp" else {},
        scheduling=_scheduling(text),
    )


def _scheduling(text: str) -> TransmissionSelection:
    pfc = _PFC.search(text)
    on = pfc[1].split() if pfc else []
    class_of: dict[int, int] = {}
    algorithm: dict[int, str] = {}
    heads = list(_CLASS.finditer(text))
    for head, after in zip(heads, [*heads[1:], None], strict=True):
        algorithm[int(head[1])] = head[2]
        part = text[head.end() : after.start() if after else len(text)]
        for member in _MEMBER.finditer(part):
            class_of[int(member[1])] = int(head[1])
    return TransmissionSelection(
        class_of=class_of,
        algorithm=algorithm,
        lossless=frozenset(p for p, flag in enumerate(on) if flag == "1"),
    )
