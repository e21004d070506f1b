"""Times and memory of many plans at once: divisions of a model under each choice of switches.

A division says how layers, GPUs and samples are divided. Switches (ZeRO, offload, recomputation)
are what else a plan decides. Times and memory are those of :mod:`.price`, plan by plan.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tessera.estimator.cells import Setting
from tessera.estimator.costs import drop_idle_degrees
from tessera.estimator.memory import limit_bytes, place_states
from tessera.estimator.pipeline import Sync, exposed_sync_s, first_send_s, paces_s
from tessera.estimator.planning.options import stages_at
from tessera.estimator.plans import Candidates, StageCosts
from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.formulation.job.execution_plan import (
    ExecutionPlan,
    PlanSwitches,
    Precision,
    Recomputation,
    Schedule,
    ZeroStage,
)
from tessera.formulation.job.techniques import PlanLimits


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Divisions:
    """P divisions of a model with K stages in all, in order.

    ``candidates`` are the stages. ``first_row`` is the first stage of each division, and
    ``accumulation`` is its number of micro-batches. ``chunks`` is above 1 for interleaved schedules,
    whose stages are chunks. Divisions of one ``kind`` differ in their micro-batches only. Arrays
    have shape (P,).
    """

    candidates: Candidates
    first_row: Ints
    accumulation: Ints
    chunks: Ints
    kind: Ints

    def __len__(self) -> int:
        return len(self.first_row)

    @property
    def lengths(self) -> Ints:
        """Return the stages of each division, counting each chunk, shape (P,)."""
        return np.diff(self.first_row, append=len(self.candidates))

    @property
    def degrees(self) -> Ints:
        """Return the pipeline degrees, shape (P,)."""
        return self.lengths // self.chunks

    def select(self, is_kept: Bools) -> Divisions:
        """Return the chosen divisions."""
        if is_kept.all():
            return self
        rows = np.flatnonzero(np.repeat(is_kept, self.lengths)).astype(np.int64)
        lengths = self.lengths[is_kept]
        return Divisions(
            candidates=self.candidates.rows(rows),
            first_row=np.cumsum(lengths) - lengths,
            accumulation=self.accumulation[is_kept],
            chunks=self.chunks[is_kept],
            kind=self.kind[is_kept],
        )

    def plan(
        self, setting: Setting, index: int, switches: PlanSwitches, model: str
    ) -> ExecutionPlan:
        """Return one division under some switches as a plan."""
        start, count = int(self.first_row[index]), int(self.accumulation[index])
        rows, chunks = np.arange(start, start + self.lengths[index]), int(self.chunks[index])
        return ExecutionPlan(
            stages=stages_at(self.candidates, rows),
            micro_batch=setting.training.global_batch // count,
            accumulation=count,
            schedule=Schedule.INTERLEAVED if chunks > 1 else Schedule.ONE_F_ONE_B,
            chunks=chunks,
            precision=Precision(setting.graph.dtype),
            shape=setting.shape.each_node,
            model=model,
            **switches.switch_values(),
        )


class DivisionPrices:
    """Divisions in a setting, with the terms of their costs."""

    def __init__(self, setting: Setting, divisions: Divisions) -> None:
        """Cost what all switches share."""
        self.divisions, self._setting = divisions, setting
        micro_batch = setting.training.global_batch // divisions.accumulation
        self._terms = setting.terms(
            drop_idle_degrees(setting.graph, divisions.candidates),
            np.repeat(micro_batch, divisions.lengths),
        )
        lengths = divisions.lengths
        self._index = np.arange(int(lengths.sum())) - np.repeat(divisions.first_row, lengths)
        self._stages = _stage_of_chunks(divisions, self._index)
        self._flights = _count_in_flight(divisions, self._index)

    def price(self, switches: PlanSwitches) -> tuple[Floats, Floats]:
        """Return the seconds and the bytes on the fullest GPU of each division, each of shape (P,).

        An interleaved division needs at least these bytes, and :func:`.price.price_plan` says how
        many.
        """
        runtime = self._setting.runtime
        costs = self._terms.costs(
            place_states(runtime.states, switches), switches.recomputation, runtime.copies
        )
        held_bytes = costs.state_bytes + costs.flight_bytes * self._flights
        first_row, working = self.divisions.first_row, costs.working_bytes
        if self._stages is not None:
            held_bytes, working = self._stages.add(held_bytes), self._stages.max_bytes(working)
            first_row = self._stages.first_row
        max_bytes = (
            np.maximum.reduceat(held_bytes + working, first_row) + runtime.room.context_bytes
        )
        return self._seconds(costs), np.asarray(max_bytes)

    def _seconds(self, costs: StageCosts) -> Floats:
        """Return the times of :func:`tessera.estimator.pipeline.iteration_s`, shape (P,)."""
        divisions, overlap = self.divisions, self._setting.runtime.overlap
        first_row, chunks = divisions.first_row, divisions.chunks
        if self._stages is not None:
            costs, first_row = self._stages.join(costs), self._stages.first_row
        steady_s = sum(np.maximum.reduceat(slots, first_row) for slots in paces_s(costs, overlap))
        through_s = np.add.reduceat(costs.busy_s + first_send_s(costs.send_s, overlap), first_row)
        synced_s = exposed_sync_s(costs.sync_s, costs.backward_s, overlap)
        fold = np.add if overlap.sync is Sync.IN_TURN else np.maximum
        after_s = fold.reduceat(synced_s, first_row) + np.maximum.reduceat(
            costs.update_s, first_row
        )
        with np.errstate(invalid="ignore"):
            seconds = through_s / chunks + (divisions.accumulation - 1 / chunks) * steady_s
        return np.asarray(np.where(np.isnan(seconds), np.inf, seconds) + after_s)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _JoinedStages:
    """The stages whose chunks some rows are: that of each row (K,), and the first of divisions (P,)."""

    of_row: Ints
    first_row: Ints

    def join(self, costs: StageCosts) -> StageCosts:
        """Return the times of stages, the sums over their chunks."""
        return replace(
            costs,
            forward_s=self.add(costs.forward_s),
            backward_s=self.add(costs.backward_s),
            comm_s=self.add(costs.comm_s),
            send_s=self.add(costs.send_s),
            receive_s=self.add(costs.receive_s),
            sync_s=self.add(costs.sync_s),
            update_s=self.add(costs.update_s),
        )

    def add(self, column: Floats) -> Floats:
        """Return the sum of a column (K,) over the chunks of each stage."""
        return np.bincount(self.of_row, weights=column).astype(np.float64)

    def max_bytes(self, column: Floats) -> Floats:
        """Return the maximum of a column (K,) over the chunks of each stage."""
        max_bytes = np.zeros(int(self.of_row[-1]) + 1)
        np.maximum.at(max_bytes, self.of_row, column)
        return max_bytes


def _stage_of_chunks(divisions: Divisions, index: Ints) -> _JoinedStages | None:
    """Return the stages that chunks belong to, or None if no division has chunks."""
    if (divisions.chunks == 1).all():
        return None
    first_row = np.cumsum(divisions.degrees) - divisions.degrees
    lengths = divisions.lengths
    of_row = np.repeat(first_row, lengths) + index % np.repeat(divisions.degrees, lengths)
    return _JoinedStages(of_row=of_row, first_row=first_row)


def _count_in_flight(divisions: Divisions, index: Ints) -> Ints:
    """Return the micro-batches of which each row keeps activations, shape (K,).

    Of a chunk, it is the number when its stage begins with the backward passes, as in
    :func:`tessera.estimator.pricing.flights.interleaved_order`.
    """
    lengths = divisions.lengths
    degree, chunks = np.repeat(divisions.degrees, lengths), np.repeat(divisions.chunks, lengths)
    count = np.repeat(divisions.accumulation, lengths)
    stages_left, chunk = degree - index % degree, index // degree
    passes_ahead = np.minimum(2 * (stages_left - 1) + (chunks - 1) * degree + 1, count * chunks)
    rounds, passes_left = np.divmod(passes_ahead, degree * chunks)
    interleaved_count = rounds * degree + np.clip(passes_left - chunk * degree, 0, degree)
    return np.asarray(np.where(chunks > 1, interleaved_count, np.minimum(stages_left, count)))


FASTEST_SWITCHES: Final = (
    PlanSwitches(zero=ZeroStage.NONE, recomputation=Recomputation.NONE),
    PlanSwitches(zero=ZeroStage.OPTIMIZER, recomputation=Recomputation.NONE),
)
"""The switches of which one is fastest, if memory does not matter. The others add kernels or messages."""


class PlanTable:
    """The plans of some divisions under each of some switches, with their times and memory.

    A plan is named by its index in the flat arrays of shape (switches, P). Plans that cannot run, or
    that the limits exclude, take infinite seconds.
    """

    def __init__(
        self,
        setting: Setting,
        divisions: Divisions,
        switches: Sequence[PlanSwitches],
        limits: PlanLimits,
        model: str,
        known_s: Mapping[int, float] | None = None,
    ) -> None:
        """Price the plans. ``model`` is the name of the model in them.

        ``known_s`` are the times of known plans by degree. If they are given, the switches begin with
        :data:`FASTEST_SWITCHES`, and divisions are priced under the others only if one of their
        plans may be faster than the known ones and all without chunks that fit here.
        """
        self._setting, self.divisions, self._switches = setting, divisions, tuple(switches)
        self._model, shape = model, (len(switches), len(divisions))
        self.seconds, self.bytes = np.full(shape, np.inf), np.full(shape, np.inf)
        self.limit_bytes = limit_bytes(setting.hardware.memory_bytes, setting.runtime.room)
        is_allowed = self._find_allowed(limits)
        is_kept = np.asarray(is_allowed.any(axis=0))
        first_row = len(switches) if known_s is None else len(FASTEST_SWITCHES)
        self._price(is_kept, range(first_row))
        if known_s is not None:
            min_s = self.seconds[:first_row].min(axis=0)
            # Chunks may need more memory than these bytes, so their plans prove nothing yet.
            is_proven = is_allowed & (self.bytes <= self.limit_bytes) & (divisions.chunks == 1)
            seconds = np.where(is_proven, self.seconds, np.inf)
            degrees, best_s = divisions.degrees, seconds.min(axis=0)
            for degree in np.unique(degrees).tolist():
                of_degree = degrees == degree
                known_degree_s = min(known_s.get(degree, math.inf), float(best_s[of_degree].min()))
                is_kept = is_kept & ~(of_degree & (min_s >= known_degree_s))
            self._price(is_kept, range(first_row, len(switches)))
        self.seconds[~is_allowed] = np.inf

    def _price(self, is_kept: Bools, switches: Iterable[int]) -> None:
        if not is_kept.any():
            return
        prices = DivisionPrices(self._setting, self.divisions.select(is_kept))
        for index in switches:
            self.seconds[index, is_kept], self.bytes[index, is_kept] = prices.price(
                self._switches[index]
            )

    def _find_allowed(self, limits: PlanLimits) -> Bools:
        """Return whether limits allow each plan. No limit depends on the number of micro-batches."""
        shape = self.seconds.shape
        if limits.allow_every_plan:
            return np.ones(shape, dtype=np.bool_)
        pairs = np.stack([self.divisions.kind, self.divisions.accumulation > 1])
        _, first_row, pair_of_division = np.unique(
            pairs, axis=1, return_index=True, return_inverse=True
        )
        rows = [
            [
                limits.allow(self.plan(index * shape[1] + division))
                for division in first_row.tolist()
            ]
            for index in range(shape[0])
        ]
        return np.array(rows, dtype=np.bool_)[:, pair_of_division.ravel()]

    def plan(self, index: int) -> ExecutionPlan:
        """Return a plan by its index in the flat arrays."""
        switches, division = divmod(index, len(self.divisions))
        return self.divisions.plan(self._setting, division, self._switches[switches], self._model)

    def kind(self, index: int) -> tuple[int, int]:
        """Return what a plan shares with those that differ in their micro-batches only."""
        switches, division = divmod(index, len(self.divisions))
        return switches, int(self.divisions.kind[division])

    def batching(self, index: int) -> tuple[int, PlanSwitches]:
        """Return a plan's number of micro-batches and its switches."""
        switches, division = divmod(index, len(self.divisions))
        return int(self.divisions.accumulation[division]), self._switches[switches]

    def in_order(
        self, degrees: Collection[int], column: Floats | Ints, memory_bytes: float = math.inf
    ) -> Iterator[int]:
        """Yield the flat indices of plans of some degrees that fit, by a rising column.

        ``column`` has the shape of ``seconds``, or that of a row of it.
        """
        has_degree = np.isin(self.divisions.degrees, list(degrees))
        index = np.flatnonzero(
            np.isfinite(self.seconds) & (self.bytes <= memory_bytes) & has_degree
        )
        values = np.broadcast_to(column, self.seconds.shape).ravel()[index]
        yield from index[np.argsort(values, kind="stable")].tolist()
