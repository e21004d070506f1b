"""Paths of packets by UDP source port, found like traceroute: UDP probes with growing time to live.

The kernel hands ICMP answers to the socket that sent the probe (ip(7), IP_RECVERR), so this needs
no raw socket and no privilege. It supports IPv4 only. The probes have the five-tuple of RoCE. A NIC
at the end drops them, because they are not valid RoCE packets, so the last hop is known only if the
host itself answers.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Callable

from tessera.formulation.errors import InvalidInput, Unavailable
from tessera.service.agent.network.paths import ROCE_PORT

_IP_RECVERR = 11  # linux/in.h; not in this Python's socket module
_ORIGIN_ICMP = 2  # linux/errqueue.h
_UNREACHABLE = 3  # ICMP type
_PAYLOAD = b"tessera path probe"

Hops = tuple[str, ...]
"""Addresses of the routers, in order. An address is "" if the router did not answer."""


def trace_hops(
    address: str,
    port: int,
    *,
    most_hops: int = 8,
    wait_s: float = 0.5,
    ecn_dscp: int = 0,
    to_port: int = ROCE_PORT,
) -> Hops:
    """Return the hops to ``address`` of packets with source port ``port``, until it is reached.

    ``wait_s`` is the time for each hop's answer. ``ecn_dscp`` is the ToS byte, for switches that
    hash it.

    Raises:
        InvalidInput: no such address.
        Unavailable: the port is taken, or there is no route.
    """
    try:
        socket.inet_pton(socket.AF_INET, address)
    except OSError as error:
        raise InvalidInput("address", f"{address!r} is not an IPv4 address") from error
    hops: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.setsockopt(socket.IPPROTO_IP, _IP_RECVERR, 1)
        probe.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, ecn_dscp)
        try:
            probe.bind(("", port))
            for hop in range(1, most_hops + 1):
                probe.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, hop)
                probe.sendto(_PAYLOAD, (address, to_port))
                router, reached = _answer(probe, wait_s)
                hops.append(router)
                if reached:
                    break
        except OSError as error:
            raise Unavailable(
                f"cannot probe {address} from UDP port {port}: {error}; choose another port, or check the"
                f" route with `ip route get {address}`"
            ) from error
    while hops and not hops[-1]:
        hops.pop()
    return tuple(hops)


def first_hops(
    address: str, count: int = 1, *, wait_s: float = 0.5, ecn_dscp: int = 0
) -> Callable[[int], Hops | None]:
    """Return a probe for ``paths.port_for`` that yields the first ``count`` hops.

    It returns None if a hop did not answer.
    """

    def probe(port: int) -> Hops | None:
        hops = trace_hops(address, port, most_hops=count, wait_s=wait_s, ecn_dscp=ecn_dscp)
        return hops if hops and all(hops) else None

    return probe


def _answer(probe: socket.socket, wait_s: float) -> tuple[str, bool]:
    """Return the address that answered, and whether it was the end of the path.

    The address is "" if no answer came in time.
    """
    ready = select.poll()
    ready.register(probe, 0)  # errors are always reported
    if not ready.poll(wait_s * 1000):
        return "", False
    _, ancillary, _, _ = probe.recvmsg(512, 512, socket.MSG_ERRQUEUE)
    for level, kind, data in ancillary:
        if (level, kind) != (socket.IPPROTO_IP, _IP_RECVERR):
            continue
        error, origin, icmp, _, _, _, _ = struct.unpack_from("=IBBBBII", data)
        if origin != _ORIGIN_ICMP:
            raise OSError(error, "not sent")
        _, _, offender = struct.unpack_from("=HH4s", data, 16)
        return socket.inet_ntop(socket.AF_INET, offender), icmp == _UNREACHABLE
    return "", False
