"""A forwarder of TCP connections on loopback, which gives a caller its own source address.

The server shares its threads between clients, which it distinguishes by their hosts. All
callers of a benchmark are on one host. A caller that must count as a separate client calls through
a forwarder.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Final

CHUNK_BYTES: Final = 65_536


@contextlib.contextmanager
def forward_from(source: str, address: str) -> Iterator[str]:
    """Yield an address whose connections reach ``address`` from the loopback address ``source``."""
    opened: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepting = threading.Thread(
            target=_accept, args=(listener, source, address, opened), daemon=True
        )
        accepting.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()
            for one in opened:
                _end(one)


def _accept(
    listener: socket.socket, source: str, address: str, opened: list[socket.socket]
) -> None:
    host, _, port = address.rpartition(":")
    while True:
        try:
            near, _ = listener.accept()
        except OSError:  # the listener was shut down
            return
        try:
            far = socket.create_connection((host, int(port)), source_address=(source, 0))
        except OSError:  # nothing listens there at the moment
            near.close()
            continue
        opened += [near, far]
        for a, b in ((near, far), (far, near)):
            threading.Thread(target=_copy, args=(a, b), daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copy received bytes until either side ends, and then end both."""
    with contextlib.suppress(OSError):
        while received := source.recv(CHUNK_BYTES):
            target.sendall(received)
    for one in (source, target):
        _end(one)


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
