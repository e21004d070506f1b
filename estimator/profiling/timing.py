"""Times of compiled functions on the available device.

On an accelerator, they are the sum of kernel durations from JAX's own profiler, without gaps
between kernels and without work of the host (Arena, section 3.4). If a trace has no kernels (on a
CPU), the clock is read before each run and after its results are ready.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

from tessera.formulation.base.errors import Unavailable

_MOST_LAPS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingEffort:
    """The number of runs of a function before and during timing. ``clock`` returns seconds.

    With the clock, short functions run repeatedly until ``host_s`` seconds have passed, so that at
    least one run is undisturbed.
    """

    warmups: int = 2
    repeats: int = 5
    host_s: float = 0.2
    clock: Callable[[], float] = time.perf_counter


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTiming:
    """The seconds of one run, with their method."""

    run_s: float
    method: str


def time_run(run: Callable[[], Any], effort: TimingEffort) -> RunTiming:
    """Return the seconds of one run of ``run``, whose results are awaited."""
    for _ in range(effort.warmups):
        jax.block_until_ready(run())
    if jax.default_backend() != "cpu":
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                for _ in range(effort.repeats):
                    jax.block_until_ready(run())
            seconds = kernel_seconds(_read(Path(folder)))
        if seconds > 0:
            return RunTiming(run_s=seconds / effort.repeats, method="kernels")
    laps: list[float] = []
    while len(laps) < effort.repeats or (sum(laps) < effort.host_s and len(laps) < _MOST_LAPS):
        start = effort.clock()
        jax.block_until_ready(run())
        laps.append(effort.clock() - start)
    # Other work of the host can only add time, so the shortest run is the best estimate.
    return RunTiming(run_s=min(laps), method="wall clock")


def _read(folder: Path) -> ProfileData:
    files = sorted(folder.glob("**/*.xplane.pb"))
    if not files:
        raise Unavailable("JAX's profiler wrote no trace; another profiler may hold the device")
    return ProfileData.from_file(str(files[-1]))


def kernel_seconds(data: ProfileData) -> float:
    """Return the seconds of all kernels and copies on devices in a trace, or 0 if it has none.

    Overlap is ignored. The plane of a GPU has one line for each stream. Derived lines (modules,
    operators, steps) repeat these and are left out. A TPU has its kernels on the line ``XLA Ops``.
    """
    total_ns = 0.0
    for plane in data.planes:
        if not plane.name.startswith("/device:"):
            continue
        lines = list(plane.lines)
        streams = [line for line in lines if line.name.startswith("Stream")]
        for line in streams or [line for line in lines if line.name == "XLA Ops"]:
            total_ns += sum(event.duration_ns for event in line.events)
    return total_ns * 1e-9


def device_name() -> str:
    """Return the kind of the device on which JAX computes."""
    return str(jax.devices()[0].device_kind)


def library_versions() -> dict[str, str]:
    """Return the versions on which a measurement depends."""
    driver = " ".join(str(jax.devices()[0].client.platform_version).split())
    return {"jax": version("jax"), "jaxlib": version("jaxlib"), "driver": driver}
