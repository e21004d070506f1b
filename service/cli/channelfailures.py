"""Failures of a channel or an identity in words: TLS, certificates, tokens and roles."""

from __future__ import annotations

import socket
import ssl
from typing import Final

import grpc

from tessera.client import CallError, ChannelSettings, Unavailable
from tessera.formulation.base.secrets import hide_secrets

PROBE_S: Final = 2.0
"""Seconds that a server may take to begin TLS, when the command line asks whether it does."""

_CONNECTING: Final = "failed to connect to all addresses"
_PLUGIN: Final = "Getting metadata from plugin failed with error: "

_CAUSES: Final = (
    (
        "WRONG_VERSION_NUMBER",
        "{server} does not use TLS, but TESSERA_CA or a login asks for it; unset TESSERA_CA, or correct"
        " the address",
    ),
    (
        "Hostname Verification Check failed",
        "the certificate of {server} is for other names; call the server by a name of its certificate,"
        " or set TESSERA_SERVER_NAME to one",
    ),
    (
        "certificate has expired",
        "the certificate of {server} has expired, or this machine's clock is wrong; its administrator"
        " makes another one with `tessera ca server`",
    ),
    (
        "certificate is not yet valid",
        "the certificate of {server} is not valid yet; compare this machine's clock with the server's",
    ),
    (
        "unsupported certificate purpose",
        "the certificate of {server} is not one of a server, so something else may answer there; check"
        " the address",
    ),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "the certificate of {server} is not signed by an authority that you trust; set TESSERA_CA to the"
        " file of the server's authorities (ca.pem), or check the address",
    ),
)
"""Words of gRPC on a failed handshake, and their meaning. The first that fits counts."""


def explain_channel(error: CallError, server: str, settings: ChannelSettings) -> str:
    """Return what is wrong with TLS or the token of a channel, or "" if it is something else."""
    text = hide_secrets(error.text)
    if _PLUGIN in text:
        return text.partition(_PLUGIN)[2]
    if not isinstance(error, Unavailable) or _CONNECTING not in text:
        return ""
    for sign, message in _CAUSES:
        if sign in text:
            return message.format(server=server)
    if "handshake failed" in text:
        return f"{server} and this machine cannot agree on TLS ({text}); upgrade both"
    was_closed = text.endswith(("Socket closed", "Connection reset by peer"))
    if settings.authorities and was_closed:
        return _explain_closed(server, settings)
    if was_closed and _uses_tls(server):
        return (
            f"{server} uses TLS; log in with `tessera login`, or set TESSERA_CA to the file of its"
            " authorities (ca.pem), or to `system`"
        )
    return ""


def advise_caller(code: grpc.StatusCode, settings: ChannelSettings) -> str:
    """Return what a caller can do who is not known or not allowed, or "" for other codes."""
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return "; ask an administrator of the server for a token that allows it"
    if code is not grpc.StatusCode.UNAUTHENTICATED:
        return ""
    if settings.find_token() is not None:
        return "; log in again with `tessera login`, or set another TESSERA_TOKEN"
    return "; log in with `tessera login`, or set TESSERA_TOKEN or TESSERA_TOKEN_FILE"


def _explain_closed(server: str, settings: ChannelSettings) -> str:
    if settings.certificate is None:
        return (
            f"{server} closed the connection, perhaps because it asks for a certificate, as the port of"
            " agents does; call the port of users, or set TESSERA_CERTIFICATE and TESSERA_KEY"
        )
    return (
        f"{server} closed the connection, perhaps because it refused the certificate"
        f" {settings.certificate}; it may have expired, or be signed by another authority"
    )


def _uses_tls(server: str) -> bool:
    """Return whether a program at ``server`` begins TLS. It is sent a hello, and nothing else."""
    host, _, port = server.rpartition(":")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), PROBE_S) as connection,
            context.wrap_socket(connection),
        ):
            return True
    except (OSError, ValueError):  # an ssl.SSLError is an OSError
        return False
