"""The only functions that open a channel to a server."""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc
import grpc.aio

from tessera.client.refusals import ChannelRefused, holds_secret, show_path
from tessera.client.secretfiles import OTHERS_RIGHTS, read_bytes
from tessera.client.settings import (
    CERTIFICATE_START,
    SYSTEM,
    ChannelSettings,
    find_settings,
    require_token,
)
from tessera.client.tokens import TokenInterceptor, TokenPlugin, aio_interceptors

SYSTEM_FILES: Final = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Alpine
    "/etc/pki/tls/certs/ca-bundle.crt",  # Red Hat
    "/etc/ssl/ca-bundle.pem",  # SUSE
    "/etc/ssl/cert.pem",  # BSD, macOS
)
"""Files of the authorities that a system trusts, if Python does not know of one."""

NO_PROXY: Final = ("grpc.enable_http_proxy", 0)
"""The option that keeps a channel to this machine from leaving it through a proxy."""

_ADDRESS: Final = re.compile(
    r"(?:dns:(?:///)?|ipv4:|ipv6:)?(?P<host>\[[^\]]*\]|[^:/\[\],%]+)(?::[0-9]+)?"
)
"""An address of one host, as gRPC reads it."""

_Options = Sequence[tuple[str, Any]]


class _ChannelPlan(NamedTuple):
    """The way to open a channel. Without credentials, it is plain text."""

    credentials: grpc.ChannelCredentials | None
    options: list[tuple[str, Any]]
    find_token: Callable[[], str] | None


def open_channel(
    address: str, settings: ChannelSettings | None = None, options: _Options = ()
) -> grpc.Channel:
    """Open a channel to ``address``, with the settings of the environment unless others are given.

    Files are read now, and not again.

    Raises:
        ChannelRefused: the settings do not allow it; says what to do, and repeats no secret.
    """
    plan = _plan_channel(address, settings, options)
    if plan.credentials is not None:
        return grpc.secure_channel(address, plan.credentials, options=plan.options)
    channel = grpc.insecure_channel(address, options=plan.options)
    if plan.find_token is None:
        return channel
    return grpc.intercept_channel(channel, TokenInterceptor(plan.find_token))


def open_async_channel(
    address: str, settings: ChannelSettings | None = None, options: _Options = ()
) -> grpc.aio.Channel:
    """Open a channel of grpc.aio like ``open_channel``. Raises ChannelRefused."""
    plan = _plan_channel(address, settings, options)
    if plan.credentials is not None:
        return grpc.aio.secure_channel(address, plan.credentials, options=plan.options)
    interceptors = aio_interceptors(plan.find_token) if plan.find_token is not None else None
    return grpc.aio.insecure_channel(address, options=plan.options, interceptors=interceptors)


def check_files(settings: ChannelSettings) -> None:
    """Check that the files for TLS are there and whole. Raises ChannelRefused."""
    _read_authorities(settings.authorities)
    if settings.certificate is not None and settings.key is not None:
        _read_pair(settings.certificate, settings.key)


def is_on_this_machine(address: str) -> bool:
    """Return whether what is sent to ``address`` cannot leave this machine."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    match = _ADDRESS.fullmatch(address)
    if match is None:
        return False
    return is_loopback(match["host"].strip("[]"))


def is_loopback(host: str) -> bool:
    """Return whether a host, by its name or its IP address, is this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _plan_channel(
    address: str, settings: ChannelSettings | None, options: _Options
) -> _ChannelPlan:
    if holds_secret(address) or not (len(address) <= 24 or set(address) & set(":./")):
        raise ChannelRefused(
            "the address of the server holds a secret, or is not an address at all; it must be"
            " HOST:PORT (--server or TESSERA_SERVER), and a token belongs in TESSERA_TOKEN"
        )
    if settings is None:
        settings = find_settings(address, os.environ)
    if settings.token:
        require_token("the setting of the token", settings.token)
    find_token = settings.find_token()
    chosen = list(options)
    if settings.authorities:
        if settings.server_name:
            chosen.append(("grpc.ssl_target_name_override", settings.server_name))
        return _ChannelPlan(_make_credentials(settings, find_token), chosen, find_token)
    if settings.certificate is not None:
        raise ChannelRefused(
            "a certificate is sent over TLS only; set TESSERA_CA to the file of the authorities that"
            " signed the server's certificate"
        )
    if find_token is not None:
        if not is_on_this_machine(address):
            raise ChannelRefused(
                f"would send the token in plain text to {address}; set TESSERA_CA to the file of the"
                " authorities that signed the server's certificate, or to `system`"
            )
        chosen = [(key, value) for key, value in chosen if key != NO_PROXY[0]] + [NO_PROXY]
    return _ChannelPlan(None, chosen, find_token)


def _make_credentials(
    settings: ChannelSettings, find_token: Callable[[], str] | None
) -> grpc.ChannelCredentials:
    roots = _read_authorities(settings.authorities)
    chain = key = None
    if settings.certificate is not None and settings.key is not None:
        chain, key = _read_pair(settings.certificate, settings.key)
    credentials = grpc.ssl_channel_credentials(roots, key, chain)
    if find_token is None:
        return credentials

    calls = grpc.metadata_call_credentials(TokenPlugin(find_token), name="tessera-token")
    return grpc.composite_channel_credentials(credentials, calls)


def _read_authorities(authorities: str) -> bytes:
    """Return the certificates to trust."""
    if authorities == SYSTEM:
        return _read_system()
    if CERTIFICATE_START in authorities:
        content, what = authorities.encode(), "the text of the authorities "
    else:
        if holds_secret(authorities):
            raise ChannelRefused("TESSERA_CA holds a secret, but must be the path of a file")
        content, _ = read_bytes(Path(authorities), "the file of authorities (TESSERA_CA)")
        what = f"the file of authorities (TESSERA_CA) {show_path(authorities)}"
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=content.decode("ascii", "replace"))
    except ssl.SSLError:
        raise ChannelRefused(
            f"{what}holds no certificates, or damaged ones; it must be PEM, which begins with"
            f" {CERTIFICATE_START}"
        ) from None
    return content


def _read_system() -> bytes:
    known = ssl.get_default_verify_paths().cafile
    for path in (*filter(None, (known,)), *SYSTEM_FILES):
        if os.path.isfile(path):
            return read_bytes(Path(path), "this machine's file of authorities")[0]
    raise ChannelRefused(
        "this machine has no file of authorities that it trusts; install its certificates, or set"
        " TESSERA_CA to a file of them"
    )


def _read_pair(certificate: Path, key: Path) -> tuple[bytes, bytes]:
    """Return the certificates and the key of a client."""
    chain, _ = read_bytes(certificate, "the certificate (TESSERA_CERTIFICATE)")
    secret, mode = read_bytes(key, "the key (TESSERA_KEY)")
    if mode & OTHERS_RIGHTS:
        raise ChannelRefused(
            f"the key (TESSERA_KEY) {show_path(str(key))}is a secret, but other users can read or change"
            f" it; run chmod 600 {key}"
        )

    def refuse_encrypted() -> str:
        raise ChannelRefused(f"the key (TESSERA_KEY) {show_path(str(key))}is encrypted; decrypt it")

    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_cert_chain(certificate, key, password=refuse_encrypted)
    except (ssl.SSLError, OSError):
        raise ChannelRefused(
            f"the certificate {show_path(str(certificate))}and the key {show_path(str(key))}cannot be used"
            " together; both must be PEM, and the key must belong to the certificate"
        ) from None
    return chain, secret
