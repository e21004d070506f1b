"""Checks of the way to a server, of the server itself, and of its agents."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from tessera.client import (
    CallError,
    ChannelRefused,
    ChannelSettings,
    Client,
    ServerTooOld,
    find_settings,
    is_on_this_machine,
)
from tessera.client.settings import CERTIFICATE_START, SYSTEM
from tessera.formulation.base.clock import SystemClock
from tessera.formulation.base.release import installed_version
from tessera.service.cli.client import CallFailed, connect, explain_failure
from tessera.service.cli.clusters.nodes import NOT_FOR_PROGRAMS, read_nodes
from tessera.service.cli.names import short_name
from tessera.service.cli.render import count_noun, format_span, format_time
from tessera.service.cli.servers.doctoring.checks import Check, CheckResult
from tessera.v1 import access_pb2, clusters_pb2, scheduler_pb2

CLOCK: Final = SystemClock()

REACH_S: Final = 3.0
"""Time limit in seconds of a connection."""

CALL_S: Final = 10.0
"""Time limit in seconds of a call."""

EXPIRES_SOON_S: Final = 14 * 86_400.0
"""Seconds before its end from which a certificate is reported."""

TOKEN_EXPIRES_SOON_S: Final = 3 * 86_400.0

WARN_SKEW_S: Final = 2.0
"""Difference of clocks in seconds from which ages and relative deadlines are visibly wrong."""

FAIL_SKEW_S: Final = 60.0
"""Difference of clocks in seconds from which tokens and certificates may be refused."""

NAMES_SHOWN: Final = 5


def check_server(address: str, cluster: str) -> list[Check]:
    """Return the checks of the way to the server at ``address``, and of ``clusters/{cluster}``."""
    checks = [_check_address(address)]
    if checks[0].result is CheckResult.FAIL:
        return checks
    try:
        settings = find_settings(address, os.environ)
    except ChannelRefused as error:
        return [*checks, Check(name="login", result=CheckResult.FAIL, found=str(error))]
    checks.append(_check_tls(address, settings))
    if settings.certificate is not None:
        checks.append(_check_own_certificate(settings.certificate))
    try:
        with connect(address) as client:
            checks += _check_release(client)
            checks.append(_check_caller(client, settings))
            checks += _check_cluster(client, cluster)
    except CallFailed as error:
        checks.append(Check(name="server", result=CheckResult.FAIL, found=str(error)))
    return checks


def _check_address(address: str) -> Check:
    """Try to connect."""
    host, _, port = address.rpartition(":")
    if address.startswith(("unix:", "unix-abstract:")):
        return Check(name="address", result=CheckResult.SKIPPED, found=f"{address} is a socket")
    if not host or not port.isdecimal():
        return Check(
            name="address",
            result=CheckResult.FAIL,
            found=f"{address} is not HOST:PORT",
            advice="correct --server or TESSERA_SERVER",
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), REACH_S):
            return Check(
                name="address", result=CheckResult.OK, found=f"{address} accepts connections"
            )
    except (OSError, OverflowError) as error:
        here = is_on_this_machine(address)
        start = "start a server with `tessera up` or `tessera serve`, or name another one with"
        check = "check the address, firewalls and that the server runs; name another one with"
        return Check(
            name="address",
            result=CheckResult.FAIL,
            found=f"{address} cannot be reached: {error}",
            advice=f"{start if here else check} --server or TESSERA_SERVER",
        )


def _check_tls(address: str, settings: ChannelSettings) -> Check:
    """Make a handshake as the command line does, and read the end of the server's certificate."""
    if not settings.authorities:
        if is_on_this_machine(address):
            return Check(
                name="tls", result=CheckResult.OK, found="plain text, on this machine only"
            )
        return Check(
            name="tls",
            result=CheckResult.WARN,
            found="plain text: everybody on the network can read and change calls",
            advice="start the server with --tls, and set TESSERA_CA or log in with --ca",
        )
    host, _, port = address.rpartition(":")
    try:
        context = _context_of(settings)
        with (
            socket.create_connection((host.strip("[]"), int(port)), REACH_S) as connection,
            context.wrap_socket(
                connection, server_hostname=settings.server_name or host.strip("[]")
            ) as secured,
        ):
            certificate = secured.getpeercert() or {}
            ends_s = ssl.cert_time_to_seconds(str(certificate.get("notAfter")))
    except (OSError, ValueError) as error:  # an ssl.SSLError is an OSError
        return Check(
            name="tls",
            result=CheckResult.FAIL,
            found=f"no TLS with {address}: {error}",
            advice="set TESSERA_CA to the file of the server's authorities, and call the server by a"
            " name of its certificate",
        )
    return _check_end("tls", "the server's certificate", ends_s, "`tessera ca server` renews it")


def _context_of(settings: ChannelSettings) -> ssl.SSLContext:
    authorities = settings.authorities
    if authorities == SYSTEM:
        context = ssl.create_default_context()
    elif CERTIFICATE_START in authorities:
        context = ssl.create_default_context(cadata=authorities)
    else:
        context = ssl.create_default_context(cafile=authorities)
    context.set_alpn_protocols(["h2"])
    if settings.certificate is not None:
        context.load_cert_chain(settings.certificate, settings.key)
    return context


def _check_own_certificate(path: Path) -> Check:
    """Read the end of the caller's certificate, if a library for it is installed."""
    try:
        from cryptography import x509  # noqa: PLC0415 - the extra `secure` has it
    except ImportError:
        return Check(
            name="certificate",
            result=CheckResult.SKIPPED,
            found=f"{path} was not read, because the library cryptography is not installed",
        )
    try:
        ends = x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
    except (OSError, ValueError) as error:
        return Check(
            name="certificate",
            result=CheckResult.FAIL,
            found=f"{path} cannot be read: {error}",
            advice="set TESSERA_CERTIFICATE to a certificate (PEM)",
        )
    return _check_end("certificate", "your certificate", ends.timestamp(), "ask for another one")


def _check_end(name: str, what: str, ends_s: float, advice: str) -> Check:
    """Return whether a certificate is valid for some time, by the seconds since 1970 of its end."""
    left_s = ends_s - CLOCK.wall_s()
    when = datetime.fromtimestamp(ends_s, UTC).strftime("%Y-%m-%d")
    if left_s <= 0:
        return Check(
            name=name, result=CheckResult.FAIL, found=f"{what} ended on {when}", advice=advice
        )
    result = CheckResult.WARN if left_s < EXPIRES_SOON_S else CheckResult.OK
    return Check(
        name=name,
        result=result,
        found=f"{what} is valid until {when}",
        advice=advice if result is CheckResult.WARN else "",
    )


def _check_release(client: Client) -> Iterator[Check]:
    """Compare releases, schemas and clocks."""
    before_s = CLOCK.wall_s()
    try:
        server = client.call(client.stubs.access.GetServer, access_pb2.GetServerRequest(), CALL_S)
    except ServerTooOld:
        yield Check(
            name="release",
            result=CheckResult.WARN,
            found="the server is older than this command",
            advice="upgrade the server to the same release",
        )
        return
    after_s = CLOCK.wall_s()
    ours, same = installed_version(), server.release == installed_version()
    yield Check(
        name="release",
        result=CheckResult.OK if same else CheckResult.WARN,
        found=f"server {server.release}, client {ours}; schema {server.schema}",
        advice="" if same else "install the same release on both",
    )
    yield _check_clock(server.time.ToNanoseconds() / 1e9, before_s, after_s)


def _check_clock(server_s: float, before_s: float, after_s: float) -> Check:
    """Compare the server's clock with ours before and after the call."""
    skew_s = max(server_s - after_s, before_s - server_s, 0.0)
    fast = "ahead of" if server_s > after_s else "behind"
    if skew_s < WARN_SKEW_S:
        return Check(name="clock", result=CheckResult.OK, found="the clocks agree")
    return Check(
        name="clock",
        result=CheckResult.FAIL if skew_s >= FAIL_SKEW_S else CheckResult.WARN,
        found=f"the server's clock is {skew_s:.1f} s {fast} this machine's",
        advice="synchronise both clocks (NTP)",
    )


def _check_caller(client: Client, settings: ChannelSettings) -> Check:
    """Ask the server who the caller is."""
    caller = client.call(client.stubs.access.GetCaller, access_pb2.GetCallerRequest(), CALL_S)
    if not caller.verified:
        unused = "; your token is not needed" if settings.find_token() else ""
        return Check(
            name="token",
            result=CheckResult.OK,
            found=f"the server asks nobody who they are{unused}",
        )
    found = f"{caller.subject}, {caller.role}"
    if not caller.HasField("expire_time"):
        return Check(name="token", result=CheckResult.OK, found=f"{found}; it does not expire")
    left_s = caller.expire_time.ToNanoseconds() / 1e9 - CLOCK.wall_s()
    renewed = settings.renew_token is not None
    soon = left_s < TOKEN_EXPIRES_SOON_S and not renewed
    return Check(
        name="token",
        result=CheckResult.WARN if soon else CheckResult.OK,
        found=f"{found}; expires {format_time(caller.expire_time)} (in {format_span(left_s)})",
        advice="log in again, or ask for another token" if soon else "",
    )


def _check_cluster(client: Client, cluster: str) -> Iterator[Check]:
    """Check the cluster, the heartbeats of its agents and its last round."""
    request = clusters_pb2.GetClusterRequest(name=cluster)
    try:
        stored = client.call(client.stubs.clusters.GetCluster, request, CALL_S)
    except CallError as error:
        problem = str(explain_failure(error, client))
        yield Check(name="cluster", result=CheckResult.FAIL, found=problem)
        return
    yield Check(
        name="cluster",
        result=CheckResult.OK if stored.gpus else CheckResult.WARN,
        found=f"{short_name(cluster)}: {count_noun(stored.nodes, 'node')},"
        f" {count_noun(stored.gpus, 'GPU')}",
        advice="" if stored.gpus else "add nodes with `tessera cluster apply -f FILE`",
    )
    nodes = read_nodes(client, cluster)
    if nodes:
        yield _check_agents(nodes)
        yield _check_faults(nodes)
        yield _check_drains(nodes)
        yield _check_runtimes(nodes)
    if stored.last_round:
        yield _check_round(client, stored.last_round)


def _check_agents(nodes: Sequence[clusters_pb2.Node]) -> Check:
    """Check that the agent of each node is heard."""
    silent = [n for n in nodes if n.state == clusters_pb2.Node.UNREACHABLE]
    if not silent:
        longest_s = max(node.silent_s for node in nodes)
        return Check(
            name="agents",
            result=CheckResult.OK,
            found=f"{count_noun(len(nodes), 'node')}; the longest silence is {longest_s:.0f} s",
        )
    never = sum(node.silent_s < 0 for node in silent)
    return Check(
        name="agents",
        result=CheckResult.FAIL if len(silent) == len(nodes) else CheckResult.WARN,
        found=f"{count_noun(len(silent), 'node')} of {len(nodes):,} without an agent"
        f" ({never:,} never had one): {_some_names(silent)}",
        advice="start `tessera-agent` there, and read its log",
    )


def _check_faults(nodes: Sequence[clusters_pb2.Node]) -> Check:
    """Check that no agent reports a fault."""
    faulty = [node for node in nodes if node.faults]
    if not faulty:
        return Check(name="faults", result=CheckResult.OK, found="no agent reports a fault")
    return Check(
        name="faults",
        result=CheckResult.WARN,
        found=f"{count_noun(len(faulty), 'node')} with faults: {_some_names(faulty)}",
        advice="see `tessera nodes -o wide`",
    )


def _check_drains(nodes: Sequence[clusters_pb2.Node]) -> Check:
    """Check that no node is drained, e.g. because programs could not be started there."""
    drains = [node for node in nodes if node.state == clusters_pb2.Node.DRAINING]
    if not drains:
        return Check(name="drains", result=CheckResult.OK, found="no node is drained")
    node = drains[0]
    return Check(
        name="drains",
        result=CheckResult.WARN,
        found=f"{count_noun(len(drains), 'node')} drained: {_some_names(drains)}; {short_name(node.name)}"
        f" by {node.drained_by or 'an operator'}: {node.drain_reason or 'no reason was given'}",
        advice="see `tessera nodes -o wide`; `tessera undrain NODE` lets rounds use a node again",
    )


def _check_runtimes(nodes: Sequence[clusters_pb2.Node]) -> Check:
    """Return the runtimes that nodes offer, and why no node offers the others."""
    offers = [offer for node in nodes for offer in node.runtimes]
    if not offers:
        return Check(
            name="runtimes",
            result=CheckResult.SKIPPED,
            found="no agent says which runtimes it can start",
        )
    texts = []
    for runtime in sorted({offer.runtime for offer in offers} - set(NOT_FOR_PROGRAMS)):
        answers = [offer for offer in offers if offer.runtime == runtime]
        versions = [offer.version for offer in answers if not offer.problem]
        details = ", ".join(sorted(set(filter(None, versions)))) or answers[0].problem
        number = f"on {count_noun(len(versions), 'node')}" if versions else "on no node"
        texts.append(f"{runtime} {number}{f' ({details})' if details else ''}")
    return Check(
        name="runtimes",
        result=CheckResult.OK,
        found="; ".join(texts),
        advice="install a framework for the interpreter of an agent's --python, and it is offered",
    )


def _check_round(client: Client, name: str) -> Check:
    """Check that the last round was committed."""
    request = scheduler_pb2.GetRoundRequest(name=name, summary_only=True)
    last = client.call(client.stubs.scheduler.GetRound, request, CALL_S)
    refused = last.outcome == "refused"
    return Check(
        name="rounds",
        result=CheckResult.FAIL if refused else CheckResult.OK,
        found=f"round {short_name(name)}, {format_time(last.create_time)}: {last.outcome}",
        advice=f"report it with `tessera replay {short_name(name)} --save-snapshot FILE`"
        if refused
        else "",
    )


def _some_names(nodes: Sequence[clusters_pb2.Node]) -> str:
    more = ", ..." if len(nodes) > NAMES_SHOWN else ""
    return ", ".join(short_name(node.name) for node in nodes[:NAMES_SHOWN]) + more
