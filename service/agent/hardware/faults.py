"""The present faults of a node's GPUs, from the states and Xids that its driver reports."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tessera.service.agent.hardware.devices import DeviceState, XidEvent
from tessera.service.agent.hardware.xids import FATAL_XIDS, XidClass, classify_xid

log = logging.getLogger(__name__)

LASTING_S: Final = 60.0
"""Seconds for which a GPU must be too hot, or unreadable, until that is a fault."""

WHOLE_NODE: Final = -1
"""The GPU index of faults of the whole node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A present fault of a GPU, or of the whole node if ``gpu`` is negative."""

    gpu: int
    kind: str
    detail: str


@dataclass(slots=True, kw_only=True)
class RememberedXid:
    """A fatal Xid that stays a fault until its GPU was reset. ``asked`` is whether its driver has asked
    for a recovery since.
    """

    xid: int
    asked: bool = False


@dataclass(slots=True)
class FaultTracker:
    """The faults of watched GPUs over time. All methods belong to one thread.

    ``xids`` are the fatal Xids of each GPU that are not settled yet.
    """

    xids: dict[int, list[RememberedXid]] = field(default_factory=dict)
    _hot_since_s: dict[int, float] = field(default_factory=dict)
    _unread_since_s: dict[int, float] = field(default_factory=dict)

    def note_events(self, events: Iterable[XidEvent]) -> None:
        """Remember the fatal Xids, and log the others."""
        for event in events:
            kind = classify_xid(event.xid)
            level = logging.INFO if kind is XidClass.APPLICATION else logging.WARNING
            log.log(
                level,
                "the driver reported an Xid",
                extra={"event": "xid", "xid": event.xid, "gpu": event.gpu, "kind": kind.value},
            )
            known = self.xids.setdefault(max(event.gpu, WHOLE_NODE), [])
            if kind is XidClass.FATAL and all(one.xid != event.xid for one in known):
                known.append(RememberedXid(xid=event.xid))
        self.xids = {gpu: known for gpu, known in self.xids.items() if known}

    def settle_xids(self, states: Sequence[DeviceState]) -> None:
        """Forget the Xids of GPUs for which the driver had asked for a recovery, and asks no more.

        Drivers that do not report the action settle nothing: their GPUs' Xids are remembered until
        a reboot, or until they are cleared.
        """
        for gpu, state in enumerate(states):
            if state.recovery is None or state.is_lost or state.problem:
                continue
            for one in self.xids.get(gpu, ()):
                one.asked = one.asked or bool(state.recovery)
            if not state.recovery:
                self.xids[gpu] = [one for one in self.xids.get(gpu, ()) if not one.asked]
        self.xids = {gpu: known for gpu, known in self.xids.items() if known}

    def find_faults(self, states: Sequence[DeviceState], now_s: float) -> tuple[Fault, ...]:
        """Return the faults that are present at ``now_s``, by the monotonic clock."""
        faults = [
            Fault(gpu=gpu, kind="xid", detail=f"Xid {one.xid}, {FATAL_XIDS.get(one.xid, 'fatal')}")
            for gpu, known in sorted(self.xids.items())
            for one in known
        ]
        for gpu, state in enumerate(states):
            faults += self._faults_of(gpu, state, now_s)
        return tuple(faults)

    def _faults_of(self, gpu: int, state: DeviceState, now_s: float) -> list[Fault]:
        if state.is_lost:
            return [Fault(gpu=gpu, kind="lost", detail="the driver has lost it")]
        is_hot = None not in (state.temperature_c, state.shutdown_c) and (
            (state.temperature_c or 0) >= (state.shutdown_c or 0)
        )
        too_hot = _has_lasted(self._hot_since_s, gpu, is_hot or state.is_slowed, now_s)
        unread = _has_lasted(self._unread_since_s, gpu, bool(state.problem), now_s)
        found: Mapping[tuple[str, str], bool] = {
            ("lost", f"the driver cannot read it: {state.problem}"): unread,
            ("recovery", f"the driver asks for {state.recovery}"): bool(state.recovery),
            ("ecc", "uncorrectable memory errors (ECC)"): state.uncorrected_errors > 0,
            ("ecc", "a row of its memory could not be remapped"): state.remap_failed,
            ("ecc", "a row of its memory waits to be remapped; reset the GPU"): state.remap_pending,
            ("thermal", "as hot as when it shuts down"): too_hot and is_hot,
            ("thermal", "slowed down by heat"): too_hot and not is_hot,
        }
        return [
            Fault(gpu=gpu, kind=kind, detail=detail)
            for (kind, detail), present in found.items()
            if present
        ]


def _has_lasted(since_s: dict[int, float], gpu: int, present: bool, now_s: float) -> bool:
    """Return whether something has been present for ``LASTING_S``, and note since when it is."""
    if not present:
        since_s.pop(gpu, None)
        return False
    return now_s - since_s.setdefault(gpu, now_s) >= LASTING_S
