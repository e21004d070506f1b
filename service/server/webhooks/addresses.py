"""The addresses that a server may connect to for its users.

A user chooses a webhook's URL, and the server connects to it from inside a private network. So only
public addresses are allowed, and others that an operator names. The address that was checked is the one
that is connected to: a name that resolves to another address a moment later gains nothing.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from tessera.formulation.base.errors import InvalidInput, Unavailable

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
"""The addresses by which networks of IPv6 alone reach those of IPv4 (RFC 6052)."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A checked address and port to connect to."""

    address: Address
    port: int


def read_networks(field: str, text: str) -> tuple[Network, ...]:
    """Return the networks in a text such as ``10.0.0.0/8, fd00::/8``. Raises InvalidInput."""
    try:
        return tuple(ipaddress.ip_network(part.strip()) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise InvalidInput(field, f"must be networks such as 10.0.0.0/8, but {error}") from error


def is_allowed(address: Address, allowed: Sequence[Network]) -> bool:
    """Return whether a server may connect to ``address``: it is public, or in one of ``allowed``.

    Of an address that stands for another one, both must be. Link-local addresses are those at which
    clouds keep the credentials of a machine.
    """
    for one in (address, *_embedded(address)):
        named = any(one.version == network.version and one in network for network in allowed)
        if not named and (not one.is_global or one.is_multicast or one.is_reserved):
            return False
    return True


def _embedded(address: Address) -> tuple[Address, ...]:
    """Return the addresses of IPv4 to which routers may forward an address of IPv6."""
    if isinstance(address, ipaddress.IPv4Address):
        return ()
    found = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if address in _NAT64:
        found.append(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF))
    return tuple(one for one in found if one is not None)


def resolve_endpoint(host: str, port: int, allowed: Sequence[Network]) -> Endpoint:
    """Return a checked address of ``host``.

    Raises:
        Unavailable: the name does not resolve, or it has an address that is not allowed.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise Unavailable("the host's name does not resolve; correct the URL") from error
    addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
    if not addresses:
        raise Unavailable("the host's name has no address; correct the URL")
    if not all(is_allowed(address, allowed) for address in addresses):
        raise Unavailable(
            "the host has an address that is not public; an operator can allow its network by the setting"
            " webhook_networks"
        )
    return Endpoint(addresses[0], port)
