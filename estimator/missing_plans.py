"""Reasons why a job has no Cell at a pipeline degree: the memory that its tightest plan lacks."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import replace

from tessera.estimator.cells import (
    MicroBatches,
    Setting,
    coarse_for,
    cost_candidates,
    degrees_by_micro_batches,
)
from tessera.estimator.memory import Overflow, find_overflow, in_flight
from tessera.estimator.planning.tightest import tightest_plan
from tessera.estimator.plans import StageCosts


def explain_missing_degrees(
    setting: Setting,
    degrees: Iterable[int],
    known: Container[int],
    rule: MicroBatches | None = None,
) -> dict[int, Overflow | None]:
    """Return the overflow of the plan that needs least memory, for each degree that is not ``known``.

    An entry is None if no amount of memory would allow a plan. In that case there are more stages
    than layers, the GPUs cannot share a micro-batch, or the number of GPUs is not a sum of powers of
    two, one for each stage. ``degrees`` are those for which plans were searched, and ``known`` those
    that have one.
    """
    wanted = sorted(set(degrees))
    coarse = coarse_for(setting.graph, wanted[-1]).graph
    overflows: dict[int, Overflow | None] = {s: None for s in wanted if s not in known}
    for count, some in degrees_by_micro_batches(list(overflows), setting.training, rule).items():
        if not some:
            continue
        here = replace(setting, graph=coarse, training=setting.training.within(count))
        costs, _ = cost_candidates(here)
        for stages in some:
            least, miss = overflows[stages], _overflow_of(here, costs, stages)
            if least is None or (miss is not None and miss.needed_bytes < least.needed_bytes):
                overflows[stages] = miss
    return overflows


def _overflow_of(setting: Setting, costs: StageCosts, stages: int) -> Overflow | None:
    training, room = setting.training, setting.runtime.room
    rows = tightest_plan(costs, training, setting.shape.gpus, stages, len(setting.graph), room)
    if rows is None:
        return None
    flights = in_flight(training.schedule, stages, training.micro_batches)
    return find_overflow(costs, rows.tolist(), flights, setting.hardware.memory_bytes, room)
