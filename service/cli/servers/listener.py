"""A check of which program listens on an address: none, a Tessera server, or another one."""

from __future__ import annotations

import socket
from enum import Enum
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tessera.client import PLAIN_TEXT, ChannelRefused, ChannelSettings, open_channel
from tessera.formulation.base.errors import InvalidInput
from tessera.service.cli.client import CallFailed, Exit
from tessera.service.cli.options import DEFAULT_SERVER
from tessera.service.server.rpc.serving.health import INSTANCE_KEY
from tessera.v1 import scheduler_pb2

CONNECT_S: Final = 1.0
ANSWER_S: Final = 2.0
"""Seconds that a program on the address may take to identify itself as a Tessera server."""

SERVICE: Final = scheduler_pb2.DESCRIPTOR.services_by_name["Scheduler"].full_name
"""A service that only a Tessera server has."""


class Health(Enum):
    """A server's answer to a health check."""

    SILENT = "silent"  # no server answers yet
    STARTING = "starting"  # the server answers, but its database is not ready
    SERVING = "serving"


def address_of(listen: str) -> str:
    """Return ``listen`` with a port. For port 0, choose one that was free a moment ago."""
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdecimal():
        raise InvalidInput("--listen", f"must be HOST:PORT, e.g. {DEFAULT_SERVER}, not {listen!r}")
    if int(port):
        return listen
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}"


def require_free(address: str) -> None:
    """Check that no program listens on ``address``.

    Raises:
        CallFailed: a Tessera server or another program does. The message says what to do.
        InvalidInput: the host is unknown.
    """
    if not _accepts(address):
        return
    if _is_tessera(address):
        raise CallFailed(
            f"another Tessera server listens on {address}; it was not changed. Use that server, stop it, or"
            " start a second one with --listen 127.0.0.1:0 (a free port)",
            Exit.REFUSED,
        )
    raise CallFailed(
        f"another program, which is not a Tessera server, listens on {address}; stop it, or choose another"
        " port, e.g. --listen 127.0.0.1:0 (a free port)",
        Exit.REFUSED,
    )


def health_of(address: str, instance: str) -> Health:
    """Return the health of the server that was started as ``instance``.

    Raises:
        CallFailed: another server answers.
    """
    with open_channel(address, PLAIN_TEXT) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        try:
            answer, call = check.with_call(health_pb2.HealthCheckRequest(), timeout=CONNECT_S)
        except grpc.RpcError:
            return Health.SILENT
    reported = {key: value for key, value in call.initial_metadata() or ()}
    if reported.get(INSTANCE_KEY) != instance:
        raise CallFailed(
            f"another server than the one just started answers on {address}; it was not changed. Stop it,"
            " or choose another port with --listen",
            Exit.REFUSED,
        )
    ready = answer.status == health_pb2.HealthCheckResponse.SERVING
    return Health.SERVING if ready else Health.STARTING


def _accepts(address: str) -> bool:
    """Return whether a program accepts connections on any of the host's addresses."""
    host, _, port = address.rpartition(":")
    try:
        addresses = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (socket.gaierror, OverflowError) as error:
        raise InvalidInput("--listen", f"{address}: {error}") from error
    for family, kind, protocol, _, place in addresses:
        with socket.socket(family, kind, protocol) as probe:
            probe.settimeout(CONNECT_S)
            if probe.connect_ex(place) == 0:
                return True
    return False


def _is_tessera(address: str) -> bool:
    """Return whether a Tessera server of any release answers, with TLS or without."""
    return any(_answers_health(address, settings) for settings in (PLAIN_TEXT, None))


def _answers_health(address: str, settings: ChannelSettings | None) -> bool:
    """Return whether a Tessera server answers. Without settings, those of the environment count."""
    request = health_pb2.HealthCheckRequest(service=SERVICE)
    try:
        with open_channel(address, settings) as channel:
            health_pb2_grpc.HealthStub(channel).Check(request, timeout=ANSWER_S)
    except (grpc.RpcError, ChannelRefused):
        return False
    return True
