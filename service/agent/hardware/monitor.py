"""The monitor of a node's health: it combines the driver's reports with the site's checks."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tessera.service.agent.hardware.checks import CheckResult, run_check
from tessera.service.agent.hardware.devices import Devices, DeviceState, XidEvent
from tessera.service.agent.hardware.faults import WHOLE_NODE, Fault, FaultTracker
from tessera.service.agent.hardware.memory import HardwareMemory
from tessera.v1 import agents_pb2 as pb

log = logging.getLogger(__name__)

PASS_S: Final = 5.0
"""Seconds between two looks at the GPUs. Xids are noticed at once."""

STUCK_S: Final = 120.0
"""Seconds without an answer of the driver after which that is a fault."""

Report = Callable[[], list[pb.NodeHealth]]
"""A function that returns the health of the agent's nodes, as far as they are watched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSettings:
    """The ways in which a node's health is watched.

    ``devices`` is None if the GPUs are not watched; otherwise ``uuids`` are those that should be
    there. An empty command means that there is no such check.
    """

    node: str
    memory: HardwareMemory
    devices: Devices | None = None
    uuids: tuple[str, ...] = ()
    health_command: tuple[str, ...] = ()
    health_period_s: float = 60.0
    health_timeout_s: float = 30.0
    validate_command: tuple[str, ...] = ()
    validate_timeout_s: float = 1800.0


class HealthMonitor:
    """A monitor of one node. All methods belong to the event loop's thread.

    The driver is asked in a thread of its own, because a broken driver may never answer.
    """

    def __init__(
        self,
        settings: HealthSettings,
        *,
        changed: Callable[[], object],
        is_idle: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        pass_s: float = PASS_S,
    ) -> None:
        """Remember the parts.

        ``changed`` is called when the report has changed. ``is_idle`` returns whether no gang holds
        a GPU here, for only then a validation may use them.
        """
        self._settings, self._memory = settings, settings.memory
        self._changed, self._is_idle, self._clock = changed, is_idle, clock
        self._pass_s = pass_s
        self._tracker = FaultTracker(xids=settings.memory.xids)
        self._from_devices: tuple[Fault, ...] | None = None if settings.devices else ()
        self._looked_s = clock()  # when the driver answered last
        self._check: CheckResult | None = (
            None if settings.health_command else CheckResult(passed=True)
        )
        self._failure = ""  # why the last validation failed; "" if it did not
        self._logged: tuple[Fault, ...] = ()

    def report(self) -> list[pb.NodeHealth]:
        """Return the node's health, or nothing until every check has had its first result."""
        faults = self._present_faults()
        if faults is None:
            return []
        messages = [pb.HealthFault(gpu=f.gpu, kind=f.kind, detail=f.detail) for f in faults]
        return [pb.NodeHealth(node=self._settings.node, faults=messages)]

    async def run(self) -> None:
        """Watch the node until this is cancelled."""
        self._memory.uuids = self._settings.uuids or self._memory.uuids
        self._memory.save()
        over = threading.Event()
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._settings.devices is not None:
                    loop = asyncio.get_running_loop()
                    watch = (self._settings.devices, loop, over)
                    threading.Thread(
                        target=self._watch_devices, args=watch, name="tessera-gpus", daemon=True
                    ).start()
                if self._settings.health_command:
                    tasks.create_task(self._check_repeatedly())
                tasks.create_task(self._attend_repeatedly())
        finally:
            over.set()

    def _present_faults(self) -> tuple[Fault, ...] | None:
        """Return all present faults, or None if a check has no result yet."""
        if self._is_stuck():
            text = f"the driver of the GPUs has not answered for {STUCK_S:g} s"
            return (Fault(gpu=WHOLE_NODE, kind="lost", detail=text), *self._grave_faults())
        if self._from_devices is None or self._check is None:
            return None
        grave = self._grave_faults()
        if grave or not self._needs_validation():
            return grave
        text = f"validation failed: {self._failure}"
        text = text if self._failure else "the validation has not passed yet"
        return (Fault(gpu=WHOLE_NODE, kind="validation", detail=text),)

    def _grave_faults(self) -> tuple[Fault, ...]:
        """Return the faults that are known, without what is missing after them."""
        faults = self._from_devices or ()
        if self._check is None or self._check.passed:
            return faults
        return (*faults, Fault(gpu=WHOLE_NODE, kind="site", detail=self._check.detail))

    def _is_stuck(self) -> bool:
        watched = self._settings.devices is not None
        return watched and self._clock() - self._looked_s > STUCK_S

    def _needs_validation(self) -> bool:
        return bool(self._settings.validate_command) and self._memory.unvalidated

    def _update(self) -> None:
        """Write down what a restart must know, and report what has changed."""
        faults = self._present_faults() or ()
        if any(fault.kind != "validation" for fault in faults):
            self._memory.unvalidated, self._failure = True, ""
        self._memory.xids = self._tracker.xids
        self._memory.save()
        if faults != self._logged:
            self._log(faults)
            self._logged = faults
            self._changed()

    def _log(self, faults: tuple[Fault, ...]) -> None:
        for fault in faults:
            if fault not in self._logged:
                log.warning(
                    "the node has a fault",
                    extra={
                        "event": "fault_found",
                        "node": self._settings.node,
                        "gpu": fault.gpu,
                        "kind": fault.kind,
                        "fault": fault.detail,
                    },
                )
        if not faults:
            log.info(
                "the node has no faults any more",
                extra={"event": "node_healthy", "node": self._settings.node},
            )

    def _watch_devices(
        self, devices: Devices, loop: asyncio.AbstractEventLoop, over: threading.Event
    ) -> None:
        """Ask the driver again and again, in a thread of its own."""
        events: tuple[XidEvent, ...] = ()
        try:
            devices.watch(self._settings.uuids)
            while not over.is_set():
                states = devices.read()
                if over.is_set():
                    return
                loop.call_soon_threadsafe(self._take, events, states)
                events = devices.wait(self._pass_s)
        except Exception:  # the outermost guard of this thread; its silence becomes a fault
            if not loop.is_closed():
                log.exception("stopped watching the GPUs", extra={"event": "gpu_watch_failed"})

    def _take(self, events: Sequence[XidEvent], states: Sequence[DeviceState]) -> None:
        """Take in what the driver has reported."""
        is_first = self._from_devices is None
        self._looked_s = self._clock()
        self._tracker.note_events(events)
        self._tracker.settle_xids(states)
        self._from_devices = self._tracker.find_faults(states, self._looked_s)
        self._update()
        if is_first:
            self._changed()

    async def _check_repeatedly(self) -> None:
        s = self._settings
        while True:
            result = await run_check(s.health_command, s.health_timeout_s, self._environment())
            is_first, self._check = self._check is None, result
            self._update()
            if is_first:
                self._changed()
            await asyncio.sleep(s.health_period_s)

    async def _attend_repeatedly(self) -> None:
        """Do what requests and time bring: forget faults, notice a stuck driver, validate."""
        while True:
            if self._memory.take_clear_request():
                log.info("the faults are forgotten on request", extra={"event": "faults_cleared"})
                self._memory.forget()
                self._tracker.xids, self._failure = {}, ""
            self._update()
            if self._may_validate():
                await self._validate()
            await asyncio.sleep(self._pass_s)

    def _may_validate(self) -> bool:
        """Return whether only the validation is missing, and nothing else uses the GPUs."""
        faults = self._present_faults()
        waits = bool(faults) and all(fault.kind == "validation" for fault in faults or ())
        return waits and not self._failure and self._is_idle()

    async def _validate(self) -> None:
        """Run the validation. It counts only if no fault came meanwhile."""
        s = self._settings
        log.info("validating the node", extra={"event": "validation_started", "node": s.node})
        result = await run_check(s.validate_command, s.validate_timeout_s, self._environment())
        if self._grave_faults():
            return
        self._memory.unvalidated = not result.passed
        self._failure = result.detail
        self._update()

    def _environment(self) -> dict[str, str]:
        return {"TESSERA_NODE": self._settings.node}


def start_monitor(
    settings: HealthSettings | None,
    spawn: Callable[[Coroutine[Any, Any, None]], object],
    changed: Callable[[], object],
    live: Callable[[], Sequence[object]],
) -> Report:
    """Watch the node's health; return the function that reports it.

    ``live`` returns the gangs that hold GPUs here. Without settings, nothing is watched.
    """
    if settings is None:
        return list
    monitor = HealthMonitor(settings, changed=changed, is_idle=lambda: not live())
    spawn(monitor.run())
    return monitor.report
