"""The interface of the runtimes that run gangs under the agent, also for training runtimes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Final, Protocol

from tessera.service.agent.gangs import Gang

EMPTY_ENVIRONMENT: Final[Mapping[str, str]] = MappingProxyType({})
"""An environment without any variables."""


class ExitOutcome(StrEnum):
    """The way in which a job's process ended."""

    SUCCEEDED = "succeeded"  # all iterations are done
    STOPPED = "stopped"  # it was asked to stop, and left a checkpoint
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class GangExit:
    """The end of a job's process. If it failed, ``error`` is one sentence."""

    outcome: ExitOutcome
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of the whole job, as its process reported it.

    ``iter_time_s`` is 0 while it is unknown. ``runtime`` is the runtime of the process, or "" if
    the process does not say.
    """

    iterations: float
    iter_time_s: float
    runtime: str = ""


class GangHandle(Protocol):
    """A gang's processes on this node, seen from an agent that may have restarted since."""

    async def begun(self) -> None:
        """Return once there may be progress, or all processes are dead. Call it once."""
        ...

    async def ended(self) -> GangExit:
        """Return once all processes are dead, so that the GPUs are free.

        Call it once, after ``begun``.
        """
        ...

    def progress(self) -> Progress | None:
        """Return the latest progress, or None before the first iteration can start."""
        ...

    def stop(self) -> None:
        """Ask the gang to write a checkpoint and exit. Harmless if repeated or after the end."""
        ...

    def kill(self) -> None:
        """End the gang immediately, without a checkpoint. Harmless if repeated or after the end."""
        ...


class Runtime(Protocol):
    """A starter of gangs whose leading member is on this node.

    The processes that it starts must outlive the agent. A generation that is too old must not be
    able to write a checkpoint (``tessera.service.agent.checkpoint``).
    """

    def start(
        self,
        gang: Gang,
        directory: Path,
        checkpoints: Path,
        environment: Mapping[str, str] = EMPTY_ENVIRONMENT,
    ) -> GangHandle:
        """Start ``gang`` in ``directory``, with ``checkpoints`` for the whole job.

        ``directory`` exists and belongs to this gang alone. The gang's processes find
        ``environment`` in their own environment; it says how their traffic is marked.

        Raises:
            InvalidInput: this runtime cannot run such a gang.
            OSError: the process could not be started.
        """
        ...

    def adopt(self, directory: Path) -> GangHandle | None:
        """Return the handle of a gang that an earlier agent started there, dead or alive.

        If none was started there, return None.
        """
        ...
