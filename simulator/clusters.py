"""The clusters of simulations, benchmarks and the demo: those of the papers, and a small one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from tessera.estimator.hardware import A10, A40, A100, A800, H100, L20, V100, Hardware
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.resources import UNSTATED_HOST, amounts_of, name_amounts
from tessera.formulation.base.values import GpuType
from tessera.formulation.records.clusters import NodeSpec

NODES_PER_RACK = 16
"""Nodes of one GPU type in a rack. The papers do not say how nodes are distributed over racks."""

TypesAndNodes = tuple[list[GpuType], list[NodeSpec]]

PRESETS: Final[Mapping[str, tuple[tuple[Hardware, int], ...]]] = {
    # Crius, Table 1 and section 8.1; the artifact's simulated cluster: 320 GPUs of each type
    "arena-1280": ((A100, 80), (V100, 20), (A40, 160), (A10, 160)),
    # Arena, section 5.1, Cluster-A: 32 A40 and 32 A10, two per node
    "testbed-a": ((A40, 16), (A10, 16)),
    # Arena, section 5.1, Cluster-B: 128 H100, eight per node, and 256 L20, sixteen per node
    "testbed-b": ((H100, 16), (L20, 16)),
    # Arena, section 5.7, the homogeneous testbed: Cluster-B's H100 alone
    "h100-128": ((H100, 16),),
    # Morphling, section 7: 8 servers of 8 A800
    "a800-64": ((A800, 8),),
    # not from a paper: 16 GPUs of each of Arena's types, so that every Cell of up to 16 GPUs fits
    "tiny": ((A100, 4), (V100, 1), (A40, 8), (A10, 8)),
}
"""The number of nodes of each GPU type, by the name of the cluster."""

NODE_HOSTS: Final[Mapping[str, tuple[int, ...]]] = {
    # Morphling, section 7: 96 vCPUs and 1,600 GB of memory in each server
    "a800-64": (96, 1_600 * 10**9),
}
"""The amounts of the resources of each host, by the name of the cluster.

The nodes of other clusters do not state them, so that they limit nothing there.
"""


def preset_cluster(name: str, share: float = 1.0) -> TypesAndNodes:
    """Return a cluster of ``PRESETS``.

    ``share`` is the fraction of each GPU type's nodes that is kept. At least one node of each type
    is kept.

    Raises:
        InvalidInput: there is no such cluster, or ``share`` is not above 0.
    """
    if name not in PRESETS:
        raise InvalidInput("cluster", f"unknown {name!r}; use one of {', '.join(PRESETS)}")
    if not 0 < share < float("inf"):
        raise InvalidInput("share", "must be a positive number")
    kinds, nodes = cluster_of_hardware(
        [(kind, max(1, round(share * nodes))) for kind, nodes in PRESETS[name]]
    )
    host = name_amounts(NODE_HOSTS.get(name, amounts_of(UNSTATED_HOST)))
    return kinds, [replace(node, **host) for node in nodes]


def arena_table1(share: float = 1.0) -> TypesAndNodes:
    """Return the simulated cluster of Crius, Table 1: four types of 320 GPUs, 1,280 in all."""
    return preset_cluster("arena-1280", share)


def tiny_cluster() -> TypesAndNodes:
    """Return a cluster of 64 GPUs in 21 nodes, with 16 GPUs of each type."""
    return preset_cluster("tiny")


def hardware_of(name: str) -> tuple[Hardware, ...]:
    """Return the hardware of a preset cluster.

    Raises:
        KeyError: there is no such cluster.
    """
    return tuple(kind for kind, _ in PRESETS[name])


def cluster_of_hardware(counts: Iterable[tuple[Hardware, int]]) -> TypesAndNodes:
    """Return the GPU types and nodes of a cluster, from the number of nodes of each hardware."""
    kinds = list(counts)
    nodes = [
        NodeSpec(
            name=f"{kind.name}-{i:03d}",
            gpu_type=kind.name,
            gpus=kind.gpus_per_node,
            rack=f"{kind.name}-rack-{i // NODES_PER_RACK:02d}",
        )
        for kind, count in kinds
        for i in range(count)
    ]
    return [kind.gpu_type for kind, _ in kinds], nodes
