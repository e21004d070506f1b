"""Why a job has no Cell at a pipeline degree: by how much the plan that needs least memory is too large."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import replace

from estimator.cells import COARSE_LAYERS, MicroBatches, Setting, priced
from estimator.graph import merged
from estimator.memory import Overflow, in_flight, overflow
from estimator.planning.tightest import tightest_plan
from estimator.plans import Training


def micro_batches_of(rule: MicroBatches | None, stages: int, training: Training) -> int:
    """Return the micro-batches of a plan; where they are searched, as many as need least memory."""
    if rule is None:
        return training.micro_batches
    if rule is MicroBatches.SEARCHED:
        return 1 << (training.global_batch.bit_length() - 1)
    wanted = stages if rule is MicroBatches.STAGES else 4 * stages
    return min(wanted, training.global_batch)


def misses(
    setting: Setting,
    degrees: Iterable[int],
    known: Container[int],
    rule: MicroBatches | None = None,
) -> dict[int, Overflow | None]:
    """Return, for each degree that is not ``known``, what overflows in the plan that needs least memory.

    None: there is no plan at all, whatever the memory (more stages than layers; a micro-batch that is not
    shared among so many GPUs). ``degrees`` is what ``cells`` was asked for, ``known`` what it answered.
    """
    asked = sorted(set(degrees))
    coarse = merged(setting.graph, max(COARSE_LAYERS, asked[-1]))
    found: dict[int, Overflow | None] = {}
    for stages in asked:
        if stages not in known:
            count = micro_batches_of(rule, stages, setting.training)
            training = setting.training.within(count)
            found[stages] = _miss(replace(setting, graph=coarse, training=training), stages)
    return found


def _miss(setting: Setting, stages: int) -> Overflow | None:
    costs, _ = priced(setting)
    training, room = setting.training, setting.runtime.room
    rows = tightest_plan(costs, training, setting.shape.gpus, stages, len(setting.graph), room)
    if rows is None:
        return None
    flights = in_flight(training.schedule, stages, training.micro_batches)
    return overflow(costs, rows.tolist(), flights, setting.hardware.memory_bytes, room)
