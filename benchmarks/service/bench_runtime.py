"""The cost of jobs that really run (starts, moves, agents), and what their times teach."""

from __future__ import annotations

import sys
from typing import Annotated, Final

import typer

from tessera.benchmarks.harness.registry import register_case
from tessera.benchmarks.service.runtime.feedback import GPUS, Feedback, measure_feedback
from tessera.benchmarks.service.runtime.footprint import (
    Footprint,
    measure_footprint,
    measure_launches,
)
from tessera.benchmarks.service.runtime.lab import run_lab
from tessera.benchmarks.service.runtime.programs import (
    find_torch_python,
    plain_program,
    stated_plans,
    steady_program,
    torch_program,
    write_programs,
)
from tessera.benchmarks.service.runtime.restarts import measure_restarts, restart_figures
from tessera.benchmarks.service.runtime.summary import (
    factor_error,
    percentile_50,
    percentile_95,
    relative_error,
)
from tessera.simulator.figures import Figure, Report

MIB: Final = 2**20

PLANS: Final = 6
"""The least number of plans for which errors and choices are judged. With fewer, noise decides."""

PAUSE_S: Final = "0.05"
"""Seconds of an iteration of the program that is moved."""

JUDGED_BY_PLANS: Final = frozenset(
    {"error_falls", "choice_after", "torch_error_falls", "torch_choice_after"}
)


@register_case(
    "runtime",
    smoke={
        "moves": 2,
        "starts": 2,
        "jobs": 4,
        "window_s": 1.0,
        "plans": 1,
        "repeats": 1,
        "torch": False,
    },
    launch_p95_s=("<=", 5.0),
    agent_cpu_share=("<=", 0.05),
    keeper_cpu_share_per_job=("<=", 0.005),
    keeper_rss_mib=("<=", 32.0),
    reported_share_is_possible=("==", True),
    error_falls=("==", True),
    choice_after=(">=", 0.95),
    torch_error_falls=("==", True),
    torch_choice_after=(">=", 0.95),
)
def measure_runtime(
    moves: Annotated[int, typer.Option(min=2, help="Moves of a job of each program.")] = 12,
    starts: Annotated[int, typer.Option(min=2, help="Starts, one after another.")] = 30,
    jobs: Annotated[int, typer.Option(min=1, help="Jobs that one agent runs together.")] = 100,
    window_s: Annotated[
        float, typer.Option(min=1.0, help="Seconds for which the agent and keepers are measured.")
    ] = 60.0,
    plans: Annotated[
        int, typer.Option(min=1, max=PLANS, help="Execution plans that jobs state.")
    ] = PLANS,
    repeats: Annotated[
        int, typer.Option(min=1, help="Runs of a chosen plan that no job stated, and of the best.")
    ] = 3,
    torch: Annotated[
        bool, typer.Option(help="Also train a GPT by torchrun, if there is a PyTorch.")
    ] = True,
    seed: int = 0,
) -> Report:
    """Run jobs whose programs really run, and measure starts, moves, agents and what estimates learn.

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

    Estimates: each of ``plans`` plans is stated by a job on 2 GPUs, twice. ``error_before`` is the mean of
    |estimate / measured - 1| of the service's estimates before anything ran, and ``error_after`` after the
    first runs. Both are compared with the second runs, which the estimates do not know. The service
    estimates a small GPT on a processor core with round figures, so a large error before is no surprise.
    ``error_factor_before`` and ``error_factor_after`` are geometric means of factors. ``error_falls`` says
    that the second is smaller. ``run_spread`` is the same between first and second runs, the noise of the
    machine. ``choice_after`` is the best measured time of the plans over that of the plan that a round gives
    to a job without a stated plan. If no job stated it, it and the best one run ``repeats`` times each, in
    turn, and their medians are compared. Programs divide states or not, with 1, 2 or 4 micro-batches. With
    fewer than 6 plans, errors and choices are not judged.
    """
    figures: dict[str, Figure] = {}
    table: list[dict[str, Figure | str]] = []
    python = find_torch_python() if torch else ""
    with run_lab() as lab:
        steady, planned = write_programs(lab.folder)
        waiting = steady_program(steady)
        found = measure_restarts(lab, waiting, sys.executable, moves, arguments=(PAUSE_S,))
        figures |= restart_figures("plain", found)
        shares = [move.reported_s / move.outside_s for move in found]
        launches = measure_launches(lab, waiting, starts)
        figures |= {
            "launch_p50_s": percentile_50(launches),
            "launch_p95_s": percentile_95(launches),
        }
        figures |= _footprint_figures(measure_footprint(lab, waiting, jobs, window_s))
        plain = measure_feedback(lab, plain_program(planned), sys.executable, plans, repeats)
        figures |= _feedback_figures("", plain)
        table += _rows("command", plain)
        if python:
            program = torch_program()
            found = measure_restarts(lab, program, python, moves, stated_plans(program, GPUS, 1)[0])
            figures |= restart_figures("torch", found)
            shares += [move.reported_s / move.outside_s for move in found]
            taught = measure_feedback(lab, program, python, plans, repeats)
            figures |= _feedback_figures("torch_", taught)
            table += _rows("torchrun", taught)
    figures["reported_share_is_possible"] = percentile_50(shares) <= 1.0
    waived = JUDGED_BY_PLANS if plans < PLANS else frozenset[str]()
    return Report(seed=seed, figures=figures, waived=waived, table=table)


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


def _feedback_figures(prefix: str, found: Feedback) -> dict[str, Figure]:
    before = relative_error(found.before, found.held_out)
    after = relative_error(found.after, found.held_out)
    times = found.overall.values()
    figures: dict[str, Figure] = {
        "plans": len(found.plans),
        "error_before": before,
        "error_after": after,
        "error_factor_before": factor_error(found.before, found.held_out),
        "error_factor_after": factor_error(found.after, found.held_out),
        "error_falls": after < before,
        "run_spread": relative_error(found.taught, found.held_out),
        "slowest_to_fastest": max(times) / min(times),
        "choice_after": found.choice_after,
        "choice_is_stated": found.choice.digest in found.plans,
    }
    return {f"{prefix}{name}": value for name, value in figures.items()}


def _rows(runtime: str, found: Feedback) -> list[dict[str, Figure | str]]:
    """Return a row for each plan, and one for the choice."""
    rows: list[dict[str, Figure | str]] = [
        {
            "runtime": runtime,
            "plan": plan,
            "estimate_before_s": found.before[digest],
            "measured_s": found.taught[digest],
            "estimate_after_s": found.after[digest],
            "measured_again_s": found.held_out[digest],
        }
        for digest, plan in found.plans.items()
    ]
    choice = found.choice
    return [
        *rows,
        {"runtime": runtime, "plan": f"chosen: {choice.plan}", "measured_s": choice.iter_time_s},
    ]
