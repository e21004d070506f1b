"""Topological orders to cut: by urgency, and random ones (Crux 4.3, algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tessera.formulation.base.tables import Ints
from tessera.solvers.network.compression.dag import Dag
from tessera.solvers.network.kernels.compression import pick_order


def topological_orders(dag: Dag, samples: int, seed: int) -> Iterator[Ints]:
    """Yield ``samples`` topological orders of the vertices: by urgency first, then random ones.

    At each place, a random order takes any of the vertices whose predecessors all have theirs, each
    with equal probability. So every topological order is possible.
    """
    count = len(dag.job)
    yield np.arange(count, dtype=np.int64)
    rng = np.random.default_rng(seed)
    for _ in range(samples - 1):
        order = np.empty(count, np.int64)
        pick_order(dag.start, dag.target, rng.random(count), order)
        yield order
