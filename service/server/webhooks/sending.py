"""One delivery: a POST over HTTPS to a checked address, within a time limit, without redirects."""

from __future__ import annotations

import contextlib
import http
import http.client
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from tessera.formulation.base.errors import InvalidInput, Unavailable
from tessera.formulation.records.webhooks import SIGNATURE_HEADER, Delivery, sign_body, write_body
from tessera.service.server.webhooks.addresses import Endpoint, Network, resolve_endpoint

TIMEOUT_S: Final = 10.0
"""Longest time in seconds of a connection, of a step, and of a whole delivery after its connection."""

MAX_URL_CHARS: Final = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class SendingOptions:
    """The limits that an operator sets: plain HTTP, and networks that are not public.

    ``authorities`` is a file of certificates (PEM) to trust. "" means those of this machine.
    """

    plain_http: bool = False
    networks: Sequence[Network] = ()
    authorities: str = ""
    timeout_s: float = TIMEOUT_S


def check_url(field: str, url: str, options: SendingOptions) -> None:
    """Check a webhook's URL. Its host's address is checked by each delivery. Raises InvalidInput."""
    if len(url) > MAX_URL_CHARS:
        raise InvalidInput(field, f"must have at most {MAX_URL_CHARS:,} characters")
    if not url.isascii() or any(character <= " " or character == "\x7f" for character in url):
        raise InvalidInput(field, "must be ASCII without spaces; write others in %XX form")
    schemes = ("https", "http") if options.plain_http else ("https",)
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InvalidInput(field, f"is not a URL: {error}") from error
    if parts.scheme not in schemes:
        raise InvalidInput(field, "must begin with https://")
    if not parts.hostname or port == 0:
        raise InvalidInput(field, "must name a host, e.g. https://example.com/hook")
    if parts.username is not None or parts.password is not None:
        raise InvalidInput(field, "must have no user and password; check the signature instead")
    if parts.fragment:
        raise InvalidInput(field, "must have no fragment (#...), which is never sent")


class Sender:
    """A sender of deliveries. It is safe to use from any thread."""

    def __init__(self, options: SendingOptions, wall_s: Callable[[], float]) -> None:
        self.options, self._wall_s = options, wall_s
        self._trust = ssl.create_default_context(cafile=options.authorities or None)

    def send(self, url: str, secret: str, delivery: Delivery) -> None:
        """Send an event. Proxies of the environment are not used.

        Raises:
            Unavailable: the address is not allowed, cannot be reached or does not accept the event.
                The message has nothing of what it answered but the status.
        """
        try:
            check_url("url", url, self.options)
        except InvalidInput as error:  # what is allowed has changed since it was registered
            raise Unavailable(str(error)) from error
        parts = urllib.parse.urlsplit(url)
        host, secure = parts.hostname or "", parts.scheme == "https"
        endpoint = resolve_endpoint(
            host, parts.port or (443 if secure else 80), self.options.networks
        )
        body = write_body(delivery)
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "tessera",
            "Tessera-Event": delivery.event,
            "Tessera-Delivery": str(delivery.number),
            SIGNATURE_HEADER: sign_body(secret, body, self._wall_s()),
        }
        target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        connection = _PinnedConnection(
            host, endpoint, self._trust if secure else None, self.options.timeout_s
        )
        try:
            status = connection.post(target, body, headers)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Unavailable(f"the delivery failed: {_cause(error)}") from error
        if 300 <= status < 400:
            raise Unavailable(f"it answered {status}; redirects are not followed: correct the URL")
        if not 200 <= status < 300:
            raise Unavailable(f"it answered {status}; it must answer with a status of 200 to 299")


class _PinnedConnection(http.client.HTTPConnection):
    """A connection to an address that was checked, which is never resolved again.

    The certificate and the header are those of the host's name. With ``trust`` None, there is no TLS.
    """

    def __init__(
        self, host: str, endpoint: Endpoint, trust: ssl.SSLContext | None, timeout_s: float
    ) -> None:
        self.default_port = 443 if trust else 80
        super().__init__(host, endpoint.port, timeout=timeout_s)
        self._endpoint, self._trust, self._limit_s = endpoint, trust, timeout_s
        self._is_late = False

    def connect(self) -> None:
        """Connect to the address."""
        address = (str(self._endpoint.address), self._endpoint.port)
        self.sock = socket.create_connection(address, self._limit_s)

    def post(self, target: str, body: bytes, headers: dict[str, str]) -> int:
        """Send a request, and return the status of the answer, whose body is not read."""
        with contextlib.closing(self):
            self.connect()
            # A server that sends a byte now and then would keep within the limit of each step.
            timer = threading.Timer(self._limit_s, self._give_up)
            timer.daemon = True
            timer.start()
            try:
                if self._trust is not None:
                    self.sock = self._trust.wrap_socket(
                        self.sock, do_handshake_on_connect=False, server_hostname=self.host
                    )
                    self.sock.do_handshake()
                self.request("POST", target, body, headers)
                return self.getresponse().status
            except (OSError, http.client.HTTPException, ValueError):
                if self._is_late:
                    raise TimeoutError("it took too long") from None
                raise
            finally:
                timer.cancel()

    def _give_up(self) -> None:
        """End the connection. It runs in a thread of its own."""
        self._is_late, connected = True, self.sock
        with contextlib.suppress(OSError):  # it is closed already
            if connected is not None:
                socket.socket.shutdown(connected, socket.SHUT_RDWR)  # TLS has nothing to say


def _cause(error: Exception) -> str:
    """Return what went wrong, without anything that the other side has sent."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not valid: {error.verify_message}"
    if isinstance(error, TimeoutError):
        return "it took too long"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return type(error).__name__
