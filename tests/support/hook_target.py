"""An HTTP server on loopback that takes the deliveries of webhooks, as a user's would."""

from __future__ import annotations

import contextlib
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass(frozen=True)
class TakenDelivery:
    """A request as it arrived."""

    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass
class HookTarget:
    """The target of webhooks: ``status`` is what it answers, and ``taken`` is what it got."""

    url: str = ""
    status: int = 204
    location: str = ""
    silent: bool = False  # it never answers
    trickles: bool = False  # it sends a byte of its answer now and then, without an end
    taken: list[TakenDelivery] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)


@contextmanager
def hook_target(certificate: Path | None = None, key: Path | None = None) -> Iterator[HookTarget]:
    """Run a target inside the block, with TLS if ``certificate`` and ``key`` are given."""
    target = HookTarget()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            target.taken.append(TakenDelivery(self.path, dict(self.headers), body))
            if target.silent:
                target.released.wait()
                return
            if target.trickles:
                with contextlib.suppress(OSError):
                    while not target.released.wait(0.05):
                        self.connection.sendall(b"H")
                return
            self.send_response(target.status)
            if target.location:
                self.send_header("Location", target.location)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    scheme, host = "http", "127.0.0.1"
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        scheme, host = "https", "localhost"
    target.url = f"{scheme}://{host}:{server.server_port}/hook?team=nlp"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield target
    finally:
        target.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
