"""The endpoint to which Hugging Face's Trainer reports its progress, without a change of the script.

``KubeflowCallback`` of transformers (as in release 5.23) posts a status to an HTTPS server that three
variables name. This is such a server, on the loopback interface, with a thread and an event loop of
its own. Programs of others may call it. Sizes, numbers and times of their requests are bounded, and
nothing that they send reaches more than one request.

Only the standard library is needed.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

MAX_HEAD_BYTES: Final = 16_384
MAX_BODY_BYTES: Final = 65_536
MAX_METRICS: Final = 512
MAX_METRIC_CHARACTERS: Final = 256
MAX_CONNECTIONS: Final = 32
"""Open connections. The oldest one is closed for a new one: a report takes milliseconds."""

REQUEST_S: Final = 5.0
"""Seconds of a connection, its handshake included. The callback itself waits as long."""

MAX_COUNT: Final = 10**15
"""The bound above which numbers of iterations mean nothing."""

FULL_S: Final = 0.1
"""Seconds until the next connection is accepted if none could be, e.g. for lack of descriptors."""

Accept = Callable[[int, float | None, int | None], None]
"""A receiver of iterations done, the loss or None, and all iterations or None."""


class BadRequest(ValueError):
    """A request that is answered with an HTTP status and a sentence."""

    def __init__(self, status: str, problem: str) -> None:
        super().__init__(problem)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerReport:
    """A status of a Trainer. What it does not say is None.

    ``percent`` is 100 once the Trainer ends, even if it was stopped early. So it says nothing about
    the iterations that are done.
    """

    iterations: int | None = None
    total: int | None = None
    loss: float | None = None
    percent: int | None = None
    remaining_s: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


def read_report(body: bytes) -> TrainerReport:
    """Return the report of a request's body. Unknown fields are left out.

    Raises:
        BadRequest: it is not the JSON that KubeflowCallback sends.
    """
    try:
        plain = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest("400 Bad Request", "the body is not JSON") from error
    status = plain.get("trainerStatus") if isinstance(plain, dict) else None
    if not isinstance(status, dict):
        raise BadRequest("400 Bad Request", "the object trainerStatus is missing")
    metrics = _read_metrics(status.get("metrics", []))
    loss = metrics.get("loss", metrics.get("train_loss", math.nan))
    return TrainerReport(
        iterations=_read_steps(metrics, "current_step"),
        total=_read_steps(metrics, "total_steps"),
        loss=loss if math.isfinite(loss) else None,
        percent=_read_count(status, "progressPercentage", 100),
        remaining_s=_read_count(status, "estimatedRemainingSeconds", MAX_COUNT),
        metrics=metrics,
    )


def _read_metrics(plain: object) -> dict[str, float]:
    """Return the metrics that are numbers. The callback sends all values as texts."""
    if not isinstance(plain, list) or len(plain) > MAX_METRICS:
        raise BadRequest("400 Bad Request", f"metrics must be at most {MAX_METRICS}")
    metrics: dict[str, float] = {}
    for metric in plain:
        name, value = _read_text(metric, "name"), _read_text(metric, "value")
        try:
            metrics[name] = float(value)
        except ValueError:
            continue  # a text, which no field of a report is
    return metrics


def _read_text(metric: object, name: str) -> str:
    text = metric.get(name) if isinstance(metric, dict) else None
    if not isinstance(text, str) or len(text) > MAX_METRIC_CHARACTERS:
        raise BadRequest("400 Bad Request", f"a metric needs a {name}, as a short text")
    return text


def _read_steps(metrics: Mapping[str, float], name: str) -> int | None:
    """Return a metric that counts steps, or None if it is missing or -1, as for unknown totals."""
    value = metrics.get(name, -1.0)
    return int(value) if 0 <= value <= MAX_COUNT else None


def _read_count(status: Mapping[str, Any], name: str, most: int) -> int | None:
    value = status.get(name)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= most:
        raise BadRequest("400 Bad Request", f"{name} must be a whole number from 0 to {most}")
    return value


class TrainerEndpoint:
    """An HTTPS server in a thread, for the reports of one job's Trainer.

    ``accept`` is called in that thread, and must be quick. It is called only for reports that say
    how many iterations are done.
    """

    def __init__(
        self, *, certificate: str, key: str, token: str, path: str, accept: Accept
    ) -> None:
        """Read the files of the certificate and its key. Raises OSError, ssl.SSLError.

        Reports to ``path`` that have the ``token`` count.
        """
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate, key)
        self._token, self._path, self._accept = token, path, accept
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._note_problem)
        self._listener: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="trainer-endpoint", daemon=True)
        self._requests: dict[asyncio.Task[None], None] = {}  # the oldest first
        self.remark = ""
        """The last problem that was not a client's, or ""."""

    def start(self, listener: socket.socket) -> None:
        """Serve the connections of ``listener``, which does not block, and close it at the end."""
        self._listener = listener
        work = self._accept_connections(listener)
        self._accepting = self._loop.create_task(work)  # kept from collection
        self._thread.start()

    def close(self) -> None:
        """End the thread and all connections. Call it at most once, after ``start``."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        if self._listener is not None:
            self._listener.close()
        self._loop.close()

    async def _accept_connections(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(listener)
            except OSError as error:
                self.remark = f"the endpoint of Trainer cannot accept a connection: {error}"
                await asyncio.sleep(FULL_S)
                continue
            if len(self._requests) >= MAX_CONNECTIONS:
                oldest = next(iter(self._requests))
                del self._requests[oldest]
                oldest.cancel()
            task = self._loop.create_task(self._serve(connection))
            self._requests[task] = None
            task.add_done_callback(partial(self._forget, connection))
            await asyncio.sleep(0)  # let others work, however fast connections come in

    def _forget(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        connection.close()
        self._requests.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.remark = f"a report of Trainer was lost: {type(error).__name__}: {error}"

    def _note_problem(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Keep asyncio from writing about clients that break off."""
        error = context.get("exception")
        if not isinstance(error, OSError):  # ssl.SSLError is one
            self.remark = str(context.get("message", ""))[:200]

    async def _serve(self, connection: socket.socket) -> None:
        """Answer the one request of a connection."""
        reader = asyncio.StreamReader(limit=MAX_HEAD_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport: asyncio.BaseTransport | None = None
        try:
            async with asyncio.timeout(REQUEST_S):
                transport, _ = await self._loop.connect_accepted_socket(
                    lambda: protocol,
                    connection,
                    ssl=self._context,
                    ssl_handshake_timeout=REQUEST_S,
                )
                writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
                status, text = await self._answer(reader)
                writer.write(_response(status, text))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, EOFError):
            pass  # the client broke off, was too slow, or does not speak TLS
        finally:
            if isinstance(transport, asyncio.WriteTransport):
                transport.abort()

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[str, str]:
        """Return the status and the text with which a request is answered.

        A body of an allowed size is read even if the request is refused: a client that is still
        sending when its connection is closed never sees the answer.
        """
        try:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.LimitOverrunError as error:
                raise BadRequest("431 Request Header Fields Too Large", "too long") from error
            first, headers = _read_head(head.decode("latin-1"))
            size = headers.get("content-length", "")
            body = await reader.readexactly(int(size)) if _is_allowed(size) else b""
            self._check(first, headers)
            self._take(read_report(body))
        except BadRequest as refused:
            return refused.status, str(refused)
        return "200 OK", ""

    def _check(self, first: str, headers: Mapping[str, str]) -> None:
        """Refuse a request of another form, or from another client. Raises BadRequest."""
        proof = headers.get("authorization", "").encode("latin-1")
        if not hmac.compare_digest(proof, f"Bearer {self._token}".encode("latin-1")):
            raise BadRequest("401 Unauthorized", "the token is not the job's")
        method, _, rest = first.partition(" ")
        if rest not in (f"{self._path} HTTP/1.1", f"{self._path} HTTP/1.0"):
            raise BadRequest("404 Not Found", "the path is not the job's")
        if method != "POST":
            raise BadRequest("405 Method Not Allowed", "reports are posted")
        if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise BadRequest("415 Unsupported Media Type", "reports are JSON")
        size = headers.get("content-length", "")
        if not _is_count(size) or "transfer-encoding" in headers:
            raise BadRequest("411 Length Required", "the length of the body is missing")
        if not _is_allowed(size):
            raise BadRequest("413 Content Too Large", f"at most {MAX_BODY_BYTES} bytes are read")

    def _take(self, report: TrainerReport) -> None:
        if report.iterations is not None:
            self._accept(report.iterations, report.loss, report.total)


def _read_head(head: str) -> tuple[str, dict[str, str]]:
    """Return a request's first line, and its headers by name in lower case. Raises BadRequest."""
    first, *lines = head.removesuffix("\r\n\r\n").split("\r\n")
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        if name.lower() in headers:
            raise BadRequest("400 Bad Request", f"the header {name[:80]} occurs twice")
        headers[name.lower()] = value.strip()
    return first, headers


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def _is_allowed(size: str) -> bool:
    """Return whether a body of this size is read."""
    digits = len(str(MAX_BODY_BYTES))
    return _is_count(size) and len(size) <= digits and int(size) <= MAX_BODY_BYTES


def _response(status: str, text: str) -> bytes:
    body = f"{text}\n".encode() if text else b""
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + body
