"""Secrets of Tessera as text: their form, their hashes, and texts without them."""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass
from typing import Final

from tessera.formulation.errors import InvalidInput

USER_PREFIX: Final = "tessera_token"
JOIN_PREFIX: Final = "tessera_join"
HOOK_PREFIX: Final = "tessera_hook"
"""The beginnings of users' tokens, of join tokens, and of the secrets of webhooks."""

HIDDEN: Final = "***"

_RANDOM: Final = r"[A-Za-z0-9_-]{43}"  # 32 random bytes in URL-safe base64
_TOKEN: Final = re.compile(rf"({USER_PREFIX}|{JOIN_PREFIX})_([a-z0-9]{{12}})_({_RANDOM})")
_SECRETS: Final = re.compile(
    r"tessera_(?:token|join|hook)_[A-Za-z0-9_-]{8,}"  # ours, whole or cut short
    r"|eyJ[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*){1,4}"  # JSON web tokens
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|(?<=[?&]password=)[^&\s]+|(?<=[?&]sslpassword=)[^&\s]+"  # a password in a URL's query
    r"|(?<=://)([^/\s:@]*):[^/\s@]+(?=@)"  # a password in a URL
)
_SECRET_VARIABLE: Final = re.compile(
    r"(?:^|_)(?:TOKEN|PASSWORD|PASSWD|SECRET|CREDENTIALS?|(?:API|ACCESS|SECRET|PRIVATE)_?KEY)$",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class SecretToken:
    """The parts of a token's text: ``{prefix}_{id}_{secret}``. Its ``repr`` shows no secret."""

    prefix: str
    id: str
    secret_hash: bytes

    def matches(self, stored_hash: bytes) -> bool:
        """Return whether the secret is the one with this hash, in a time that tells nothing."""
        return hmac.compare_digest(self.secret_hash, stored_hash)


def hash_secret(secret: str) -> bytes:
    """Return the SHA-256 of a secret. Secrets are random, so no salt or stretching is needed."""
    return hashlib.sha256(secret.encode()).digest()


def format_token(prefix: str, token_id: str, secret: str) -> str:
    """Return the text of a token."""
    return f"{prefix}_{token_id}_{secret}"


def parse_token(field: str, text: str, prefix: str) -> SecretToken:
    """Return the parts of a token's text.

    Raises:
        InvalidInput: it is not such a token. The message does not repeat it.
    """
    match = _TOKEN.fullmatch(text)
    if match is None or match[1] != prefix:
        kind = "join token" if prefix == JOIN_PREFIX else "token"
        raise InvalidInput(field, f"is not a {kind}; a {kind} begins with {prefix}_")
    return SecretToken(match[1], match[2], hash_secret(match[3]))


def holds_secret(text: str) -> bool:
    """Return whether ``text`` has a part that ``hide_secrets`` would hide."""
    return _SECRETS.search(text) is not None


def suggests_secret(variable: str) -> bool:
    """Return whether the value of an environment's ``variable`` is a secret, by its name."""
    return _SECRET_VARIABLE.search(variable) is not None


def hide_secrets(text: str) -> str:
    """Return ``text`` with every token, private key and password of a URL in it hidden."""
    return _SECRETS.sub(lambda m: f"{m[1]}:{HIDDEN}" if m[1] is not None else HIDDEN, text)
