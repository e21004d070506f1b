"""Clusters that benchmarks and the demo run on."""

from __future__ import annotations

from collections.abc import Iterable

from estimator.hardware import A10, A40, A100, V100, Hardware
from formulation.resources import NodeSpec
from formulation.snapshot import GpuType

NODES_PER_RACK = 16
"""Of one type; the papers do not say how nodes lie in racks."""

Cluster = tuple[list[GpuType], list[NodeSpec]]


def arena_table1(share: float = 1.0) -> Cluster:
    """Return the simulated cluster of Crius, Table 1: 320 GPUs of each of four types, 1,280 in all.

    ``share``: so much of each type's nodes, at least one.
    """
    counts = ((A100, 80), (V100, 20), (A40, 160), (A10, 160))
    return cluster([(kind, max(1, round(share * nodes))) for kind, nodes in counts])


def tiny() -> Cluster:
    """Return 64 GPUs in 21 nodes: 16 of each type, so that every Cell of up to 16 GPUs fits."""
    return cluster([(A100, 4), (V100, 1), (A40, 8), (A10, 8)])


def cluster(counts: Iterable[tuple[Hardware, int]]) -> Cluster:
    """Return the types and nodes of a cluster with so many nodes of each kind."""
    kinds = list(counts)
    nodes = [
        NodeSpec(
            name=f"{kind.name}-{i:03d}", gpu_type=kind.name, gpus=kind.gpus_per_node,
            rack=f"{kind.name}-rack-{i // NODES_PER_RACK:02d}",
        )
        for kind, count in kinds
        for i in range(count)
    ]  # fmt: skip
    return [kind.gpu_type for kind, _ in kinds], nodes
