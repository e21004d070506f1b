"""UDP source ports of RoCE and the paths that switches hash them onto.

The port follows the Linux kernel's rule (include/rdma/ib_verbs.h, since commit d5665a21). It is
derived from the flow label. If the label is 0, as with NCCL, it is derived from the product of both
queue pair numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from tessera.formulation.errors import InvalidInput

FIRST_PORT = 0xC000
PORT_COUNT = 0x4000
ROCE_PORT = 4791
_LABEL_BITS = 20
_STRIDE = 9973  # odd, so every port occurs once

Path = TypeVar("Path", bound=Hashable)


def flow_label_of(local: int, remote: int) -> int:
    """Return the 20-bit label that drivers derive from queue pair numbers, alike at both ends."""
    for number in (local, remote):
        if not 0 <= number < 1 << 24:
            raise InvalidInput("queue pair", f"a number has 24 bits, {number} has not")
    product = local * remote
    product ^= product >> 20
    product ^= product >> 40
    return product & ((1 << _LABEL_BITS) - 1)


def source_port(label: int, local: int = 0, remote: int = 0) -> int:
    """Return the UDP source port of a queue pair with flow label ``label``.

    If ``label`` is 0, the port is derived from the queue pair numbers.
    """
    if not 0 <= label < 1 << _LABEL_BITS:
        raise InvalidInput("flow label", f"has {_LABEL_BITS} bits, {label} has not")
    used = label or flow_label_of(local, remote)
    return FIRST_PORT | ((used & 0x3FFF) ^ (used >> 14))


def flow_label_for(port: int) -> int:
    """Return a nonzero flow label whose source port is ``port``, for transports that set labels."""
    if not FIRST_PORT <= port < FIRST_PORT + PORT_COUNT:
        raise InvalidInput(
            "port", f"must be {FIRST_PORT} to {FIRST_PORT + PORT_COUNT - 1}, not {port}"
        )
    return port - FIRST_PORT or (1 << 14) | 1


def candidate_ports(count: int, start: int = 0) -> list[int]:
    """Return ``count`` different source ports, spread so that neighbours differ in many bits."""
    if not 0 <= count <= PORT_COUNT:
        raise InvalidInput("count", f"must be 0 to {PORT_COUNT}, not {count}")
    return [FIRST_PORT + (start + i) * _STRIDE % PORT_COUNT for i in range(count)]


def ports_by_path(
    probe: Callable[[int], Path | None], ports: Iterable[int]
) -> dict[Path, list[int]]:
    """Return the ``ports`` that lead over each path. ``probe`` returns None if it got no answer."""
    by_path: dict[Path, list[int]] = {}
    for port in ports:
        path = probe(port)
        if path is not None:
            by_path.setdefault(path, []).append(port)
    return by_path


def port_for(
    path: Path, probe: Callable[[int], Path | None], ports: Iterable[int], *, confirm: int = 1
) -> int | None:
    """Return the first of ``ports`` that leads over ``path``, also in ``confirm`` more probes.

    If no port does, return None. A port whose path varies does not count: the fabric routes
    adaptively there.
    """
    for port in ports:
        if probe(port) == path and all(probe(port) == path for _ in range(confirm)):
            return port
    return None
