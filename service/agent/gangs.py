"""Gangs that an agent must run and its reports of them, as values, JSON and messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from tessera.formulation.errors import InvalidInput
from tessera.formulation.exit_reasons import ExitReason
from tessera.formulation.launch import (
    DEFAULT_LAUNCH,
    LaunchSpec,
    SecretVariable,
    launch_from_plain,
)
from tessera.formulation.records.jobs import RestartTimes
from tessera.formulation.values import Cell, CellKey, cell_from_plain, cell_to_plain
from tessera.v1 import agents_pb2 as pb
from tessera.v1 import launch_pb2


class GangPhase(StrEnum):
    """The progress of a gang on this agent's nodes, from start to end."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


LIVE_PHASES = frozenset({GangPhase.STARTING, GangPhase.RUNNING, GangPhase.STOPPING})
"""Phases in which a gang occupies its GPUs."""


GangKey = tuple[str, int]
"""A job and its generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkPart:
    """A gang's part in the network plan in force, which may change while the gang runs.

    Each of the ``routes`` is (source, target, the switches between them), by names of the cluster's
    topology.
    """

    level: int  # 0 to levels - 1; a higher one is served first
    levels: int
    dscp: int  # negative: no tag
    routes: tuple[tuple[str, str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    """A generation of a job, as seen from one agent.

    Times are simulated seconds for the replay runtime.
    """

    job: str
    generation: int
    shares: tuple[tuple[str, tuple[int, ...]], ...]  # (node, GPU indices), this agent's nodes only
    leader: str  # node whose agent runs the process and reports progress
    members: tuple[str, ...]  # all nodes in rank order
    model: str = ""
    params: str = ""
    global_batch: int = 0
    cell: Cell
    iter_time_s: float  # expected
    iterations_total: float
    iterations_done: float = 0.0  # known to the server; a checkpoint may be further on
    restart_s: float = 0.0
    command: tuple[str, ...] = ()
    runtime: str = ""  # name of the runtime; "" is the agent's own
    execution_plan: str = ""
    """Canonical JSON of the execution plan, as the server sent it; "" if it was not recorded."""
    launch: LaunchSpec = DEFAULT_LAUNCH
    """The way in which its program is started."""
    launch_problem: str = ""
    """Why this agent cannot use the launch that the server sent; "" if it can. Such a gang must fail."""
    tenant: str = ""  # whose secrets the program may have
    member_gpus: tuple[int, ...] = ()
    """The number of GPUs on each of ``members``."""
    job_number: int = 0  # distinguishes the job from an earlier one of its name
    array_index: int = 0  # of the job in its array
    array_size: int = 0  # jobs of that array; 0 if the job is in none
    tuning_plans: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """Canonical JSON of the execution plans to try at this start, the best estimate first. Only the
    start itself needs them, so they are not stored."""
    network: NetworkPart | None = field(
        default=None, compare=False
    )  # also stored apart from the rest

    @property
    def key(self) -> GangKey:
        """Return the job and the generation."""
        return self.job, self.generation

    @property
    def devices(self) -> frozenset[tuple[str, int]]:
        """Return the (node, GPU index) pairs that the gang occupies here."""
        return frozenset((node, gpu) for node, gpus in self.shares for gpu in gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class GangReport:
    """A report about one member of a gang.

    A negative ``iterations_done`` and an ``iter_time_s`` of 0 mean that the value is unknown.
    ``period_s`` is the duration of an iteration and ``sent_bytes`` the bytes that this node sends
    in one, both by the node's counters; 0 means unknown. ``runtime`` is the one that reported
    ``iter_time_s``, or "" if its process does not say. The other fields are those of ``Progress``
    and ``MemberExit``; ``checkpoint_age_s`` is the age of the newest checkpoint.
    """

    job: str
    generation: int
    node: str
    phase: GangPhase
    iterations_done: float = -1.0
    iter_time_s: float = 0.0
    error: str = ""
    period_s: float = 0.0
    sent_bytes: float = 0.0
    runtime: str = ""
    loss: float | None = None
    memory_bytes: int = 0
    checkpoint_iterations: float | None = None
    checkpoint_age_s: float = 0.0
    resumed_iterations: float | None = None
    restart_times: RestartTimes | None = None
    exit_reason: ExitReason | None = None
    remark: str = ""
    executed_plan: str = ""
    executed_iter_time_s: float = 0.0
    planned_iter_time_s: float = 0.0


def gang_to_json(gang: Gang) -> dict[str, Any]:
    """Return ``gang`` as a JSON object, without its network part, which is sent each time.

    The plans to try are left out, too.
    """
    plain = asdict(gang)
    del plain["network"], plain["cell"], plain["tuning_plans"]
    return plain | cell_to_plain(gang.cell) | {"launch": gang.launch.to_plain()}


def gang_from_json(value: dict[str, Any]) -> Gang:
    """Return the gang that ``gang_to_json`` has written.

    Raises:
        KeyError, TypeError, ValueError: no agent has written it.
    """
    fields = {name: part for name, part in value.items() if name not in CellKey._fields}
    fields |= {name: tuple(value[name]) for name in ("members", "command", "member_gpus")}
    fields["shares"] = tuple((node, tuple(gpus)) for node, gpus in value["shares"])
    try:
        fields["launch"] = launch_from_plain(value["launch"])
    except InvalidInput as error:
        raise ValueError(f"launch: {error}") from error
    return Gang(**fields, cell=cell_from_plain(value))


def gang_from_message(message: pb.DesiredGang) -> Gang:
    """Return the gang that the server described.

    A launch that this agent cannot use, which a server of a later release may send, becomes the
    gang's ``launch_problem``, because the other gangs of the message must run.
    """
    m, launch, problem = message, DEFAULT_LAUNCH, ""
    try:
        launch = _launch(m.launch)
    except InvalidInput as error:
        problem = f"this agent cannot use the job's launch; upgrade tessera on its node: {error}"
    return Gang(
        job=m.job,
        generation=m.generation,
        shares=tuple((share.node, tuple(share.gpu_indices)) for share in m.shares),
        leader=m.leader,
        members=tuple(m.members),
        model=m.model,
        params=m.params,
        global_batch=m.global_batch,
        cell=Cell(gpu_type=m.gpu_type, gpus=m.gpus, pipeline_degree=m.pipeline_degree, plan=m.plan),
        iter_time_s=m.iter_time_s,
        iterations_total=m.iterations_total,
        array_index=m.array_index,
        array_size=m.array_size,
        iterations_done=m.iterations_done,
        restart_s=m.restart_s,
        command=tuple(m.command),
        runtime=m.runtime,
        execution_plan=m.execution_plan,
        launch=launch,
        launch_problem=problem,
        tenant=m.tenant,
        member_gpus=tuple(m.member_gpus),
        job_number=m.job_number,
        tuning_plans=tuple(m.tuning_plans),
        network=_part(m.network) if m.HasField("network") else None,
    )


def _launch(message: launch_pb2.Launch) -> LaunchSpec:
    """Return the launch of a message. An empty message is the default. Raises InvalidInput."""
    m = message
    return LaunchSpec(
        runtime=m.runtime,
        env=dict(m.env),
        workdir=m.workdir,
        image=m.image,
        secrets=tuple(SecretVariable(variable=s.variable, name=s.name) for s in m.secrets),
        staging_command=tuple(m.staging_command),
        user=m.user,
        progress_pattern=m.progress_pattern,
        stall_limit_s=m.stall_limit.ToNanoseconds() / 1e9,
        stop_grace_s=m.stop_grace.ToNanoseconds() / 1e9,
        tuning_space=m.tuning_space,
        tuning_budget_s=m.tuning_budget.ToNanoseconds() / 1e9,
        until_exit=m.until_exit,
    )


def _part(message: pb.GangNetwork) -> NetworkPart:
    return NetworkPart(
        level=message.level,
        levels=message.levels,
        dscp=message.dscp,
        routes=tuple((r.source, r.target, tuple(r.via)) for r in message.routes),
    )


def observed_message(
    reports: Iterable[GangReport],
    revision: int,
    network: Iterable[str] = (),
    health: Iterable[pb.NodeHealth] = (),
) -> pb.AgentMessage:
    """Return the message that reports what runs here, under ``revision`` of the desired state.

    ``network`` holds sentences on what keeps the network plan from having an effect here.
    ``health`` is that of the nodes that are watched.
    """
    gangs = [_observed_gang(report) for report in reports]
    return pb.AgentMessage(
        observed=pb.Observed(gangs=gangs, revision=revision, network_remarks=network, health=health)
    )


def _observed_gang(report: GangReport) -> pb.ObservedGang:
    """Return the message of a report. A reason that is not known is left out."""
    r = report
    message = pb.ObservedGang(
        job=r.job,
        generation=r.generation,
        node=r.node,
        phase=pb.ObservedGang.Phase.Value(r.phase.name),
        iterations_done=r.iterations_done,
        iter_time_s=r.iter_time_s,
        error=r.error,
        period_s=r.period_s,
        sent_bytes=r.sent_bytes,
        runtime=r.runtime,
        loss=r.loss,
        memory_bytes=r.memory_bytes,
        checkpoint_iterations=r.checkpoint_iterations,
        checkpoint_age_s=r.checkpoint_age_s,
        resumed_iterations=r.resumed_iterations,
        remark=r.remark,
        executed_plan=r.executed_plan,
        executed_iter_time_s=r.executed_iter_time_s,
        planned_iter_time_s=r.planned_iter_time_s,
    )
    if r.restart_times is not None:
        message.restart_times.CopyFrom(launch_pb2.RestartTimes(**asdict(r.restart_times)))
    if r.exit_reason is not None:
        message.exit_reason = launch_pb2.ExitReason.Value(f"EXIT_{r.exit_reason.name}")
    return message
