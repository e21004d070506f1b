"""Secrets of Tessera as text: their form, their hashes, and texts without them."""

from __future__ import annotations

import hashlib
import hmac
import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import Final

from tessera.formulation.base.errors import InvalidInput

USER_PREFIX: Final = "tessera_token"
JOIN_PREFIX: Final = "tessera_join"
HOOK_PREFIX: Final = "tessera_hook"
"""The beginnings of users' tokens, of join tokens, and of the secrets of webhooks."""

HIDDEN: Final = "***"

_RANDOM: Final = r"[A-Za-z0-9_-]{43}"  # 32 random bytes in URL-safe base64
_TOKEN: Final = re.compile(rf"({USER_PREFIX}|{JOIN_PREFIX})_([a-z0-9]{{12}})_({_RANDOM})")
MIN_ENTROPY_BITS: Final = 3.2
"""Entropy of a character from which a text with letters and digits counts as random."""

SERVICE_SECRETS: Final = {
    "a key of AWS": r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    "a token of GitHub or GitLab": r"\b(?:gh[pousr]_[A-Za-z0-9]{36}|github_pat_\w{60,}|glpat-[\w-]{20,})",
    "a token of Slack": r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}",
    "a key of Google": r"\bAIza[A-Za-z0-9_-]{35}\b",
    "a token of a package index": r"\b(?:pypi-[A-Za-z0-9_-]{50,}|npm_[A-Za-z0-9]{36}\b)",
    "a key of a model service": r"\b(?:sk-[A-Za-z0-9_-]{32,}|hf_[A-Za-z0-9]{30,}|nvapi-[A-Za-z0-9_-]{32,})",
}
"""The forms of tokens and keys of well-known services."""

_SECRETS: Final = re.compile(
    r"tessera_(?:token|join|hook)_[A-Za-z0-9_-]{8,}"  # ours, whole or cut short
    r"|eyJ[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*){1,4}"  # JSON web tokens
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|(?<=[?&]password=)[^&\s]+|(?<=[?&]sslpassword=)[^&\s]+"  # a password in a URL's query
    r"|(?<=://)([^/\s:@]*):[^/\s@]+(?=@)|"  # a password in a URL
    + "|".join(SERVICE_SECRETS.values())
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


def is_random(value: str) -> bool:
    """Return whether a text has digits and letters, and few repetitions."""
    if not (re.search(r"\d", value) and re.search(r"[A-Za-z]", value)) or re.search(
        r"[().,]", value
    ):
        return False
    counts = Counter(value).values()
    bits = -sum(n / len(value) * math.log2(n / len(value)) for n in counts)
    return bits >= MIN_ENTROPY_BITS


def hide_secrets(text: str) -> str:
    """Return ``text`` with every token, key, private key and password of a URL in it hidden."""
    return _SECRETS.sub(lambda m: f"{m[1]}:{HIDDEN}" if m[1] is not None else HIDDEN, text)
