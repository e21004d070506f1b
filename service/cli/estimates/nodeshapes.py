"""The nodes that an estimate assumes: those of a cluster, or those of data sheets."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from tessera.estimator.hardware import Hardware
from tessera.estimator.hardware.cluster_types import hardware_of
from tessera.formulation.base.values import GpuType
from tessera.formulation.records.estimates import ClusterGpuType
from tessera.service.cli.client import CallFailed, connect
from tessera.service.cli.names import cluster_name, short_name
from tessera.service.cli.options import DEFAULT_CLUSTER, DEFAULT_SERVER
from tessera.v1 import clusters_pb2

CONNECT_S: Final = 0.5
"""Seconds that the default server may take to accept a connection."""

CALL_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShapes:
    """The GPU types of a cluster.

    ``source`` names the cluster. It is "" if no server was asked, or if none answered.
    """

    source: str = ""
    kinds: Mapping[str, ClusterGpuType] = field(default_factory=dict)
    node_gpus: int | None = None  # the user's number, if not None

    def hardware(self, known: Hardware) -> Hardware:
        """Return a GPU type with the memory and nodes that a job would have.

        The service uses the same function to estimate Cells.
        """
        kind = self.kinds.get(known.name)
        actual = known if kind is None else hardware_of("--gpu", kind, {known.name: known})
        return actual if self.node_gpus is None else replace(actual, gpus_per_node=self.node_gpus)

    def describe(self, hardware: Hardware) -> str:
        """Return a sentence on the assumed nodes, and how to change them."""
        nodes = f"assumed nodes of {hardware.gpus_per_node} x {hardware.name}"
        if self.node_gpus is not None:
            return f"{nodes}, from --node-gpus"
        kind = self.kinds.get(hardware.name)
        if kind is not None and kind.node_gpus:
            return f"{nodes}, as in {self.source} (change this with --offline or --node-gpus)"
        cause = f"{self.source} has none" if self.source else "no server was asked"
        return (
            f"{nodes}, as in data sheets ({cause}); change this with --node-gpus, or use the nodes of a"
            " cluster with --server and --cluster"
        )


def shapes_of(server: str, cluster: str, *, offline: bool, node_gpus: int | None) -> NodeShapes:
    """Return the shapes of a cluster, or none if no server was named and none answers.

    Raises:
        CallFailed: the named server does not answer, or the named cluster does not exist.
    """
    named = bool(server or cluster)
    address, name = server or DEFAULT_SERVER, cluster_name(cluster or DEFAULT_CLUSTER)
    if offline or not (named or _accepts(address)):
        return NodeShapes(node_gpus=node_gpus)
    try:
        with connect(address) as client:
            request = clusters_pb2.GetClusterRequest(name=name)
            stored = client.call(client.stubs.clusters.GetCluster, request, CALL_S)
    except CallFailed as failed:
        if not named:  # another program, or a server without this cluster
            return NodeShapes(node_gpus=node_gpus)
        raise CallFailed(
            f"{failed}; --offline estimates from data sheets alone", failed.exit_code
        ) from failed
    return NodeShapes(
        source=f"cluster {short_name(name)} at {address}",
        kinds={kind.name: _kind(kind) for kind in stored.gpu_types},
        node_gpus=node_gpus,
    )


def _kind(message: clusters_pb2.GpuType) -> ClusterGpuType:
    gpu_type = GpuType(name=message.name, memory_bytes=message.memory_bytes)
    return ClusterGpuType(gpu_type=gpu_type, node_gpus=message.node_gpus, gpus=message.node_gpus)


def _accepts(address: str) -> bool:
    """Return whether a program listens on the address."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S):
            return True
    except (OSError, ValueError):
        return False
