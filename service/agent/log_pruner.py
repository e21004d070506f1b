"""The regular deletion of old output of jobs on the agent's disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tessera.formulation.base.clock import SystemClock
from tessera.service.agent.gangs import key_of
from tessera.service.agent.logs import prune_logs
from tessera.v1 import agents_pb2 as pb

PERIOD_S: Final = 600.0
"""Seconds between two looks at the output on the disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLimits:
    """The age in seconds and the bytes up to which output of ended starts is kept."""

    keep_s: float = 7 * 86_400.0
    keep_bytes: int = 20 * 2**30


async def keep_logs_within(
    logs: Path, limits: LogLimits, live: Callable[[], list[tuple[pb.DesiredGang, bool]]]
) -> None:
    """Delete old output regularly, but none of the gangs that ``live`` returns. Never return."""
    wall_s = SystemClock().wall_s
    while True:
        keys = {key_of(gang) for gang, _ in live()}
        await asyncio.to_thread(
            prune_logs, logs, limits.keep_s, limits.keep_bytes, now_s=wall_s(), live=keys
        )
        await asyncio.sleep(PERIOD_S)
