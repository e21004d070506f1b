"""Clusters, GPU types and nodes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

from google.protobuf.message import Message

from tessera.formulation.base import limits
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.resources import (
    HOST_RESOURCES,
    REPORTED_PREFIX,
    amounts_of,
    name_amounts,
)
from tessera.formulation.base.selectors import require_node_labels
from tessera.formulation.base.values import GpuType
from tessera.formulation.records.clusters import ClusterRecord, NodeRecord, NodeSpec
from tessera.service import fields
from tessera.service.server.convert import names
from tessera.v1 import clusters_pb2 as pb
from tessera.v1.launch_pb2 import RuntimeOffer

MAX_GPU_TYPES: Final = 256

ANY_TYPE: Final = "any"
"""The name in quotas for GPUs of any type. Therefore no GPU type may have this name."""


def to_gpu_types(field: str, messages: Iterable[pb.GpuType]) -> tuple[GpuType, ...]:
    """Return GPU types, each name once."""
    types = tuple(
        GpuType(
            name=_new_type(f"{field}[{i}].name", m.name),
            memory_bytes=fields.require_whole(
                f"{field}[{i}].memory_bytes", m.memory_bytes, 1, limits.MAX_MEMORY_BYTES
            ),
            dollars_per_hour=fields.require_real(
                f"{field}[{i}].dollars_per_hour",
                m.dollars_per_hour,
                0.0,
                limits.MAX_DOLLARS_PER_HOUR,
            ),
            watts=fields.require_real(f"{field}[{i}].watts", m.watts, 0.0, limits.MAX_WATTS),
        )
        for i, m in enumerate(messages)
    )
    fields.require_batch_size(field, len(types), MAX_GPU_TYPES)
    fields.require_distinct((f"{field}[{i}].name", t.name) for i, t in enumerate(types))
    return types


def _new_type(field: str, name: str) -> str:
    if name == ANY_TYPE:
        raise InvalidInput(field, f"{ANY_TYPE!r} is reserved: quotas use it for GPUs of any type")
    return names.require_gpu_type(field, name)


def of_cluster(record: ClusterRecord) -> pb.Cluster:
    """Return the message of a stored cluster."""
    last = record.last_round
    node_gpus = record.node_gpus or (0,) * len(record.gpu_types)
    return pb.Cluster(
        name=names.cluster_name(record.name),
        gpu_types=[
            pb.GpuType(
                name=t.name,
                memory_bytes=t.memory_bytes,
                dollars_per_hour=t.dollars_per_hour,
                watts=t.watts,
                node_gpus=gpus,
            )
            for t, gpus in zip(record.gpu_types, node_gpus, strict=True)
        ],
        etag=fields.etag_of(record.version),
        create_time=fields.timestamp_of(record.created_s),
        nodes=record.nodes,
        gpus=record.gpus,
        last_round=names.round_name(record.name, last) if last else "",
    )


def to_node_spec(field: str, cluster: str, message: pb.Node) -> NodeSpec:
    """Return the node, which must belong to ``cluster``."""
    return NodeSpec(
        name=to_node_id(f"{field}.name", cluster, message.name),
        gpu_type=names.require_gpu_type(f"{field}.gpu_type", message.gpu_type),
        gpus=fields.require_whole(f"{field}.gpus", message.gpus, 1, limits.MAX_GPUS_PER_NODE),
        rack=fields.require_text(f"{field}.rack", message.rack, 100),
        version=fields.version_of(message.etag),
        **to_host(field, message),
        labels=require_node_labels(f"{field}.labels", message.labels),
    )


def to_host(field: str, message: Message) -> dict[str, Any]:
    """Return the resources of its host that a message of a node states, by name."""
    return {
        r.name: fields.require_whole(
            f"{field}.{r.name}", getattr(message, r.name), 0, r.max_on_node
        )
        for r in HOST_RESOURCES
        if message.HasField(r.name)
    }


def to_node_id(field: str, cluster: str, name: str) -> str:
    """Return the id of a node, which must belong to ``cluster``."""
    parent, node = names.parse_node(field, name)
    names.require_parent(field, parent, cluster)
    return node


def of_node(cluster: str, record: NodeRecord, lease_s: float) -> pb.Node:
    """Return the message of a stored node.

    If it was silent for longer than ``lease_s``, it is unreachable.
    """
    state = pb.Node.READY
    if record.draining:
        state = pb.Node.DRAINING
    elif record.silent_s > lease_s:
        state = pb.Node.UNREACHABLE
    return pb.Node(
        name=names.node_name(cluster, record.spec.name),
        gpu_type=record.spec.gpu_type,
        gpus=record.spec.gpus,
        rack=record.spec.rack,
        state=state,
        etag=fields.etag_of(record.version),
        free_gpus=record.free_gpus,
        jobs=[names.job_name(cluster, job) for job in record.jobs],
        silent_s=record.silent_s if math.isfinite(record.silent_s) else -1.0,
        network_remarks=record.network_remarks,
        drain_reason=record.drain_reason,
        drained_by=record.drained_by,
        drained=record.drained,
        drain_time=None if record.drained_s is None else fields.timestamp_of(record.drained_s),
        faults=record.faults,
        probation_end_time=None
        if record.probation_end_s is None
        else fields.timestamp_of(record.probation_end_s),
        **name_amounts(amounts_of(record.spec)),
        **name_amounts(amounts_of(record, REPORTED_PREFIX), REPORTED_PREFIX),
        labels=record.spec.labels,
        agent_labels=record.agent_labels,
        runtimes=[
            RuntimeOffer(runtime=o.runtime, version=o.version, problem=o.problem)
            for o in record.offers.runtimes
        ],
        tools=record.offers.tools,
    )
