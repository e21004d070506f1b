"""Gangs on an agent's nodes: their members, what to do about them, and reports of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.exit_reasons import ExitReason
from tessera.service.agent.gangs import LIVE_PHASES, GangKey, devices_of, key_of
from tessera.service.agent.isolation import UnfitNode, UnsuitableNode
from tessera.service.agent.runtimes.protocol import MemberHandle, Progress
from tessera.v1 import agents_pb2 as pb
from tessera.v1 import launch_pb2


@dataclass(slots=True, kw_only=True)
class LocalMember:
    """A member of a gang on one of this agent's nodes."""

    node: str
    phase: pb.ObservedGang.Phase.ValueType
    handle: MemberHandle | None = None  # None without a process: it ended, or has none
    progress: Progress | None = None
    error: str = ""
    reason: ExitReason | None = None
    is_gone: bool = False  # it was stopped and has ended, so there is nothing to report


@dataclass(slots=True, kw_only=True)
class LocalGang:
    """A gang that is here, or whose end has yet to be reported."""

    gang: pb.DesiredGang
    members: list[LocalMember]
    is_stopping: bool = False
    reported: bool = False  # its end was sent to a server

    @property
    def is_live(self) -> bool:
        """Return whether a member occupies its GPUs."""
        return any(m.phase in LIVE_PHASES and not m.is_gone for m in self.members)

    @property
    def has_processes(self) -> bool:
        """Return whether a process would have to die before the gang is gone."""
        return any(member.handle is not None for member in self.members)

    @property
    def is_running(self) -> bool:
        """Return whether a member runs."""
        return any(member.phase == pb.ObservedGang.RUNNING for member in self.members)


@dataclass(frozen=True, slots=True, kw_only=True)
class GangActions:
    """The actions to take now.

    ``waiting`` are gangs whose GPUs or job still have a live process here.
    """

    start: tuple[pb.DesiredGang, ...] = ()
    stop: tuple[GangKey, ...] = ()
    forget: tuple[GangKey, ...] = ()
    waiting: tuple[GangKey, ...] = ()


def reconcile_gangs(
    desired: Iterable[pb.DesiredGang] | None, here: Iterable[LocalGang]
) -> GangActions:
    """Return the actions that turn ``here`` into ``desired``.

    If ``desired`` is None, nothing may run, but no end is forgotten. Of several generations of a
    job, the newest counts. Nothing starts on a GPU that a live gang occupies, nor next to a live
    older process of the same job. An end is forgotten once it was reported and its gang is no
    longer desired.
    """
    # Keep the newest generation of each job.
    wanted: dict[str, pb.DesiredGang] = {}
    for gang in desired or ():
        if gang.job not in wanted or wanted[gang.job].generation < gang.generation:
            wanted[gang.job] = gang
    keys = {key_of(gang) for gang in wanted.values()}
    known = {key_of(local.gang): local for local in here}
    gone = [local for key, local in known.items() if key not in keys]
    stop = [x for x in gone if x.is_live and not x.is_stopping]
    at_once = {key_of(x.gang) for x in stop if not x.has_processes}
    # Everything else that lives blocks its job and its GPUs until it is dead.
    live = [x for key, x in known.items() if x.is_live and key not in at_once]
    busy_jobs = {local.gang.job for local in live}
    busy = {device for local in live for device in devices_of(local.gang)}
    start, waiting = [], []
    for gang in wanted.values():
        if key_of(gang) in known:
            continue
        if gang.job in busy_jobs or busy & devices_of(gang):
            waiting.append(key_of(gang))
        else:
            start.append(gang)
            busy |= devices_of(gang)
    return GangActions(
        start=tuple(start),
        stop=tuple(key_of(x.gang) for x in stop),
        forget=tuple(
            key_of(x.gang) for x in gone if desired is not None and not x.is_live and x.reported
        ),
        waiting=tuple(waiting),
    )


def failed_member(node: str, error: Exception) -> LocalMember:
    """Return a member that could not be started.

    Wrong input fails in the same way again, but not what only this node lacks.
    """
    if isinstance(error, UnfitNode | OSError):
        reason = ExitReason.NODE_UNFIT
    elif isinstance(error, InvalidInput) and not isinstance(error, UnsuitableNode):
        reason = ExitReason.REFUSED
    else:
        reason = ExitReason.NOT_STARTED
    return LocalMember(node=node, phase=pb.ObservedGang.FAILED, error=str(error), reason=reason)


def report_of(local: LocalGang, member: LocalMember, now_s: float) -> pb.ObservedGang:
    """Return the report on a member. ``now_s`` is in seconds since 1970."""
    report, progress = pb.ObservedGang(iterations_done=-1.0), member.progress
    if progress is not None and member.node == local.gang.leader:
        report.CopyFrom(progress.report)
        if progress.checkpoint_s:
            report.checkpoint_age_s = max(0.0, now_s - progress.checkpoint_s)
    report.job, report.generation = key_of(local.gang)
    report.node, report.phase, report.error = member.node, member.phase, member.error
    if local.is_stopping and member.handle:
        report.phase = pb.ObservedGang.STOPPING
    if member.reason is not None:
        report.exit_reason = launch_pb2.ExitReason.Value(f"EXIT_{member.reason.name}")
    return report
