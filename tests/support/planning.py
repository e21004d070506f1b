"""All plans of a few layers, listed one by one, and random costs, for checks of planners."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tessera.estimator.planning.options import StageOptions, every_stage, make_options
from tessera.estimator.plans import Candidates, StageCosts
from tessera.formulation.base.tables import Ints


def every_plan(option: StageOptions, gpus: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Yield every plan as indices of options, by trying each option after each prefix."""

    def onward(layer: int, gpus: int, left: int) -> Iterator[tuple[int, ...]]:
        if left == 0:
            if layer == option.layers and gpus == 0:
                yield ()
            return
        for k in range(len(option)):
            if option.start[k] == layer and option.gpus[k] <= gpus and option.depth[k] >= left:
                for more in onward(int(option.end[k]), gpus - int(option.gpus[k]), left - 1):
                    yield (k, *more)

    yield from onward(0, gpus, stages)


def every_candidate(layers: int, gpus: int) -> Candidates:
    """Return each stretch of layers on each power of two of GPUs, in each split into dp and tp."""
    start, end, size = every_stage(layers, gpus)
    splits = np.array([int(n).bit_length() for n in size])
    row = np.repeat(np.arange(len(size)), splits)
    dp = 2 ** (np.arange(len(row)) - np.repeat(np.cumsum(splits) - splits, splits))
    return Candidates(
        start=start[row],
        end=end[row],
        dp=dp,
        tp=size[row] // dp,
        ep=np.ones_like(dp),
        sp=np.zeros(len(dp), dtype=np.bool_),
    )


def random_costs(candidates: Candidates, rng: np.random.Generator) -> StageCosts:
    """Return random costs that grow with layers and shrink with GPUs."""
    span = (candidates.end - candidates.start).astype(np.float64)

    def about(value: float) -> np.ndarray:
        return value * span / candidates.gpus * rng.uniform(0.5, 2.0, len(span))

    first, last = candidates.start == 0, candidates.end == candidates.end.max()
    return StageCosts(
        candidates=candidates,
        forward_s=about(1.0),
        backward_s=about(2.0),
        comm_s=about(0.5),
        send_s=np.where(last, 0.0, rng.uniform(0.0, 3.0, len(span))),
        receive_s=np.where(first, 0.0, rng.uniform(0.0, 3.0, len(span))),
        sync_s=about(3.0),
        update_s=about(1.0),
        state_bytes=about(4e9),
        flight_bytes=about(1e9),
        working_bytes=about(1e8),
    )


def random_depth(count: int, rng: np.random.Generator) -> Ints:
    """Return random depths, of which some forbid early stages and some forbid all."""
    return rng.integers(0, 6, count).astype(np.int64)


def all_stages(layers: int, gpus: int) -> StageOptions:
    """Return each stretch of layers on each power of two of GPUs, all of which fit."""
    return make_options(*every_stage(layers, gpus))
