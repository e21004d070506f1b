"""The time that an agent waits before it tries again."""

from __future__ import annotations

import hashlib


def backoff_s(seed: str, attempt: int, servers: int) -> float:
    """Return how long to wait after ``attempt`` failures in a row, repeatable for a seed.

    The wait is 0.1 s, doubled each time that all servers have failed, at most 5 s, times a factor
    in [0.5, 1.5).
    """
    digest = hashlib.blake2b(f"{seed}/{attempt}".encode(), digest_size=8).digest()
    base_s = min(5.0, 0.1 * 2.0 ** min(attempt // servers, 10))
    return base_s * (0.5 + int.from_bytes(digest, "big") / 2**64)
