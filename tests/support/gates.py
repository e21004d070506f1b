"""Gates for servers of tests that have only some of a server's parts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from tessera.formulation.records.access import Refusal
from tessera.service.rpc.errors import code_of
from tessera.service.security.admission import Admission
from tessera.service.security.auditing import RefusalRecorder
from tessera.service.security.authenticator import Authenticator
from tessera.service.security.gate import Gate
from tessera.service.security.sessions import Sessions


async def _no_thread(work: Any, *args: Any) -> Any:
    return work(*args)


async def _no_jobs(cluster: str, names: Collection[str]) -> dict[str, str]:
    return {}


async def _forget(refusals: Sequence[Refusal]) -> None:
    return None


def an_open_gate() -> Gate:
    """Return a gate that asks nobody who they are."""
    return Gate(
        Authenticator(None, _no_thread, wall_s=lambda: 0.0),
        Admission(_no_jobs, calls_per_minute=0, job_bytes=2**20),
        Sessions(lambda: 0.0),
        RefusalRecorder(_forget),
        code_of,
    )
