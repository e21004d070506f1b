"""The reasons why a job's program ended without success.

Agents import this module, so it needs only the standard library.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class ExitReason(StrEnum):
    """The reason why a program ended without success, most telling first.

    If one member of a gang fails, its other members end, too. Of their reasons, the first in this
    order is the cause.
    """

    REFUSED = "refused"  # the runtime or the program cannot run this; trying again is pointless
    LOSS_NOT_FINITE = "loss_not_finite"  # the same samples would lead there again
    OUT_OF_MEMORY = "out_of_memory"  # of a GPU or of the host: its execution plan does not fit
    GPU_FAILED = "gpu_failed"
    NODE_UNFIT = "node_unfit"  # the node can start no program until it is mended
    BAD_CHECKPOINT = "bad_checkpoint"
    STALLED = "stalled"  # no progress for too long
    NOT_STARTED = "not_started"  # e.g. a missing program, a taken port, an absent member
    ENDED_EARLY = "ended_early"  # with status 0, before its iterations were done
    KILLED = "killed"  # by a signal that the agent had not sent
    ERROR = "error"  # it exited with an error

    @property
    def is_final(self) -> bool:
        """Return whether trying again is pointless."""
        return self in (ExitReason.REFUSED, ExitReason.LOSS_NOT_FINITE)

    @property
    def sentence(self) -> str:
        """Return the reason in words, without a full stop."""
        return _SENTENCES[self]


_SENTENCES: Final = {
    ExitReason.REFUSED: "the runtime refused it, so it is not tried again",
    ExitReason.LOSS_NOT_FINITE: "its loss is not a finite number, so it is not tried again",
    ExitReason.OUT_OF_MEMORY: "it ran out of memory",
    ExitReason.GPU_FAILED: "a GPU failed",
    ExitReason.NODE_UNFIT: "its node cannot start programs",
    ExitReason.BAD_CHECKPOINT: "it could not go on from its checkpoint",
    ExitReason.STALLED: "it made no progress for too long",
    ExitReason.NOT_STARTED: "it could not be started",
    ExitReason.ENDED_EARLY: "it ended before its iterations were done",
    ExitReason.KILLED: "a signal ended it",
    ExitReason.ERROR: "it exited with an error",
}


_RANKS: Final = {reason: rank for rank, reason in enumerate(ExitReason)}


def rank_of(reason: ExitReason | None) -> int:
    """Return the place of a reason among all, the most telling first. An unknown one is last."""
    return len(_RANKS) if reason is None else _RANKS[reason]
