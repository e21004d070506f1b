"""The output of jobs: where it is, requests for a part of it, and their answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tessera.formulation.job.lifecycle import TERMINAL, JobState

MAX_READ_BYTES: Final = 256 * 1024
"""Largest number of bytes in the answer to a request for output."""

MAX_READS_PER_AGENT: Final = 16
"""Largest number of requests that an agent gets at the same time. It works on 4 at a time."""

LAUNCHER_RANK: Final = -1
"""The rank that stands for the launcher on the first node of a gang, in requests to agents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStart:
    """A generation of a job: the GPUs that the job was given once, and what became of them."""

    generation: int
    shares: tuple[tuple[str, tuple[int, ...]], ...]  # (node, GPU indices) in rank order
    waits: bool  # some of the GPUs are not free yet, so the gang was not started
    holds: bool  # some of the GPUs are still the gang's, so it may still run

    def nodes_of_ranks(self, *, ranks_are_gpus: bool) -> list[str]:
        """Return the node of each rank."""
        return [
            node for node, gpus in self.shares for _ in range(len(gpus) if ranks_are_gpus else 1)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedJob:
    """A job, and one of its starts."""

    number: int  # distinguishes the job from an earlier one of its name
    tenant: str
    state: JobState
    start: JobStart | None  # None if there is no such start
    first: int  # the first and the last generation that are known; 0 if the job was never started
    last: int
    following: int  # the next generation after the one that was asked for; 0 if there is none

    @property
    def has_ended(self) -> bool:
        """Return whether the job will not be started again."""
        return self.state in TERMINAL


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRead:
    """A request for a part of a rank's output on a node.

    A negative ``rank`` is a launcher: ``LAUNCHER_RANK`` is that of the gang's first node. A
    negative ``offset`` counts from the present end.
    """

    id: str
    job: str
    job_number: int
    generation: int
    rank: int
    node: str
    offset: int
    max_bytes: int = MAX_READ_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class LogAnswer:
    """A part of a rank's output. If ``error`` is not "", it says why the output cannot be read."""

    id: str  # of the request
    offset: int = 0  # of the first byte; later than requested if older output was deleted
    data: bytes = b""
    ended: bool = False  # whether the rank has ended, and nothing follows ``data``
    error: str = ""


def agent_key(cluster: str, agent: str) -> str:
    """Return the notice that an agent is asked for output. No cluster has such a name."""
    return f"{cluster}/agents/{agent}"


def answer_key(read_id: str) -> str:
    """Return the notice that a request is answered. No cluster has such a name."""
    return f"logs/{read_id}"
