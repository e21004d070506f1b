"""The calls that are open, by what proved their caller's identity, so that revocation ends them."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable

from tessera.formulation.base.access import Identity
from tessera.formulation.base.errors import NotAuthenticated


class Sessions:
    """The open calls of verified identities. It belongs to the event loop's thread."""

    def __init__(self, wall_s: Callable[[], float]) -> None:
        self._wall_s = wall_s
        self._open: dict[str, set[asyncio.Timeout]] = {}

    @contextlib.asynccontextmanager
    async def open(self, identity: Identity) -> AsyncIterator[None]:
        """Run the block until it ends, or the identity's proof expires or is revoked.

        Raises:
            NotAuthenticated: the proof expired or was revoked inside the block.
        """
        if not identity.is_verified:
            yield
            return
        left_s = identity.expires_s - self._wall_s()
        limit = asyncio.timeout(left_s if math.isfinite(left_s) else None)
        group = self._open.setdefault(identity.key, set())
        group.add(limit)
        try:
            async with limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise NotAuthenticated(
                f"the {proof_kind(identity.key)} with which this call began was revoked or has"
                " expired; call again with a new one"
            ) from None
        finally:
            group.discard(limit)
            if not group and self._open.get(identity.key) is group:
                del self._open[identity.key]

    def end(self, key: str) -> int:
        """End the calls that ``key`` proved; return how many did not end already."""
        limits = [limit for limit in self._open.get(key, ()) if not limit.expired()]
        for limit in limits:
            limit.reschedule(asyncio.get_running_loop().time())
        return len(limits)

    def keys(self) -> list[str]:
        """Return what proves the identities of the open calls."""
        return list(self._open)


def proof_kind(key: str) -> str:
    """Return what a key of an identity refers to, in words."""
    return "certificate" if key.startswith("certificate/") else "token"
