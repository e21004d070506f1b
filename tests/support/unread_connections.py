"""A minimal HTTP/2 client that makes gRPC calls and does not read their answers.

It opens its streams with a flow-control window of 0 bytes and never widens it, so that a server
cannot send a single message of an answer. It acknowledges settings and pings, so that keepalive
succeeds.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0x0, 0x1, 0x3, 0x4, 0x6, 0x7
ACK = END_STREAM = 0x1
END_HEADERS = 0x4
INITIAL_WINDOW_SIZE: Final = 0x4

MAX_FRAME_BYTES: Final = 16_384
"""The frame size that every peer accepts (RFC 9113, section 4.2)."""


def pack_frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    """Return an HTTP/2 frame."""
    return len(body).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + body


def pack_settings(window_bytes: int) -> bytes:
    """Return a SETTINGS frame that allows ``window_bytes`` for each stream."""
    return pack_frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, window_bytes))


def pack_headers(headers: list[tuple[str, str]]) -> bytes:
    """Return a header block of literals, without index or Huffman codes (RFC 7541, 6.2.2)."""
    return b"".join(b"\x00" + _pack_text(name) + _pack_text(value) for name, value in headers)


def _pack_text(text: str) -> bytes:
    raw = text.encode()
    return _pack_length(len(raw)) + raw


def _pack_length(length: int) -> bytes:
    """Return an integer with a prefix of 7 bits (RFC 7541, section 5.1)."""
    if length < 127:
        return bytes([length])
    rest, packed = length - 127, bytearray([127])
    while rest >= 128:
        packed.append(rest % 128 + 128)
        rest //= 128
    packed.append(rest)
    return bytes(packed)


def pack_message(message: bytes) -> bytes:
    """Return an uncompressed gRPC message with its prefix."""
    return b"\x00" + len(message).to_bytes(4, "big") + message


def split_frames(buffer: bytearray) -> Iterator[tuple[int, int, int, bytes]]:
    """Remove complete frames from the buffer, and yield their kind, flags, stream and body."""
    while len(buffer) >= 9:
        length = int.from_bytes(buffer[:3], "big")
        if len(buffer) < 9 + length:
            return
        kind, flags, stream = struct.unpack(">BBI", buffer[3:9])
        body = bytes(buffer[9 : 9 + length])
        del buffer[: 9 + length]
        yield kind, flags, stream & 0x7FFFFFFF, body


class UnreadConnection:
    """A connection that makes calls without reading the answers."""

    def __init__(self, address: str, *, window_bytes: int = 0, source: str = "") -> None:
        """Connect from the loopback address ``source``, or as the system chooses if it is empty."""
        host, _, port = address.rpartition(":")
        self._address = address
        self._socket = socket.create_connection(
            (host, int(port)), timeout=10, source_address=(source, 0) if source else None
        )
        self._socket.sendall(PREFACE + pack_settings(window_bytes))
        self._socket.setblocking(False)
        self._buffer, self._unsent = bytearray(), bytearray()
        self._next_stream = 1
        self.open_streams: set[int] = set()
        self.begun_streams: set[int] = set()
        """The streams on which the server has begun an answer."""
        self.closed = False
        """Whether the server has ended the connection."""

    def fileno(self) -> int:
        """Return the socket's descriptor, for selectors."""
        return self._socket.fileno()

    def call(self, path: str, message: bytes, *, end: bool = True) -> int:
        """Begin a call and return its stream. Unless ``end`` is set, more messages may follow."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        block = pack_headers(
            [
                (":method", "POST"),
                (":scheme", "http"),
                (":path", path),
                (":authority", self._address),
                ("te", "trailers"),
                ("content-type", "application/grpc"),
            ]
        )
        self._send(pack_frame(HEADERS, END_HEADERS, stream, block))
        self.open_streams.add(stream)
        self.say(stream, message, end=end)
        return stream

    def say(self, stream: int, message: bytes, *, end: bool = False) -> None:
        """Send a message on a stream."""
        body = pack_message(message)
        for start in range(0, len(body), MAX_FRAME_BYTES):
            last = end and start + MAX_FRAME_BYTES >= len(body)
            part = body[start : start + MAX_FRAME_BYTES]
            self._send(pack_frame(DATA, END_STREAM if last else 0, stream, part))

    def pump(self) -> None:
        """Acknowledge settings and pings, and note which streams the server has ended."""
        with contextlib.suppress(BlockingIOError):
            while not self.closed:
                received = self._socket.recv(65_536)
                self.closed = self.closed or not received
                self._buffer += received
        for kind, flags, stream, body in split_frames(self._buffer):
            if kind == SETTINGS and not flags & ACK:
                self._send(pack_frame(SETTINGS, ACK, 0))
            elif kind == PING and not flags & ACK:
                self._send(pack_frame(PING, ACK, 0, body))
            elif kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
                self.open_streams.discard(stream)
            elif kind == HEADERS:
                self.begun_streams.add(stream)
        self._send(b"")

    def close(self) -> None:
        """Close the connection without notice."""
        self._socket.close()

    def _send(self, raw: bytes) -> None:
        """Send as much as the socket takes now, and keep the rest."""
        self._unsent += raw
        try:
            while self._unsent and not self.closed:
                sent = self._socket.send(self._unsent)
                del self._unsent[:sent]
        except BlockingIOError:
            return
        except OSError:
            self.closed = True
