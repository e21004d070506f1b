"""A scenario run through a real server, whose agents train faster than in reality."""

from __future__ import annotations

import json
import math
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from tessera.benchmarks.service.fleet import Fleet
from tessera.db import embedded
from tessera.db.engine import connect_database
from tessera.db.migrate import upgrade_schema
from tessera.formulation.clock import SystemClock
from tessera.service.cli.demo.drive import (
    CLUSTER,
    PARENT,
    add_estimates,
    make_cluster,
    submit_jobs,
)
from tessera.service.cli.demo.stack import Stack, run_stack
from tessera.simulator.scenario import Scenario
from tessera.solvers.rounds.options import RoundOptions
from tessera.v1 import jobs_pb2, scheduler_pb2

STEP_S: Final = 0.05
"""Seconds between two steps of training. A job's end is noticed up to this much late."""

LOOK_S: Final = 0.25
"""Seconds between two looks whether all jobs have ended."""

PATIENCE_S: Final = 600.0
"""Longest time in seconds until every job has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """The outcome of a run, by job in order of arrival. Times are seconds of training."""

    jct_s: Sequence[float]  # from arrival to end; inf if the job has not ended
    met: Sequence[bool]  # whether the job ended by its deadline
    rounds: int


@contextmanager
def run_databases(count: int) -> Iterator[list[str]]:
    """Run migrated databases, and yield their URLs. Migrations cannot run at the same time."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tessera-bench-")))
        urls = []
        for k in range(count):
            urls.append(embedded.start_server(folder / f"pg-{k}"))
            stack.callback(embedded.stop_server, folder / f"pg-{k}")
            upgrade_schema(connect_database(urls[-1]))
        yield urls


def serve_scenario(
    database_url: str,
    scenario: Scenario,
    options: RoundOptions,
    *,
    spacing_s: float,
    restart_s: float,
    factor: float,
) -> Verdicts:
    """Run a scenario through a server with rounds on events, and return what came of it.

    Training runs ``factor`` times as fast as in reality. All arguments are in training time, and
    ``options.round_s`` is the period. A start costs ``restart_s``. The database is migrated and
    has no cluster yet.
    """
    policy = {
        "objective": options.objective,
        "scheduler": options.scheduler,
        "seed": options.seed,
        "round": f"{options.round_s / factor:.6f}s",
        "restart_horizon": f"{options.restart_horizon_s / factor:.6f}s",
    }
    settings = {
        "TESSERA_POLICY": json.dumps({name: value for name, value in policy.items() if value}),
        "TESSERA_ROUND_SPACING_S": f"{spacing_s / factor:.6f}",
        "TESSERA_CLOCK_FACTOR": f"{factor}",
    }
    period_s = options.round_s / factor
    with run_stack(settings=settings, period_s=period_s, database_url=database_url) as stack:
        make_cluster(stack, scenario.gpu_types, scenario.nodes)
        add_estimates(stack, scenario.profiles)
        with (
            Fleet(stack.addresses[0], CLUSTER, scenario.nodes, "fleet") as fleet,
            Training(fleet, factor),
        ):
            _submit_in_time(stack, scenario, restart_s, factor)
            _wait_until_over(stack)
        return _verdicts(stack, scenario, factor)


class Training:
    """A thread that lets a fleet's jobs train, ``factor`` times as fast as in reality."""

    def __init__(self, fleet: Fleet, factor: float) -> None:
        self._fleet, self._factor = fleet, factor
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._train, daemon=True)

    def __enter__(self) -> Training:
        """Begin to train."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop training."""
        self._over.set()
        self._thread.join()

    def _train(self) -> None:
        last_s = time.monotonic()
        while not self._over.wait(STEP_S):
            now_s = time.monotonic()
            self._fleet.advance((now_s - last_s) * self._factor)
            last_s = now_s


def _submit_in_time(stack: Stack, scenario: Scenario, restart_s: float, factor: float) -> None:
    """Submit each job when it arrives. Deadlines count from the submission."""
    clock, begun_s = SystemClock(), time.monotonic()
    for arrival_s, spec in scenario.arrivals:
        time.sleep(max(0.0, begun_s + arrival_s / factor - time.monotonic()))
        due_s = clock.wall_s() + spec.deadline_s / factor  # inf without a deadline
        submit_jobs(stack, [replace(spec, deadline_s=due_s, restart_s=restart_s)])


def _wait_until_over(stack: Stack) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while any(not job.HasField("end_time") for job in _jobs(stack)):
        if time.monotonic() > end_s:
            raise TimeoutError(f"some jobs have not ended after {PATIENCE_S:g} s")
        time.sleep(LOOK_S)


def _jobs(stack: Stack) -> Sequence[jobs_pb2.Job]:
    return stack.jobs.ListJobs(jobs_pb2.ListJobsRequest(parent=PARENT, page_size=1000)).jobs


def _verdicts(stack: Stack, scenario: Scenario, factor: float) -> Verdicts:
    jobs = {job.name.rpartition("/")[2]: job for job in _jobs(stack)}
    jct_s, met = list[float](), list[bool]()
    for arrival in scenario.arrivals:
        job = jobs[arrival.spec.name]
        ended = job.state == jobs_pb2.SUCCEEDED
        end_s = _seconds(job.end_time) if ended else math.inf
        jct_s.append((end_s - _seconds(job.create_time)) * factor)
        due_s = _seconds(job.deadline) if job.HasField("deadline") else math.inf
        met.append(ended and end_s <= due_s)
    latest = scheduler_pb2.ListRoundsRequest(parent=PARENT, page_size=1)
    (newest,) = stack.scheduler.ListRounds(latest).rounds
    return Verdicts(jct_s=jct_s, met=met, rounds=int(newest.name.rpartition("/")[2]))


def _seconds(at: Timestamp) -> float:
    """Return a time in seconds since 1970."""
    return at.ToNanoseconds() / 1e9
