"""How a client reaches a server: the authorities it trusts, its certificate and its token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSettings:
    """What a channel needs besides an address. Its ``repr`` shows no secret.

    ``authorities`` is a file of certificates (PEM) to trust, or ``system`` for those of this
    machine. If it is "", the channel is plain text, which is refused with a token unless the
    address is on this machine. ``certificate`` and ``key`` are files (PEM) for mutual TLS.
    """

    authorities: str = ""
    certificate: Path | None = None
    key: Path | None = None
    token: str = field(default="", repr=False)
    server_name: str = ""  # the name to expect in the server's certificate, if not the address


def find_settings(address: str, environment: Mapping[str, str]) -> ChannelSettings:
    """Return the settings for ``address`` from the environment, or else from the login file."""
    return ChannelSettings(
        authorities=environment.get("TESSERA_CA", ""), token=environment.get("TESSERA_TOKEN", "")
    )
