"""The log of a run: the GPUs that each job held, the times, and the speed at which it trained."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.formulation.base.values import Cell

Members = tuple[tuple[int, tuple[int, ...]], ...]
"""(node, GPU indices on it) in order of node. Nodes are indices into the snapshot's nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch in which a job held the same GPUs and trained at one speed.

    The job holds the GPUs from ``start_s`` to ``end_s`` and trains from ``ready_s`` on, which may be
    after the end. It trained ``iterations`` in this stretch. At its end, ``lost`` of all iterations
    that the job had trained are undone. Times are in seconds since the world began. The job is an
    index into the scenario's arrivals.
    """

    job: int
    start_s: float
    ready_s: float
    end_s: float
    cell: Cell
    members: Members
    slowdown: float  # the slowdown of the slowest node times that of the network, at least 1
    iterations: float
    lost: float = 0.0
    network: float = 1.0  # the network's part of ``slowdown``; the log's file has the product
    ended_by: str = ""
    """The event that ended the segment: finish, suspend, move, resize, retype, replan, failure,
    crash, speed or horizon. After ``speed``, the job continues on the same GPUs in its next segment.
    """

    @property
    def held_gpu_s(self) -> float:
        """Return the GPU-seconds held."""
        return self.cell.gpus * (self.end_s - self.start_s)
