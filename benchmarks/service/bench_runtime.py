"""The cost of jobs that really run: starts, moves and agents."""

from __future__ import annotations

import sys
from typing import Annotated, Final

import typer

from tessera.benchmarks.harness.registry import register_case
from tessera.benchmarks.service.runtime.footprint import (
    Footprint,
    measure_footprint,
    measure_launches,
)
from tessera.benchmarks.service.runtime.lab import run_lab
from tessera.benchmarks.service.runtime.programs import (
    find_torch_python,
    steady_program,
    torch_plan,
    torch_program,
    write_program,
)
from tessera.benchmarks.service.runtime.restarts import measure_restarts, restart_figures
from tessera.benchmarks.service.runtime.summary import percentile_50, percentile_95
from tessera.simulator.figures import Figure, Report

MIB: Final = 2**20

PAUSE_S: Final = "0.05"
"""Seconds of an iteration of the program that is moved."""


@register_case(
    "runtime",
    smoke={
        "moves": 2,
        "starts": 2,
        "jobs": 4,
        "window_s": 1.0,
        "torch": False,
    },
    launch_p95_s=("<=", 5.0),
    agent_cpu_share=("<=", 0.05),
    keeper_cpu_share_per_job=("<=", 0.005),
    keeper_rss_mib=("<=", 32.0),
    reported_share_is_possible=("==", True),
)
def measure_runtime(
    moves: Annotated[int, typer.Option(min=2, help="Moves of a job of each program.")] = 12,
    starts: Annotated[int, typer.Option(min=2, help="Starts, one after another.")] = 30,
    jobs: Annotated[int, typer.Option(min=1, help="Jobs that one agent runs together.")] = 100,
    window_s: Annotated[
        float, typer.Option(min=1.0, help="Seconds for which the agent and keepers are measured.")
    ] = 60.0,
    torch: Annotated[
        bool, typer.Option(help="Also train a GPT by torchrun, if there is a PyTorch.")
    ] = True,
    seed: int = 0,
) -> Report:
    """Run jobs whose programs really run, and measure starts, moves and agents.

    PostgreSQL, the server, agents and programs are processes on this machine. A virtual GPU is one of
    its cores, in name only. The moved programs are a ``command`` that waits, and a GPT of
    ``docs/examples/train_gpt.py`` under torchrun on two processes if an interpreter with PyTorch is
    found (figures that begin with ``torch_``).

    Moves: the node of a job is drained ``moves`` times, so a round moves the job to another. The parts
    are those that keepers measured and the server stored: ``plain_checkpoint``, ``plain_stop`` (which
    includes it), ``plain_launch`` and ``plain_first_iteration``. ``plain_outside`` is the time from the
    commit of the round until the first iteration is in the program's output, by another clock.
    ``plain_reported_share`` is the median share of it that the parts explain. The rest is messages
    between server and agent. A part that is counted twice would make it more than 1, which
    ``reported_share_is_possible`` excludes.

    Starts: ``launch_p95_s`` is the time from the decision until the job is RUNNING, of jobs that start
    one after another. ``burst_launch_p95_s`` is that of the ``jobs`` jobs, which all start at once. The
    bound of 5 s is a hundredth of the usual period of rounds (300 s), with room for a busy machine.

    Agents: ``agent_cpu_share`` is the share of a core that the agent process uses while ``jobs`` jobs
    report progress each second, at the server's usual intervals. ``keeper_cpu_share_per_job`` and
    ``keeper_rss_mib`` are those of a keeper without its program; ``keeper_pss_mib`` divides shared
    pages. A node of 8 GPUs may thus lose 4 % of one core to keepers, and 5 % to its agent.
    """
    figures: dict[str, Figure] = {}
    python = find_torch_python() if torch else ""
    with run_lab() as lab:
        waiting = steady_program(write_program(lab.folder))
        found = measure_restarts(lab, waiting, sys.executable, moves, arguments=(PAUSE_S,))
        figures |= restart_figures("plain", found)
        shares = [move.reported_s / move.outside_s for move in found]
        launches = measure_launches(lab, waiting, starts)
        figures |= {
            "launch_p50_s": percentile_50(launches),
            "launch_p95_s": percentile_95(launches),
        }
        figures |= _footprint_figures(measure_footprint(lab, waiting, jobs, window_s))
        if python:
            program = torch_program()
            found = measure_restarts(lab, program, python, moves, torch_plan(program))
            figures |= restart_figures("torch", found)
            shares += [move.reported_s / move.outside_s for move in found]
    figures["reported_share_is_possible"] = percentile_50(shares) <= 1.0
    return Report(seed=seed, figures=figures)


def _footprint_figures(found: Footprint) -> dict[str, Figure]:
    return {
        "jobs": found.jobs,
        "burst_launch_p50_s": percentile_50(found.launches_s),
        "burst_launch_p95_s": percentile_95(found.launches_s),
        "agent_cpu_share": found.agent_cpu_s / found.window_s,
        "agent_rss_mib": found.agent_rss_bytes / MIB,
        "keeper_cpu_share_per_job": found.keeper_cpu_s / found.window_s / found.jobs,
        "keeper_rss_mib": found.keeper_rss_bytes / MIB,
        "keeper_pss_mib": found.keeper_pss_bytes / MIB,
    }
