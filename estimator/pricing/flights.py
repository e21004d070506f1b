"""The bytes of activations that stages hold at most, under each schedule."""

from __future__ import annotations

import numpy as np

from tessera.estimator.memory import in_flight
from tessera.formulation.base.tables import Floats, Ints
from tessera.formulation.job.execution_plan import Schedule


def held_bytes(schedule: Schedule, flight_bytes: Floats, micro_batches: int) -> Floats:
    """Return the most bytes of activations that each stage's GPUs hold at a time, shape (stages,).

    ``flight_bytes`` are those of a micro-batch in each chunk, shape (chunks, stages).
    """
    stages = flight_bytes.shape[1]
    if schedule is not Schedule.INTERLEAVED:
        return np.asarray(flight_bytes[0] * in_flight(schedule, stages, micro_batches))
    return np.array(
        [
            _interleaved_bytes(flight_bytes[:, stage], stage, stages, micro_batches)
            for stage in range(stages)
        ]
    )


def interleaved_order(
    stage: int, stages: int, chunks: int, micro_batches: int
) -> tuple[Ints, Ints, int]:
    """Return the chunks of a stage's forward passes, those of its backward passes, and the head start.

    Micro-batches pass in groups of ``stages`` through one chunk after another. A stage begins with
    the backward passes after ``2 (stages - stage - 1) + (chunks - 1) stages + 1`` forward ones, and
    then alternates (Narayanan et al., SC 2021, section 2.2; Megatron-LM's schedule).
    """
    passes = np.arange(micro_batches * chunks, dtype=np.int64)
    forward = passes // stages % chunks
    ahead = 2 * (stages - stage - 1) + (chunks - 1) * stages + 1
    return forward, chunks - 1 - forward, min(ahead, len(passes))


def _interleaved_bytes(bytes_: Floats, stage: int, stages: int, micro_batches: int) -> float:
    """Return the most bytes that a stage holds, by adding up its passes in order.

    The order repeats itself after a group of micro-batches, so three groups are enough.
    """
    few = min(micro_batches, 3 * stages)
    forward, backward, ahead = interleaved_order(stage, stages, len(bytes_), few)
    kept = np.concatenate([[0.0], np.cumsum(bytes_[forward])])
    freed = np.concatenate([[0.0], np.cumsum(bytes_[backward])])
    done = np.arange(ahead, len(kept))  # forward passes done, each followed by a backward pass
    return float((kept[done] - freed[done - ahead]).max())
