"""A driver that runs the Philly trace, as in the Arena artifact, through the API."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tessera.benchmarks.harness.progress import track_steps
from tessera.benchmarks.service.fleet import Fleet
from tessera.formulation.records.estimates import EstimateRecord
from tessera.service.cli.demo.drive import (
    CLUSTER,
    add_estimates,
    make_cluster,
    schedule_round,
    submit_jobs,
    wait_until_settled,
)
from tessera.service.cli.demo.stack import Stack
from tessera.simulator.clusters import TypesAndNodes
from tessera.simulator.data import require_data_file
from tessera.simulator.traces.profiles import read_profiles
from tessera.simulator.traces.trace import Arrival, read_trace
from tessera.v1 import scheduler_pb2

ROUND_S = 300.0
DEADLINE_S = 10.0
"""The deadline of each call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhillyTrace:
    """The jobs of a trace with their arrivals, and the estimates of their workloads."""

    estimates: list[EstimateRecord]
    arrivals: list[Arrival]


def read_philly(jobs: int) -> PhillyTrace:
    """Read the trace's first ``jobs`` jobs from the data folder. Raises MissingData."""
    return PhillyTrace(
        estimates=read_profiles(require_data_file("arena", "alpa_optimal.csv")),
        arrivals=[  # the objective ignores deadlines, and the trace's are on its own clock
            Arrival(a.arrival_s, replace(a.spec, deadline_s=math.inf))
            for a in read_trace(require_data_file("arena", "trace_philly.csv"), limit=jobs)
        ],
    )


def drive_rounds(
    stack: Stack,
    cluster: TypesAndNodes,
    trace: PhillyTrace,
    *,
    rounds: int,
    objective: str,
    seed: int,
) -> Iterator[tuple[scheduler_pb2.Round, float]]:
    """Run up to ``rounds`` rounds for ``objective`` with an event, and yield each with its time.

    An event is an arrival or an end. Agents train for 300 s between rounds. The time is in seconds
    since the trace began.
    """
    types, nodes = cluster
    make_cluster(stack, types, nodes)
    add_estimates(stack, trace.estimates)
    with Fleet(stack.addresses[0], CLUSTER, nodes, "fleet") as fleet:
        now_s, done = 0.0, ["first"]
        todo = sorted(trace.arrivals, key=lambda a: a.arrival_s)
        for _ in track_steps(rounds, "rounds"):
            arrived = _due(todo, now_s)
            while not arrived and not done and (todo or fleet.busy()):
                done = fleet.advance(ROUND_S)
                now_s += ROUND_S
                arrived = _due(todo, now_s)
            if not arrived and not done:
                break  # the trace is over
            submit_jobs(stack, [a.spec for a in arrived])
            wait_until_settled(stack, [] if done == ["first"] else done)
            record = schedule_round(stack, DEADLINE_S, objective=objective, seed=seed)
            wait_until_settled(stack)
            done = []
            yield record, now_s


def _due(todo: list[Arrival], now_s: float) -> list[Arrival]:
    """Remove the arrivals up to ``now_s`` from the front of ``todo``, and return them."""
    count = sum(1 for a in todo if a.arrival_s <= now_s)
    due, todo[:] = todo[:count], todo[count:]
    return due
