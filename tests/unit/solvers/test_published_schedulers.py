"""Characteristic decisions of FCFS, SRT, Gandiva, Gavel, ElasticFlow and Sia, on obvious small cases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tessera.solvers.schedulers.elasticflow import ElasticFlow
from tessera.solvers.schedulers.fcfs import Fcfs
from tessera.solvers.schedulers.gandiva import Gandiva
from tessera.solvers.schedulers.gavel import Gavel, GavelLas
from tessera.solvers.schedulers.sia import Sia
from tessera.solvers.schedulers.srt import Srt
from tests.support.scheduling import (
    A100,
    LINEAR,
    V100,
    Speeds,
    a_running_job,
    a_waiting_job,
    chosen_cells,
    cluster,
    gpus_of,
)

# FCFS


def test_fcfs_lets_the_first_job_that_does_not_fit_block_later_ones() -> None:
    jobs = [
        a_running_job("r", on=(A100, 4)),
        a_waiting_job("big", gpus=8),
        a_waiting_job("small", gpus=4),
    ]
    assert chosen_cells(Fcfs(), cluster(jobs, {A100: LINEAR})) == [(A100, 4), None, None]


def test_fcfs_blocks_only_the_types_that_the_blocked_job_could_use() -> None:
    jobs = [
        a_running_job("r", on=(A100, 4)),
        a_waiting_job("big", gpus=8, requested_gpu_type=A100),
        a_waiting_job("other", gpus=4, requested_gpu_type=V100),
        a_waiting_job("any", gpus=1),
    ]
    snapshot = cluster(jobs, {A100: LINEAR, V100: {1: 0.5, 4: 2.0}}, v100=8)
    assert chosen_cells(Fcfs(), snapshot) == [(A100, 4), None, (V100, 4), (V100, 1)]


# SRT


def test_srt_suspends_a_long_job_for_a_short_one() -> None:
    jobs = [
        a_running_job("long", on=(A100, 8), iterations_left=1e6),
        a_waiting_job("short", gpus=8, iterations_left=10.0),
    ]
    assert gpus_of(Srt(), cluster(jobs, {A100: LINEAR})) == [0, 8]


def test_srt_compares_remaining_time_and_not_remaining_work() -> None:
    jobs = [
        a_waiting_job("slow", 0, gpus=8, iterations_left=100.0),
        a_waiting_job("fast", 1, gpus=8, iterations_left=150.0),
    ]
    snapshot = cluster(jobs, {A100: {8: 1.0}}, {A100: {8: 2.0}})
    assert gpus_of(Srt(), snapshot) == [0, 8]


# Gandiva


@pytest.mark.parametrize(("since_s", "expected"), [(690.0, [0, 8]), (950.0, [8, 0])])
def test_gandiva_gives_the_waiting_job_its_turn_once_the_slice_is_over(
    since_s: float, expected: list[int]
) -> None:
    jobs = [a_running_job("r", on=(A100, 8), since_s=since_s), a_waiting_job("w", gpus=8)]
    assert gpus_of(Gandiva(slice_s=300.0), cluster(jobs, {A100: LINEAR})) == expected


def test_gandiva_shrinks_grown_jobs_when_others_wait() -> None:
    jobs = [
        a_running_job("grown", on=(A100, 8), gpus=4),
        a_waiting_job("a", gpus=4),
        a_waiting_job("b", gpus=4),
    ]
    assert gpus_of(Gandiva(slice_s=300.0), cluster(jobs, {A100: LINEAR})) == [4, 4, 0]


# Gavel


def test_gavel_gives_each_type_to_the_job_with_the_comparative_advantage() -> None:
    jobs = [a_waiting_job("even", 0, gpus=8), a_waiting_job("picky", 1, gpus=8)]
    snapshot = cluster(
        jobs, {A100: {8: 20.0}, V100: {8: 18.0}}, {A100: {8: 10.0}, V100: {8: 1.0}}, v100=8
    )
    assert chosen_cells(Gavel(), snapshot) == [(V100, 8), (A100, 8)]


def test_gavel_normalises_throughput_and_arenas_copy_sums_raw_samples() -> None:
    jobs = [
        a_waiting_job("small model", 0, gpus=8),
        a_waiting_job("large model", 1, gpus=8, weight=2.0),
    ]
    snapshot = cluster(jobs, {A100: {8: 100.0}}, {A100: {8: 1.0}})
    assert gpus_of(Gavel(), snapshot) == [0, 8]
    assert gpus_of(Gavel(raw=True), snapshot) == [8, 0]


def test_gavel_with_a_change_limit_leaves_running_jobs_alone() -> None:
    jobs = [a_running_job("a", 0, on=(A100, 8)), a_running_job("b", 1, on=(V100, 8))]
    speeds: Sequence[Speeds] = (
        {A100: {8: 10.0}, V100: {8: 9.0}},
        {A100: {8: 10.0}, V100: {8: 1.0}},
    )
    snapshot = cluster(jobs, *speeds, v100=8)
    assert chosen_cells(Gavel(), snapshot) == [(V100, 8), (A100, 8)]
    assert chosen_cells(Gavel(max_changed=1), snapshot) == [(A100, 8), (V100, 8)]
    assert chosen_cells(Gavel(max_changed=2), snapshot) == [(V100, 8), (A100, 8)]


def test_gavel_las_serves_the_job_with_least_attained_service() -> None:
    jobs = [
        a_running_job("served", on=(A100, 8), service_gpu_s=7000.0),
        a_waiting_job("new", gpus=8),
    ]
    snapshot = cluster(jobs, {A100: {8: 1.0}})
    assert gpus_of(GavelLas(), snapshot) == [0, 8]
    assert gpus_of(Gavel(), snapshot) == [8, 0]


# ElasticFlow


def test_elasticflow_gives_the_smallest_count_that_meets_the_deadline() -> None:
    # an iteration has 256 samples and a GPU trains 1 sample/s, so 100 iterations take 25,600
    # GPU-seconds; the time is 1000 s
    jobs = [
        a_waiting_job("due", iterations_left=100.0, deadline_s=1000.0 + 25_600 / 3),
        a_waiting_job("also due", iterations_left=100.0, deadline_s=1000.0 + 25_600 / 3),
    ]
    assert gpus_of(ElasticFlow(), cluster(jobs, {A100: LINEAR})) == [4, 4]


def test_elasticflow_admits_by_minimum_share_in_order_of_deadline() -> None:
    def job(name: str, due_s: float) -> dict[str, Any]:
        return a_waiting_job(name, iterations_left=100.0, deadline_s=due_s)

    jobs = [job("later", 1000.0 + 25_600 / 3), job("sooner", 1000.0 + 25_600 / 8)]
    assert gpus_of(ElasticFlow(), cluster(jobs, {A100: LINEAR})) == [0, 8]


def test_elasticflow_gives_leftover_gpus_by_the_greatest_marginal_return() -> None:
    jobs = [a_waiting_job("flat", 0), a_waiting_job("steep", 1)]
    snapshot = cluster(
        jobs, {A100: {1: 1.0, 2: 1.2, 4: 1.3}}, {A100: {1: 1.0, 2: 1.9, 4: 3.5}}, a100=5
    )
    assert gpus_of(ElasticFlow(), snapshot) == [1, 4]


def test_elasticflow_ls_loosens_every_deadline() -> None:
    jobs = [
        a_waiting_job(f"j{i}", iterations_left=100.0, deadline_s=1000.0 + 25_600 / 8)
        for i in range(8)
    ]
    snapshot = cluster(jobs, {A100: LINEAR})
    assert sorted(gpus_of(ElasticFlow(), snapshot)) == [0] * 7 + [8]
    assert gpus_of(ElasticFlow(loosened=True), snapshot) == [1] * 8


# Sia


def test_sia_starts_jobs_at_their_smallest_count() -> None:
    assert gpus_of(
        Sia(), cluster([a_waiting_job("w", gpus=8)], {A100: {2: 2.0, 4: 4.0, 8: 8.0}})
    ) == [2]


def test_sia_at_most_doubles_in_a_round() -> None:
    assert gpus_of(Sia(), cluster([a_running_job("r", on=(A100, 2))], {A100: LINEAR})) == [4]


def test_sia_avoids_restarts_of_young_jobs_that_would_gain_little() -> None:
    def move(age_s: float) -> list[tuple[int, int] | None]:
        job = a_running_job("r", on=(V100, 1), restart_s=300.0, submit_s=1000.0 - age_s)
        return chosen_cells(Sia(), cluster([job], {A100: {1: 1.3}, V100: {1: 1.0}}, v100=1))

    assert move(age_s=400.0) == [(V100, 1)]
    assert move(age_s=100_000.0) == [(A100, 1)]


def test_sia_as_published_helps_worse_off_jobs_and_arenas_copy_helps_faster_ones() -> None:
    jobs = [a_running_job("small", on=(A100, 1)), a_running_job("large", on=(A100, 2))]
    snapshot = cluster(jobs, {A100: LINEAR}, a100=5)
    assert gpus_of(Sia(), snapshot) == [2, 2]
    assert gpus_of(Sia(fairness=0.5), snapshot) == [1, 4]
