"""The interface of runtimes, which start the processes of gangs on this agent's nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Final, Protocol

from tessera.formulation.job.exit_reasons import ExitReason
from tessera.formulation.job.runtime_offers import needed_runtime
from tessera.service.agent.isolation import UnsuitableNode
from tessera.service.agent.runtimes.offers import OfferWatch
from tessera.v1 import agents_pb2 as pb

EMPTY_ENVIRONMENT: Final[Mapping[str, str]] = MappingProxyType({})
"""An environment without any variables."""


class ExitOutcome(StrEnum):
    """The way in which a member's process ended."""

    SUCCEEDED = "succeeded"  # its iterations are done, or its program has decided so
    STOPPED = "stopped"  # it was asked to stop
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberExit:
    """The end of a member's process. If it failed, ``error`` is one sentence."""

    outcome: ExitOutcome
    error: str = ""
    reason: ExitReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of the whole job, as the leader's process reported it.

    ``report`` has the fields about progress alone. It has no age of the newest checkpoint, because
    that grows: ``checkpoint_s`` is when the checkpoint was complete, in seconds since 1970. It is 0
    without one.
    """

    report: pb.ObservedGang
    checkpoint_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A gang's part on one node, with the directories that it uses.

    ``directory`` is the agent's own, for this member alone. All members of the job, also of its
    other generations, share ``store``. ``environment`` says how the member's traffic is marked.
    """

    gang: pb.DesiredGang
    node: str
    directory: Path
    store: Path
    environment: Mapping[str, str] = field(default_factory=lambda: EMPTY_ENVIRONMENT)

    @property
    def rank(self) -> int:
        """Return the member's place among the gang's nodes. The leader has 0."""
        return list(self.gang.members).index(self.node)

    @property
    def leads(self) -> bool:
        """Return whether this is the leader, which reports the job's progress."""
        return self.node == self.gang.leader

    @property
    def gpus(self) -> tuple[int, ...]:
        """Return the indices of the GPUs on the node."""
        return next(tuple(s.gpu_indices) for s in self.gang.shares if s.node == self.node)


class MemberHandle(Protocol):
    """A member's processes, seen from an agent that may have restarted since they started."""

    async def begun(self) -> None:
        """Return once there may be progress, or all processes are dead. Call it once."""
        ...

    async def ended(self) -> MemberExit:
        """Return once all processes are dead, so that the GPUs are free.

        Call it once, after ``begun``.
        """
        ...

    def observe(self) -> Progress | None:
        """Return the latest progress, or None before the first iteration can start."""
        ...

    def request_checkpoint(self) -> None:
        """Ask the program to write a checkpoint and go on. Programs may ignore this."""
        ...

    def stop(self) -> None:
        """Ask the program to write a checkpoint and exit. Harmless if repeated or after the end."""
        ...

    def kill(self) -> None:
        """End the member immediately, without a checkpoint. Harmless if repeated or after the end."""
        ...


class Runtime(Protocol):
    """A starter of members of gangs.

    The processes that it starts must outlive the agent. A generation that is too old must not be
    able to write a checkpoint that a newer one reads.
    """

    @property
    def leader_only(self) -> bool:
        """Return whether only the leader has a process. Other members then just hold their GPUs."""
        ...

    def launch(self, member: Member) -> MemberHandle:
        """Check that the member can be run here, and start its processes.

        Raises:
            InvalidInput: this runtime cannot run such a gang. Trying again is pointless, unless it
                is UnsuitableNode: another node may run it.
            OSError: a file cannot be written or read, or the process could not be started.
        """
        ...

    def adopt(self, directory: Path) -> MemberHandle | None:
        """Return the handle of a member that an earlier agent launched there, dead or alive.

        If none was launched there, return None.
        """
        ...


class RuntimeChooser:
    """The agent's runtimes by name. A gang that names none is run by ``default``.

    All runtimes keep the same files in a member's directory, so any can adopt what another has
    started.
    """

    def __init__(
        self, runtimes: Mapping[str, Runtime], default: str, offers: OfferWatch | None = None
    ) -> None:
        """Remember the runtimes. Without ``offers``, all of them can be started."""
        self._runtimes, self._default, self.offers = runtimes, default, offers

    def require_offered(self, gang: pb.DesiredGang) -> None:
        """Check that the runtime of ``gang`` can be started now. Raises UnsuitableNode."""
        if self.offers is None or gang.launch.runtime not in self._runtimes:
            return
        name = needed_runtime(gang.launch.runtime, gang.launch.env)
        if problem := self.offers.find_problem(name):
            raise UnsuitableNode("runtime", f"{name} cannot be started here: {problem}")

    def choose(self, gang: pb.DesiredGang) -> Runtime:
        """Return the runtime of ``gang``. Raises UnsuitableNode (this agent does not have it)."""
        name = gang.launch.runtime or self._default
        runtime = self._runtimes.get(name)
        if runtime is None:
            raise UnsuitableNode(
                "runtime", f"this agent has no runtime {name!r}; upgrade tessera on its node"
            )
        return runtime

    def adopt(self, directory: Path) -> MemberHandle | None:
        """Return the handle of a member that an earlier agent launched there, dead or alive.

        If none was launched there, return None.
        """
        return self._runtimes[self._default].adopt(directory)
