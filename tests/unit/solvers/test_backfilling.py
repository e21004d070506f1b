"""EASY and conservative backfilling: small cases by hand, and random ones by plain loops."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tessera.formulation.base.tables import Ints
from tessera.formulation.round.policy import Policy
from tessera.formulation.state.snapshot import Snapshot
from tessera.service.cli.main import app
from tessera.simulator.data import data_file
from tessera.simulator.run import Decider
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.schedulers.base import Scheduler, SchedulerView, make_view
from tessera.solvers.schedulers.conservative import Conservative, planned_starts
from tessera.solvers.schedulers.easy import Easy
from tessera.solvers.schedulers.registry import make_scheduler
from tests.support.oracles.backfilling import (
    Interval,
    QueuedJob,
    plan_conservatively,
    start_by_easy,
)
from tests.support.scheduling import (
    A100,
    BATCH,
    LINEAR,
    V100,
    a_running_job,
    a_waiting_job,
    chosen_cells,
    cluster,
    gpus_of,
)
from tests.support.worlds import a_scenario, an_arrival, simulate_scenario, some_specs

NOW_S = 1000.0
SPEED = {gpus: float(gpus) for gpus in range(1, 9)}


def a_waiting(name: str, gpus: int, run_s: float, **fields: Any) -> dict[str, Any]:
    """Return a job that trains for ``run_s`` seconds on ``gpus`` A100, once it has started."""
    return a_waiting_job(name, gpus=gpus, iterations_left=run_s * gpus / BATCH, **fields)


def a_running(
    name: str, gpus: int, remaining_s: float, gpu_type: int = A100, **fields: Any
) -> dict[str, Any]:
    """Return a job that trains for another ``remaining_s`` seconds, if an A100 has its rate."""
    return a_running_job(
        name, on=(gpu_type, gpus), iterations_left=remaining_s * gpus / BATCH, **fields
    )


def starts_of(snapshot: Snapshot) -> list[float]:
    """Return the planned starts under conservative backfilling, in seconds from now."""
    starts_s: list[float] = (planned_starts(make_view(snapshot, Policy())) - NOW_S).tolist()
    return starts_s


# EASY


@pytest.mark.parametrize(("run_s", "gpus"), [(99.0, 4), (100.0, 4), (101.0, 0)])
def test_easy_backfills_a_job_that_ends_before_the_head_can_start(run_s: float, gpus: int) -> None:
    # the head starts after 100 s, when r ends
    jobs = [a_running("r", 4, 100.0), a_waiting("head", 8, 500.0), a_waiting("later", 4, run_s)]
    assert gpus_of(Easy(), cluster(jobs, {A100: LINEAR})) == [4, 0, gpus]


def test_easy_backfills_a_long_job_on_gpus_that_are_spare_at_the_shadow_time() -> None:
    # after 100 s, 8 GPUs are free: 6 for the head, and 2 to spare
    jobs = [
        a_running("r", 4, 100.0),
        a_waiting("head", 6, 500.0),
        a_waiting("too wide", 3, 9000.0),
        a_waiting("on spare ones", 2, 9000.0),
        a_waiting("none to spare", 1, 9000.0),
        a_waiting("short", 1, 50.0),
    ]
    assert gpus_of(Easy(), cluster(jobs, {A100: SPEED})) == [4, 0, 0, 2, 0, 1]


def test_the_shadow_time_includes_jobs_that_start_in_the_same_round() -> None:
    # a starts now, so that the head waits for its end after 300 s
    jobs = [
        a_running("r", 4, 100.0),
        a_waiting("a", 2, 300.0),
        a_waiting("head", 8, 500.0),
        a_waiting("later", 2, 250.0),
    ]
    assert gpus_of(Easy(), cluster(jobs, {A100: LINEAR})) == [4, 2, 0, 2]


@pytest.mark.parametrize(("run_s", "gpus"), [(109.0, 4), (111.0, 0)])
def test_starts_take_their_time(run_s: float, gpus: int) -> None:
    # r has 40 s of its start left and trains for 100 s; the job behind the head starts for 30 s
    r = a_running("r", 4, 100.0, restart_s=50.0, since_s=NOW_S - 10.0)
    candidate = a_waiting("later", 4, run_s, restart_s=30.0)
    snapshot = cluster([r, a_waiting("head", 8, 500.0), candidate], {A100: LINEAR})
    assert gpus_of(Easy(), snapshot) == [4, 0, gpus]
    assert gpus_of(Conservative(), snapshot) == [4, 0, gpus]


def test_a_head_of_any_type_waits_for_the_type_that_is_free_first() -> None:
    # v100 trains at half the speed: r1 ends after 300 s, and r2 after 2 x 100 s
    jobs = [
        a_running("r1", 4, 300.0),
        a_running("r2", 4, 100.0, V100),
        a_waiting("head", 8, 500.0),
        a_waiting("v100", 4, 150.0, requested_gpu_type=V100),
        a_waiting("any", 4, 250.0),
    ]
    snapshot = cluster(jobs, {A100: LINEAR, V100: {4: 2.0, 8: 4.0}}, v100=8)
    assert chosen_cells(Easy(), snapshot) == [(A100, 4), (V100, 4), None, None, (A100, 4)]
    assert starts_of(snapshot)[2:] == pytest.approx([200.0, 200.0 + 1000.0, 0.0])


@pytest.mark.parametrize("scheduler", [Easy(), Conservative()])
def test_a_job_that_no_end_makes_room_for_holds_up_nobody(
    scheduler: Easy | Conservative,
) -> None:
    jobs = [
        a_running("r", 2, 100.0),
        a_waiting("never", 8, 10.0),
        a_waiting("head", 4, 500.0),
        a_waiting("long", 2, 101.0),
        a_waiting("short", 2, 99.0),
    ]
    snapshot = cluster(jobs, {A100: LINEAR}, a100=4)
    assert gpus_of(scheduler, snapshot) == [2, 0, 0, 0, 2]
    assert starts_of(snapshot)[1] == math.inf


@pytest.mark.parametrize("scheduler", [Easy(), Conservative()])
def test_an_overdue_job_keeps_its_gpus_until_it_ends(scheduler: Easy | Conservative) -> None:
    jobs = [a_running("overdue", 8, 0.0), a_waiting("next", 8, 100.0)]
    snapshot = cluster(jobs, {A100: LINEAR})
    assert gpus_of(scheduler, snapshot) == [8, 0]
    assert 0.0 < starts_of(snapshot)[1] < 1.0


# conservative


def test_conservative_refuses_a_backfill_that_easy_allows_at_the_cost_of_a_later_job() -> None:
    # The head needs 4 of the 6 GPUs that are free after 100 s. Two are spare, but the second job in
    # the queue needs all 8 once the head has ended.
    jobs = [
        a_running("r1", 4, 100.0),
        a_running("r2", 2, 400.0),
        a_waiting("head", 4, 300.0),
        a_waiting("second", 8, 100.0),
        a_waiting("long", 2, 9000.0),
        a_waiting("fits", 2, 400.0),
    ]
    snapshot = cluster(jobs, {A100: LINEAR})
    assert gpus_of(Easy(), snapshot) == [4, 2, 0, 0, 2, 0]
    assert gpus_of(Conservative(), snapshot) == [4, 2, 0, 0, 0, 2]
    assert starts_of(snapshot) == pytest.approx(
        [math.nan, math.nan, 100.0, 400.0, 500.0, 0.0], nan_ok=True
    )


def test_a_job_is_planned_into_the_first_gap_that_is_long_enough() -> None:
    # From 100 s on, wide holds 6 GPUs until 200 s and all holds 8 from then until 250 s.
    jobs = [
        a_running("r", 8, 100.0),
        a_waiting("wide", 6, 100.0),
        a_waiting("all", 8, 50.0),
        a_waiting("brief", 2, 100.0),
        a_waiting("lasting", 2, 101.0),
    ]
    snapshot = cluster(jobs, {A100: SPEED})
    expected = [math.nan, 100.0, 200.0, 100.0, 250.0]
    assert starts_of(snapshot) == pytest.approx(expected, nan_ok=True)


# both


@pytest.mark.parametrize("name", ["easy", "conservative"])
def test_choices_last_for_no_longer_than_a_round(name: str) -> None:
    # A job that trains more slowly than expected moves the shadow time, and a job may then backfill.
    jobs = [a_running("r", 4, 100.0), a_waiting("head", 8, 500.0), a_waiting("later", 4, 150.0)]
    scheduler = make_scheduler(name)
    assert gpus_of(scheduler, cluster(jobs, {A100: LINEAR})) == [4, 0, 0]
    jobs[0] = a_running("r", 4, 200.0)
    assert gpus_of(scheduler, cluster(jobs, {A100: LINEAR})) == [4, 0, 4]
    assert not Scheduler(published=scheduler).lasts(Policy())


def a_random_queue(seed: int) -> tuple[Snapshot, list[list[Interval]], list[QueuedJob]]:
    """Return a round on two types, with its running jobs by type and its queue."""
    rng = np.random.default_rng(seed)
    jobs: list[dict[str, Any]] = []
    running: list[list[Interval]] = [[], []]
    free_gpus = [8, 8]
    for i in range(int(rng.integers(1, 9))):
        gpu_type, gpus, run_s = int(rng.integers(2)), int(rng.integers(1, 5)), rng.uniform(1, 1000)
        if gpus <= free_gpus[gpu_type]:
            free_gpus[gpu_type] -= gpus
            jobs.append(a_running(f"r{i}", gpus, run_s, gpu_type))
            running[gpu_type].append((0.0, run_s * (1 + gpu_type), gpus))
    queue = []
    for i in range(int(rng.integers(1, 15))):
        gpus, gpu_type, run_s = (
            int(rng.integers(1, 9)),
            int(rng.integers(-1, 2)),
            rng.uniform(1, 1000),
        )
        jobs.append(a_waiting(f"w{i}", gpus, run_s, requested_gpu_type=gpu_type))
        gpu_types = (A100, V100) if gpu_type < 0 else (gpu_type,)
        queue.append(QueuedJob(gpus, {t: run_s * (1 + t) for t in gpu_types}))
    speeds = {A100: SPEED, V100: {gpus: rate / 2 for gpus, rate in SPEED.items()}}
    return cluster(jobs, speeds, v100=8), running, queue


@pytest.mark.parametrize("seed", range(60))
def test_both_follow_their_definitions(seed: int) -> None:
    snapshot, running, queue = a_random_queue(seed)
    waiting = slice(len(snapshot.jobs) - len(queue), None)
    by_easy, by_conservative = (
        [cell[0] if cell else -1 for cell in chosen_cells(scheduler, snapshot)[waiting]]
        for scheduler in (Easy(), Conservative())
    )
    assert by_easy == start_by_easy([8, 8], running, queue)
    plans = plan_conservatively([8, 8], running, queue)
    assert starts_of(snapshot)[waiting] == pytest.approx([start_s for start_s, _ in plans])
    assert by_conservative == [gpu_type if start_s == 0.0 else -1 for start_s, gpu_type in plans]


class RecordedPlans(Conservative):
    """Conservative backfilling that records when each job was first planned to start."""

    def __init__(self) -> None:
        self.start_s: dict[str, float] = {}

    def choose(self, view: SchedulerView) -> Ints:
        names = view.draft.snapshot.jobs.name
        for name, start_s in zip(names, planned_starts(view).tolist(), strict=True):
            self.start_s.setdefault(name, start_s)
        return super().choose(view)


@pytest.mark.parametrize("seed", range(3))
def test_if_jobs_end_as_expected_they_start_when_they_were_first_planned_to(seed: int) -> None:
    rng = np.random.default_rng(seed)
    jobs = [
        an_arrival(
            f"j{i}",
            200.0 * i,
            iterations=int(rng.integers(100, 4000)),
            requested_gpus=int(2 ** rng.integers(4)),
        )
        for i in range(30)
    ]
    plans, node = RecordedPlans(), some_specs(("a100", 1, 8))
    decide = Decider(RoundOptions(scheduler="conservative"), policy=plans)
    result = simulate_scenario(
        a_scenario(*jobs, nodes=node), decide=decide, on_events=True, spacing_s=0.0
    )
    expected = [plans.start_s[job.spec.name] - plans.start_s["j0"] for job in jobs]
    assert result.first_start_s.tolist() == pytest.approx(expected, abs=1e-3)
    assert result.first_start_s.max() > 200.0 * len(jobs)  # jobs have waited


@pytest.mark.parametrize("name", ["easy", "conservative"])
def test_a_stream_of_small_jobs_does_not_starve_a_large_one(name: str, tmp_path: Path) -> None:
    trace = data_file(None, "cases", "starve.csv")
    profiles = data_file(None, "cases", "starve-profiles.csv")
    if trace is None or profiles is None:
        pytest.skip("needs cases/starve.csv and cases/starve-profiles.csv of TESSERA_DATA")
    results = tmp_path / "results.json"
    command = (
        f"simulate {trace} --profiles {profiles} --nodes a100=2x8 --policy {name}"
        f" --horizon 3h --results {results}"
    )
    result = CliRunner().invoke(app, command.split(), env={"TESSERA_SERVER": "127.0.0.1:1"})
    assert result.exit_code == 0, (result.stderr, result.exception)
    (policy,) = json.loads(results.read_text())["policies"]
    (big,) = [outcome for outcome in policy["outcomes"] if outcome["job"] == "big"]
    # It waits for the jobs before it alone, the longest of which end after 1529 s.
    assert big["first_start_s"] - big["arrival_s"] <= 1800.0
    assert (big["state"], big["restarts"]) == ("succeeded", 0)
