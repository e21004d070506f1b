"""The supervisor of an agent's gangs: it compares desired with actual gangs and derives actions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tessera.formulation.errors import TesseraError
from tessera.formulation.network.tags import TagSettings
from tessera.service.agent.gangs import LIVE_PHASES, Gang, GangKey, GangPhase, GangReport
from tessera.service.agent.network.map_worker import NetworkMapWorker
from tessera.service.agent.network.sampling import TrafficSampler
from tessera.service.agent.runtime import ExitOutcome, GangExit, GangHandle, Progress, Runtime
from tessera.service.agent.state import StateDir

log = logging.getLogger(__name__)

PART_VARIABLE = "TESSERA_NETWORK"
"""The variable that names the file with a job's part in the network plan.

The file holds the job's priority level, the number of levels, its tag and its paths. It is replaced
when they change.
"""

START_BATCH = 8
"""The number of gangs started in one go. Between two batches the agent talks to its server."""


@dataclass(slots=True, kw_only=True)
class LocalGang:
    """A gang that is here, or whose end has yet to be reported."""

    gang: Gang
    phase: GangPhase
    handle: GangHandle | None = None  # None without a process: it ended or is led elsewhere
    progress: Progress | None = None
    error: str = ""
    reported: bool = False  # its end was sent to a server


@dataclass(frozen=True, slots=True, kw_only=True)
class GangActions:
    """The actions to take now.

    ``waiting`` are gangs whose GPUs or job still have a live process here.
    """

    start: tuple[Gang, ...] = ()
    stop: tuple[GangKey, ...] = ()
    forget: tuple[GangKey, ...] = ()
    waiting: tuple[GangKey, ...] = ()


def reconcile_gangs(desired: Iterable[Gang] | None, here: Iterable[LocalGang]) -> GangActions:
    """Return the actions that turn ``here`` into ``desired``.

    If ``desired`` is None, nothing may run, but no end is forgotten. Of several generations of a
    job, the newest counts. Nothing starts on a GPU that a live gang occupies, nor next to a live
    older process of the same job. An end is forgotten once it was reported and its gang is no
    longer desired.
    """
    # Keep the newest generation of each job.
    wanted: dict[str, Gang] = {}
    for gang in desired or ():
        if gang.job not in wanted or wanted[gang.job].generation < gang.generation:
            wanted[gang.job] = gang
    keys = {gang.key for gang in wanted.values()}
    known = {local.gang.key: local for local in here}
    gone = [local for key, local in known.items() if key not in keys]
    stop = [x for x in gone if x.phase in (GangPhase.STARTING, GangPhase.RUNNING)]
    at_once = {
        x.gang.key for x in stop if x.handle is None
    }  # there is no process that would have to die first
    # Everything else that lives blocks its job and its GPUs until it is dead.
    live = [x for key, x in known.items() if x.phase in LIVE_PHASES and key not in at_once]
    busy_jobs = {local.gang.job for local in live}
    busy = {device for local in live for device in local.gang.devices}
    start, waiting = [], []
    for gang in wanted.values():
        if gang.key in known:
            continue
        if gang.job in busy_jobs or busy & gang.devices:
            waiting.append(gang.key)
        else:
            start.append(gang)
            busy |= gang.devices
    return GangActions(
        start=tuple(start),
        stop=tuple(x.gang.key for x in stop),
        forget=tuple(
            x.gang.key
            for x in gone
            if desired is not None and x.phase not in LIVE_PHASES and x.reported
        ),
        waiting=tuple(waiting),
    )


class Supervisor:
    """An executor of the actions of ``reconcile_gangs``, which also records them on disk.

    ``spawn`` runs a coroutine concurrently with the caller and must not lose its errors.
    ``changed`` is called whenever ``reports`` or ``network_remarks`` would return something new.
    All methods belong to one event loop.
    """

    def __init__(
        self,
        runtime: Runtime,
        state: StateDir,
        *,
        grace_s: float,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        changed: Callable[[], None],
        network: NetworkMapWorker | None = None,
        sampling: TrafficSampler | None = None,
    ) -> None:
        self._runtime = runtime
        self._state = state
        self._grace_s = grace_s
        self._spawn = spawn
        self._changed = changed
        self._network, self._sampling = network, sampling
        if network is not None:
            network.call_on_change(self._network_changed)
        self._here: dict[GangKey, LocalGang] = {}
        self._desired: Sequence[Gang] | None = None
        self._closing = False
        self._idle = asyncio.Event()
        self.revision = 0

    def adopt(self) -> None:
        """Take over the gangs that an earlier agent left, without disturbing them."""
        for gang in list(self._state.gangs()):
            handle = self._runtime.adopt(self._state.directory(gang.key)) if gang.led_here else None
            if gang.led_here and handle is None:  # recorded, but never started
                self._state.remove(gang.key)
                continue
            local = LocalGang(gang=gang, phase=GangPhase.STARTING, handle=handle)
            self._here[gang.key] = local
            self._look(local)
            log.info("adopted %s", _name(gang.key), extra={"action": "adopt"})
            self._follow(local)

    @property
    def network_remarks(self) -> tuple[str, ...]:
        """Return sentences on what keeps the network plan from having an effect here."""
        return self._network.remarks if self._network is not None else ()

    def apply(
        self, revision: int, gangs: Sequence[Gang], settings: TagSettings | None = None
    ) -> None:
        """Make ``gangs``, and nothing else, run here. Ignore a revision older than the newest.

        ``settings`` tell interfaces how to treat traffic, and apply before any gang starts. A gang
        whose part in the network plan has changed goes on and is notified.
        """
        if revision < self.revision:
            log.warning(
                "ignored desired state %d, because the newer %d was received before",
                revision,
                self.revision,
                extra={"action": "ignore"},
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
        while any(local.phase in LIVE_PHASES for local in self._here.values()):
            self._idle.clear()
            await self._idle.wait()

    def live(self) -> list[tuple[Gang, bool]]:
        """Return the gangs that occupy GPUs here, and whether their processes run."""
        here = self._here.values()
        return [(x.gang, x.phase is GangPhase.RUNNING) for x in here if x.phase in LIVE_PHASES]

    def inspect(self) -> None:
        """Read the progress of all running gangs."""
        for local in self._here.values():
            self._look(local)

    def reports(self) -> list[GangReport]:
        """Return a report for each gang member on this agent's nodes, by last known progress."""
        found = []
        for local in self._here.values():
            for node, _ in local.gang.shares:
                if node == local.gang.leader:
                    found.append(_leader_report(local))
                else:
                    leaving = local.phase is GangPhase.STOPPING
                    phase = GangPhase.STOPPING if leaving else GangPhase.RUNNING
                    job, generation = local.gang.key
                    found.append(GangReport(job=job, generation=generation, node=node, phase=phase))
        return (
            found if self._sampling is None else [self._sampling.add_measurement(r) for r in found]
        )

    def note_sent(self, reports: Iterable[GangReport]) -> None:
        """Note that ``reports`` were sent: the next desired state answers the ends among them."""
        for report in reports:
            local = self._here.get((report.job, report.generation))
            if local and local.phase not in LIVE_PHASES and report.phase is local.phase:
                local.reported = True

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
            log.info("%s waits for its GPUs", _name(key), extra={"action": "wait"})
        if plan.forget or plan.stop or ready:
            self._changed()

    def _start(self, gang: Gang) -> None:
        local = LocalGang(gang=gang, phase=GangPhase.STARTING)
        self._here[gang.key] = local
        try:
            directory = self._state.add(gang)
            environment = self._environment(gang)
            if gang.led_here:
                checkpoints = self._state.checkpoints(gang.job)
                local.handle = self._runtime.start(gang, directory, checkpoints, environment)
        except (TesseraError, OSError) as error:
            local.phase, local.error = GangPhase.FAILED, str(error)
            log.error("%s did not start: %s", _name(gang.key), error, extra={"action": "start"})
            return
        log.info("started %s", _name(gang.key), extra={"action": "start"})
        self._follow(local)

    def _environment(self, gang: Gang) -> dict[str, str]:
        """Return the environment variables that convey the gang's part in the network plan."""
        if self._network is None or gang.network is None:
            return {}
        file = self._state.write_part(gang.key, gang.network)
        return {**self._network.environment(gang.job), PART_VARIABLE: str(file)}

    def _update_part(self, gang: Gang) -> None:
        """Notify a gang that is here of its part in the network plan, if the part has changed."""
        local = self._here.get(gang.key)
        if self._network is None or gang.network is None or local is None:
            return
        if local.gang.network == gang.network:
            return
        local.gang = replace(local.gang, network=gang.network)
        try:
            self._state.write_part(gang.key, gang.network)
        except OSError as error:
            log.warning(
                "cannot pass %s its part in the network plan: %s",
                _name(gang.key),
                error,
                extra={"action": "network"},
            )

    def _network_changed(self) -> None:
        """Go on with gangs that waited for the map, and report what is wrong with the network."""
        self._changed()
        if self._desired is not None:
            self._reconcile()

    def _stop(self, local: LocalGang) -> None:
        log.info("stopping %s", _name(local.gang.key), extra={"action": "stop"})
        local.phase = GangPhase.STOPPING
        if local.handle is None:
            self._forget(local.gang.key)
            return
        local.handle.stop()
        asyncio.get_running_loop().call_later(self._grace_s, self._kill_after_grace, local)

    def _kill_after_grace(self, local: LocalGang) -> None:
        if local.handle is not None:
            log.warning("killing %s", _name(local.gang.key), extra={"action": "kill"})
            local.handle.kill()

    def _forget(self, key: GangKey) -> None:
        del self._here[key]
        self._state.remove(key)

    def _follow(self, local: LocalGang) -> None:
        if local.handle is None:
            local.phase = GangPhase.RUNNING
        else:
            self._spawn(self._watch(local, local.handle))

    async def _watch(self, local: LocalGang, handle: GangHandle) -> None:
        await handle.begun()
        self._look(local)
        self._ended(local, await handle.ended(), handle.progress())

    def _look(self, local: LocalGang) -> None:
        """Refresh the progress. A gang that shows progress is running."""
        if local.handle is None:
            return
        local.progress = local.handle.progress()
        if local.progress is not None and local.phase is GangPhase.STARTING:
            local.phase = GangPhase.RUNNING
            log.info("%s is running", _name(local.gang.key), extra={"action": "run"})
            self._changed()

    def _ended(self, local: LocalGang, how: GangExit, progress: Progress | None) -> None:
        key = local.gang.key
        local.handle, local.progress = None, progress
        log.info("%s has ended: %s %s", _name(key), how.outcome, how.error, extra={"action": "end"})
        if how.outcome is ExitOutcome.SUCCEEDED:
            local.phase = GangPhase.SUCCEEDED
        elif local.phase is GangPhase.STOPPING or how.outcome is ExitOutcome.STOPPED:
            self._forget(key)
        else:
            local.phase, local.error = GangPhase.FAILED, how.error
        self._idle.set()
        self._changed()
        if self._desired is not None:
            self._reconcile()


def _leader_report(local: LocalGang) -> GangReport:
    progress = local.progress
    return GangReport(
        job=local.gang.job,
        generation=local.gang.generation,
        node=local.gang.leader,
        phase=local.phase,
        iterations_done=progress.iterations if progress else -1.0,
        iter_time_s=progress.iter_time_s if progress else 0.0,
        runtime=progress.runtime if progress else "",
        error=local.error,
    )


def _name(key: GangKey) -> str:
    return f"{key[0]} generation {key[1]}"
