"""The replay runtime: each job is a real process that lasts as long as training would.

The process runs on a faster clock.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.runtimes import REPLAY, fail_at
from tessera.service.agent.process import python_argv
from tessera.service.agent.runtimes import replay_job
from tessera.service.agent.runtimes.handle import ProcessHandle
from tessera.service.agent.runtimes.protocol import Member, MemberHandle

log = logging.getLogger(__name__)

UNKNOWN_ITER_TIME_S: Final = 1.0
"""Simulated seconds of an iteration of a replayed job whose rate is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRuntime:
    """A runtime that replays gangs at ``clock_factor`` simulated seconds per real second."""

    clock_factor: float = 1.0
    lease: str = ""  # the agent's file with the end of its lease; "" without a lease
    checkpoint_s: float = 600.0  # simulated seconds between checkpoints; at least one real second

    def __post_init__(self) -> None:
        """Check the clock. Raises InvalidInput."""
        if not (self.clock_factor > 0 and self.checkpoint_s > 0):
            raise InvalidInput("clock_factor, checkpoint_s", "must be above 0")

    @property
    def leader_only(self) -> bool:
        """Return that one process replays the whole job."""
        return True

    def launch(self, member: Member) -> MemberHandle:
        """Start the process. Raises InvalidInput (its command is not ``fail-at N``), OSError."""
        gang, end = member.gang, fail_at(member.gang.command)
        if not gang.iter_time_s >= 0:
            raise InvalidInput("iter_time_s", f"must be at least 0, not {gang.iter_time_s}")
        iter_time_s = gang.iter_time_s or UNKNOWN_ITER_TIME_S
        if not gang.iter_time_s:
            log.info(
                "nobody knows the rate of this job, so it is replayed at another one",
                extra={"event": "rate_unknown", "job": gang.job, "iter_time_s": iter_time_s},
            )
        spec = {
            "runtime": REPLAY,
            "directory": str(member.directory),
            "lease": self.lease,
            "checkpoints": str(member.store),
            "generation": gang.generation,
            "job_number": gang.job_number,
            "iter_time_s": iter_time_s,
            "iterations_total": gang.iterations_total,
            "iterations_done": gang.iterations_done,
            "restart_s": gang.restart_s,
            "fail_at": end,
            "clock_factor": self.clock_factor,
            "checkpoint_s": self.checkpoint_s,
        }
        argv = python_argv(Path(replay_job.__file__))
        return ProcessHandle.spawn(argv, spec, member.directory, member.environment)

    def adopt(self, directory: Path) -> MemberHandle | None:
        """Return the handle of the process that an earlier agent started there, dead or alive.

        If there is no such process, return None.
        """
        return ProcessHandle.adopt(directory)
