"""The time until jobs run, and what an agent and keepers use while many jobs run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import psutil

from tessera.benchmarks.harness.progress import track_steps
from tessera.benchmarks.service.runtime.lab import (
    ProgramAgent,
    RuntimeLab,
    job_spec,
    seconds_of,
    wait_for,
)
from tessera.benchmarks.service.runtime.programs import Program
from tessera.service.agent.keeper import main as keeper
from tessera.v1 import jobs_pb2

NODE_GPUS: Final = 50
"""GPUs of each virtual node. A node has at most 64."""

REPORT_S: Final = 1.0
"""Seconds between two reports of a program's progress."""

SETTLE_S: Final = 3.0
"""Seconds between the start of the last job and the measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Processor time and memory while ``jobs`` run."""

    jobs: int
    window_s: float
    agent_cpu_s: float
    agent_rss_bytes: int
    keeper_cpu_s: float  # of all keepers, without their programs
    keeper_rss_bytes: float  # the mean of all keepers
    keeper_pss_bytes: float  # the same, with shared pages divided among those who share them
    launches_s: Sequence[float]  # of the jobs, which all started at the same time


def measure_launches(lab: RuntimeLab, program: Program, starts: int) -> list[float]:
    """Start jobs one after another, and return the seconds from each decision until RUNNING."""
    with lab.run_agent("launches", [("launches", 1)]):
        seconds = []
        for k in track_steps(starts, "launches"):
            name = f"launch-{k}"
            lab.submit([job_spec(name, program, 1, arguments=("0.05",))])
            seconds.append(_start(lab, name))
            lab.end(name)
        return seconds


def _start(lab: RuntimeLab, name: str) -> float:
    """Wait until a submitted job is RUNNING, and return the seconds from its decision until then."""
    wait_for(lambda: lab.job(name).state == jobs_pb2.RUNNING, f"the start of {name}")
    return _launch_s(lab, name)


def _launch_s(lab: RuntimeLab, name: str) -> float:
    """Return the seconds from the decision to start a job until it was RUNNING."""
    first: dict[str, float] = {}
    for event in lab.events(name):
        first.setdefault(event.event, seconds_of(event.time))
    return first["ran"] - first["start"]


def measure_footprint(lab: RuntimeLab, program: Program, jobs: int, window_s: float) -> Footprint:
    """Run ``jobs`` jobs on one agent, and measure its processes for ``window_s``."""
    nodes = [(f"many-{k}", NODE_GPUS) for k in range(-(-jobs // NODE_GPUS))]
    with lab.run_agent("many", nodes) as agent:
        names = [f"many-{k}" for k in range(jobs)]
        lab.submit([job_spec(name, program, 1, arguments=(f"{REPORT_S}",)) for name in names])
        wait_for(lambda: _running(lab) == jobs, f"{jobs} running jobs")
        time.sleep(SETTLE_S)
        keepers, itself = _keepers(agent, jobs), psutil.Process(agent.process.pid)
        begun_s, before = time.monotonic(), _cpu_s([itself, *keepers])
        time.sleep(window_s)
        after, ended_s = _cpu_s([itself, *keepers]), time.monotonic()
        memory = [process.memory_full_info() for process in keepers]
        return Footprint(
            jobs=jobs,
            window_s=ended_s - begun_s,
            agent_cpu_s=after[itself.pid] - before[itself.pid],
            agent_rss_bytes=itself.memory_info().rss,
            keeper_cpu_s=sum(after[k.pid] - before[k.pid] for k in keepers),
            keeper_rss_bytes=sum(m.rss for m in memory) / jobs,
            keeper_pss_bytes=sum(m.pss for m in memory) / jobs,
            launches_s=[_launch_s(lab, name) for name in names],
        )


def _running(lab: RuntimeLab) -> int:
    return sum(job.state == jobs_pb2.RUNNING for job in lab.jobs())


def _keepers(agent: ProgramAgent, jobs: int) -> list[psutil.Process]:
    """Return the keepers of an agent. Raises RuntimeError unless there is one for each job."""
    children = psutil.Process(agent.process.pid).children(recursive=True)
    found = [child for child in children if keeper.__file__ in child.cmdline()]
    if len(found) != jobs:
        raise RuntimeError(f"{len(found)} keepers run, but {jobs} jobs do")
    return found


def _cpu_s(processes: Sequence[psutil.Process]) -> Mapping[int, float]:
    """Return the processor time that each process has used, without that of its children."""
    times = {process.pid: process.cpu_times() for process in processes}
    return {pid: used.user + used.system for pid, used in times.items()}
