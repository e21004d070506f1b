"""The work and traffic of a job in one iteration, independent of the location of its GPUs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Final

import numpy as np

from tessera.formulation.base.documents import CELL_TRAFFIC, read_json
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Ints

MAX_FLOP: Final = 1e30
MIN_ITERATION_S: Final = 1e-9
MAX_ITERATION_S: Final = 1e9
MAX_BYTES: Final = 1e21
"""Largest number of bytes that an iteration can send.

The limits above are on its work and its length. A value beyond them is a mistake, and would spoil
sums with other values.
"""


class Pattern(StrEnum):
    """The senders and receivers in a group."""

    RING = "ring"  # each member to the next, the last to the first: rings of collectives
    CHAIN = "chain"  # each member to the next and back: stages of a pipeline
    ALL = "all"  # each member to every other: all-to-all


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exchange:
    """One kind of traffic inside groups of a job's GPUs. The groups are equally large.

    ``members`` is int64[groups, size]: ranks (positions in the gang's GPUs, in its order of nodes
    and indices), in the order of the pattern. ``sent_bytes`` is the number of bytes that a member
    sends to each of its receivers in one iteration. For an all-reduce of V bytes in a ring of n it
    is 2 V (n - 1) / n. ``messages`` is their number in sequence; each pays the delay.
    """

    pattern: Pattern
    members: Ints
    sent_bytes: float
    messages: int = 1

    def __post_init__(self) -> None:
        """Refuse meaningless numbers."""
        if self.members.ndim != 2:
            raise InvalidInput(
                "members", f"has {self.members.ndim} axes; it must be [groups, size]"
            )
        if not 0 <= self.sent_bytes <= MAX_BYTES or self.messages < 0:
            raise InvalidInput("sent_bytes", f"must be 0 to {MAX_BYTES:g}, and messages at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """One iteration of a job. ``work_flop`` is summed over its GPUs (Crux 3.1: W).

    Compute takes ``compute_s``. Communication may begin ``start_s`` after the start of the
    iteration. Without overlap, start_s = compute_s. The iteration ends when both have ended.
    """

    work_flop: float
    compute_s: float
    start_s: float
    exchanges: tuple[Exchange, ...] = ()

    def __post_init__(self) -> None:
        """Refuse meaningless numbers."""
        _check_times(self.work_flop, self.compute_s, self.start_s)


def _check_times(work_flop: float, compute_s: float, start_s: float) -> None:
    if not 0 <= work_flop <= MAX_FLOP:
        raise InvalidInput("work_flop", f"is {work_flop}; it must be 0 to {MAX_FLOP:g}")
    if not MIN_ITERATION_S <= compute_s <= MAX_ITERATION_S:
        raise InvalidInput(
            "compute_s", f"is {compute_s}; it must be {MIN_ITERATION_S:g} to {MAX_ITERATION_S:g}"
        )
    if not 0 <= start_s <= compute_s:
        raise InvalidInput(
            "start_s", f"is {start_s}; it must lie between 0 and compute_s ({compute_s})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTraffic:
    """The traffic of one stage of an execution plan in one iteration.

    The stage has ``dp`` replicas of ``tp`` parts, with experts divided over ``ep`` neighbors. Each
    pair is the bytes that a GPU sends to each partner, and the messages in sequence. ``tensor`` is
    sent to the next GPU in the ring of the tensor group, ``data`` in that of the replicas, and
    ``expert_data`` in that of the GPUs that hold the same experts. ``expert`` is sent to each other
    GPU of the expert group. ``pipeline`` is sent to the partner in the next stage, which sends as
    much back.
    """

    dp: int
    tp: int
    ep: int = 1
    tensor: tuple[float, int] = (0.0, 0)
    data: tuple[float, int] = (0.0, 0)
    expert_data: tuple[float, int] = (0.0, 0)
    expert: tuple[float, int] = (0.0, 0)
    pipeline: tuple[float, int] = (0.0, 0)

    @property
    def gpus(self) -> int:
        """Return the number of GPUs."""
        return self.dp * self.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class CellTraffic:
    """One iteration of a Cell under its execution plan. :meth:`traffic` gives its exchanges.

    Ranks are ordered by stage, then by replica. A replica's tensor parts are adjacent, so that the
    most frequent traffic has the shortest way.
    """

    work_flop: float
    compute_s: float
    start_s: float
    stages: tuple[StageTraffic, ...]

    def __post_init__(self) -> None:
        """Refuse an execution plan without stages, or groups that do not divide a stage."""
        if not self.stages:
            raise InvalidInput(
                "stages", "must not be empty: an execution plan has at least one stage"
            )
        _check_times(self.work_flop, self.compute_s, self.start_s)
        for k, stage in enumerate(self.stages):
            if min(stage.dp, stage.tp, stage.ep) < 1 or stage.gpus % stage.ep:
                raise InvalidInput(
                    f"stages[{k}]", "must have degrees of at least 1, and ep must divide its GPUs"
                )

    @property
    def gpus(self) -> int:
        """Return the number of GPUs."""
        return sum(stage.gpus for stage in self.stages)

    def to_json(self) -> str:
        """Return the traffic as a line that ``parse_cell_traffic`` reads. Default amounts are left out."""
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
        """Return the exchanges of the job's ranks. Those without partners or bytes are left out."""
        firsts = [sum(stage.gpus for stage in self.stages[:k]) for k in range(len(self.stages))]
        exchanges: list[Exchange] = []
        for stage, first in zip(self.stages, firsts, strict=True):
            exchanges += _inside(stage, first)
        for k, (stage, after) in enumerate(pairwise(self.stages)):
            most = max(stage.gpus, after.gpus)  # the smaller stage's GPUs have several partners
            left = firsts[k] + np.arange(most) * stage.gpus // most
            right = firsts[k + 1] + np.arange(most) * after.gpus // most
            sent = stage.pipeline[0] * stage.gpus / most, stage.pipeline[1]
            exchanges += _exchange(Pattern.CHAIN, np.stack([left, right], axis=1), sent)
        return Traffic(
            work_flop=self.work_flop,
            compute_s=self.compute_s,
            start_s=self.start_s,
            exchanges=tuple(exchanges),
        )


def parse_cell_traffic(text: str) -> CellTraffic:
    """Return the traffic that ``CellTraffic.to_json`` wrote.

    Raises:
        InvalidInput: the text is not such a line.
    """
    try:
        plain = read_json("traffic", text, CELL_TRAFFIC)
        stages = tuple(StageTraffic(**_stage(stage)) for stage in plain.pop("stages"))
        return CellTraffic(**{key: float(plain[key]) for key in plain}, stages=stages)
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise InvalidInput("traffic", f"is not the traffic of a Cell: {error}") from error


@dataclass(frozen=True, kw_only=True)
class DescribedTraffic:
    """The traffic of a Cell as JSON, which is kept unchanged to be stored and compared.

    A snapshot holds thousands of documents, but a network plan needs only those of running jobs.
    Reading one takes a tenth of a millisecond, so each is read when it is first needed. A document
    from a store was checked when it was stored. Callers with a snapshot from elsewhere should call
    ``Traffics.require_readable``.
    """

    document: str

    @cached_property
    def cell(self) -> CellTraffic:
        """The traffic of the Cell. Raises InvalidInput if the document does not describe any."""
        return parse_cell_traffic(self.document)

    @cached_property
    def traffic(self) -> Traffic:
        """The exchanges of the Cell's ranks. Raises InvalidInput as ``cell`` does."""
        return self.cell.traffic()


@lru_cache(maxsize=10_000)
def intern_traffic(text: str) -> DescribedTraffic:
    """Return the traffic that a document describes.

    For a recent document it is the same object, so that each is read once.
    """
    return DescribedTraffic(document=text)


def _stage(plain: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: (float(value[0]), int(value[1])) if isinstance(value, list) else int(value)
        for key, value in plain.items()
    }


def _inside(stage: StageTraffic, first: int) -> Iterator[Exchange]:
    """Yield the exchanges within a stage whose first rank is ``first``."""
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
