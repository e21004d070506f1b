"""``tessera demo``: schedule a simulated 1,280-GPU cluster for a few rounds, with real processes.

A database, a server and four agents run as separate processes on this machine. The 1,280-GPU
cluster of Arena's Table 1 is scheduled for a few rounds over gRPC. Greedy solves the snapshots of
the same rounds, for comparison with the ILP.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from tessera.estimator.samples import sample_profiles
from tessera.formulation.base.values import Workload
from tessera.formulation.records.clusters import NodeSpec
from tessera.service.cli.demo.drive import (
    CLUSTER,
    PARENT,
    add_estimates,
    make_cluster,
    replay_round,
    schedule_round,
    submit_jobs,
)
from tessera.service.cli.demo.picture import RoundPair, draw_picture
from tessera.service.cli.demo.stack import Stack, run_stack
from tessera.service.cli.render import count_noun
from tessera.simulator.clusters import arena_table1
from tessera.simulator.workloads.philly_like import philly_like
from tessera.v1 import clusters_pb2, jobs_pb2, scheduler_pb2

OBJECTIVE: Final = "throughput"
"""The objective of the rounds, whose unit is easy to compare."""
ROUND_S = 300.0
UNPROFILED_WORKLOAD = Workload(model="llama", params="7B", global_batch=256)
"""The workload that one of the demo's users submits before anybody has profiled it."""
CLOCK_FACTOR = 300.0  # seconds of training per second of the demo: a round's training takes 1 s

NEXT_STEPS = (
    ("tessera up", "start a cluster of your own on this machine, and keep it running"),
    ("tessera submit --help", "submit jobs to it from a second terminal"),
    ("tessera simulate --help", "try policies on traces, without a server"),
    ("docs/getting-started.md", "go on from here"),
)
"""Commands to try after the demo, each with its purpose."""

out, err = Console(), Console(stderr=True)


def add_commands(app: typer.Typer) -> None:
    """Add ``run_demo`` to the command line."""
    app.command("demo")(run_demo)


def run_demo(
    rounds: Annotated[
        int, typer.Option(help="Number of rounds, each followed by 300 s of training.", min=1)
    ] = 8,
    jobs: Annotated[int, typer.Option(help="Number of jobs that wait at the start.", min=1)] = 260,
    arrivals: Annotated[
        int, typer.Option(help="Number of new jobs before each later round.", min=0)
    ] = 40,
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = 0,
    picture: Annotated[Path, typer.Option(help="File to which the picture is written.")] = Path(
        "tessera-demo.png"
    ),
) -> None:
    """Schedule a simulated 1,280-GPU cluster for a few rounds, and compare the ILP with greedy.

    A database, a server and four agents run as real processes on this machine. They train nothing.
    """
    types, nodes = arena_table1()
    workload = [spec for _, spec in philly_like(jobs + arrivals * (rounds - 1), seed)]
    workload[0] = replace(workload[0], workload=UNPROFILED_WORKLOAD)
    with ExitStack() as stack:
        system = stack.enter_context(run_stack(report=tell))
        tell("sending the cluster and its estimates")
        make_cluster(system, types, nodes)
        add_estimates(system, sample_profiles())
        tell(f"starting four agents for {len(nodes)} nodes")
        stack.enter_context(_agents(system, nodes))
        wait_for_nodes(system, len(nodes))
        pairs = []
        for k in range(rounds):
            submit_jobs(
                system,
                workload[:jobs] if k == 0 else workload[jobs + (k - 1) * arrivals :][:arrivals],
            )
            started_s = time.monotonic()
            ilp = schedule_round(system, 10.0, objective=OBJECTIVE, seed=seed)
            call_s = time.monotonic() - started_s
            greedy = replay_round(system, ilp.name, objective=OBJECTIVE, solver="greedy")
            pairs.append(RoundPair(ilp=ilp, greedy=greedy, call_s=call_s))
            tell(f"round {k + 1} of {rounds}: {ilp.running} running, {ilp.waiting} waiting")
            if k < rounds - 1:
                time.sleep(ROUND_S / CLOCK_FACTOR)
        listed = list_jobs(system)
        last = get_round(system, pairs[-1].ilp.name)
        draw_picture(picture, pairs, last.decisions, [(n.name, n.gpu_type, n.gpus) for n in nodes])
    _show(pairs, listed, picture)


def _show(pairs: Sequence[RoundPair], found: Sequence[jobs_pb2.Job], picture: Path) -> None:
    table = Table(title="1,280 GPUs, a round every 300 s")
    for column in ("round", "ILP", "greedy", "ratio", "running", "waiting", "gap", "seconds"):
        table.add_column(column, justify="right")
    for pair in pairs:
        r, g = pair.ilp, pair.greedy
        table.add_row(
            r.name.rpartition("/")[2],
            f"{r.placed_score:.2f}",
            f"{g.placed_score:.2f}",
            f"{r.placed_score / g.placed_score:.3f}" if g.placed_score else "-",
            str(r.running),
            str(r.waiting),
            _gap(r),
            f"{pair.call_s:.2f}",
        )
    out.print(table)
    say(
        "ILP and greedy: throughput placed on the same snapshot, in effective GPUs. One GPU of the job's best"
        " type, at its most efficient count, counts as 1. Gap: distance from the proven bound."
        " Seconds: the whole"
        " Schedule call, from socket to commit."
    )
    states = [jobs_pb2.JobState.Name(job.state) for job in found]
    counts = ", ".join(f"{states.count(s)} {s.lower()}" for s in sorted(set(states)))
    say(f"Jobs now: {counts}.")
    waiting_jobs = instructive_jobs(found)
    if waiting_jobs:
        out.print("\nWhy jobs wait:", style="bold")
    for job in waiting_jobs:
        say(
            f"  {job.name.rpartition('/')[2]} ({job.workload.model} {job.workload.params}, requests"
            f" {count_noun(job.requested_gpus, 'GPU')}): {job.reason.message}. Next step:"
            f" {job.reason.next_step}."
        )
    say(f"\nPicture: {picture}")
    out.print("\nNext steps:", style="bold")
    for command, purpose in NEXT_STEPS:
        say(f"  {command:<25}{purpose}")


def tell(step: str) -> None:
    """Print a step on standard error when it begins or has ended."""
    err.print(step, highlight=False, markup=False)


def say(text: str) -> None:
    """Print a line, wrapped at words on a terminal and left whole elsewhere."""
    out.print(text, highlight=False, markup=False, soft_wrap=not out.is_terminal)


def _gap(value: scheduler_pb2.Round) -> str:
    """Return the gap in a few characters, or "?" if no bound was proven."""
    if value.bound_is_trivial or not math.isfinite(value.gap):
        return "?"
    return f"{value.gap:.0e}" if value.gap else "0"


def instructive_jobs(jobs: Sequence[jobs_pb2.Job], count: int = 3) -> list[jobs_pb2.Job]:
    """Return the most instructive waiting jobs: each reason once, then the largest requests."""
    waiting = sorted(
        (job for job in jobs if job.reason.code), key=lambda job: (-job.requested_gpus, job.name)
    )
    first = {job.reason.code: job for job in reversed(waiting)}
    chosen = list(first.values())
    chosen += [job for job in waiting if job not in chosen]
    return chosen[:count]


def get_round(system: Stack, name: str) -> scheduler_pb2.Round:
    """Return a round with its decisions."""
    return system.scheduler.GetRound(scheduler_pb2.GetRoundRequest(name=name))


def list_jobs(system: Stack) -> list[jobs_pb2.Job]:
    """Return all jobs of the cluster."""
    return list(
        system.jobs.ListJobs(jobs_pb2.ListJobsRequest(parent=PARENT, page_size=10_000)).jobs
    )


@contextmanager
def _agents(system: Stack, nodes: Sequence[NodeSpec]) -> Iterator[None]:
    """Run one agent process for the nodes of each GPU type, on a fast clock."""
    processes = []
    for kind in sorted({n.gpu_type for n in nodes}):
        listed = system.folder / f"nodes-{kind}.json"
        listed.write_text(
            json.dumps(
                [
                    {"node": n.name, "gpu_type": n.gpu_type, "gpus": n.gpus, "rack": n.rack}
                    for n in nodes
                    if n.gpu_type == kind
                ]
            )
        )
        log = (system.folder / f"agent-{kind}.log").open("wb")
        with log:
            processes.append(
                subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "tessera.service.agent.main",
                        "--server",
                        system.addresses[0],
                        "--cluster",
                        CLUSTER,
                        "--agent-id",
                        f"agent-{kind}",
                        "--nodes-file",
                        str(listed),
                        "--data-dir",
                        str(system.folder / kind),
                        "--clock-factor",
                        str(CLOCK_FACTOR),
                        "--inspect-s",
                        "0.5",
                        "--stop-on-exit",
                    ],
                    env=os.environ,
                    stdout=log,
                    stderr=log,
                )
            )
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)


def wait_for_nodes(system: Stack, count: int, limit_s: float = 30.0) -> None:
    """Wait until the agents of all nodes have reported."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        ready = sum(node.state == node.READY for node in list_nodes(system))
        if ready == count:
            return
        time.sleep(0.1)
    logs = "\n".join(p.read_text()[-500:] for p in sorted(system.folder.glob("agent-*.log")))
    raise RuntimeError(f"{count - ready} nodes did not report within {limit_s} s:\n{logs}")


def list_nodes(system: Stack) -> list[clusters_pb2.Node]:
    """Return all nodes of the cluster."""
    request = clusters_pb2.ListNodesRequest(parent=PARENT, page_size=1000)
    return list(system.clusters.ListNodes(request).nodes)
