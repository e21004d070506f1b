"""HTTP requests to an identity provider: only HTTPS, with limits of time and size."""

from __future__ import annotations

import http
import http.client
import json
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final

from tessera.client import is_loopback
from tessera.formulation.base.errors import InvalidInput, Unavailable

TIMEOUT_S: Final = 5.0
"""Longest time in seconds of a connection, of a read, and of the whole answer."""

MAX_ANSWER_BYTES: Final = 256 << 10
"""Largest size of an answer. Providers' answers have less than a tenth of this."""

MAX_REDIRECTS: Final = 3
"""Number of redirects of a request that are followed."""

DISCOVERY_PATH: Final = "/.well-known/openid-configuration"

_CHUNK_BYTES: Final = 16 << 10


class ProviderAnswer:
    """An answer of the provider: its HTTP status and its JSON object. Its ``repr`` shows neither."""

    __slots__ = ("document", "status")

    def __init__(self, status: int, document: dict[str, Any]) -> None:
        self.status, self.document = status, document

    def text(self, key: str) -> str:
        """Return the text of a key, or "" if it has no text."""
        value = self.document.get(key)
        return value if isinstance(value, str) else ""

    def number(self, key: str, usual: float) -> float:
        """Return the number of a key, or ``usual`` if it has no positive one."""
        value = self.document.get(key)
        if isinstance(value, str) and value.isdecimal() and len(value) < 16:
            value = int(value)  # some providers send numbers as text
        if isinstance(value, bool) or not isinstance(value, int | float):
            return usual
        return float(value) if 0 < value < 1e12 else usual


class ProviderConnection:
    """Requests to one identity provider.

    ``authorities`` is a file of certificates (PEM) to trust. "" means those of this machine.
    """

    def __init__(self, authorities: str = "", timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        handlers: list[urllib.request.BaseHandler] = [
            _NoRedirects(),
            urllib.request.HTTPSHandler(context=_trust(authorities)),
        ]
        self._remote = urllib.request.build_opener(*handlers)
        # A proxy of the environment is for other machines only.
        self._local = urllib.request.build_opener(*handlers, urllib.request.ProxyHandler({}))

    def get(self, url: str) -> ProviderAnswer:
        """Return the answer to a GET request, whatever its status. Raises Unavailable."""
        return self._send(urllib.request.Request(url, headers=_HEADERS))  # noqa: S310 - checked below

    def post(self, url: str, fields: Mapping[str, str]) -> ProviderAnswer:
        """Return the answer to a form that is posted, whatever its status. Raises Unavailable."""
        form = urllib.parse.urlencode(fields).encode()
        return self._send(urllib.request.Request(url, form, _HEADERS))  # noqa: S310 - checked below

    def discover(self, issuer: str) -> ProviderAnswer:
        """Return the provider's description of itself.

        Raises:
            Unavailable: it has none, or one of another issuer.
        """
        answer = self.get(issuer.rstrip("/") + DISCOVERY_PATH)
        if answer.status != http.HTTPStatus.OK:
            raise Unavailable(
                f"the identity provider answered {answer.status} to {issuer.rstrip('/')}{DISCOVERY_PATH};"
                " check the issuer"
            )
        if answer.document.get("issuer") != issuer:
            raise Unavailable(
                f"the identity provider at {issuer} calls itself by another name; set the issuer to"
                " exactly the `issuer` of its openid-configuration"
            )
        return answer

    def _send(self, request: urllib.request.Request) -> ProviderAnswer:
        limit_s = time.monotonic() + self._timeout_s
        for _ in range(MAX_REDIRECTS + 1):
            answer = self._send_once(request, limit_s)
            if isinstance(answer, ProviderAnswer):
                return answer
            request = _follow(request, answer)
        raise Unavailable(f"{_host(request.full_url)} redirects too often")

    def _send_once(self, request: urllib.request.Request, limit_s: float) -> ProviderAnswer | str:
        """Return the answer, or the address to which it redirects."""
        url = request.full_url
        require_secure(url)
        opener = self._local if _is_loopback(url) else self._remote
        try:
            with opener.open(request, timeout=self._timeout_s) as response:
                return ProviderAnswer(response.status, _read_object(response, url, limit_s))
        except urllib.error.HTTPError as error:
            with error:  # a status of 300 or above has an answer, too
                target = error.headers.get("Location", "")
                if error.code in _REDIRECTS and target:
                    return urllib.parse.urljoin(url, target)
                return ProviderAnswer(error.code, _read_refusal(error, url, limit_s))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Unavailable(f"{_host(url)} cannot be reached: {_cause(error)}") from error


_HEADERS: Final = {"Accept": "application/json", "User-Agent": "tessera"}


_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Redirects as answers, so that they are followed within our limits or not at all."""

    def redirect_request(self, *_: Any) -> None:
        """Follow nothing."""


def _follow(request: urllib.request.Request, target: str) -> urllib.request.Request:
    """Return the request to the address of a redirect. Raises Unavailable: it is not followed."""
    require_secure(target)
    # A form has secrets, and must not reach another place than the one it was meant for.
    if _scheme(target) != _scheme(request.full_url) or request.data is not None:
        raise Unavailable(
            f"{_host(request.full_url)} redirects to another kind of address, which is not followed"
        )
    return urllib.request.Request(target, headers=_HEADERS)  # noqa: S310 - checked above


def require_secure(url: str) -> None:
    """Check that nobody on the network can change what this address answers.

    Raises:
        Unavailable: it is neither HTTPS nor on this machine.
    """
    if not is_secure(url):
        named = _host(url) or "the identity provider"
        raise Unavailable(
            f"{named} must have an https:// address; http:// is allowed on this machine only"
        )


def is_secure(url: str) -> bool:
    """Return whether the address is HTTPS, or plain HTTP on this machine."""
    return bool(_host(url)) and (_scheme(url) == "https" or _is_loopback(url))


def _is_loopback(url: str) -> bool:
    return _scheme(url) == "http" and is_loopback(_host(url))


def _scheme(url: str) -> str:
    return url.partition(":")[0].lower()


def _host(url: str) -> str:
    """Return the host of an address, without a user and a password, or "" if it has none."""
    try:
        return urllib.parse.urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _trust(authorities: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=authorities or None)
    except (OSError, ssl.SSLError) as error:
        if not Path(authorities).is_file():
            raise InvalidInput(
                authorities, "cannot be read; name a file of certificates"
            ) from error
        raise InvalidInput(authorities, "is not a file of certificates (PEM)") from error


def _read_object(response: IO[bytes], url: str, limit_s: float) -> dict[str, Any]:
    """Return the JSON object that an answer contains. Raises Unavailable."""
    text = _read_within(response, url, limit_s)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise Unavailable(f"{_host(url)} answered with something else than a JSON object")
    return document


def _read_refusal(response: IO[bytes], url: str, limit_s: float) -> dict[str, Any]:
    """Return the JSON object of an error, or an empty one if the error is not described so."""
    try:
        return _read_object(response, url, limit_s)
    except (Unavailable, OSError, http.client.HTTPException):
        return {}


def _read_within(response: IO[bytes], url: str, limit_s: float) -> bytes:
    """Return the bytes of an answer. Raises Unavailable: there are too many, or they take too long."""
    chunks: list[bytes] = []
    size = 0
    read = getattr(response, "read1", response.read)  # does not wait for a full chunk
    while chunk := read(_CHUNK_BYTES):
        chunks.append(chunk)
        size += len(chunk)
        if size > MAX_ANSWER_BYTES:
            raise Unavailable(f"{_host(url)} answered with more than {MAX_ANSWER_BYTES:,} bytes")
        if time.monotonic() > limit_s:
            raise Unavailable(f"{_host(url)} took too long to answer")
    return b"".join(chunks)


def _cause(error: Exception) -> str:
    """Return the cause of a failed request in words that fit into a sentence."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({reason.verify_message}); name its authorities"
    if isinstance(reason, TimeoutError):
        return "no answer in time"
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    return str(reason) or type(reason).__name__
