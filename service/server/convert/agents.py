"""The messages of agents and those to agents."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection
from dataclasses import fields as fields_of
from functools import lru_cache
from itertools import islice
from typing import Final

from tessera.formulation.answer.network.outcome import NetworkDecision
from tessera.formulation.answer.network.tags import assign_tags
from tessera.formulation.base import limits
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.selectors import require_node_labels
from tessera.formulation.job.execution_plan import ExecutionPlan, read_execution_plan
from tessera.formulation.job.runtime_offers import AgentOffers, RuntimeOffer
from tessera.formulation.records.agents import (
    DesiredGang,
    DesiredState,
    HealthFault,
    NodeHealth,
    ObservedGang,
)
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.records.jobs import RestartTimes
from tessera.formulation.records.logs import LogAnswer, LogRead
from tessera.service import fields
from tessera.service.server.convert import names
from tessera.service.server.convert.clusters import to_host
from tessera.service.server.convert.jobs import EXIT_NUMBERS
from tessera.service.server.convert.launch import of_launch
from tessera.v1 import agents_pb2 as pb
from tessera.v1 import launch_pb2

log = logging.getLogger(__name__)

MAX_ERROR_CHARS: Final = 2000
MAX_REMARK_CHARS: Final = 500

MAX_LOSS: Final = 1e30
MAX_PART_S: Final = 86_400.0
MAX_CHECKPOINT_AGE_S: Final = 10 * 365.25 * 86_400
"""The largest loss (without its sign), duration of a part of a restart, and age of a checkpoint.

Larger numbers are not what they claim to be, and count as unknown.
"""

_PARTS: Final = tuple(f.name for f in fields_of(RestartTimes))

MAX_HEALTH_ENTRIES: Final = 100_000
MAX_FAULTS_A_NODE: Final = 64
MAX_DETAIL_CHARS: Final = 200
"""Largest numbers of an agent's entries about health, of a node's faults that are kept, and of
characters of a fault's description.
"""

MAX_RUNTIMES: Final = 100

_FAULT_KIND: Final = re.compile(r"[a-z][a-z_]{0,19}")
MAX_OUTPUT_BYTES: Final = 2**62
"""Largest position in the output of a rank that an agent may report."""

ENDED_PHASES: Final = frozenset({"succeeded", "failed"})
"""Phases that an agent forgets once it has reported them."""

_PHASES: Final = {
    number: name.lower()
    for name, number in pb.ObservedGang.Phase.items()
    if number != pb.ObservedGang.PHASE_UNSPECIFIED
}

_EXIT_REASONS: Final = {number: reason for reason, number in EXIT_NUMBERS.items()}


def to_nodes(field: str, hello: pb.Hello) -> tuple[NodeSpec, ...]:
    """Return the nodes of an agent, at least one, each once."""
    fields.require_batch_size(field, len(hello.nodes), 100_000)
    specs = tuple(
        NodeSpec(
            name=names.require_identifier(f"{field}[{i}].node", m.node),
            gpu_type=names.require_gpu_type(f"{field}[{i}].gpu_type", m.gpu_type),
            gpus=fields.require_whole(f"{field}[{i}].gpus", m.gpus, 1, limits.MAX_GPUS_PER_NODE),
            rack=fields.require_text(f"{field}[{i}].rack", m.rack, 100),
            **to_host(f"{field}[{i}]", m),
            labels=require_node_labels(f"{field}[{i}].labels", m.labels),
        )
        for i, m in enumerate(hello.nodes)
    )
    fields.require_distinct((f"{field}[{i}].node", n.name) for i, n in enumerate(specs))
    return specs


def to_offers(hello: pb.Hello) -> AgentOffers:
    """Return what an agent says that it can start. Texts are cut, and lose what cannot be printed."""
    return AgentOffers(
        runtimes=tuple(
            RuntimeOffer(
                runtime=names.require_identifier(f"hello.runtimes[{i}].runtime", m.runtime),
                version=_printable(m.version, MAX_DETAIL_CHARS),
                problem=_printable(m.problem, MAX_ERROR_CHARS),
            )
            for i, m in enumerate(hello.runtimes[:MAX_RUNTIMES])
        ),
        tools=tuple(_printable(tool, MAX_DETAIL_CHARS) for tool in hello.tools[:MAX_RUNTIMES]),
    )


def to_observed(field: str, observed: pb.Observed) -> tuple[ObservedGang, ...]:
    """Return what runs on an agent's nodes.

    Meaningless numbers (NaN, infinite, negative, absurdly large) come from the job's own output.
    They are treated as unknown, each alone, so that one job cannot end its agent's stream. Texts
    are cut, and lose what a terminal cannot print. A reason that this server does not know counts
    as unknown.
    """
    return tuple(
        ObservedGang(
            job=names.require_identifier(f"{field}.gangs[{i}].job", m.job),
            generation=m.generation,
            node=names.require_identifier(f"{field}.gangs[{i}].node", m.node),
            phase=_phase(f"{field}.gangs[{i}].phase", m.phase),
            iterations_done=m.iterations_done if _known(m.iterations_done) else -1.0,
            iter_time_s=m.iter_time_s if _known(m.iter_time_s) else 0.0,
            error=_printable(m.error, MAX_ERROR_CHARS),
            period_s=m.period_s if _known(m.period_s) else 0.0,
            sent_bytes=m.sent_bytes if _known(m.sent_bytes) else 0.0,
            runtime=m.runtime,
            loss=m.loss if m.HasField("loss") and abs(m.loss) <= MAX_LOSS else None,
            memory_bytes=m.memory_bytes if 0 <= m.memory_bytes <= limits.MAX_MEMORY_BYTES else 0,
            checkpoint_iterations=_iterations(
                m.HasField("checkpoint_iterations"), m.checkpoint_iterations
            ),
            checkpoint_age_s=_age_s(m.checkpoint_age_s),
            resumed_iterations=_iterations(m.HasField("resumed_iterations"), m.resumed_iterations),
            restart_times=_restart_times(m.restart_times) if m.HasField("restart_times") else None,
            exit_reason=_EXIT_REASONS.get(m.exit_reason),
            remark=" ".join(_printable(m.remark, MAX_REMARK_CHARS).split()),
            executed_plan=_executed_plan(m),
            executed_iter_time_s=m.executed_iter_time_s if _known(m.executed_iter_time_s) else 0.0,
            planned_iter_time_s=_planned_s(m.planned_iter_time_s),
        )
        for i, m in enumerate(observed.gangs)
    )


def to_health(observed: pb.Observed, own: Collection[str]) -> tuple[NodeHealth, ...]:
    """Return the health of the agent's ``own`` nodes, by name. Entries for other nodes are left out.

    Texts are cut to size, and an index that no GPU can have stands for the whole node, so that a
    wrong report cannot end its agent's stream.
    """
    entries: dict[str, NodeHealth] = {}
    for entry in islice(observed.health, MAX_HEALTH_ENTRIES):
        if entry.node in own and entry.node not in entries:
            faults = dict.fromkeys(_to_fault(m) for m in entry.faults[:MAX_FAULTS_A_NODE])
            entries[entry.node] = NodeHealth(node=entry.node, faults=tuple(faults))
    return tuple(entries[node] for node in sorted(entries))


def _to_fault(message: pb.HealthFault) -> HealthFault:
    kind = message.kind if _FAULT_KIND.fullmatch(message.kind) else "other"
    detail = "".join(c if c.isprintable() else " " for c in message.detail[:MAX_DETAIL_CHARS])
    gpu = message.gpu if 0 <= message.gpu < limits.MAX_GPUS_PER_NODE else -1
    return HealthFault(gpu=gpu, kind=kind, detail=detail.strip() or f"a fault of the kind {kind}")


def of_desired(desired: DesiredState, nodes: Collection[str]) -> pb.Desired:
    """Return the message for the agent of ``nodes``."""
    return pb.Desired(
        revision=desired.revision,
        network=_of_network(desired),
        gangs=[_of_gang(gang, nodes, desired.network_levels) for gang in desired.gangs],
        deleted_nodes=desired.deleted_nodes,
    )


def of_log_read(read: LogRead) -> pb.LogRead:
    """Return the message that asks an agent for output."""
    return pb.LogRead(
        read_id=read.id,
        job=read.job,
        generation=read.generation,
        rank=read.rank,
        node=read.node,
        offset=read.offset,
        max_bytes=read.max_bytes,
        job_number=read.job_number,
    )


def to_log_answer(answer: pb.LogAnswer, most_bytes: int) -> LogAnswer:
    """Return an agent's answer to a request for at most ``most_bytes`` of output.

    An answer that makes no sense becomes an error, so that it cannot end the agent's stream.
    """
    error = "".join(c if c.isprintable() else " " for c in answer.error[:MAX_ERROR_CHARS])
    if not error and not (
        len(answer.data) <= most_bytes and 0 <= answer.offset <= MAX_OUTPUT_BYTES
    ):
        error = "its agent sent more than was asked for, or a wrong position; upgrade the agent"
    if error:
        return LogAnswer(id=answer.read_id, error=error)
    return LogAnswer(id=answer.read_id, offset=answer.offset, data=answer.data, ended=answer.ended)


def _of_network(desired: DesiredState) -> pb.NetworkMap | None:
    """Return the settings of interfaces for the tags of gangs, or None without a network plan."""
    if not desired.network_levels:
        return None
    parts = {g.spec.name: g.network for g in desired.gangs if g.network is not None}
    tagged = {job: part for job, part in parts.items() if part.tag >= 0}
    settings = assign_tags(
        {job: part.level for job, part in tagged.items()},
        desired.network_levels,
        {job: part.tag for job, part in tagged.items()},
    )
    return pb.NetworkMap(priorities=settings.priorities, control_dscp=settings.control_tag)


def _of_part(
    part: NetworkDecision | None, levels: int, elsewhere: Collection[str]
) -> pb.GangNetwork | None:
    """Return a gang's part in the network plan, without the routes of GPUs on nodes ``elsewhere``.

    GPUs are recognised by their names, NODE/... If a topology uses other names, all routes are
    included.
    """
    if part is None:
        return None
    return pb.GangNetwork(
        level=part.level,
        levels=levels,
        dscp=part.tag,
        routes=[
            pb.GangRoute(source=r.source, target=r.target, via=r.via)
            for r in part.routes
            if r.source.partition("/")[0] not in elsewhere
        ],
    )


def _of_gang(gang: DesiredGang, nodes: Collection[str], levels: int) -> pb.DesiredGang:
    spec, cell = gang.spec, gang.allocation.cell
    shares, rate, plan = gang.allocation.shares, gang.allocation.rate, gang.allocation.plan
    message = pb.DesiredGang(
        job=spec.name,
        generation=gang.generation,
        job_number=gang.job_number,
        leader=gang.leader,
        shares=[
            pb.AgentShare(node=node, gpu_indices=gpus) for node, gpus in shares if node in nodes
        ],
        members=[node for node, _ in shares],
        global_batch=spec.workload.global_batch,
        gpu_type=cell.gpu_type,
        iter_time_s=spec.workload.global_batch / rate if rate > 0 else 0.0,
        iterations_total=spec.iterations,
        array_index=spec.array.index if spec.array else 0,
        array_size=spec.array.size if spec.array else 0,
        iterations_done=gang.iterations_done,
        restart_s=spec.restart_s,
        command=spec.command,
        network=_of_part(gang.network, levels, {node for node, _ in shares if node not in nodes}),
        launch=of_launch(spec),
        tenant=spec.tenant,
        member_gpus=[len(gpus) for _, gpus in shares],
        tuning_plans=gang.tuning_plans,
    )
    if plan is not None:
        message.execution_plan = plan.to_json()
    else:
        message.pipeline_degree = cell.pipeline_degree
    return message


def _phase(field: str, number: pb.ObservedGang.Phase.ValueType) -> str:
    if number not in _PHASES:
        raise InvalidInput(field, "is not a phase that this server knows; upgrade the server first")
    return _PHASES[number]


def _known(value: float) -> bool:
    return math.isfinite(value) and value >= 0


def _iterations(is_present: bool, value: float) -> float | None:
    return value if is_present and 0 <= value <= limits.MAX_ITERATIONS else None


def _age_s(value: float) -> float | None:
    """Return the age of a checkpoint, or None if it is not known.

    It is 0 if the checkpoint is from the future, because nodes' clocks differ.
    """
    return max(value, 0.0) if abs(value) <= MAX_CHECKPOINT_AGE_S else None


def _executed_plan(message: pb.ObservedGang) -> ExecutionPlan | None:
    """Return the plan that a program reports to run by, or None without one that can be read."""
    if not message.executed_plan:
        return None
    try:
        return _read_plan(message.executed_plan)
    except InvalidInput as error:
        log.warning(
            "ignored the plan by which a job reports to run",
            extra={"event": "tuning_refused", "job": message.job, "error": error},
        )
        return None


@lru_cache(maxsize=4096)
def _read_plan(text: str) -> ExecutionPlan:
    """Return the plan of a report, which agents repeat. Raises InvalidInput."""
    return read_execution_plan("executed_plan", text)


def _planned_s(value: float) -> float:
    """Return the seconds of a job's own plan: 0 if they are not known, inf if it does not run."""
    return value if value == math.inf or _known(value) else 0.0


def _restart_times(message: launch_pb2.RestartTimes) -> RestartTimes:
    parts = {name: getattr(message, name) for name in _PARTS}
    return RestartTimes(**{n: s if 0 <= s <= MAX_PART_S else 0.0 for n, s in parts.items()})


def _printable(text: str, most: int) -> str:
    """Return the first ``most`` characters of a text, without those that cannot be printed."""
    return "".join(c for c in text[:most] if c.isprintable() or c in "\n\t")
