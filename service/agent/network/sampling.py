"""Measurement of what a gang sends in an iteration, while no other gang here sends (Crux 5).

The agent reads byte counters in a thread, one second at a time. A separate process finds the period
(``period``), so that numpy is not loaded here. A failure here stops no job and is logged once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tessera.formulation.base.errors import InvalidInput, TesseraError, Unavailable
from tessera.service.agent.gangs import GangKey, key_of
from tessera.service.agent.network.counters import PortCounter, find_counters, sample_counter
from tessera.service.agent.network.devices import SYSFS_ROOT, link_layers, rdma_devices
from tessera.v1 import agents_pb2 as pb

log = logging.getLogger(__name__)

STEP_S: Final = 0.01
CHUNK_S: Final = 1.0
"""Seconds between two checks that the gang still runs, alone."""

MAX_IRREGULAR_WINDOWS: Final = 10
"""Windows without a regular iteration, including warm-up, after which a gang is not measured."""

MIN_CONFIDENCE: Final = 0.5

ANALYSIS_S: Final = 60.0
"""The largest time in seconds for finding a period; it takes half a second."""

CounterSamples = tuple[list[float], list[int]]
"""Times in seconds, and the values of the counter at these times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficMeasurement:
    """One iteration of a gang, as this node's counters show it. ``confidence`` is at most 1."""

    period_s: float
    sent_bytes: float
    confidence: float


Analyse = Callable[[CounterSamples], Awaitable[TrafficMeasurement | None]]


class TrafficSampler:
    """A sampler that measures gangs, each once, for ``window_s`` at a time.

    ``read`` returns the bytes that the node has sent. ``sleep`` blocks the thread that it is called
    in. All methods belong to one event loop.
    """

    def __init__(
        self,
        read: Callable[[], int],
        *,
        window_s: float,
        clock: Callable[[], float],
        sleep: Callable[[float], object],
        analyse: Analyse | None = None,
        step_s: float = STEP_S,
    ) -> None:
        self._read, self._window_s, self._step_s = read, window_s, step_s
        self._clock, self._sleep = clock, sleep
        self._analyse = analyse or analysed_apart
        self._found: dict[GangKey, TrafficMeasurement] = {}
        self._tries: dict[GangKey, int] = {}
        self._warned: set[str] = set()

    def add_measurement(self, report: pb.ObservedGang) -> None:
        """Add its gang's measurements to the report, if they are known."""
        measurement = self._found.get(key_of(report))
        if measurement is not None:
            report.period_s, report.sent_bytes = measurement.period_s, measurement.sent_bytes

    async def watch(
        self,
        here: Callable[[], Iterable[tuple[pb.DesiredGang, bool]]],
        changed: Callable[[], object],
    ) -> None:
        """Measure the gangs that are ``here``; never return.

        ``here`` returns the live gangs, and whether their processes run. ``changed`` is called when
        ``add_measurement`` would return something new.
        """
        while True:
            try:
                if await self.step(here):
                    changed()
            except (TesseraError, OSError) as error:
                self._warn_once(str(error))
            except Exception:  # the outermost guard of this task: jobs do not end with it
                log.exception(
                    "stopped measuring traffic after an unexpected error",
                    extra={"event": "traffic_measuring_failed"},
                )
                return
            await asyncio.sleep(CHUNK_S)

    async def step(self, here: Callable[[], Iterable[tuple[pb.DesiredGang, bool]]]) -> bool:
        """Measure one gang for one window, if any is due; return whether it was measured.

        Raises:
            Unavailable: a counter cannot be read, or the samples cannot be analysed.
        """
        key = self._due(here)
        if key is None:
            return False
        samples = await self._sampled(key, here)
        if samples is None:
            return False
        name = f"{key[0]} generation {key[1]}"
        measurement = await self._analyse(samples)
        if measurement is None or measurement.confidence < MIN_CONFIDENCE:
            self._tries[key] = self._tries.get(key, 0) + 1
            if self._tries[key] == MAX_IRREGULAR_WINDOWS:
                self._warn_once(f"{name} has no regular period")
            return False
        self._found[key] = measurement
        log.info(
            "measured the traffic of a gang",
            extra={
                "event": "traffic_measured",
                "job": key[0],
                "generation": key[1],
                "sent_bytes": measurement.sent_bytes,
                "period_s": measurement.period_s,
                "confidence": measurement.confidence,
            },
        )
        return True

    def _due(self, here: Callable[[], Iterable[tuple[pb.DesiredGang, bool]]]) -> GangKey | None:
        """Return the gang to measure now, or None; forget the gangs that are gone."""
        senders = _senders(here())
        for past in (self._found, self._tries):
            for key in past.keys() - senders.keys():
                del past[key]
        new = [
            key
            for key in senders
            if key not in self._found and self._tries.get(key, 0) < MAX_IRREGULAR_WINDOWS
        ]
        if new and len(senders) > 1:
            names = ", ".join(sorted(job for job, _ in senders))
            self._warn_once(f"several jobs send from this node: {names}")
            return None
        return next((key for key in new if senders[key]), None)

    async def _sampled(
        self, key: GangKey, here: Callable[[], Iterable[tuple[pb.DesiredGang, bool]]]
    ) -> CounterSamples | None:
        """Return samples of a whole window, or None if the gang did not run through it alone."""
        times_s: list[float] = []
        counts: list[int] = []
        chunk = max(1, round(min(CHUNK_S, self._window_s) / self._step_s))
        while not times_s or times_s[-1] - times_s[0] < self._window_s:
            some_s, some = await asyncio.to_thread(
                sample_counter,
                self._read,
                step_s=self._step_s,
                count=chunk,
                clock=self._clock,
                sleep=self._sleep,
            )
            times_s += some_s
            counts += some
            if _senders(here()) != {key: True}:
                return None
            await asyncio.to_thread(self._sleep, self._step_s)
        return times_s, counts

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning(
                "traffic is not measured", extra={"event": "traffic_unmeasured", "cause": text}
            )


def _senders(here: Iterable[tuple[pb.DesiredGang, bool]]) -> dict[GangKey, bool]:
    """Return the gangs on several nodes, and whether their processes run."""
    return {key_of(gang): runs for gang, runs in here if len(gang.members) > 1}


async def analysed_apart(samples: CounterSamples) -> TrafficMeasurement | None:
    """Return the iteration in the samples, found by a separate process. Raises Unavailable."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",  # nothing is imported from the working directory
        "-m",
        "tessera.service.agent.network.period",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(ANALYSIS_S):
            output, wrong = await child.communicate(json.dumps(samples).encode())
    except TimeoutError as late:
        raise Unavailable(f"finding a period took more than {ANALYSIS_S:g} s") from late
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode:
        raise Unavailable(
            f"no period can be found: {wrong.decode(errors='replace')[-300:].strip()}"
        )
    iteration = json.loads(output)
    return None if iteration is None else TrafficMeasurement(**iteration)


def sent_bytes_reader(interfaces: Sequence[str] = (), sys_: Path = SYSFS_ROOT) -> Callable[[], int]:
    """Return a function that reads the bytes sent by interfaces and their RDMA ports.

    Without names, all hardware interfaces are read. Traffic over InfiniBand ports is counted at
    these ports, including IP packets.

    Raises:
        InvalidInput: there is nothing to read.
    """
    physical = [path.parent.name for path in sorted((sys_ / "class/net").glob("*/device"))]
    names = list(interfaces) or physical
    devices = {name: rdma_devices(name, sys_) for name in names}
    chosen = {device for found in devices.values() for device in found}
    known = find_counters(sys_)
    if not interfaces:
        chosen |= {c.name.partition("/")[0] for c in known if "/" in c.name}
    over_ports = {
        name
        for name, found in devices.items()
        if any("InfiniBand" in link_layers(d, sys_) for d in found)
    }
    used = [
        counter
        for counter in known
        if (counter.name in names and counter.name not in over_ports)
        or ("/" in counter.name and counter.name.partition("/")[0] in chosen)
    ]
    if missing := set(interfaces) - {c.name for c in known}:
        raise InvalidInput("--interface", f"this node has no interface {min(missing)}")
    if not used:
        raise InvalidInput(
            "--measure-traffic",
            "found no network hardware; name the interfaces that jobs use with --interface",
        )
    return lambda: _total(used)


def _total(used: Sequence[PortCounter]) -> int:
    return sum(counter.read() for counter in used)
