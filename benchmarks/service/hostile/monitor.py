"""An outside view of the server's process: its memory, its busy threads and agents' silence."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

import psutil

from tessera.db.engine import Database
from tessera.db.invariants import load_silence_s
from tessera.formulation.errors import Unavailable

MIB: Final = 2**20

LOOK_EVERY_S: Final = 0.5

WINDOW_S: Final = 1.0
"""The time over which a thread's share of a processor is measured."""

QUIET_WINDOWS: Final = 2
"""Consecutive quiet windows required: on a busy machine a computing thread may be idle in one."""

BUSY_SHARE: Final = 0.05
"""The share of a processor below which a thread counts as waiting.

Twice the share that a thread takes without any callers also counts as waiting.
"""

LITTLE_MIB: Final = 64.0
"""The growth of memory up to which nothing waits for its release."""

RUNAWAY_MIB: Final = 3072.0
"""The growth at which a server is killed, so that the machine does not run out of memory."""


def processes_of(pid: int) -> list[psutil.Process]:
    """Return the process and all its descendants, or nothing if it has ended."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def measure_rss_mib(pid: int) -> float:
    """Return the resident memory of the process and all its descendants in MiB."""
    total = 0
    for process in processes_of(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total / MIB


def read_thread_seconds(pid: int) -> dict[int, float]:
    """Return the processor seconds of each thread of the process and of its descendants."""
    result = {}
    for process in processes_of(pid):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            for thread in process.threads():
                result[thread.id] = thread.user_time + thread.system_time
    return result


def busy_threads(
    before: Mapping[int, float], after: Mapping[int, float], wall_s: float, share: float
) -> list[int]:
    """Return the threads that took more than ``share`` of a processor between two readings."""
    return [
        thread
        for thread, seconds in after.items()
        if (seconds - before.get(thread, 0.0)) / wall_s > share
    ]


def watch_threads(pid: int) -> Iterator[tuple[dict[int, float], dict[int, float], float]]:
    """Yield pairs of readings one window apart, with the seconds between them, forever."""
    before, before_s = read_thread_seconds(pid), time.monotonic()
    while True:
        time.sleep(WINDOW_S)
        after, after_s = read_thread_seconds(pid), time.monotonic()
        yield before, after, after_s - before_s
        before, before_s = after, after_s


def measure_idle_share(pid: int, windows: int = 4) -> float:
    """Return the largest share of a processor that a thread takes without any callers."""
    shares = [0.0]
    for (before, after, wall_s), _ in zip(watch_threads(pid), range(windows), strict=False):
        shares += [(s - before.get(t, 0.0)) / wall_s for t, s in after.items()]
    return max(shares)


def wait_until_quiet(pid: int, left_s: float, within_s: float, share: float) -> tuple[float, int]:
    """Wait for windows in which no thread computes, until ``within_s`` after ``left_s``.

    Return the seconds from ``left_s`` to the first of them, and the number of threads that still
    compute.
    """
    quiet_windows = 0
    for before, after, wall_s in watch_threads(pid):
        busy = busy_threads(before, after, wall_s, share)
        passed_s = time.monotonic() - left_s
        quiet_windows = 0 if busy else quiet_windows + 1
        if quiet_windows == QUIET_WINDOWS or (busy and passed_s >= within_s):
            return max(0.0, passed_s - quiet_windows * wall_s), len(busy)
    raise AssertionError("unreachable")


def wait_until_given_back(pid: int, before_mib: float, left_s: float, within_s: float) -> float:
    """Wait until the process has released the memory that it took, and return its memory in MiB.

    The wait ends ``within_s`` after ``left_s`` at the latest. A process releases memory only from
    time to time, so memory that it holds at first is not a leak.
    """
    while True:
        rss_mib = measure_rss_mib(pid)
        if rss_mib <= before_mib + LITTLE_MIB or time.monotonic() >= left_s + within_s:
            return rss_mib
        time.sleep(LOOK_EVERY_S)


@dataclass(slots=True)
class MonitorReadings:
    """The highest memory and silences that the monitor has seen since the last query."""

    rss_mib: float = 0.0
    silence_s: dict[str, float] = field(default_factory=dict)
    """The longest silence by cluster and agent."""

    def take_in(self, rss_mib: float, silence_s: Mapping[str, float]) -> None:
        """Merge one observation."""
        self.rss_mib = max(self.rss_mib, rss_mib)
        for agent, seconds in silence_s.items():
            self.silence_s[agent] = max(seconds, self.silence_s.get(agent, 0.0))


class Monitor:
    """A thread that observes the server's process, and the silence of agents in the database.

    It kills a server whose memory exceeds ``base_mib`` by ``RUNAWAY_MIB``.
    """

    def __init__(self, database: Database, agents: Sequence[tuple[str, str]]) -> None:
        """Watch the silence of ``agents``, which are pairs of cluster and agent."""
        self._database, self._agents = database, frozenset(agents)
        self._clusters = sorted({cluster for cluster, _ in agents})
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._seen = MonitorReadings()
        self._thread = threading.Thread(target=self._repeat, daemon=True)
        self._process: psutil.Process | None = None
        self._base_mib = 0.0
        self.runaways = 0
        """The number of servers that were killed because they took too much memory."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def follow(self, pid: int, base_mib: float) -> None:
        """Observe this server from now on."""
        with self._lock:
            self._process, self._base_mib = psutil.Process(pid), base_mib

    def take_seen(self) -> MonitorReadings:
        """Return the worst values since the last call."""
        self.look()
        with self._lock:
            seen, self._seen = self._seen, MonitorReadings()
        return seen

    def look(self) -> None:
        """Make one observation."""
        silence_s = {}
        for cluster in self._clusters:
            with contextlib.suppress(Unavailable):  # the next observation sees a longer silence
                for agent, seconds in load_silence_s(self._database, cluster).items():
                    if (cluster, agent) in self._agents:
                        silence_s[f"{cluster}/{agent}"] = seconds
        with self._lock:
            process, base_mib = self._process, self._base_mib
            rss_mib = measure_rss_mib(process.pid) if process else 0.0
            self._seen.take_in(rss_mib, silence_s)
        if process and rss_mib > base_mib + RUNAWAY_MIB:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                self.runaways += 1

    def _repeat(self) -> None:
        while not self._stopped.wait(LOOK_EVERY_S):
            self.look()
