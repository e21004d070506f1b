"""The wait of each job of a storm of submissions for its first decision, over real sockets."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence, Set
from itertools import pairwise
from typing import Annotated

import grpc
import typer
from google.protobuf.timestamp_pb2 import Timestamp

from tessera.benchmarks.harness.progress import track_steps
from tessera.benchmarks.harness.registry import register_case
from tessera.benchmarks.service.fleet import Fleet
from tessera.client import PLAIN_TEXT, open_channel
from tessera.estimator.samples import sample_profiles
from tessera.formulation.clock import SystemClock
from tessera.formulation.records.jobs import JobSpec
from tessera.service.cli.demo.drive import CLUSTER, PARENT, add_estimates, make_cluster
from tessera.service.cli.demo.stack import CHANNEL_OPTIONS, Stack, run_stack
from tessera.service.config import Config
from tessera.service.rpc.convert import job_spec_to_proto
from tessera.simulator.clusters import arena_table1
from tessera.simulator.figures import Figure, Report
from tessera.simulator.workloads.philly_like import philly_like
from tessera.v1 import jobs_pb2, scheduler_pb2, scheduler_pb2_grpc

PERIOD_S = 3600.0
"""Seconds between periodic rounds. None falls into the measurement, so events cause every round."""

LOOK_S = 0.02
"""Seconds between two looks for new rounds. A wait may be measured longer by this, but not shorter."""

PATIENCE_S = 300.0
"""Longest time in seconds until every job has a decision."""


@register_case(
    "event-rounds",
    smoke={"jobs": 40, "seconds": 0.2, "spacing_s": 1.0},
    rounds=("<=", 5),
    first_decision_ratio=("<=", 2.0),
    all_decided=("==", True),
    verified=("==", True),
)
def measure_event_rounds(
    jobs: Annotated[int, typer.Option(min=2, help="Number of submitted jobs.")] = 1000,
    seconds: Annotated[float, typer.Option(help="Time over which they are spread.")] = 1.0,
    batch: Annotated[int, typer.Option(min=1, help="Number of jobs that one call submits.")] = 10,
    spacing_s: Annotated[
        float, typer.Option(help="The server's round_spacing_s: least time between two rounds.")
    ] = Config().round_spacing_s,
    seed: int = 0,
) -> Report:
    """Submit many jobs in a second, and measure how long each waits for its first decision.

    A server with PostgreSQL gets the jobs over a socket, on 1,280 GPUs. Nobody calls Schedule, and
    the period is an hour, so events cause every round. Agents answer over their own stream.

    ``first_decision_p95_s`` is the 95th percentile of the time from a job's creation, by the
    database's clock, until a round with a decision for it was seen. ``first_decision_ratio`` is this
    divided by the least distance between two rounds. Its bound is 2: a job waits for the distance,
    at most, and then for its round, which should not take longer than the distance. ``rounds``
    counts the rounds until twice the distance after the last decision. The first submission has a
    round, and all submissions of a distance share one. The bound allows for a machine that needs a
    few seconds to take them all. ``submitted_in_s`` is the time until all calls were answered.
    ``least_distance_s`` is the shortest time between the snapshots of two rounds, and
    ``round_p50_s`` the median of the rounds' seconds.
    """
    types, nodes = arena_table1()
    specs = [spec for _, spec in philly_like(jobs, seed)]
    with run_stack(
        settings={"TESSERA_ROUND_SPACING_S": f"{spacing_s}"}, period_s=PERIOD_S
    ) as stack:
        make_cluster(stack, types, nodes)
        add_estimates(stack, sample_profiles())
        with Fleet(stack.addresses[0], CLUSTER, nodes, "fleet"), RoundWatcher(stack) as watcher:
            created_s, submitted_in_s = _submit(stack, specs, seconds, batch)
            watcher.wait_until_decided(created_s.keys(), 2 * spacing_s)
        waits = [watcher.decided_s[job] - at_s for job, at_s in created_s.items()]
        rounds = watcher.rounds
    begun = sorted(_seconds(r.create_time) for r in rounds)
    figures: dict[str, Figure] = {
        "rounds": len(rounds),
        "first_decision_p50_s": statistics.median(waits),
        "first_decision_p95_s": statistics.quantiles(waits, n=20, method="inclusive")[-1],
        "first_decision_max_s": max(waits),
        "spacing_s": spacing_s,
        "submitted_in_s": submitted_in_s,
        "least_distance_s": min((b - a for a, b in pairwise(begun)), default=float("nan")),
        "round_p50_s": statistics.median(sum(r.seconds.values()) for r in rounds),
        "all_decided": len(waits) == jobs,
        "verified": all(r.verified and r.outcome == "committed" for r in rounds),
    }
    figures["first_decision_ratio"] = float(figures["first_decision_p95_s"]) / spacing_s
    return Report(
        seed=seed,
        figures=figures,
        table=[
            {
                "round": r.name.rpartition("/")[2],
                "at_s": _seconds(r.create_time) - begun[0],
                "seconds": sum(r.seconds.values()),
                "decisions": len(r.decisions),
                "running": r.running,
                "waiting": r.waiting,
                "gap": r.gap,
            }
            for r in rounds
        ],
    )


def _submit(
    stack: Stack, specs: Sequence[JobSpec], seconds: float, batch: int
) -> tuple[dict[str, float], float]:
    """Submit the jobs evenly over ``seconds``, without waiting for answers.

    Return when each job was created (seconds since 1970), and the seconds until all were answered.
    """
    calls: list[grpc.Future[jobs_pb2.SubmitJobsResponse]] = []
    begun_s = time.monotonic()
    for k in track_steps(-(-len(specs) // batch), "submissions"):
        due_s = begun_s + k * batch * seconds / len(specs)
        time.sleep(max(0.0, due_s - time.monotonic()))
        requests = [
            jobs_pb2.SubmitJobRequest(job_id=spec.name, job=job_spec_to_proto(CLUSTER, spec))
            for spec in specs[k * batch : (k + 1) * batch]
        ]
        message = jobs_pb2.SubmitJobsRequest(parent=PARENT, requests=requests)
        calls.append(stack.jobs.SubmitJobs.future(message, timeout=PATIENCE_S))
    created_s = {
        job.name.rpartition("/")[2]: _seconds(job.create_time)
        for call in calls
        for job in call.result().jobs
    }
    return created_s, time.monotonic() - begun_s


def _seconds(at: Timestamp) -> float:
    """Return a time in seconds since 1970."""
    return at.ToNanoseconds() / 1e9


class RoundWatcher:
    """A thread that looks for new rounds and notes when it saw the first decision for each job.

    Times are seconds since 1970: the database has the clock of this machine.
    """

    def __init__(self, stack: Stack) -> None:
        self._channel = open_channel(stack.addresses[0], PLAIN_TEXT, CHANNEL_OPTIONS)
        self._scheduler = scheduler_pb2_grpc.SchedulerStub(self._channel)
        self._clock, self._over = SystemClock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.decided_s: dict[str, float] = {}
        self.rounds: list[scheduler_pb2.Round] = []

    def __enter__(self) -> RoundWatcher:
        """Begin to look."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop looking."""
        self._over.set()
        self._thread.join()
        self._channel.close()

    def wait_until_decided(self, jobs: Set[str], quiet_s: float) -> None:
        """Wait until every job has a decision, and then until no round was seen for ``quiet_s``."""
        end_s = time.monotonic() + PATIENCE_S
        while not jobs <= self.decided_s.keys():
            if time.monotonic() > end_s or not self._thread.is_alive():
                missing = len(jobs - self.decided_s.keys())
                raise TimeoutError(f"{missing} jobs have no decision after {PATIENCE_S:g} s")
            self._over.wait(LOOK_S)
        seen, since_s = len(self.rounds), time.monotonic()
        while time.monotonic() < since_s + quiet_s:
            self._over.wait(LOOK_S)
            if len(self.rounds) > seen:
                seen, since_s = len(self.rounds), time.monotonic()

    def _watch(self) -> None:
        latest = scheduler_pb2.ListRoundsRequest(parent=PARENT, page_size=1)
        while not self._over.wait(LOOK_S):
            for newest in self._scheduler.ListRounds(latest).rounds:
                now_s = self._clock.wall_s()
                last = int(newest.name.rpartition("/")[2])
                for number in range(len(self.rounds) + 1, last + 1):
                    name = f"{PARENT}/rounds/{number}"
                    record = self._scheduler.GetRound(scheduler_pb2.GetRoundRequest(name=name))
                    for decision in record.decisions:
                        self.decided_s.setdefault(decision.job.rpartition("/")[2], now_s)
                    self.rounds.append(record)
