"""Plans whose stages differ in their GPUs and parallelism, faster than known ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np

from tessera.estimator.cells import CoarseGraph, Setting, coarse_for
from tessera.estimator.costs import candidates_of
from tessera.estimator.graph import Graph
from tessera.estimator.memory import States, place_states
from tessera.estimator.planning.options import options_of, stage_depths, stages_at
from tessera.estimator.planning.search import best_plans, latency_of
from tessera.estimator.plans import Candidates, Shape, powers_of_two
from tessera.formulation.base.tables import Ints
from tessera.formulation.job.execution_plan import ExecutionPlan, PlanSwitches, Precision


class MixedStages:
    """The candidate stages of plans whose stages differ, between the cuts of coarse layers."""

    def __init__(
        self, setting: Setting, stages: int, unit: int, is_cancelled: Callable[[], bool]
    ) -> None:
        """List the candidates for up to some stages, on multiples of ``unit`` GPUs each.

        Raises:
            DeadlineTooShort: it was cancelled.
        """
        self._setting, self._is_cancelled = setting, is_cancelled
        coarse = coarse_for(setting.graph, stages, is_cancelled)
        self._candidates = _candidates(
            coarse.graph, setting.shape, len(coarse.graph) == len(setting.graph), unit
        )
        self._fine = _in_fine_layers(self._candidates, coarse)
        self._single_rows = np.flatnonzero(self._candidates.end - self._candidates.start == 1)
        self._terms = lru_cache(maxsize=4)(partial(setting.terms, self._fine))
        self._terms_alone = lru_cache(maxsize=4)(
            partial(setting.terms, self._fine.rows(self._single_rows))
        )
        self._layers = len(coarse.graph)
        self.work = self._layers * len(self._candidates)

    def search(
        self,
        count: int,
        switches: PlanSwitches,
        known_s: Mapping[int, float],
        model: str,
    ) -> Iterator[tuple[float, ExecutionPlan]]:
        """Yield the seconds and the plan of each degree of which one is faster than the known one."""
        setting, runtime = self._setting, self._setting.runtime
        training, gpus = setting.training, setting.shape.gpus
        states, micro_batch = place_states(runtime.states, switches), training.global_batch // count
        rows = self._fast_rows(micro_batch, states, switches, max(known_s.values()))
        if not (self._candidates.end[rows] == self._layers).any():
            return  # the last layer would take too long
        fine = self._fine.rows(rows)
        costs = setting.terms(fine, micro_batch).costs(
            states, switches.recomputation, runtime.copies
        )
        memory = setting.hardware.memory_bytes
        depths = stage_depths(costs, memory, count, training.schedule, runtime.room)
        if not depths.any():
            return
        options = options_of(self._candidates.rows(rows), depths)
        latency = latency_of(costs, count, runtime.overlap)
        plans = best_plans(options, latency, gpus, known_s, self._is_cancelled, known_s)
        for plan in plans.values():
            plan_found = ExecutionPlan(
                stages=stages_at(fine, np.array(plan.rows, dtype=np.int64)),
                micro_batch=micro_batch,
                accumulation=count,
                schedule=training.schedule,
                zero=switches.zero,
                recomputation=switches.recomputation,
                precision=Precision(setting.graph.dtype),
                shape=setting.shape.each_node,
                model=model,
            )
            yield plan.latency_s, plan_found

    def _fast_rows(
        self, micro_batch: int, states: States, switches: PlanSwitches, known_s: float
    ) -> Ints:
        """Return the candidates that may be part of a plan faster than ``known_s``, ascending.

        Every layer takes at least the time of its fastest candidate, and the slowest stage at least
        the mean of the GPU seconds of the cheapest ones. It counts once more for each further
        micro-batch.
        """
        recomputation = switches.recomputation
        alone_s = self._terms_alone(micro_batch).busy_s(states, recomputation)
        c, single = self._candidates, self._candidates.rows(self._single_rows)
        min_layer_s, min_layer_gpu_s = np.full((2, int(c.end.max())), np.inf)
        np.minimum.at(min_layer_s, single.start, alone_s)
        np.minimum.at(min_layer_gpu_s, single.start, alone_s * single.gpus)
        further_batches = self._setting.training.global_batch // micro_batch - 1
        pace_s = min_layer_gpu_s.sum() / self._setting.shape.gpus
        if min_layer_s.sum() + (further_batches * pace_s if further_batches else 0.0) >= known_s:
            return np.zeros(0, dtype=np.int64)
        busy_s = self._terms(micro_batch).busy_s(states, recomputation)
        before_s = np.concatenate([[0.0], np.cumsum(min_layer_s)])
        whole_s = before_s[-1] - (before_s[c.end] - before_s[c.start]) + busy_s
        if further_batches:
            whole_s = whole_s + further_batches * np.maximum(busy_s, pace_s)
        return np.flatnonzero(whole_s < known_s).astype(np.int64)


@lru_cache(maxsize=64)
def _candidates(graph: Graph, shape: Shape, sequence_parallel: bool, unit: int) -> Candidates:
    """Return the candidate stages on powers of two of GPUs, from ``unit`` on."""
    counts = [power for power in powers_of_two(shape.gpus) if power >= unit]
    return candidates_of(graph, shape, stage_gpus=counts, sequence_parallel=sequence_parallel)


def _in_fine_layers(candidates: Candidates, coarse: CoarseGraph) -> Candidates:
    """Return candidates of coarse layers with the bounds of the model's own layers."""
    bounds = np.concatenate([[0], coarse.ends]).astype(np.int64)
    return replace(candidates, start=bounds[candidates.start], end=bounds[candidates.end])
