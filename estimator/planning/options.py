"""The stages from which a plan may be built, one per row, and the places where each fits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tessera.estimator.memory import UsableMemory, limit_bytes, memory_bytes
from tessera.estimator.plans import Candidates, StageCosts, powers_of_two
from tessera.formulation.base.errors import TesseraError
from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.formulation.job.execution_plan import PlanStage, Schedule

FITS_ANYWHERE = 2**30
"""A depth that no pipeline reaches."""


class NoPlan(TesseraError):
    """An error for GPUs on which no chain of stages covers the layers."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageOptions:
    """Stages of the layers ``start`` to ``end`` (exclusive) on ``gpus`` GPUs, sorted by ``start``.

    A row fits into memory while at most ``depth`` stages are between it and the end, including
    itself. Under 1F1B, that is the number of micro-batches whose activations it keeps (Narayanan et
    al., SC 2021, section 2.2), so one rule covers all pipeline degrees. ``source`` are the rows of
    the original table. All arrays have shape (K,).
    """

    start: Ints
    end: Ints
    gpus: Ints
    depth: Ints
    source: Ints
    layers: int

    def __len__(self) -> int:
        return len(self.start)

    @property
    def sizes(self) -> Ints:
        """Return the distinct GPU counts, ascending."""
        return np.flatnonzero(np.bincount(self.gpus)).astype(np.int64)

    def only(self, kept: Bools | Ints) -> StageOptions:
        """Return the options selected by a mask or by indices in ascending order."""
        return StageOptions(
            start=self.start[kept],
            end=self.end[kept],
            gpus=self.gpus[kept],
            depth=self.depth[kept],
            source=self.source[kept],
            layers=self.layers,
        )


def make_options(start: Ints, end: Ints, gpus: Ints, depth: Ints | None = None) -> StageOptions:
    """Return the options of these rows. The number of layers is the largest end.

    If ``depth`` is None, all rows fit everywhere.

    Raises:
        NoPlan: there is no row.
    """
    if not len(start):
        raise NoPlan("no candidate stages; give at least one")
    fits = np.full(len(start), FITS_ANYWHERE, dtype=np.int64) if depth is None else depth
    source = np.flatnonzero(fits > 0)
    source = source[np.argsort(start[source], kind="stable")]
    return StageOptions(
        start=start[source],
        end=end[source],
        gpus=gpus[source],
        depth=fits[source],
        source=source.astype(np.int64),
        layers=int(end.max()),
    )


def options_of(candidates: Candidates, depth: Ints | None = None) -> StageOptions:
    """Return candidates as options."""
    return make_options(candidates.start, candidates.end, candidates.gpus, depth)


def stage_depths(
    costs: StageCosts,
    memory: float,
    micro_batches: int,
    schedule: Schedule,
    room: UsableMemory | None = None,
) -> Ints:
    """Return the depth of each candidate on GPUs of ``memory`` bytes, shape (K,).

    It is the depth of :class:`StageOptions`, or 0 for a candidate that fits nowhere or cannot run.
    """
    left = limit_bytes(memory, room) - memory_bytes(costs, 0, room)
    flights = np.floor(left / np.maximum(costs.flight_bytes, 1.0)).clip(0, FITS_ANYWHERE)
    some = flights if schedule is Schedule.ONE_F_ONE_B else 0
    depth = np.where(flights >= micro_batches, FITS_ANYWHERE, some)
    return np.where((left >= 0) & np.isfinite(costs.busy_s), depth, 0).astype(np.int64)


def stages_at(candidates: Candidates, rows: Ints) -> tuple[PlanStage, ...]:
    """Return these candidates as stages of a plan."""
    c = candidates
    return tuple(
        PlanStage(
            start=int(c.start[i]),
            end=int(c.end[i]),
            dp=int(c.dp[i]),
            tp=int(c.tp[i]),
            ep=int(c.ep[i]),
            sp=bool(c.sp[i]),
        )
        for i in rows
    )


def every_stage(layers: int, gpus: int) -> tuple[Ints, Ints, Ints]:
    """Return start, end and GPUs of each segment of layers on each power of two up to ``gpus``."""
    sizes = powers_of_two(gpus)
    first, last = np.triu_indices(layers)
    count = len(first)
    return (
        np.repeat(first, len(sizes)).astype(np.int64),
        np.repeat(last + 1, len(sizes)).astype(np.int64),
        np.tile(sizes, count).astype(np.int64),
    )


def least_in_each(group: Ints, value: Floats) -> Ints:
    """Return the index of the least value of each group, ascending. Ties go to the first index."""
    order = np.lexsort((value, group))
    leads = np.r_[True, np.diff(group[order]) != 0]
    return np.sort(order[leads])
