"""What a job does in one iteration, as the network sees it, wherever its GPUs are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from formulation.errors import InvalidInput
from formulation.tables import Ints


class Pattern(StrEnum):
    """Who sends to whom in a group."""

    RING = "ring"  # each member to the next, the last to the first: rings of collectives
    CHAIN = "chain"  # each member to the next and back: stages of a pipeline
    ALL = "all"  # each member to every other: all-to-all


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exchange:
    """One kind of traffic inside equally large groups of a job's GPUs.

    ``members``: int64[groups, size], ranks (positions in the gang's GPUs, in its order of nodes and indices),
    in the order of the pattern. ``sent_bytes``: what a member sends to each one that it sends to, in one
    iteration; an all-reduce of V bytes in a ring of n is 2 V (n - 1) / n. ``messages``: how many in sequence,
    each paying the delay.
    """

    pattern: Pattern
    members: Ints
    sent_bytes: float
    messages: int = 1

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing."""
        if self.members.ndim != 2:
            raise InvalidInput(
                "members", f"has {self.members.ndim} axes; it must be [groups, size]"
            )
        if not 0 <= self.sent_bytes < math.inf or self.messages < 0:
            raise InvalidInput("sent_bytes", "and messages must be at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """One iteration of a job. ``work_flop`` is summed over its GPUs (Crux 3.1: W).

    Compute takes ``compute_s``; communication may begin ``start_s`` after the iteration has (no overlap:
    start_s = compute_s); the iteration ends when both have.
    """

    work_flop: float
    compute_s: float
    start_s: float
    exchanges: tuple[Exchange, ...] = ()

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing."""
        if not 0 <= self.work_flop < math.inf:
            raise InvalidInput("work_flop", f"is {self.work_flop}; it must be at least 0")
        if not 0 < self.compute_s < math.inf:
            raise InvalidInput("compute_s", f"is {self.compute_s}; it must be above 0")
        if not 0 <= self.start_s <= self.compute_s:
            raise InvalidInput(
                "start_s",
                f"is {self.start_s}; it must lie between 0 and compute_s ({self.compute_s})",
            )


def ranks(gpus: int, stages: int, dp: int, tp: int) -> Ints:
    """Return rank[stage, replica, part], int64[stages, dp, tp]: parts of a tensor lie next to each other."""
    if stages * dp * tp != gpus:
        raise InvalidInput(
            "gpus", f"{stages} stages of {dp} x {tp} GPUs are {stages * dp * tp}, not {gpus}"
        )
    return np.arange(gpus, dtype=np.int64).reshape(stages, dp, tp)
