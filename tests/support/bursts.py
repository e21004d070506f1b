"""Bursts over a real interface by a simulated clock, which a busy machine does not affect."""

from __future__ import annotations

import contextlib
import socket

PERIOD_S = 0.12
PACKETS = 150
PACKET_BYTES = 1042
"""The bytes on the wire: a thousand bytes with the headers of UDP, IP and Ethernet."""


class Bursts:
    """A sender of a burst in each period. Its time passes only in calls of ``sleep``."""

    def __init__(self, address: str) -> None:
        self._flow = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._to = (address, 9)
        _find_neighbour(self._to)
        self._now_s = self._due_s = 0.0

    def clock(self) -> float:
        """Return the seconds that have passed."""
        return self._now_s

    def sleep(self, seconds: float) -> None:
        """Let time pass, and send the bursts that are due in it."""
        end_s = self._now_s + seconds
        while self._due_s <= end_s:
            for _ in range(PACKETS):
                self._flow.sendto(bytes(1000), self._to)
            self._due_s += PERIOD_S
        self._now_s = end_s


def _find_neighbour(to: tuple[str, int]) -> None:
    """Wait until the other end has refused a packet, so that the kernel knows its link address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.settimeout(30)
        probe.connect(to)
        probe.send(b"")
        with contextlib.suppress(ConnectionRefusedError):
            probe.recv(1)
