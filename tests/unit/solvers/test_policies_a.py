"""FCFS, SRT, Gandiva, Gavel, ElasticFlow and Sia do what they are known for, on cases small enough to see."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera.formulation.decisions import DecisionKind
from tessera.formulation.errors import InvalidInput
from tessera.formulation.lifecycle import JobState
from tessera.formulation.placement import Gang
from tessera.formulation.policy import Policy
from tessera.formulation.reasons import ReasonCode
from tessera.formulation.snapshot import BEST_FOUND, Estimates, Snapshot
from tessera.formulation.statement import state
from tessera.formulation.tables import Ints
from tessera.service.loop import decide_again
from tessera.solvers.base import Budget
from tessera.solvers.greedy import Greedy
from tessera.solvers.rounds.plan import Outcome, RoundOptions, plan_round
from tessera.solvers.schedulers.base import Published, Scheduler, Seen, carried, seen
from tessera.solvers.schedulers.elasticflow import ElasticFlow
from tessera.solvers.schedulers.fcfs import Fcfs
from tessera.solvers.schedulers.gandiva import Gandiva
from tessera.solvers.schedulers.gavel import Gavel, GavelLas
from tessera.solvers.schedulers.packing import options_of
from tessera.solvers.schedulers.registry import names, published, scheduler_of
from tessera.solvers.schedulers.sia import Sia
from tessera.solvers.schedulers.srt import Srt
from tests.support.builders import (
    a_job,
    a_node,
    a_random_snapshot,
    a_snapshot,
    an_estimate,
    some_nodes,
)

A100, V100 = 0, 1
BATCH = 256
LINEAR = {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}
FOREVER = Budget(remaining_s=lambda: math.inf)

Speeds = Mapping[int, Mapping[int, float]]  # GPU type -> GPUs -> samples/s


def rates(workload: int, speeds: Speeds) -> list[dict[str, Any]]:
    return [
        an_estimate(workload, gpu_type, gpus, iter_time_s=BATCH / rate)
        for gpu_type, by_count in speeds.items()
        for gpus, rate in by_count.items()
    ]


def cluster(
    jobs: Sequence[dict[str, Any]], *speeds: Speeds, a100: int = 8, v100: int = 0
) -> Snapshot:
    """Return one node of each type that has GPUs; workload w has ``speeds[w]``; running jobs hold GPUs."""
    nodes = [
        a_node(f"n{t}", t, gpus) for t, gpus in ((A100, a100), (V100, v100)) if gpus or t == A100
    ]
    taken, gangs = {A100: 0, V100: 0}, {}
    for j, job in enumerate(jobs):
        kind, gpus = job["current_type"], job["current_gpus"]
        if gpus:
            first = taken[kind]
            gangs[j] = Gang(members=((kind, tuple(range(first, first + gpus))),))
            taken[kind] += gpus
    estimates = [row for w, speed in enumerate(speeds) for row in rates(w, speed)]
    return a_snapshot(nodes=nodes, jobs=jobs, estimates=estimates, gangs=gangs, batch=BATCH)


def waiting(name: str, workload: int = 0, *, gpus: int = 1, **more: Any) -> dict[str, Any]:
    return a_job(name, workload, requested_gpus=gpus, **more)


def running(
    name: str, workload: int = 0, *, on: tuple[int, int], gpus: int | None = None, **more: Any
) -> dict[str, Any]:
    """Return a job that runs on (type, GPUs), which it requested unless ``gpus`` says otherwise."""
    more = {"generation": 1, "since_s": 900.0} | more
    return a_job(name, workload, state=JobState.RUNNING, cell=(*on, 1),
                 requested_gpus=gpus or on[1], **more)  # fmt: skip


def chosen(policy: Published, snapshot: Snapshot, **options: Any) -> list[tuple[int, int] | None]:
    """Return (type, GPUs) of each job; None: it waits."""
    view = seen(snapshot, Policy(**options))
    return [
        (int(view.draft.gpu_type[c]), int(view.draft.gpus[c])) if c >= 0 else None
        for c in policy.choose(view).tolist()
    ]


def gpus_of(policy: Published, snapshot: Snapshot, **options: Any) -> list[int]:
    """Return the GPUs of each job, 0: it waits."""
    return [cell[1] if cell else 0 for cell in chosen(policy, snapshot, **options)]


def decided(policy: Published, snapshot: Snapshot) -> Outcome:
    return plan_round(snapshot, Policy(), Greedy(), FOREVER, scheduler=Scheduler(published=policy))


class Stopped:
    """A clock that stands still."""

    def monotonic_s(self) -> float:
        return 0.0


class Fixed:
    """A policy that takes given options, room or not."""

    name = "fixed"

    def __init__(self, *cells: tuple[int, int] | None) -> None:
        self._cells = cells

    def choose(self, seen: Seen) -> Ints:
        options = options_of(seen)
        found = np.full(len(options.current), -1)
        for job, cell in enumerate(self._cells):
            for option in options.of(job):
                if (int(options.gpu_type[option]), int(options.gpus[option])) == cell:
                    found[job] = options.column[option]
        return found


# options


def test_a_running_job_is_offered_the_cell_that_it_runs_on_and_not_a_faster_plan() -> None:
    snapshot = cluster([running("r", on=(A100, 4))], {A100: {4: 3.0}})
    faster = an_estimate(0, A100, 4, degree=2, iter_time_s=BATCH / 9.0)
    both = a_snapshot(
        nodes=[a_node("n0", A100, 8)], jobs=[running("r", on=(A100, 4)), waiting("w", gpus=4)],
        estimates=[*rates(0, {A100: {4: 3.0}}), faster],
        gangs={0: Gang(members=((0, (0, 1, 2, 3)),))},
    )  # fmt: skip
    assert options_of(seen(snapshot, Policy())).rate.tolist() == [3.0]
    assert options_of(seen(both, Policy())).rate.tolist() == [3.0, 9.0]


# FCFS


def test_fcfs_lets_the_first_job_that_does_not_fit_block_those_behind_it() -> None:
    jobs = [running("r", on=(A100, 4)), waiting("big", gpus=8), waiting("small", gpus=4)]
    assert chosen(Fcfs(), cluster(jobs, {A100: LINEAR})) == [(A100, 4), None, None]


def test_fcfs_blocks_only_the_types_that_the_blocked_job_could_use() -> None:
    jobs = [running("r", on=(A100, 4)), waiting("big", gpus=8, requested_type=A100),
            waiting("other", gpus=4, requested_type=V100), waiting("any", gpus=1)]  # fmt: skip
    snapshot = cluster(jobs, {A100: LINEAR, V100: {1: 0.5, 4: 2.0}}, v100=8)
    assert chosen(Fcfs(), snapshot) == [(A100, 4), None, (V100, 4), (V100, 1)]


def test_fcfs_blocks_every_type_for_a_job_that_takes_any_and_finds_none() -> None:
    jobs = [running("r", on=(A100, 4)), waiting("big", gpus=8),
            waiting("other", gpus=4, requested_type=V100)]  # fmt: skip
    speeds = {A100: LINEAR, V100: {4: 2.0, 8: 4.0}}
    snapshot = cluster([*jobs[:1], running("s", on=(V100, 4)), *jobs[1:]], speeds, v100=8)
    assert chosen(Fcfs(), snapshot) == [(A100, 4), (V100, 4), None, None]


def test_fcfs_is_not_blocked_by_a_request_that_no_cell_meets() -> None:
    jobs = [waiting("odd", gpus=3), waiting("next", gpus=8)]
    assert gpus_of(Fcfs(), cluster(jobs, {A100: LINEAR})) == [0, 8]


def test_fcfs_gives_a_job_that_takes_any_type_the_fastest_with_room() -> None:
    jobs = [waiting("first", gpus=8), waiting("second", gpus=8)]
    snapshot = cluster(jobs, {A100: LINEAR, V100: {8: 12.0}}, v100=8)
    assert chosen(Fcfs(), snapshot) == [(V100, 8), (A100, 8)]


# SRT


def test_srt_suspends_a_long_job_for_a_short_one() -> None:
    jobs = [running("long", on=(A100, 8), iterations_left=1e6),
            waiting("short", gpus=8, iterations_left=10.0)]  # fmt: skip
    assert gpus_of(Srt(), cluster(jobs, {A100: LINEAR})) == [0, 8]


def test_srt_compares_remaining_time_and_not_remaining_work() -> None:
    jobs = [waiting("slow", 0, gpus=8, iterations_left=100.0),
            waiting("fast", 1, gpus=8, iterations_left=150.0)]  # fmt: skip
    snapshot = cluster(jobs, {A100: {8: 1.0}}, {A100: {8: 2.0}})
    assert gpus_of(Srt(), snapshot) == [0, 8]


def test_srt_leaves_a_running_job_on_its_type_though_another_is_faster() -> None:
    snapshot = cluster([running("r", on=(V100, 4))], {A100: LINEAR, V100: {4: 1.0}}, v100=8)
    assert chosen(Srt(), snapshot) == [(V100, 4)]


# Gandiva


@pytest.mark.parametrize(("since_s", "expected"), [(690.0, [0, 8]), (950.0, [8, 0])])
def test_gandiva_gives_the_waiting_job_its_turn_once_the_slice_is_over(
    since_s: float, expected: list[int]
) -> None:
    jobs = [running("r", on=(A100, 8), since_s=since_s), waiting("w", gpus=8)]
    assert gpus_of(Gandiva(slice_s=300.0), cluster(jobs, {A100: LINEAR})) == expected


def test_gandiva_takes_turns_by_the_time_waited_and_skips_what_has_no_room() -> None:
    jobs = [running("r", on=(A100, 4), since_s=100.0), waiting("late", gpus=4, queued_s=900.0),
            waiting("early", gpus=4, queued_s=500.0), waiting("big", gpus=8, queued_s=950.0)]  # fmt: skip
    assert gpus_of(Gandiva(), cluster(jobs, {A100: LINEAR})) == [0, 4, 4, 0]


def test_gandiva_grows_jobs_into_idle_gpus_where_a_gpu_adds_most() -> None:
    jobs = [running("flat", 0, on=(A100, 2)), running("steep", 1, on=(A100, 2))]
    snapshot = cluster(jobs, {A100: {2: 2.0, 4: 2.1}}, {A100: {2: 1.0, 4: 1.9}}, a100=6)
    assert gpus_of(Gandiva(), snapshot) == [2, 4]


def test_gandiva_keeps_what_a_job_has_grown_to_while_nobody_waits() -> None:
    jobs = [running("grown", 0, on=(A100, 4), gpus=2), running("steeper", 1, on=(A100, 2))]
    snapshot = cluster(jobs, {A100: {2: 2.0, 4: 2.1}}, {A100: {2: 1.0, 4: 1.9}}, a100=6)
    assert gpus_of(Gandiva(), snapshot) == [4, 2]


def test_gandiva_shrinks_grown_jobs_when_others_wait() -> None:
    jobs = [running("grown", on=(A100, 8), gpus=4), waiting("a", gpus=4), waiting("b", gpus=4)]
    assert gpus_of(Gandiva(slice_s=300.0), cluster(jobs, {A100: LINEAR})) == [4, 4, 0]


# Gavel


def test_gavel_gives_each_type_to_the_job_with_the_comparative_advantage() -> None:
    jobs = [waiting("even", 0, gpus=8), waiting("picky", 1, gpus=8)]
    snapshot = cluster(
        jobs, {A100: {8: 20.0}, V100: {8: 18.0}}, {A100: {8: 10.0}, V100: {8: 1.0}}, v100=8
    )
    assert chosen(Gavel(), snapshot) == [(V100, 8), (A100, 8)]


def test_gavel_normalises_where_arenas_copy_adds_samples_up() -> None:
    jobs = [waiting("small model", 0, gpus=8), waiting("large model", 1, gpus=8, weight=2.0)]
    snapshot = cluster(jobs, {A100: {8: 100.0}}, {A100: {8: 1.0}})
    assert gpus_of(Gavel(), snapshot) == [0, 8]
    assert gpus_of(Gavel(raw=True), snapshot) == [8, 0]


def test_gavel_never_changes_the_requested_count() -> None:
    jobs = [waiting("one", gpus=2), waiting("two", gpus=2)]
    assert gpus_of(Gavel(), cluster(jobs, {A100: LINEAR})) == [2, 2]


def test_gavel_with_a_limit_on_changes_leaves_running_jobs_alone() -> None:
    jobs = [running("a", 0, on=(A100, 8)), running("b", 1, on=(V100, 8))]
    speeds: Sequence[Speeds] = (
        {A100: {8: 10.0}, V100: {8: 9.0}},
        {A100: {8: 10.0}, V100: {8: 1.0}},
    )
    snapshot = cluster(jobs, *speeds, v100=8)
    assert chosen(Gavel(), snapshot) == [(V100, 8), (A100, 8)]
    assert chosen(Gavel(max_changes=1), snapshot) == [(A100, 8), (V100, 8)]
    assert chosen(Gavel(max_changes=2), snapshot) == [(V100, 8), (A100, 8)]


def test_gavel_gives_up_its_limit_on_changes_when_nodes_are_lost() -> None:
    jobs = [running("a", on=(A100, 8)), running("b", on=(V100, 8))]
    snapshot = cluster(jobs, {A100: {8: 1.0}, V100: {8: 1.0}}, v100=8)
    lost = replace(snapshot, nodes=replace(snapshot.nodes, schedulable=np.array([True, False])))
    assert gpus_of(Gavel(max_changes=0), lost) == [8, 0]


def test_gavel_las_serves_who_was_served_least() -> None:
    jobs = [running("served", on=(A100, 8), service_gpu_s=7000.0), waiting("new", gpus=8)]
    snapshot = cluster(jobs, {A100: {8: 1.0}})
    assert gpus_of(GavelLas(), snapshot) == [0, 8]
    assert gpus_of(Gavel(), snapshot) == [8, 0]


def test_gavel_las_shares_by_weight() -> None:
    jobs = [waiting("light", gpus=8, service_gpu_s=2000.0),
            waiting("heavy", gpus=8, service_gpu_s=3000.0, weight=4.0)]  # fmt: skip
    assert gpus_of(GavelLas(), cluster(jobs, {A100: {8: 1.0}})) == [0, 8]


# ElasticFlow


def test_elasticflow_gives_the_least_count_that_meets_the_deadline() -> None:
    # 256 samples each iteration, 1 sample/s a GPU, now is 1000 s: 100 iterations are 25,600 GPU-seconds
    jobs = [waiting("due", iterations_left=100.0, deadline_s=1000.0 + 25_600 / 3),
            waiting("also due", iterations_left=100.0, deadline_s=1000.0 + 25_600 / 3)]  # fmt: skip
    assert gpus_of(ElasticFlow(), cluster(jobs, {A100: LINEAR})) == [4, 4]


def test_elasticflow_counts_the_restart_of_a_job_that_has_to_start() -> None:
    due_s = 1000.0 + 25_600 / 4
    late = waiting("late", iterations_left=100.0, deadline_s=due_s, restart_s=10.0)
    snapshot = cluster([late, waiting("other", 1)], {A100: LINEAR}, {A100: {4: 1.0}})
    assert gpus_of(ElasticFlow(), snapshot) == [8, 0]


def test_elasticflow_admits_by_minimum_share_in_order_of_deadline() -> None:
    def job(name: str, due_s: float) -> dict[str, Any]:
        return waiting(name, iterations_left=100.0, deadline_s=due_s)

    jobs = [job("later", 1000.0 + 25_600 / 3), job("sooner", 1000.0 + 25_600 / 8)]
    assert gpus_of(ElasticFlow(), cluster(jobs, {A100: LINEAR})) == [0, 8]


def test_elasticflow_does_not_admit_a_deadline_that_no_count_meets() -> None:
    jobs = [waiting("hopeless", iterations_left=100.0, deadline_s=1001.0), waiting("free")]
    assert gpus_of(ElasticFlow(), cluster(jobs, {A100: LINEAR})) == [0, 8]


def test_elasticflow_keeps_an_admitted_job_before_a_new_one_with_an_earlier_deadline() -> None:
    jobs = [running("admitted", on=(A100, 8), iterations_left=100.0, deadline_s=1000.0 + 25_600 / 7),
            waiting("new", iterations_left=100.0, deadline_s=1000.0 + 25_600 / 7.5)]  # fmt: skip
    assert gpus_of(ElasticFlow(), cluster(jobs, {A100: LINEAR})) == [8, 0]


def test_elasticflow_gives_leftover_gpus_where_the_marginal_return_is_greatest() -> None:
    jobs = [waiting("flat", 0), waiting("steep", 1)]
    snapshot = cluster(
        jobs, {A100: {1: 1.0, 2: 1.2, 4: 1.3}}, {A100: {1: 1.0, 2: 1.9, 4: 3.5}}, a100=5
    )
    assert gpus_of(ElasticFlow(), snapshot) == [1, 4]


def test_elasticflow_counts_the_marginal_return_by_gpu() -> None:
    jobs = [waiting("big step", 0), waiting("small step", 1)]
    snapshot = cluster(jobs, {A100: {1: 1.0, 5: 2.0}}, {A100: {1: 1.0, 2: 1.5}}, a100=6)
    assert gpus_of(ElasticFlow(), snapshot) == [1, 2]


def test_elasticflow_stays_on_the_requested_type() -> None:
    jobs = [waiting("w", requested_type=V100)]
    assert chosen(ElasticFlow(), cluster(jobs, {A100: LINEAR, V100: {1: 0.1}}, v100=4)) == [
        (V100, 1)
    ]


def test_elasticflow_ls_loosens_every_deadline() -> None:
    jobs = [
        waiting(f"j{i}", iterations_left=100.0, deadline_s=1000.0 + 25_600 / 8) for i in range(8)
    ]
    snapshot = cluster(jobs, {A100: LINEAR})
    assert sorted(gpus_of(ElasticFlow(), snapshot)) == [0] * 7 + [8]
    assert gpus_of(ElasticFlow(loosened=True), snapshot) == [1] * 8


# Sia


def test_sia_starts_jobs_at_their_least_count() -> None:
    assert gpus_of(Sia(), cluster([waiting("w", gpus=8)], {A100: {2: 2.0, 4: 4.0, 8: 8.0}})) == [2]


def test_sia_at_most_doubles_in_a_round() -> None:
    assert gpus_of(Sia(), cluster([running("r", on=(A100, 2))], {A100: LINEAR})) == [4]


def test_sia_avoids_restarts_of_young_jobs_that_would_gain_little() -> None:
    def move(age_s: float) -> list[tuple[int, int] | None]:
        job = running("r", on=(V100, 1), restart_s=300.0, submit_s=1000.0 - age_s)
        return chosen(Sia(), cluster([job], {A100: {1: 1.3}, V100: {1: 1.0}}, v100=1))

    assert move(age_s=400.0) == [(V100, 1)]
    assert move(age_s=100_000.0) == [(A100, 1)]


def test_sia_charges_the_restarts_that_a_job_has_had() -> None:
    def move(generation: int) -> list[tuple[int, int] | None]:
        job = running("r", on=(V100, 1), restart_s=100.0, submit_s=-9000.0, generation=generation)
        return chosen(Sia(), cluster([job], {A100: {1: 1.3}, V100: {1: 1.0}}, v100=1))

    assert move(generation=1) == [(A100, 1)]
    assert move(generation=50) == [(V100, 1)]


def test_sia_prefers_a_job_more_to_more_goodput_of_those_that_run() -> None:
    jobs = [running("r", on=(A100, 4)), *(waiting(f"w{i}") for i in range(4))]
    assert gpus_of(Sia(), cluster(jobs, {A100: LINEAR})) == [4, 1, 1, 1, 1]


def test_sia_counts_the_goodput_of_a_job_by_its_least_count() -> None:
    jobs = [waiting("large", 0), *(waiting(f"small{i}", 1) for i in range(4))]
    snapshot = cluster(jobs, {A100: {4: 1.0}}, {A100: {1: 1.0}}, a100=4)
    assert gpus_of(Sia(), snapshot) == [4, 0, 0, 0, 0]


def test_sia_as_published_helps_the_worse_off_where_arenas_copy_helps_the_faster() -> None:
    jobs = [running("small", on=(A100, 1)), running("large", on=(A100, 2))]
    snapshot = cluster(jobs, {A100: LINEAR}, a100=5)
    assert gpus_of(Sia(), snapshot) == [2, 2]
    assert gpus_of(Sia(fairness=0.5), snapshot) == [1, 4]


# the registry


def test_an_unknown_scheduler_is_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(InvalidInput, match=r"unknown 'lottery'; choose one of fcfs, srt, gandiva"):
        published("lottery")
    assert scheduler_of("") is None


@pytest.mark.parametrize("name", names())
def test_every_policy_is_built_under_its_name(name: str) -> None:
    assert published(name).name == name


# rounds


def test_a_round_says_that_the_policy_did_not_choose_a_job() -> None:
    jobs = [running("r", on=(A100, 4)), waiting("big", gpus=8), waiting("small", gpus=4)]
    found = decided(Fcfs(), cluster(jobs, {A100: LINEAR}))
    assert [d.kind for d in found.decisions] == [
        DecisionKind.KEEP, DecisionKind.WAIT, DecisionKind.WAIT,
    ]  # fmt: skip
    reason = found.decisions[2].reason
    assert reason is not None
    assert reason.code is ReasonCode.NOT_CHOSEN
    assert "fcfs" in reason.message


def test_a_round_measures_the_choice_by_its_objective_and_claims_no_gap_that_is_not_proven() -> (
    None
):
    jobs = [running("r", on=(A100, 4)), waiting("big", gpus=8)]
    snapshot = cluster(jobs, {A100: LINEAR})
    found = decided(Fcfs(), snapshot)
    best = plan_round(snapshot, Policy(), Greedy(), FOREVER)
    assert found.solution.objective == pytest.approx(4.0 * found.problem.scale)
    assert found.goals[0].objective == pytest.approx(4.0)
    assert found.solution.bound >= best.solution.objective
    assert found.solution.solver == "fcfs"


def test_a_choice_beyond_capacity_is_refused() -> None:
    found = decided(
        Fixed((A100, 8), (A100, 4)), cluster([waiting("a"), waiting("b")], {A100: LINEAR})
    )
    assert [v.rule for v in found.violations] == ["capacity"]
    assert found.decisions == ()


def test_a_job_whose_blocks_are_not_free_waits_rather_than_runs_on_another_count() -> None:
    jobs = [running("a", 1, on=(A100, 4), movable=False), running("b", 1, on=(A100, 4), movable=False),
            waiting("w", gpus=8)]  # fmt: skip
    snapshot = a_snapshot(
        nodes=some_nodes((A100, 2, 8)), jobs=jobs, batch=BATCH,
        estimates=[*rates(0, {A100: {4: 4.0, 8: 8.0}}), *rates(1, {A100: {4: 4.0}})],
        gangs={j: Gang(members=((j, (0, 1, 2, 3)),)) for j in (0, 1)},
    )  # fmt: skip
    spread = an_estimate(0, A100, 8, nodes=2, iter_time_s=math.inf)  # it needs one whole node
    snapshot = replace(
        snapshot,
        estimates=Estimates.from_rows(
            [*(snapshot.estimates.row(i) for i in range(len(snapshot.estimates))), spread]
        ),
    )
    own = plan_round(snapshot, Policy(), Greedy(), FOREVER).decisions[2]
    waits = decided(Fcfs(), snapshot).decisions[2]
    assert own.gpus == 4
    assert waits.gang is None
    assert waits.reason is not None
    assert waits.reason.code is ReasonCode.FRAGMENTED


def test_a_choice_that_does_not_truly_run_is_dropped_and_said_to_be() -> None:
    fails = an_estimate(0, A100, 4, iter_time_s=math.inf)
    snapshot = a_snapshot(
        nodes=[a_node("n0")],
        jobs=[waiting("w", gpus=4)],
        estimates=[*rates(0, {A100: {1: 1.0}}), fails],
    )

    def rosy(true: Snapshot) -> Snapshot:
        e = true.estimates
        return replace(true, estimates=replace(e, iter_time_s=np.full(len(e), 1.0)))

    found = plan_round(
        snapshot, Policy(), Greedy(), FOREVER,
        scheduler=Scheduler(published=Fcfs(), information=rosy),
    )  # fmt: skip
    reason = found.decisions[0].reason
    assert reason is not None
    assert "does not run" in reason.message


def test_a_choice_is_carried_to_the_plan_that_the_job_runs_on_where_the_policy_saw_no_plan() -> (
    None
):
    job, gangs = [running("r", on=(A100, 4))], {0: Gang(members=((0, (0, 1, 2, 3)),))}
    slow, fast = (an_estimate(0, A100, 4, degree=d, iter_time_s=3.0 - d) for d in (1, 2))
    searched = an_estimate(0, A100, 4, degree=BEST_FOUND, iter_time_s=1.5)
    true, told = (
        a_snapshot(nodes=[a_node("n0")], jobs=job, estimates=rows, gangs=gangs)
        for rows in ([slow, fast], [searched])
    )
    problem = state(true, Policy(), published=True).problem
    found = carried(seen(told, Policy()).draft, problem, np.array([0]))
    assert found.tolist() == problem.current.tolist()
    assert problem.cells.pipeline_degree[problem.cell[found[0]]] == 1


def test_the_service_runs_the_scheduler_that_the_options_name() -> None:
    jobs = [running("r", on=(A100, 4)), waiting("big", gpus=8), waiting("small", gpus=4)]
    record = decide_again(
        cluster(jobs, {A100: LINEAR}), RoundOptions(scheduler="srt"), Stopped(),
        remaining_s=lambda: math.inf, cancelled=lambda: False,
    )  # fmt: skip
    assert record.summary.solver == "srt"
    assert record.summary.verified
    assert record.summary.options["scheduler"] == "srt"
    with pytest.raises(InvalidInput, match="unknown 'lottery'"):
        decide_again(
            cluster(jobs, {A100: LINEAR}), RoundOptions(scheduler="lottery"), Stopped(),
            remaining_s=lambda: math.inf, cancelled=lambda: False,
        )  # fmt: skip


# exactness


def best_by_trying_all(snapshot: Snapshot, worth: Mapping[tuple[int, int], float]) -> float:
    """Return the best sum of worth (by job and option) over all choices that fit."""
    view = seen(snapshot, Policy())
    options = options_of(view)
    ways = [
        [None, *(o for o in options.of(j) if (j, o) in worth)] for j in range(len(snapshot.jobs))
    ]
    best = 0.0
    for picked in itertools.product(*ways):
        used = np.zeros(len(view.capacity), dtype=np.int64)
        total = 0.0
        for job, option in enumerate(picked):
            if option is not None:
                used[options.gpu_type[option]] += options.gpus[option]
                total += worth[job, option]
        if (used <= view.capacity).all():
            best = max(best, total)
    return best


@pytest.mark.parametrize("seed", range(8))
def test_the_integer_programs_are_solved_to_their_optimum(seed: int) -> None:
    snapshot = a_random_snapshot(seed, jobs=5, groups=((0, 2, 4), (1, 1, 4)), max_gpus=8)
    view = seen(snapshot, Policy())
    options = options_of(view)
    reference = view.draft.requested_rate
    requested = snapshot.jobs.requested_gpus
    gavel, sia = {}, {}
    for job in range(5):
        mine = list(options.of(job))
        least_rate = min(float(options.rate[o]) for o in mine)
        least_gpus = min(int(options.gpus[o]) for o in mine)
        for o in mine:
            if options.gpus[o] == requested[job]:
                gavel[job, o] = float(options.rate[o] / reference[job])
            if options.gpus[o] == 1:  # a waiting job starts at its least count
                goodput = float(options.rate[o]) / least_rate * least_gpus
                sia[job, o] = 1.1 - goodput**-0.5
    for policy, worth in ((Gavel(), gavel), (Sia(), sia)):
        option = {int(c): o for o, c in enumerate(options.column.tolist())}
        choice = policy.choose(view).tolist()
        found = sum(worth[job, option[c]] for job, c in enumerate(choice) if c >= 0)
        assert found == pytest.approx(best_by_trying_all(snapshot, worth), rel=2e-4)


@pytest.mark.parametrize(
    "objective",
    ["max-min then throughput", "finish-time-fairness", "jct", "0.5*throughput + 0.5*jct"],
)
def test_every_objective_measures_what_a_policy_chose_and_changes_nothing(objective: str) -> None:
    snapshot = a_random_snapshot(4, jobs=10, groups=((0, 2, 4), (1, 1, 8)))

    def by(policy: Policy) -> Outcome:
        return plan_round(
            snapshot, policy, Greedy(), FOREVER, scheduler=Scheduler(published=Fcfs())
        )

    plain, found = by(Policy()), by(Policy(objective=objective))
    assert found.violations == ()
    assert [(d.kind, d.gpus) for d in found.decisions] == [
        (d.kind, d.gpus) for d in plain.decisions
    ]
    assert len(found.goals) == len(Policy(objective=objective).stages)
