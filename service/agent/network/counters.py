"""Byte counters of NICs, and how they are sampled. ``period`` interprets the samples.

RoCE does not pass through the kernel. Its bytes are in the RDMA port's counters only, not in the
interface's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tessera.formulation.base.errors import InvalidInput, Unavailable
from tessera.service.agent.files import read_trusted
from tessera.service.agent.network.devices import SYSFS_ROOT

_WORD = 4  # port_*_data count words of four bytes (InfiniBand specification, PortCounters)


@dataclass(frozen=True, slots=True, kw_only=True)
class PortCounter:
    """A counter of the bytes sent or received through one port since some moment."""

    name: str
    path: Path
    unit_bytes: int = 1

    def read(self) -> int:
        """Return the counter in bytes. Raises Unavailable: the port is gone."""
        try:
            return int(read_trusted(self.path)) * self.unit_bytes
        except (OSError, ValueError) as error:
            raise Unavailable(f"cannot read the counter {self.path}: {error}") from error


def find_counters(sys: Path = SYSFS_ROOT, *, received: bool = False) -> tuple[PortCounter, ...]:
    """Return the counters of bytes sent (or received) of each interface and RDMA port, by name."""
    way, rdma = ("rx_bytes", "port_rcv_data") if received else ("tx_bytes", "port_xmit_data")
    port_counters = [
        PortCounter(name=path.parents[1].name, path=path)
        for path in (sys / "class/net").glob(f"*/statistics/{way}")
    ]
    for path in (sys / "class/infiniband").glob(f"*/ports/*/counters/{rdma}"):
        device, port = path.parents[3].name, path.parents[1].name
        port_counters.append(PortCounter(name=f"{device}/{port}", path=path, unit_bytes=_WORD))
    return tuple(sorted(port_counters, key=lambda counter: counter.name))


def sample_counter(
    read: Callable[[], int],
    *,
    step_s: float,
    count: int,
    clock: Callable[[], float],
    sleep: Callable[[float], object],
) -> tuple[list[float], list[int]]:
    """Return ``count`` times, ``step_s`` apart, and the values of ``read`` at these times.

    Delays do not add up.
    """
    if not (step_s > 0 and count > 0):
        raise InvalidInput("step_s", "must be above 0, as must be count")
    times_s: list[float] = []
    values: list[int] = []
    begun_s = clock()
    for number in range(count):
        ahead_s = begun_s + number * step_s - clock()
        if ahead_s > 0:
            sleep(ahead_s)
        times_s.append(clock())
        values.append(read())
    return times_s, values
