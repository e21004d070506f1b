"""Topologies and network plans."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

from tessera.estimator.files.documents import read_document
from tessera.formulation.answer.network.outcome import (
    NetworkDecision,
    NetworkOutcome,
    NetworkPlanRecord,
)
from tessera.formulation.base import limits
from tessera.formulation.base.cancellation import never_cancelled
from tessera.formulation.base.documents import TOPOLOGY
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.records.clusters import TopologyRecord
from tessera.formulation.state.topologies import document
from tessera.formulation.state.topologies.described import DescribedTopology
from tessera.formulation.state.topologies.measures import disconnected_groups
from tessera.formulation.state.topologies.topology import NO_HOST
from tessera.formulation.state.traffic import CellTraffic, StageTraffic
from tessera.service import fields
from tessera.service.server.convert import names
from tessera.v1 import estimates_pb2
from tessera.v1 import networks_pb2 as pb

_KINDS: Final = ("tensor", "data", "expert_data", "expert", "pipeline")
MAX_STAGES: Final = 1024
MAX_DEGREE: Final = 65_536
MAX_BYTES: Final = 1e18
MAX_MESSAGES: Final = 10**12


def to_topology(
    field: str, text: str, cancelled: Callable[[], bool] = never_cancelled
) -> DescribedTopology:
    """Return the network that a text in JSON or YAML describes, and its canonical JSON.

    Raises:
        InvalidInput: it is neither JSON nor YAML, describes no network, or one whose parts are not
            connected.
        DeadlineTooShort: it was cancelled.
    """
    if not text.strip():
        raise InvalidInput(field, "must not be empty")
    plain = read_document(field, text, TOPOLOGY, cancelled)
    try:
        topology = document.build_topology(plain, cancelled)
    except InvalidInput as wrong:
        part = wrong.field.removeprefix("topology")  # the prefix stands for the whole document
        raise InvalidInput(f"{field}.{part}".rstrip("."), wrong.problem) from wrong
    parts = disconnected_groups(topology)
    if len(parts) > 1:
        first, second = (topology.hosts[part[0]] for part in parts[:2])
        raise InvalidInput(
            field,
            f"is not connected: no path joins {first} and {second}; add links, or"
            " describe the parts as clusters",
        )
    try:
        canonical = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as wrong:
        raise InvalidInput(field, f"has a value that JSON cannot represent: {wrong}") from wrong
    return DescribedTopology(document=canonical, topology=topology)


def of_topology(cluster: str, record: TopologyRecord, nodes: set[str]) -> pb.Topology:
    """Return the message of a stored topology."""
    described, topology = record.described, record.described.topology
    hosts = set(topology.hosts)
    return pb.Topology(
        name=names.topology_name(cluster),
        document=described.document,
        etag=fields.etag_of(record.version),
        hosts=len(hosts),
        links=len(topology.links),
        switches=int((topology.vertices.host == NO_HOST).sum()),
        unknown_hosts=sorted(hosts - nodes)[: limits.MAX_NAMED_HOSTS],
        missing_nodes=sorted(nodes - hosts)[: limits.MAX_NAMED_HOSTS],
    )


def of_plan(cluster: str, plan: NetworkPlanRecord) -> pb.NetworkPlan:
    """Return the message of a stored network plan."""
    return pb.NetworkPlan(
        name=names.network_plan_name(cluster, str(plan.number)),
        plan_time=fields.timestamp_of(plan.planned_s),
        cause=plan.cause,
        round=names.round_name(cluster, plan.round) if plan.round else "",
        levels=plan.levels,
        changed=plan.changed,
        seconds=plan.seconds,
        notes=plan.notes,
        decisions=[of_decision(cluster, d) for d in plan.decisions],
    )


def of_outcome(cluster: str, outcome: NetworkOutcome, seconds: float) -> pb.NetworkPlan:
    """Return the message of a network plan that is not in force."""
    decisions = sorted(outcome.decisions, key=lambda d: d.rank)
    return pb.NetworkPlan(
        name=names.network_plan_name(cluster, "-"),
        cause="call",
        levels=outcome.levels,
        seconds=seconds,
        notes=outcome.notes,
        decisions=[of_decision(cluster, d) for d in decisions],
    )


def of_decision(cluster: str, d: NetworkDecision) -> pb.NetworkDecision:
    """Return the message of a job's part in a network plan."""
    return pb.NetworkDecision(
        job=names.job_name(cluster, d.job),
        rank=d.rank,
        level=d.level,
        dscp=d.tag,
        priority=d.priority,
        intensity=d.intensity,
        contending_jobs=[names.job_name(cluster, other) for other in d.contending_jobs],
        note=d.note,
        routes=[
            pb.NetworkRoute(source=r.source, target=r.target, via=r.via, sent_bytes=r.sent_bytes)
            for r in d.routes
        ],
    )


def to_traffic(field: str, message: estimates_pb2.CellTraffic, gpus: int) -> CellTraffic:
    """Return the traffic of the execution plan of a Cell with this number of GPUs."""
    fields.require_batch_size(f"{field}.stages", len(message.stages), MAX_STAGES)
    stages = [_to_stage(f"{field}.stages[{i}]", stage) for i, stage in enumerate(message.stages)]
    try:
        found = CellTraffic(
            work_flop=message.work_flop,
            compute_s=message.compute_s,
            start_s=message.start_s,
            stages=tuple(stages),
        )
    except InvalidInput as wrong:
        raise InvalidInput(f"{field}.{wrong.field}", wrong.problem) from wrong
    if found.gpus != gpus:
        raise InvalidInput(f"{field}.stages", f"have {found.gpus} GPUs; the Cell has {gpus}")
    return found


def _to_stage(field: str, message: estimates_pb2.StageTraffic) -> StageTraffic:
    def degree(name: str) -> int:
        return fields.require_whole(f"{field}.{name}", getattr(message, name), 1, MAX_DEGREE)

    sent = {
        kind: (
            fields.require_real(
                f"{field}.{kind}.bytes", getattr(message, kind).bytes, 0.0, MAX_BYTES
            ),
            fields.require_whole(
                f"{field}.{kind}.messages", getattr(message, kind).messages, 0, MAX_MESSAGES
            ),
        )
        for kind in _KINDS
    }
    ep = degree("expert_parallel") if message.expert_parallel else 1
    return StageTraffic(dp=degree("data_parallel"), tp=degree("tensor_parallel"), ep=ep, **sent)


def of_traffic(found: CellTraffic | None) -> estimates_pb2.CellTraffic | None:
    """Return the message of an execution plan's traffic, or None if it is unknown."""
    if found is None:
        return None
    return estimates_pb2.CellTraffic(
        work_flop=found.work_flop,
        compute_s=found.compute_s,
        start_s=found.start_s,
        stages=[
            estimates_pb2.StageTraffic(
                data_parallel=stage.dp,
                tensor_parallel=stage.tp,
                expert_parallel=stage.ep,
                **{
                    kind: estimates_pb2.Sent(bytes=amount[0], messages=amount[1])
                    for kind in _KINDS
                    if (amount := getattr(stage, kind))[0]
                },
            )
            for stage in found.stages
        ],
    )
