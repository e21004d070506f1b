"""An identity provider (OpenID Connect) on loopback, which can fail, rotate keys and be forged."""

from __future__ import annotations

import base64
import functools
import json
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any, Final, cast

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from tests.support.patience import PATIENCE_S

NOW_S: Final = 1_900_000_000.0
"""The time at which the provider's tokens begin, unless a test gives another one."""

AUDIENCE: Final = "tessera"
CLIENT_ID: Final = "tessera-cli"
DEVICE_GRANT: Final = "urn:ietf:params:oauth:grant-type:device_code"

_ALGORITHMS: Final = {name: jwt.get_algorithm_by_name(name) for name in ("RS256", "ES256", "EdDSA")}


@dataclass(frozen=True)
class ProviderKey:
    """A private key of the provider with its id."""

    id: str
    private: Any
    algorithm: str = "RS256"

    def as_jwk(self) -> dict[str, Any]:
        """Return the public key as the provider publishes it."""
        family = {"R": "RS256", "P": "RS256", "E": "ES256"}[self.algorithm[0]]
        family = "EdDSA" if self.algorithm == "EdDSA" else family
        jwk = cast(Any, _ALGORITHMS[family]).to_jwk(self.private.public_key(), as_dict=True)
        names = {"kid": self.id} if self.id else {}
        return {**jwk, "use": "sig", "alg": self.algorithm, **names}

    def public_pem(self) -> bytes:
        public: bytes = self.private.public_key().public_bytes(
            Encoding.PEM, PublicFormat.SubjectPublicKeyInfo
        )
        return public


@functools.cache
def make_private_key(algorithm: str = "RS256", number: int = 0, bits: int = 2048) -> Any:
    """Return a private key, the same one for the same arguments."""
    match algorithm:
        case "ES256":
            return ec.generate_private_key(ec.SECP256R1())
        case "ES384":
            return ec.generate_private_key(ec.SECP384R1())
        case "EdDSA":
            return ed25519.Ed25519PrivateKey.generate()
    return rsa.generate_private_key(public_exponent=65537, key_size=bits)


@functools.cache
def make_key(key_id: str = "k1", algorithm: str = "RS256", number: int = 0) -> ProviderKey:
    """Return a key. Another ``number`` gives another key with the same id."""
    return ProviderKey(key_id, make_private_key(algorithm, number), algorithm)


class IdentityProvider:
    """A provider whose behaviour a test sets. Its attributes may be changed while it serves."""

    def __init__(self) -> None:
        self.keys: list[ProviderKey] = [make_key()]
        self.requests: list[str] = []  # paths, in the order in which they came
        self.forms: list[dict[str, str]] = []  # what was posted
        self.bodies: dict[str, bytes] = {}  # answers to paths instead of the true ones
        self.statuses: dict[str, int] = {}
        self.redirects: dict[str, str] = {}
        self.discovery: dict[str, Any] = {}  # changes to the description; None removes a key
        self.polls: list[str] = []  # errors of the next polls; the login is approved after them
        self.claims: dict[str, Any] = {}  # of tokens that are given to logins
        self.interval_s: float | None = 1.0
        self.expires_in_s: float = 600.0
        self.lifetime_s: float = 300.0
        self.has_refresh_tokens = True
        self.wall_s: Callable[[], float] = lambda: NOW_S
        self._refresh_tokens: set[str] = set()
        self._issued = 0
        self._open = threading.Event()
        self._open.set()
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None
        self.port = 0

    @property
    def issuer(self) -> str:
        """Return the provider's name, which is its address."""
        return f"http://127.0.0.1:{self.port}"

    def switch_on(self) -> None:
        """Listen, on the previous port if there was one."""
        server = _HttpServer(("127.0.0.1", self.port), _Requests)
        server.provider = self
        self._server, self.port = server, server.server_address[1]
        self._thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        self._thread.start()

    def switch_off(self) -> None:
        """Refuse connections."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(PATIENCE_S)
            self._server = None

    def hold_answers(self) -> None:
        """Let requests wait."""
        self._open.clear()

    def release_answers(self) -> None:
        """Answer the requests that wait, and later ones."""
        self._open.set()

    def rotate_keys(self, key_id: str, *, keep_old: bool = False) -> ProviderKey:
        """Sign with a new key from now on; return it."""
        key = make_key(key_id, number=len(key_id) + len(self.requests))
        self.keys = [key, *(self.keys if keep_old else [])]
        return key

    def count_requests(self, path: str) -> int:
        return self.requests.count(path)

    def make_token(
        self,
        key: ProviderKey | None = None,
        algorithm: str = "",
        headers: Mapping[str, Any] = MappingProxyType({}),
        **claims: Any,
    ) -> str:
        """Return a token that is valid unless ``claims`` differ. A claim None is left out."""
        key = key or self.keys[0]
        values = self.usual_claims() | claims
        names = {"kid": key.id} if key.id else {}
        return jwt.encode(
            {name: value for name, value in values.items() if value is not None},
            key.private,
            algorithm or key.algorithm,
            {**names, **headers},
        )

    def usual_claims(self) -> dict[str, Any]:
        now_s = int(self.wall_s())
        return {
            "iss": self.issuer,
            "aud": AUDIENCE,
            "sub": "ada",
            "iat": now_s,
            "exp": now_s + int(self.lifetime_s),
            "roles": ["user"],
            "tenants": ["vision"],
        }

    def describe(self) -> dict[str, Any]:
        """Return the provider's openid-configuration."""
        usual = {
            "issuer": self.issuer,
            "jwks_uri": f"{self.issuer}/keys",
            "device_authorization_endpoint": f"{self.issuer}/device",
            "token_endpoint": f"{self.issuer}/token",
            "revocation_endpoint": f"{self.issuer}/revoke",
        }
        return {k: v for k, v in (usual | self.discovery).items() if v is not None}

    def answer(self, path: str, form: dict[str, str]) -> tuple[int, bytes]:
        """Return the status and the body of an answer."""
        self.requests.append(path)
        if form:
            self.forms.append(form)
        if not self._open.wait(PATIENCE_S):
            raise TimeoutError("the test has not released the answers")
        if path in self.bodies:
            return self.statuses.get(path, 200), self.bodies[path]
        if path in self.statuses:
            return self.statuses[path], b"{}"
        status, document = self._document(path, form)
        return status, json.dumps(document).encode()

    def _document(self, path: str, form: dict[str, str]) -> tuple[int, dict[str, Any]]:
        match path:
            case "/.well-known/openid-configuration":
                return 200, self.describe()
            case "/keys":
                return 200, {"keys": [key.as_jwk() for key in self.keys]}
            case "/device":
                return 200, self._begin_login()
            case "/revoke":
                self._refresh_tokens.discard(form["token"])
                return 200, {}
            case "/token" if form.get("grant_type") == "refresh_token":
                return self._refresh(form)
            case "/token":
                return self._poll(form)
        return 404, {"error": "not_found"}

    def _begin_login(self) -> dict[str, Any]:
        interval = {} if self.interval_s is None else {"interval": self.interval_s}
        return {
            "device_code": "the-device-code",
            "user_code": "WDJB-MJHT",
            "verification_uri": f"{self.issuer}/go",
            "verification_uri_complete": f"{self.issuer}/go?user_code=WDJB-MJHT",
            "expires_in": self.expires_in_s,
            **interval,
        }

    def _poll(self, form: dict[str, str]) -> tuple[int, dict[str, Any]]:
        is_right = form.get("grant_type") == DEVICE_GRANT and form.get("client_id") == CLIENT_ID
        if not is_right or form.get("device_code") != "the-device-code":
            return 400, {"error": "invalid_grant"}
        if self.polls:
            return 400, {"error": self.polls.pop(0), "error_description": "described"}
        return 200, self._issue()

    def _refresh(self, form: dict[str, str]) -> tuple[int, dict[str, Any]]:
        if form.get("refresh_token") not in self._refresh_tokens:
            return 400, {"error": "invalid_grant", "error_description": "Session not active"}
        self._refresh_tokens.remove(form["refresh_token"])  # each is good for one use
        return 200, self._issue()

    def _issue(self) -> dict[str, Any]:
        self._issued += 1
        answer = {
            "access_token": self.make_token(jti=f"t{self._issued}", **self.claims),
            "id_token": self.make_token(aud=CLIENT_ID, jti=f"i{self._issued}"),
            "token_type": "Bearer",
            "expires_in": self.lifetime_s,
        }
        if self.has_refresh_tokens:
            refresh = f"refresh-{self._issued}"
            self._refresh_tokens.add(refresh)
            answer["refresh_token"] = refresh
        return answer

    def end_session(self) -> None:
        """Let every refresh token end."""
        self._refresh_tokens.clear()


class _HttpServer(ThreadingHTTPServer):
    """The server of a provider."""

    provider: IdentityProvider
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients of these tests leave in the middle of answers."""


class _Requests(BaseHTTPRequestHandler):
    """The requests to a provider."""

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self._answer(dict(urllib.parse.parse_qsl(raw)))

    def _answer(self, form: dict[str, str]) -> None:
        provider = cast(_HttpServer, self.server).provider
        if (target := provider.redirects.get(self.path)) is not None:
            provider.requests.append(self.path)
            self.send_response(302)
            self.send_header("Location", target)
            self.end_headers()
            return
        status, body = provider.answer(self.path, form)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def running_provider() -> Iterator[IdentityProvider]:
    """Run a provider for the length of the block."""
    provider = IdentityProvider()
    provider.switch_on()
    try:
        yield provider
    finally:
        provider.release_answers()
        provider.switch_off()


def encode_segments(header: Mapping[str, Any], claims: Any, signature: bytes = b"") -> str:
    """Return a token with exactly these parts, which no library would make."""
    parts = (json.dumps(header).encode(), json.dumps(claims).encode(), signature)
    return join_segments(*parts)


def sign_segments(header: Mapping[str, Any], claims: Any, key: Any, algorithm: str) -> str:
    """Return a token with exactly these parts and their signature."""
    unsigned = encode_segments(header, claims).rpartition(".")[0]
    signature = jwt.get_algorithm_by_name(algorithm).sign(unsigned.encode(), key)
    return f"{unsigned}.{join_segments(signature)}"


def join_segments(*parts: bytes) -> str:
    """Return bytes in the form of a token."""
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)
