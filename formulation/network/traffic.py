"""What a job does in one iteration, as the network sees it, wherever its GPUs are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Final

import numpy as np

from tessera.formulation.documents import CELL_TRAFFIC, read_json
from tessera.formulation.errors import InvalidInput
from tessera.formulation.tables import Ints

MOST_FLOP: Final = 1e30
SHORTEST_S: Final = 1e-9
LONGEST_S: Final = 1e9
MOST_BYTES: Final = 1e21
"""What one iteration can do, last and send; what is beyond is a mistake, and would spoil sums with others."""


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
        if not 0 <= self.sent_bytes <= MOST_BYTES or self.messages < 0:
            raise InvalidInput(
                "sent_bytes", f"must be 0 to {MOST_BYTES:g}, and messages at least 0"
            )


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
        _check_times(self.work_flop, self.compute_s, self.start_s)


def _check_times(work_flop: float, compute_s: float, start_s: float) -> None:
    if not 0 <= work_flop <= MOST_FLOP:
        raise InvalidInput("work_flop", f"is {work_flop}; it must be 0 to {MOST_FLOP:g}")
    if not SHORTEST_S <= compute_s <= LONGEST_S:
        raise InvalidInput(
            "compute_s", f"is {compute_s}; it must be {SHORTEST_S:g} to {LONGEST_S:g}"
        )
    if not 0 <= start_s <= compute_s:
        raise InvalidInput(
            "start_s", f"is {start_s}; it must lie between 0 and compute_s ({compute_s})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTraffic:
    """What the GPUs of one stage of a plan send in one iteration: ``dp`` replicas of ``tp`` parts, experts
    divided over ``ep`` neighbours.

    Bytes that a GPU sends to each partner, with the messages in sequence: to the next in the ring of its
    tensor group, in that of its replicas and in that of the GPUs that hold the same experts; to each other
    GPU of its expert group; and to its partner in the next stage, which sends as much back.
    """

    dp: int
    tp: int
    ep: int = 1
    tensor: tuple[float, int] = (0.0, 0)
    data: tuple[float, int] = (0.0, 0)
    expert_data: tuple[float, int] = (0.0, 0)
    expert: tuple[float, int] = (0.0, 0)
    handed: tuple[float, int] = (0.0, 0)

    @property
    def gpus(self) -> int:
        """Return the number of GPUs."""
        return self.dp * self.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class CellTraffic:
    """One iteration of a Cell under its plan; :meth:`traffic` says who sends to whom.

    Ranks: stages in order, in a stage replicas in order, a replica's tensor parts next to each other, so that
    what is sent most often has the shortest way.
    """

    work_flop: float
    compute_s: float
    start_s: float
    stages: tuple[StageTraffic, ...]

    def __post_init__(self) -> None:
        """Refuse a plan without stages, or groups that do not divide a stage."""
        if not self.stages:
            raise InvalidInput("stages", "are empty; a plan has at least one")
        _check_times(self.work_flop, self.compute_s, self.start_s)
        for k, stage in enumerate(self.stages):
            if min(stage.dp, stage.tp, stage.ep) < 1 or stage.gpus % stage.ep:
                raise InvalidInput(f"stages[{k}]", "has degrees below 1, or experts on odd GPUs")

    @property
    def gpus(self) -> int:
        """Return the number of GPUs."""
        return sum(stage.gpus for stage in self.stages)

    def to_json(self) -> str:
        """Return it as a line that ``cell_traffic`` reads; amounts that are none are left out."""
        stages = [
            {
                f.name: getattr(stage, f.name)
                for f in fields(stage)
                if getattr(stage, f.name) != f.default
            }
            for stage in self.stages
        ]
        plain = {"work_flop": self.work_flop, "compute_s": self.compute_s, "start_s": self.start_s}
        return json.dumps(plain | {"stages": stages}, separators=(",", ":"), allow_nan=False)

    def traffic(self) -> Traffic:
        """Return the exchanges of the job's ranks; those without partners or bytes are left out."""
        firsts = [sum(stage.gpus for stage in self.stages[:k]) for k in range(len(self.stages))]
        exchanges: list[Exchange] = []
        for stage, first in zip(self.stages, firsts, strict=True):
            exchanges += _inside(stage, first)
        for k, (stage, after) in enumerate(pairwise(self.stages)):
            most = max(stage.gpus, after.gpus)  # the smaller stage's GPUs have several partners
            left = firsts[k] + np.arange(most) * stage.gpus // most
            right = firsts[k + 1] + np.arange(most) * after.gpus // most
            sent = stage.handed[0] * stage.gpus / most, stage.handed[1]
            exchanges += _exchange(Pattern.CHAIN, np.stack([left, right], axis=1), sent)
        return Traffic(
            work_flop=self.work_flop,
            compute_s=self.compute_s,
            start_s=self.start_s,
            exchanges=tuple(exchanges),
        )


def cell_traffic(text: str) -> CellTraffic:
    """Return what ``CellTraffic.to_json`` wrote.

    Raises:
        InvalidInput: it is something else.
    """
    try:
        plain = read_json("traffic", text, CELL_TRAFFIC)
        stages = tuple(StageTraffic(**_stage(stage)) for stage in plain.pop("stages"))
        return CellTraffic(**{key: float(plain[key]) for key in plain}, stages=stages)
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise InvalidInput("traffic", f"is not the traffic of a Cell: {error}") from error


@dataclass(frozen=True, kw_only=True)
class DescribedTraffic:
    """What a Cell sends, by the JSON that describes it, which is kept as it came to be stored and compared.

    A snapshot holds thousands, of which a network plan wants those of the jobs that run. To read one takes a
    tenth of a millisecond, so each is read when it is first asked for: what comes from a store was checked
    on its way in, and who takes a snapshot from elsewhere calls ``Traffics.require_readable``.
    """

    document: str

    @cached_property
    def cell(self) -> CellTraffic:
        """The traffic of the Cell. Raises InvalidInput: the document describes none."""
        return cell_traffic(self.document)

    @cached_property
    def traffic(self) -> Traffic:
        """The exchanges of its ranks. Raises InvalidInput as ``cell`` does."""
        return self.cell.traffic()


@lru_cache(maxsize=10_000)
def intern_traffic(text: str) -> DescribedTraffic:
    """Return what a document describes; the very same value for one of late, so that each is read once."""
    return DescribedTraffic(document=text)


def _stage(plain: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: (float(value[0]), int(value[1])) if isinstance(value, list) else int(value)
        for key, value in plain.items()
    }


def _inside(stage: StageTraffic, first: int) -> Iterator[Exchange]:
    """Yield what is sent within a stage whose first rank is ``first``."""
    rank = first + np.arange(stage.gpus, dtype=np.int64)
    rings = (
        (rank.reshape(stage.dp, stage.tp), stage.tensor),
        (rank.reshape(stage.dp, stage.tp).T, stage.data),
        (rank.reshape(-1, stage.ep).T, stage.expert_data),
    )
    for members, sent in rings:
        yield from _exchange(Pattern.RING, members, sent)
    yield from _exchange(Pattern.ALL, rank.reshape(-1, stage.ep), stage.expert)


def _exchange(pattern: Pattern, members: Ints, sent: tuple[float, int]) -> Iterator[Exchange]:
    if members.shape[1] > 1 and sent[0] > 0:
        yield Exchange(pattern=pattern, members=members, sent_bytes=sent[0], messages=sent[1])
