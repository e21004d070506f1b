"""Screening of traces: bad jobs are found, counted by reason, and refused or dropped."""

from __future__ import annotations

import math

import pytest

from tessera.formulation.errors import InvalidInput
from tessera.simulator.traces import screening
from tessera.simulator.traces.screening import (
    screen_durations,
    screen_jobs,
)
from tessera.simulator.traces.trace import Arrival
from tests.support.traces import (
    a_cluster,
    a_record,
    a_type,
    a_workload,
    an_arrival,
    an_asked,
    some_arrivals,
)

OTHER, GIANT = a_workload("moe", "2.4B"), a_workload("moe", "27B")
PROFILES = [
    a_record(1),
    a_record(2),
    a_record(4, iter_time_s=math.inf),
    a_record(8, nodes=2),
    a_record(16, nodes=4),
    a_record(16, nodes=4, work=GIANT),
]
NODES = a_cluster(nodes=2, gpus=4)


def dropped_reasons(*arrivals: Arrival) -> list[str]:
    screened_jobs = screen_jobs(arrivals, PROFILES, [a_type()], NODES, "drop")
    return [one.reason for one in screened_jobs.dropped]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (an_arrival("b", iterations=0), screening.EMPTY),
        (an_arrival("b", at_s=-1.0), screening.EARLY),
        (an_arrival("b", at_s=math.nan), screening.EARLY),
        (an_arrival("b", work=OTHER), screening.UNKNOWN_MODEL),
        (an_arrival("b", work=a_workload(batch=512)), screening.UNKNOWN_MODEL),
        (an_arrival("b", gpu_type="h100"), screening.ABSENT_TYPE),
        (an_arrival("b", gpus=16), screening.TOO_LARGE),
        (an_arrival("b", gpus=16, gpu_type=""), screening.TOO_LARGE),
        (an_arrival("b", gpus=3), screening.NOT_PROFILED),
        (an_arrival("b", gpus=4), screening.INFEASIBLE),
        (an_arrival("b", gpus=4, gpu_type=""), screening.INFEASIBLE),
        (an_arrival("b", gpus=8, work=GIANT), screening.NEVER_RUNS),
    ],
)
def test_each_kind_of_bad_job_has_its_own_reason(bad: Arrival, reason: str) -> None:
    assert dropped_reasons(an_arrival("a", gpus=8), bad, an_arrival("c", gpu_type="")) == [reason]


def test_the_first_good_job_of_a_repeated_name_is_kept() -> None:
    jobs = [an_arrival("a", iterations=0), an_arrival("a", 5.0), an_arrival("a", 6.0)]
    screened_jobs = screen_jobs(jobs, PROFILES, [a_type()], NODES, "drop")
    assert screened_jobs.arrivals == [jobs[1]]
    assert [one.reason for one in screened_jobs.dropped] == [screening.EMPTY, screening.REPEATED]


def test_bad_jobs_are_refused_with_the_count_and_the_first_names_of_each_reason() -> None:
    jobs = [an_arrival(f"big{i}", gpus=16) for i in range(7)] + [an_arrival("x", work=OTHER)]
    with pytest.raises(InvalidInput) as caught:
        screen_jobs(jobs, PROFILES, [a_type()], NODES)
    text = str(caught.value)
    assert "8 jobs) cannot be run as they are" in text
    lines = text.splitlines()[1:]
    assert lines[0].startswith(f"7 jobs with {screening.TOO_LARGE}: big0 (16 a100), big1")
    assert lines[0].endswith("big4 (16 a100), ...")
    assert lines[1] == f"1 job with {screening.UNKNOWN_MODEL}: x (moe 2.4B 256)"


def test_unsorted_jobs_are_refused_or_sorted_and_named_but_never_lost() -> None:
    jobs = [an_arrival("a", 5.0), an_arrival("b", 3.0), an_arrival("c", 4.0), an_arrival("d", 5.0)]
    with pytest.raises(InvalidInput, match="2 jobs listed after a job that arrives later: b, c"):
        screen_jobs(jobs, PROFILES, [a_type()], NODES)
    screened_jobs = screen_jobs(jobs, PROFILES, [a_type()], NODES, "drop")
    assert [a.spec.name for a in screened_jobs.arrivals] == ["b", "c", "a", "d"]
    assert (screened_jobs.dropped, screened_jobs.reordered) == ([], ["b", "c"])


def test_a_good_trace_passes_unchanged_without_remarks() -> None:
    jobs = some_arrivals(5)
    screened_jobs = screen_jobs(jobs, PROFILES, [a_type()], NODES)
    assert (screened_jobs.arrivals, screened_jobs.message()) == (jobs, "")


def test_jobs_without_models_must_have_a_duration_and_be_unique() -> None:
    jobs = [an_asked("a", 2.0), an_asked("b", 1.0, duration_s=0.0), an_asked("a", 3.0)]
    screened_jobs = screen_durations(jobs, "drop")
    assert screened_jobs.arrivals == [jobs[0]]
    assert [one.reason for one in screened_jobs.dropped] == [screening.EMPTY, screening.REPEATED]
    with pytest.raises(InvalidInput, match="no duration: b"):
        screen_durations(jobs)
