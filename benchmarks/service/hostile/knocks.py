"""Attacks on a port with TLS by callers who have neither a token nor a certificate."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from tessera.benchmarks.service.hostile.caller import AttackOrders, Caller, call_from_threads
from tessera.benchmarks.service.hostile.requests import (
    NEIGHBOUR_CLUSTER,
    submit_request,
)
from tessera.benchmarks.service.hostile.tally import LEFT_CODE, CallTally, merge_tallies
from tessera.benchmarks.service.hostile.wire import PREFACE, pack_settings
from tessera.formulation.secrets import USER_PREFIX
from tessera.service.rpc.access import make_token

CONNECT_S: Final = 10.0
"""Longest time in seconds of a connection attempt."""

HALF_OPEN_SOCKETS: Final = 2_000
KNOCKS: Final = 200_000
"""Largest numbers of connections of the full attack."""

READ_BYTES: Final = 65_536

LOOK_EVERY_S: Final = 0.2

CLIENT_HELLO_START: Final = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
"""The start of a handshake: a record of 512 bytes with a ClientHello of 508."""

Opening = Callable[[int], bytes]
"""A function that returns the bytes that a connection sends, by the number of the connection."""


def send_plaintext(attack: AttackOrders) -> CallTally:
    """Speak HTTP/2 or HTTP/1.1 without TLS, and wait until the server hangs up."""
    openings = (PREFACE + pack_settings(65_535), b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    return _knock(attack, "plaintext", lambda k: openings[k % len(openings)])


def send_garbage(attack: AttackOrders) -> CallTally:
    """Send random bytes, of which half pose as the start of a handshake."""

    def opening(k: int) -> bytes:
        noise = os.urandom(600)
        return noise if k % 2 else CLIENT_HELLO_START + noise

    return _knock(attack, "garbage", opening)


def leave_handshakes_open(attack: AttackOrders) -> CallTally:
    """Open connections that never finish their handshake, and replace those that are closed."""
    number = attack.scaled(HALF_OPEN_SOCKETS, 20)
    starts = (b"", CLIENT_HELLO_START[:3], CLIENT_HELLO_START + bytes(100))
    tally = CallTally()
    with contextlib.ExitStack() as left, selectors.DefaultSelector() as closed:
        while not attack.is_over:
            while len(closed.get_map()) < number and not attack.is_over:
                start = starts[attack.next_turn() % len(starts)]
                if (opened := _open(attack, start, tally)) is None:
                    break
                left.callback(opened.close)
                closed.register(opened, selectors.EVENT_READ)
            for key, _ in closed.select(LOOK_EVERY_S):
                closed.unregister(key.fileobj)
                _close(key.fileobj)
                tally.record("half-open", "ENDED_BY_SERVER", 0.0)
        for _ in closed.get_map():
            tally.record("half-open", "OPEN", 0.0)
    return tally


def guess_tokens(attack: AttackOrders) -> CallTally:
    """Call with another unknown token each time."""
    path, size = "/tessera.v1.Jobs/SubmitJobs", attack.scaled(1_000, 10)
    message = submit_request(NEIGHBOUR_CLUSTER, size).SerializeToString()

    def guess(caller: Caller) -> None:
        caller.token = make_token().text(USER_PREFIX)
        caller.call(path, message, timeout_s=60.0)

    return call_from_threads(attack, attack.scaled(32, 4), guess, attack.scaled(200_000, 200))


def _knock(attack: AttackOrders, what: str, opening: Opening) -> CallTally:
    """Open connections from threads, send something, and wait until the server hangs up."""
    threads, most = attack.scaled(64, 4), attack.scaled(KNOCKS, 100)
    tallies = [CallTally() for _ in range(threads)]

    def repeat(tally: CallTally) -> None:
        while not attack.is_over and (turn := attack.next_turn()) < most:
            started_s = time.monotonic()
            code = "REFUSED"
            opened = _open(attack, opening(turn), tally)
            if opened is not None:
                with opened:
                    code = _wait_for_end(attack, opened)
            tally.record(what, code, time.monotonic() - started_s)

    with ThreadPoolExecutor(threads) as pool:
        for repeated in [pool.submit(repeat, tally) for tally in tallies]:
            repeated.result()
    return merge_tallies(tallies)


def _open(attack: AttackOrders, start: bytes, tally: CallTally) -> socket.socket | None:
    """Return a connection on which ``start`` was sent, or None if there can be none."""
    host, _, port = attack.address.rpartition(":")
    try:
        opened = socket.create_connection((host, int(port)), timeout=CONNECT_S)
    except OSError as error:
        tally.record("connection", type(error).__name__, 0.0)
        return None
    with contextlib.suppress(OSError):  # the server hung up
        opened.sendall(start)
    return opened


def _wait_for_end(attack: AttackOrders, opened: socket.socket) -> str:
    """Read until the server hangs up or the attack is over; return which."""
    opened.settimeout(LOOK_EVERY_S)
    while not attack.is_over:
        try:
            if not opened.recv(READ_BYTES):
                return "ENDED_BY_SERVER"
        except TimeoutError:
            continue
        except OSError:
            return "ENDED_BY_SERVER"
    return LEFT_CODE


def _close(opened: object) -> None:
    if isinstance(opened, socket.socket):
        opened.close()


TLS_KINDS: Final[Mapping[str, Callable[[AttackOrders], CallTally]]] = {
    "plaintext": send_plaintext,
    "garbage": send_garbage,
    "half-open": leave_handshakes_open,
    "tokens": guess_tokens,
}
"""The kinds of attacks on a port with TLS by name, in the order in which they are run."""
