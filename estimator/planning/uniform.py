"""Uniform divisions: stages of equal GPUs and parallelism, in every number of micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import Final

import numpy as np

from tessera.estimator.graph import Graph, merged_ends
from tessera.estimator.plans import Candidates, Shape, powers_dividing, powers_of_two
from tessera.estimator.pricing.divisions import Divisions
from tessera.formulation.base.tables import Ints

MAX_ACCUMULATION: Final = 2**12
"""Largest number of micro-batches that is tried."""

MAX_CHUNKS: Final = 4
"""Largest number of chunks of layers on each stage's GPUs that is tried."""

MAX_DEGREE: Final = 128
"""Largest pipeline degree that is tried."""


def possible_degrees(layers: int, gpus: int) -> tuple[int, ...]:
    """Return the pipeline degrees to try: powers of two and divisors of the GPUs, ascending."""
    max_degree = min(layers, gpus, MAX_DEGREE)
    divisors = {d for d in range(1, max_degree + 1) if gpus % d == 0}
    return tuple(sorted(divisors | set(powers_of_two(min(max_degree, 16)))))


@lru_cache(maxsize=256)
def uniform_divisions(
    graph: Graph, shape: Shape, batch: int, degrees: tuple[int, ...], count: int | None = None
) -> Divisions | None:
    """Return the divisions into stages of equal GPUs and parallelism, or None without any.

    Blocks are cut into equal parts where they can be, and where the heaviest part is lightest.
    ``count`` is the number of micro-batches. If it is None, all of :func:`accumulations` are tried.
    """
    cuts = [(degree, 1, ends) for degree in degrees for ends in _cuts(graph, degree)]
    return _divisions(graph, shape, batch, cuts, count)


@lru_cache(maxsize=256)
def interleaved_divisions(
    graph: Graph, shape: Shape, batch: int, degrees: tuple[int, ...], count: int | None = None
) -> Divisions | None:
    """Return the divisions with several equal chunks of blocks on each stage, or None.

    The number of micro-batches is a multiple of the pipeline degree (Megatron-LM's schedule).
    """
    cuts = [
        (degree, chunks, ends)
        for degree, chunks in product(degrees, range(2, MAX_CHUNKS + 1))
        if degree > 1 and (ends := _equal_ends(len(graph), degree * chunks))
    ]
    return _divisions(graph, shape, batch, cuts, count)


def _divisions(
    graph: Graph,
    shape: Shape,
    batch: int,
    cuts: Sequence[tuple[int, int, Sequence[int]]],
    fixed_count: int | None,
) -> Divisions | None:
    """Return the divisions with some (pipeline degree, chunks, ends of stages)."""
    rows: list[Ints] = []
    plans: list[Ints] = []
    kinds = 0
    for degree, chunks, ends in cuts:
        if shape.gpus % degree:
            continue
        settings = np.array(
            [
                (*setting, count, kind)
                for kind, setting in enumerate(_settings(graph, shape, degree), kinds)
                for count in possible_counts(batch, setting[0], fixed_count)
                if chunks == 1 or count % degree == 0
            ],
            dtype=np.int64,
        ).reshape(-1, 6)
        kinds = max(kinds, *settings[:, 5]) + 1 if len(settings) else kinds
        stage_gpus = np.repeat(settings[:, :4], len(ends), axis=0)
        bounds = np.array([(0, *ends[:-1]), ends], dtype=np.int64).T
        rows.append(np.hstack([np.tile(bounds, (len(settings), 1)), stage_gpus]))
        plans.append(
            np.stack(
                [
                    settings[:, 4],
                    np.full(len(settings), chunks),
                    np.full(len(settings), len(ends)),
                    settings[:, 5],
                ],
                axis=1,
            )
        )
    if not sum(map(len, plans)):
        return None
    start, end, dp, tp, ep, sp = np.concatenate(rows).T.copy()
    accumulation, chunk, lengths, kind = np.concatenate(plans).T.copy()
    return Divisions(
        candidates=Candidates(start=start, end=end, dp=dp, tp=tp, ep=ep, sp=sp.astype(bool)),
        first_row=np.cumsum(lengths) - lengths,
        accumulation=accumulation,
        chunks=chunk,
        kind=kind,
    )


def _settings(graph: Graph, shape: Shape, degree: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield each (dp, tp, ep, sp) of stages, data parallelism first."""
    stage_gpus = shape.gpus // degree
    max_tp = float(graph.tensor_limit.min())
    experts = {int(n) for n in graph.experts if n > 1}
    for tp, ep in product(
        powers_dividing(stage_gpus), powers_dividing(stage_gpus) if experts else (1,)
    ):
        if tp <= max_tp and not any(count % ep for count in experts):
            for sp in range(1 + (tp > 1)):
                yield stage_gpus // tp, tp, ep, sp


def _cuts(graph: Graph, degree: int) -> list[tuple[int, ...]]:
    """Return the distinct ends of stages to try."""
    if degree > len(graph):
        return []
    balanced_ends_here = _balanced_ends(graph, degree)
    equal = _equal_ends(len(graph), degree)
    return (
        [balanced_ends_here] if equal in ((), balanced_ends_here) else [equal, balanced_ends_here]
    )


def _equal_ends(layers: int, degree: int) -> tuple[int, ...]:
    """Return the ends of stages with as many blocks each, or () if the blocks do not divide.

    The first and the last layer are the embedding and the head, which are no blocks.
    """
    if degree == 1:
        return (layers,)
    stage_gpus, remainder = divmod(layers - 2, degree)
    if remainder or stage_gpus < 1:
        return ()
    return (*(1 + stage_gpus * (stage + 1) for stage in range(degree - 1)), layers)


@lru_cache(maxsize=1024)
def _balanced_ends(graph: Graph, degree: int) -> tuple[int, ...]:
    return tuple(merged_ends(graph, degree).tolist())


def possible_counts(batch: int, replicas: int, fixed_count: int | None) -> tuple[int, ...]:
    """Return the numbers of micro-batches of a batch among replicas, or the fixed one if possible."""
    if batch % replicas:
        return ()
    if fixed_count is None:
        return accumulations(batch // replicas)
    return () if (batch // replicas) % fixed_count else (fixed_count,)


@lru_cache(maxsize=1024)
def accumulations(samples: int) -> tuple[int, ...]:
    """Return numbers of equal micro-batches of a replica's samples, rising.

    For each power of two, there is the largest divisor up to it, as a number of micro-batches and
    as the samples of one.
    """
    divisors = [n for n in range(1, min(samples, MAX_ACCUMULATION) + 1) if samples % n == 0]
    powers = powers_of_two(samples) if divisors else []
    divisors_below = [max(n for n in divisors if n <= power) for power in powers]
    counts = {*divisors_below, *(samples // divisor for divisor in divisors_below)}
    return tuple(sorted(count for count in counts if count <= MAX_ACCUMULATION))
