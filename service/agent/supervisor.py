"""The supervisor of an agent's gangs: it compares desired with actual gangs and derives actions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from tessera.formulation.answer.network.tags import TagSettings
from tessera.formulation.base.clock import SystemClock
from tessera.formulation.base.errors import InvalidInput, TesseraError
from tessera.formulation.job.exit_reasons import ExitReason
from tessera.formulation.job.runtimes import DEFAULT_RUNTIME, RUNTIMES
from tessera.service.agent.gangs import LIVE_PHASES, GangKey, key_of, nodes_of, to_seconds
from tessera.service.agent.local_gangs import (
    LocalGang,
    LocalMember,
    failed_member,
    reconcile_gangs,
    report_of,
)
from tessera.service.agent.network.map_worker import NetworkMapWorker
from tessera.service.agent.network.sampling import TrafficSampler
from tessera.service.agent.runtimes.protocol import (
    ExitOutcome,
    Member,
    MemberExit,
    MemberHandle,
    Progress,
    Runtime,
    RuntimeChooser,
)
from tessera.service.agent.state import StateDir
from tessera.v1 import agents_pb2 as pb

log = logging.getLogger(__name__)

PART_VARIABLE = "TESSERA_NETWORK"
"""The variable that names the file with a job's part in the network plan.

The file holds the job's priority level, the number of levels, its tag and its paths. It is replaced
when they change.
"""

KEEPER_MARGIN_S = 5.0
"""Seconds after the grace in which a keeper itself ends a program and tells how that went."""

_WALL_S = SystemClock().wall_s

START_BATCH = 8
"""The number of gangs started in one go. Between two batches the agent talks to its server."""


class Supervisor:
    """An executor of the actions of ``reconcile_gangs``, which also records them on disk.

    ``spawn`` runs a coroutine concurrently with the caller and must not lose its errors.
    ``changed`` is called whenever ``reports`` or ``network_remarks`` would return something new.
    All methods belong to one event loop.
    """

    def __init__(
        self,
        runtimes: RuntimeChooser,
        state: StateDir,
        *,
        grace_s: float,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        changed: Callable[[], None],
        network: NetworkMapWorker | None = None,
        sampling: TrafficSampler | None = None,
        wall_s: Callable[[], float] = _WALL_S,
    ) -> None:
        self._runtimes = runtimes
        self._state = state
        self._grace_s = grace_s
        self._spawn = spawn
        self._changed = changed
        self._network, self._sampling = network, sampling
        self._wall_s = wall_s
        if network is not None:
            network.call_on_change(self._network_changed)
        self._here: dict[GangKey, LocalGang] = {}
        self._desired: Sequence[pb.DesiredGang] | None = None
        self._closing = False
        self._idle = asyncio.Event()
        self.revision = 0

    def adopt(self) -> None:
        """Take over the gangs that an earlier agent left, without disturbing them."""
        for gang in list(self._state.gangs()):
            local = LocalGang(gang=gang, members=[])
            for node in self._nodes_with_processes(gang):
                handle = self._runtimes.adopt(self._state.member_directory(gang, node))
                if handle is not None:
                    member = LocalMember(node=node, phase=pb.ObservedGang.STARTING, handle=handle)
                    local.members.append(member)
            led = {member.node for member in local.members}
            if not led and self._nodes_with_processes(gang):  # recorded, but never started
                self._state.remove(key_of(gang))
                continue
            is_whole = len(led) == len(self._nodes_with_processes(gang))
            rest = [node for node in nodes_of(gang) if node not in led]
            local.members += [LocalMember(node=n, phase=pb.ObservedGang.RUNNING) for n in rest]
            self._here[key_of(gang)] = local
            log.info("adopted a gang", extra={"event": "gang_adopted", **_facts(key_of(gang))})
            for member in local.members:
                self._look(local, member)
                self._follow(local, member)
            if not is_whole:  # the agent died while it started them, so the gang starts again
                self._stop(local)

    @property
    def network_remarks(self) -> tuple[str, ...]:
        """Return sentences on what keeps the network plan from having an effect here."""
        return self._network.remarks if self._network is not None else ()

    def apply(
        self, revision: int, gangs: Sequence[pb.DesiredGang], settings: TagSettings | None = None
    ) -> None:
        """Make ``gangs``, and nothing else, run here. Ignore a revision older than the newest.

        ``settings`` tell interfaces how to treat traffic, and apply before any gang starts. A gang
        whose part in the network plan has changed goes on and is notified.
        """
        if revision < self.revision:
            log.warning(
                "ignored a desired state, because a newer one was received before",
                extra={
                    "event": "desired_state_ignored",
                    "revision": revision,
                    "newest": self.revision,
                },
            )
            return
        if revision > self.revision:  # even if nothing follows: the server waits for this
            self._changed()
        self.revision = revision
        self._desired = [gang for gang in gangs if gang.shares]
        if self._network is not None:
            self._network.desired(settings)
        for gang in self._desired:
            self._update_part(gang)
        self._reconcile()

    def stop_all(self) -> None:
        """Stop every gang, until a desired state is applied again."""
        self._desired = None
        self._reconcile()

    async def close(self) -> None:
        """Stop every gang for good; return once all are dead."""
        self._closing = True
        self.stop_all()
        while any(local.is_live for local in self._here.values()):
            self._idle.clear()
            await self._idle.wait()

    def live(self) -> list[tuple[pb.DesiredGang, bool]]:
        """Return the gangs that occupy GPUs here, and whether their processes run."""
        here = self._here.values()
        return [(local.gang, local.is_running) for local in here if local.is_live]

    def request_checkpoints(self) -> None:
        """Ask all gangs for a checkpoint, because they may have to stop soon."""
        for local in self._here.values():
            for member in local.members:
                if member.handle is not None:
                    member.handle.request_checkpoint()

    def inspect(self) -> None:
        """Read the progress of all running gangs."""
        for local in self._here.values():
            for member in local.members:
                self._look(local, member)

    def reports(self) -> list[pb.ObservedGang]:
        """Return a report for each gang member on this agent's nodes, by last known progress."""
        now_s = self._wall_s()
        reports = [
            report_of(local, member, now_s)
            for local in self._here.values()
            for member in local.members
            if not member.is_gone
        ]
        if self._sampling is not None:
            for report in reports:
                self._sampling.add_measurement(report)
        return reports

    def note_sent(self, reports: Iterable[pb.ObservedGang]) -> None:
        """Note that ``reports`` were sent: the next desired state answers the ends among them."""
        sent: dict[GangKey, dict[str, int]] = {}
        for report in reports:
            sent.setdefault(key_of(report), {})[report.node] = report.phase
        for key, phases in sent.items():
            local = self._here.get(key)
            if local is not None and not local.is_live:
                local.reported = all(
                    phases.get(member.node) == member.phase
                    for member in local.members
                    if not member.is_gone
                )

    def _reconcile(self) -> None:
        plan = reconcile_gangs(() if self._closing else self._desired, self._here.values())
        for key in plan.forget:
            self._forget(key)
        for key in plan.stop:
            self._stop(self._here[key])
        ready = plan.start if self._network is None or self._network.settled else ()
        for gang in ready[:START_BATCH]:
            self._start(gang)
        if len(ready) > START_BATCH:
            asyncio.get_running_loop().call_soon(self._reconcile)
        for key in plan.waiting:
            log.info("a gang waits for its GPUs", extra={"event": "gang_waiting", **_facts(key)})
        if plan.forget or plan.stop or ready:
            self._changed()

    def _start(self, message: pb.DesiredGang) -> None:
        gang = pb.DesiredGang()
        gang.CopyFrom(message)  # a part of a message would keep all of it in memory
        local = LocalGang(gang=gang, members=[])
        self._here[key_of(gang)] = local
        try:
            self._state.add(gang)
            environment = self._environment(gang)
            self._runtimes.require_offered(gang)
            runtime = self._runtimes.choose(gang)
        except (TesseraError, OSError) as error:
            local.members = [failed_member(node, error) for node in nodes_of(gang)]
            log.error(
                "a gang did not start",
                extra={"event": "gang_not_started", **_facts(key_of(gang)), "error": error},
            )
            return
        for node in nodes_of(gang):
            member = LocalMember(node=node, phase=pb.ObservedGang.STARTING)
            local.members.append(member)
            if node == gang.leader or not runtime.leader_only:
                self._launch(local, member, runtime, environment)
            if member.phase != pb.ObservedGang.FAILED:
                self._follow(local, member)

    def _launch(
        self, local: LocalGang, member: LocalMember, runtime: Runtime, environment: dict[str, str]
    ) -> None:
        """Start the processes of one member. A failure is reported as that member's."""
        gang = local.gang
        try:
            part = Member(
                gang=gang,
                node=member.node,
                directory=self._state.make_member_directory(gang, member.node),
                store=self._state.checkpoints(gang.job),
                environment=environment,
            )
            member.handle = runtime.launch(part)
        except (TesseraError, OSError, ValueError) as error:  # e.g. a file that a program changed
            failed = failed_member(member.node, error)
            member.phase, member.error, member.reason = failed.phase, failed.error, failed.reason
            log.error(
                "a gang did not start",
                extra={
                    "event": "gang_not_started",
                    **_facts(key_of(gang)),
                    "node": member.node,
                    "error": error,
                },
            )
            return
        log.info(
            "started a gang",
            extra={"event": "gang_started", **_facts(key_of(gang)), "node": member.node},
        )

    def _nodes_with_processes(self, gang: pb.DesiredGang) -> list[str]:
        """Return the nodes of this agent on which the gang has processes."""
        nodes = nodes_of(gang)
        try:
            leader_only = self._runtimes.choose(gang).leader_only
        except InvalidInput:  # another agent started it, with this runtime
            leader_only = True
        return [node for node in nodes if node == gang.leader] if leader_only else nodes

    def _environment(self, gang: pb.DesiredGang) -> dict[str, str]:
        """Return the environment variables that convey the gang's part in the network plan."""
        if self._network is None or not gang.HasField("network"):
            return {}
        file = self._state.write_part(key_of(gang), gang.network)
        return {**self._network.environment(gang.job), PART_VARIABLE: str(file)}

    def _update_part(self, gang: pb.DesiredGang) -> None:
        """Notify a gang that is here of its part in the network plan, if the part has changed."""
        local = self._here.get(key_of(gang))
        if self._network is None or not gang.HasField("network") or local is None:
            return
        if local.gang.network == gang.network:
            return
        local.gang.network.CopyFrom(gang.network)
        try:
            self._state.write_part(key_of(gang), gang.network)
        except OSError as error:
            log.warning(
                "cannot pass a gang its part in the network plan",
                extra={"event": "network_part_unwritten", **_facts(key_of(gang)), "error": error},
            )

    def _network_changed(self) -> None:
        """Go on with gangs that waited for the map, and report what is wrong with the network."""
        self._changed()
        if self._desired is not None:
            self._reconcile()

    def _stop(self, local: LocalGang) -> None:
        gang = local.gang
        log.info("stopping a gang", extra={"event": "gang_stopping", **_facts(key_of(gang))})
        local.is_stopping = True
        if not local.has_processes:
            self._forget(key_of(gang))
            return
        for member in local.members:
            if member.handle is None:
                member.is_gone = member.phase in LIVE_PHASES
                continue
            member.phase = pb.ObservedGang.STOPPING
            member.handle.stop()
        grace_s = to_seconds(gang.launch.stop_grace) or self._grace_s
        if RUNTIMES.get(gang.launch.runtime, RUNTIMES[DEFAULT_RUNTIME]).trains:
            grace_s += KEEPER_MARGIN_S  # its keeper kills it first
        asyncio.get_running_loop().call_later(grace_s, self._kill_after_grace, local)

    def _kill_after_grace(self, local: LocalGang) -> None:
        for member in local.members:
            if member.handle is not None:
                log.warning(
                    "killing a gang that did not stop in time",
                    extra={
                        "event": "gang_killed",
                        **_facts(key_of(local.gang)),
                        "node": member.node,
                    },
                )
                member.handle.kill()

    def _forget(self, key: GangKey) -> None:
        del self._here[key]
        self._state.remove(key)

    def _follow(self, local: LocalGang, member: LocalMember) -> None:
        if member.handle is None:
            member.phase = pb.ObservedGang.RUNNING
        else:
            self._spawn(self._watch(local, member, member.handle))

    async def _watch(self, local: LocalGang, member: LocalMember, handle: MemberHandle) -> None:
        await handle.begun()
        self._look(local, member)
        self._ended(local, member, await handle.ended(), handle.observe())

    def _look(self, local: LocalGang, member: LocalMember) -> None:
        """Refresh the progress. A member that shows progress is running."""
        if member.handle is None:
            return
        member.progress = member.handle.observe()
        if member.progress is not None and member.phase == pb.ObservedGang.STARTING:
            member.phase = pb.ObservedGang.RUNNING
            log.info(
                "a gang is running",
                extra={"event": "gang_running", **_facts(key_of(local.gang)), "node": member.node},
            )
            self._changed()

    def _ended(
        self, local: LocalGang, member: LocalMember, how: MemberExit, progress: Progress | None
    ) -> None:
        key = key_of(local.gang)
        member.handle, member.progress = None, progress
        log.info(
            "a gang has ended",
            extra={
                "event": "gang_ended",
                **_facts(key),
                "node": member.node,
                "outcome": how.outcome,
                "error": how.error,
            },
        )
        if how.outcome is ExitOutcome.SUCCEEDED:
            member.phase = pb.ObservedGang.SUCCEEDED
        elif local.is_stopping or how.outcome is ExitOutcome.STOPPED:
            member.is_gone = True
        else:
            member.phase, member.error, member.reason = (
                pb.ObservedGang.FAILED,
                how.error,
                how.reason,
            )
            if how.reason is ExitReason.NOT_STARTED and self._runtimes.offers is not None:
                self._runtimes.offers.check_soon()
        if all(m.is_gone or (local.is_stopping and m.handle is None) for m in local.members):
            self._leave_behind(local)
        self._idle.set()
        self._changed()
        if self._desired is not None:
            self._reconcile()

    def _leave_behind(self, local: LocalGang) -> None:
        """Forget a gang that was stopped, unless a member has done all iterations meanwhile."""
        if all(member.phase != pb.ObservedGang.SUCCEEDED for member in local.members):
            self._forget(key_of(local.gang))


def _facts(key: GangKey) -> dict[str, str | int]:
    return {"job": key[0], "generation": key[1]}
