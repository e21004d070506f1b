"""What a runtime must offer to run gangs under the agent; the seam for runtimes that train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Final, Protocol

from tessera.service.agent.gangs import Gang

NOTHING: Final[Mapping[str, str]] = MappingProxyType({})
"""No variables."""


class Outcome(StrEnum):
    """How a job's process ended."""

    SUCCEEDED = "succeeded"  # all iterations are done
    STOPPED = "stopped"  # it was asked to, and left a checkpoint
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """The end of a job's process; ``error`` is one sentence where it failed."""

    outcome: Outcome
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far the whole job is. ``iter_time_s``: measured, 0 where not known yet."""

    iterations: float
    iter_time_s: float


class Handle(Protocol):
    """One gang's processes on this node, seen from an agent that may have been restarted since."""

    async def begun(self) -> None:
        """Return once progress may be there, or all processes are dead. Call it once."""
        ...

    async def ended(self) -> Exit:
        """Return once all processes are dead, so that the GPUs are free. Call it once, after ``begun``."""
        ...

    def progress(self) -> Progress | None:
        """Return the latest progress; None before the first iteration can start."""
        ...

    def stop(self) -> None:
        """Ask it to write a checkpoint and exit. Harmless when repeated, or after the end."""
        ...

    def kill(self) -> None:
        """End it at once, without a checkpoint. Harmless when repeated, or after the end."""
        ...


class Runtime(Protocol):
    """Starts gangs whose leading member is on this node.

    What it starts must outlive the agent, and a generation that is too old must not be able to write a
    checkpoint (``tessera.service.agent.checkpoint``).
    """

    def start(
        self,
        gang: Gang,
        directory: Path,
        checkpoints: Path,
        environment: Mapping[str, str] = NOTHING,
    ) -> Handle:
        """Start ``gang``; ``directory`` exists and is its own, ``checkpoints`` is the whole job's.

        Its processes find ``environment`` in theirs: how their traffic is marked.

        Raises:
            InvalidInput: this runtime cannot run such a gang.
            OSError: the process could not be started.
        """
        ...

    def adopt(self, directory: Path) -> Handle | None:
        """Return what an earlier agent started in ``directory``, dead or alive; None: nothing."""
        ...
