"""FCFS, SRT, Gandiva, Gavel, ElasticFlow and Sia do what they are known for, on cases small enough to see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera.formulation.placement import Gang
from tessera.formulation.policy import Policy
from tessera.solvers.schedulers.base import make_view
from tessera.solvers.schedulers.elasticflow import ElasticFlow
from tessera.solvers.schedulers.fcfs import Fcfs
from tessera.solvers.schedulers.gandiva import Gandiva
from tessera.solvers.schedulers.gavel import Gavel, GavelLas
from tessera.solvers.schedulers.packing import options_of
from tessera.solvers.schedulers.sia import Sia
from tessera.solvers.schedulers.srt import Srt
from tests.support.builders import (
    a_node,
    a_snapshot,
    an_estimate,
)
from tests.support.scheduling import (
    A100,
    BATCH,
    LINEAR,
    V100,
    Speeds,
    chosen,
    cluster,
    gpus_of,
    rates,
    running,
    waiting,
)

# options


def test_a_running_job_is_offered_the_cell_that_it_runs_on_and_not_a_faster_plan() -> None:
    snapshot = cluster([running("r", on=(A100, 4))], {A100: {4: 3.0}})
    faster = an_estimate(0, A100, 4, degree=2, iter_time_s=BATCH / 9.0)
    both = a_snapshot(
        nodes=[a_node("n0", A100, 8)],
        jobs=[running("r", on=(A100, 4)), waiting("w", gpus=4)],
        estimates=[*rates(0, {A100: {4: 3.0}}), faster],
        gangs={0: Gang(members=((0, (0, 1, 2, 3)),))},
    )
    assert options_of(make_view(snapshot, Policy())).rate.tolist() == [3.0]
    assert options_of(make_view(both, Policy())).rate.tolist() == [3.0, 9.0]


# FCFS


def test_fcfs_lets_the_first_job_that_does_not_fit_block_those_behind_it() -> None:
    jobs = [running("r", on=(A100, 4)), waiting("big", gpus=8), waiting("small", gpus=4)]
    assert chosen(Fcfs(), cluster(jobs, {A100: LINEAR})) == [(A100, 4), None, None]


def test_fcfs_blocks_only_the_types_that_the_blocked_job_could_use() -> None:
    jobs = [
        running("r", on=(A100, 4)),
        waiting("big", gpus=8, requested_type=A100),
        waiting("other", gpus=4, requested_type=V100),
        waiting("any", gpus=1),
    ]
    snapshot = cluster(jobs, {A100: LINEAR, V100: {1: 0.5, 4: 2.0}}, v100=8)
    assert chosen(Fcfs(), snapshot) == [(A100, 4), None, (V100, 4), (V100, 1)]


def test_fcfs_blocks_every_type_for_a_job_that_takes_any_and_finds_none() -> None:
    jobs = [
        running("r", on=(A100, 4)),
        waiting("big", gpus=8),
        waiting("other", gpus=4, requested_type=V100),
    ]
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
    jobs = [
        running("long", on=(A100, 8), iterations_left=1e6),
        waiting("short", gpus=8, iterations_left=10.0),
    ]
    assert gpus_of(Srt(), cluster(jobs, {A100: LINEAR})) == [0, 8]


def test_srt_compares_remaining_time_and_not_remaining_work() -> None:
    jobs = [
        waiting("slow", 0, gpus=8, iterations_left=100.0),
        waiting("fast", 1, gpus=8, iterations_left=150.0),
    ]
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
    jobs = [
        running("r", on=(A100, 4), since_s=100.0),
        waiting("late", gpus=4, queued_s=900.0),
        waiting("early", gpus=4, queued_s=500.0),
        waiting("big", gpus=8, queued_s=950.0),
    ]
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
    jobs = [
        waiting("light", gpus=8, service_gpu_s=2000.0),
        waiting("heavy", gpus=8, service_gpu_s=3000.0, weight=4.0),
    ]
    assert gpus_of(GavelLas(), cluster(jobs, {A100: {8: 1.0}})) == [0, 8]


# ElasticFlow


def test_elasticflow_gives_the_least_count_that_meets_the_deadline() -> None:
    # 256 samples each iteration, 1 sample/s a GPU, now is 1000 s: 100 iterations are 25,600 GPU-seconds
    jobs = [
        waiting("due", iterations_left=100.0, deadline_s=1000.0 + 25_600 / 3),
        waiting("also due", iterations_left=100.0, deadline_s=1000.0 + 25_600 / 3),
    ]
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
    jobs = [
        running("admitted", on=(A100, 8), iterations_left=100.0, deadline_s=1000.0 + 25_600 / 7),
        waiting("new", iterations_left=100.0, deadline_s=1000.0 + 25_600 / 7.5),
    ]
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
