"""Laws of trace files and of their shaping."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.records.estimates import EstimateRecord
from tessera.simulator.traces import profiles, trace
from tessera.simulator.traces.csv_writer import trace_csv
from tessera.simulator.traces.csvfile import MAX_ERRORS
from tessera.simulator.traces.redraw import job_requests, redraw_models
from tessera.simulator.traces.screening import screen_jobs
from tessera.simulator.traces.shaping import busiest_jobs, sample_jobs, split_tenants
from tessera.simulator.traces.speeds import ClusterRoom, Speeds, gpu_seconds
from tessera.simulator.traces.trace import Arrival, parse_trace
from tests.support.laws import examples
from tests.support.traces import a_cluster, a_record, a_type, a_workload, an_arrival

T = TypeVar("T")


HEADS = (
    ",".join([*profiles.REQUIRED, *profiles.OPTIONAL]),
    ",".join(profiles.REQUIRED),
    ",".join([*trace.REQUIRED, *trace.OPTIONAL]),
    ",".join(trace.REQUIRED),
)

FIELDS = st.one_of(
    st.sampled_from(
        ["bert", "1.3B", "256", "a100", "1", "2", "", "ok", "oom", "1e9", '"', '"a\nb"']
    ),
    st.text(max_size=8),
)

ROWS = st.lists(st.lists(FIELDS, min_size=6, max_size=12).map(",".join), max_size=8)

NEARLY = st.builds(
    lambda head, rows, end: end.join([head, *rows]).encode("utf-8", "surrogatepass"),
    st.sampled_from(HEADS),
    ROWS,
    st.sampled_from(["\n", "\r\n", "\r"]),
)


def read_or_refused(parse: Callable[[bytes, str], list[T]], data: bytes) -> list[T]:
    """Return the rows read, or [] if the file is refused; then every mistake must name the file."""
    message = ""
    try:
        return parse(data, "f.csv")
    except InvalidInput as error:
        message = str(error)
    mistakes = message.split("\nf.csv ")
    assert message.startswith("f.csv line ")
    assert len(mistakes) <= MAX_ERRORS
    return []


@given(data=st.one_of(st.binary(max_size=300), NEARLY))
@examples(300)
@example(data=HEADS[0].encode() + b"\n" + b"9" * 5000)
@example(data=HEADS[3].encode() + b'\nj,1,m,p,1,1,1\nj,1,m,p,1,1,1\n"')
@example(data=("\ufeff" + HEADS[3]).encode("utf-16"))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    records = read_or_refused(profiles.parse_profiles, data)
    assert all(e.cell.gpus >= e.cell.nodes >= 1 and e.iter_time_s > 0 for e in records)
    arrivals = read_or_refused(trace.parse_trace, data)
    assert all(math.isfinite(a.arrival_s) and a.arrival_s >= 0 for a in arrivals)
    assert all(a.spec.iterations >= 1 and a.spec.deadline_s > 0 for a in arrivals)


@given(
    rows=st.lists(
        st.tuples(st.integers(1, 10**12), st.floats(0, 1e9), st.integers(1, 64)), max_size=20
    )
)
@examples(50)
def test_written_files_read_back_unchanged(rows: list[tuple[int, float, int]]) -> None:
    lines = [f"j{i},{t!r},m,p,8,{n},{g}" for i, (n, t, g) in enumerate(rows)]
    data = "\r\n".join([",".join(trace.REQUIRED), *lines]).encode()
    options = trace.TraceOptions(iteration_divisor=1)
    found = {a.spec.name: a for a in trace.parse_trace(data, "f", options)}
    first = min((t for _, t, _ in rows), default=0.0)
    assert len(found) == len(rows)
    for i, (n, t, g) in enumerate(rows):
        a = found[f"j{i}"]
        assert (a.spec.iterations, a.arrival_s, a.spec.requested_gpus) == (n, t - first, g)


WORKS = [a_workload("bert", "760M"), a_workload("bert", "6.7B", 128), a_workload("moe", "10B", 512)]

NODES = a_cluster("a100", nodes=4, gpus=4) + a_cluster("v100", nodes=1, gpus=16)

SPEEDS_S = [0.3, 1.7, 9.0]


def some_profiles(seed: int) -> list[EstimateRecord]:
    rng = np.random.default_rng(seed)
    return [
        a_record(gpus, kind, math.inf if rng.random() < 0.3 else base / gpus**0.8, 0, work)
        for work, base in zip(WORKS, SPEEDS_S, strict=True)
        for kind in ("a100", "v100")
        for gpus in (1, 2, 4, 8, 16, 32)
    ]


@st.composite
def traces(draw: st.DrawFn) -> list[Arrival]:
    """Draw jobs with all kinds of faults: names, order, counts, models, types."""
    count = draw(st.integers(0, 12))
    return [
        an_arrival(
            draw(st.sampled_from([f"j{i}", "same"])),
            draw(st.floats(0, 1e6)),
            draw(st.integers(0, 10_000)),
            draw(st.sampled_from([1, 2, 3, 8, 32])),
            draw(st.sampled_from(["a100", "v100", "h100", ""])),
            draw(st.sampled_from([*WORKS, a_workload("gpt9")])),
            deadline_s=draw(st.sampled_from([math.inf, 1.0, 5e5])),
        )
        for i in range(count)
    ]


@examples(60)
@given(traces(), st.integers(0, 50))
def test_screening_loses_no_job_and_kept_jobs_run_as_requested(
    jobs: list[Arrival], seed: int
) -> None:
    known = some_profiles(seed)
    screened_jobs = screen_jobs(jobs, known, [a_type("a100"), a_type("v100")], NODES, "drop")
    kept = [a.spec.name for a in screened_jobs.arrivals]
    dropped = [one.job for one in screened_jobs.dropped]
    assert sorted(kept + dropped) == sorted(a.spec.name for a in jobs)
    assert len(set(kept)) == len(kept)
    assert np.isfinite(
        gpu_seconds(screened_jobs.arrivals, Speeds(known, ClusterRoom.of(NODES)))
    ).all()
    times = [a.arrival_s for a in screened_jobs.arrivals]
    assert times == sorted(times)
    again = screen_jobs(
        screened_jobs.arrivals, known, [a_type("a100"), a_type("v100")], NODES, "refuse"
    )
    assert again.arrivals == screened_jobs.arrivals  # the kept jobs are valid


@examples(60)
@given(traces(), st.integers(0, 50), st.integers(0, 2**31))
def test_redrawing_keeps_gpu_seconds_within_half_an_iteration_and_fits_the_cluster(
    jobs: list[Arrival], profile: int, seed: int
) -> None:
    speeds = Speeds(some_profiles(profile), ClusterRoom.of(NODES))
    good = screen_jobs(
        jobs, some_profiles(profile), [a_type("a100"), a_type("v100")], NODES, "drop"
    ).arrivals
    if not speeds.workloads():
        return
    redrawn_jobs = redraw_models(job_requests(good, speeds), speeds, seed)
    assert redrawn_jobs == redraw_models(job_requests(good, speeds), speeds, seed)
    before, after = gpu_seconds(good, speeds), gpu_seconds(redrawn_jobs, speeds)
    for a, b, one in zip(before.tolist(), after.tolist(), redrawn_jobs, strict=True):
        step = one.spec.requested_gpus * speeds.iter_time_s(one.spec)
        assert math.isfinite(step)
        assert abs(a - b) <= (0.5 if a >= step / 2 else 1.0) * step * (1 + 1e-9)


@examples(60)
@given(traces(), st.floats(0.01, 300))
def test_no_window_of_that_length_has_more_jobs_than_the_busiest(
    jobs: list[Arrival], hours: float
) -> None:
    busiest = busiest_jobs(jobs, hours)
    times = [a.arrival_s for a in jobs]
    expected = max((sum(t <= u < t + hours * 3600 for u in times) for t in times), default=0)
    assert len(busiest) == expected
    assert all(0 <= a.arrival_s < hours * 3600 + 1e-6 for a in busiest)


@examples(40)
@given(traces(), st.integers(0, 2**31), st.floats(0.05, 1.0))
def test_sampling_and_tenants_change_nothing_else_of_a_job(
    jobs: list[Arrival], seed: int, share: float
) -> None:
    sample = sample_jobs(jobs, share, seed)
    assert len(sample) == round(share * len(jobs))
    position = iter(jobs)
    assert all(any(a is b for b in position) for a in sample)  # a subsequence
    split, _ = split_tenants(jobs, len(jobs) // 2, 8, seed)
    assert [(a.arrival_s, a.spec.workload, a.spec.iterations) for a in split] == [
        (a.arrival_s, a.spec.workload, a.spec.iterations) for a in jobs
    ]
    assert sum(a.spec.guaranteed for a in split) == len(jobs) // 2


@examples(60)
@given(traces(), st.integers(0, 50))
def test_a_written_trace_is_read_back_to_the_microsecond(jobs: list[Arrival], seed: int) -> None:
    good = screen_jobs(
        jobs, some_profiles(seed), [a_type("a100"), a_type("v100")], NODES, "drop"
    ).arrivals
    first_s = good[0].arrival_s if good else 0.0
    back = parse_trace(trace_csv(good).encode(), "t.csv")
    assert len(back) == len(good)
    by_name = {a.spec.name: a for a in back}
    for one in good:
        read = by_name[one.spec.name]
        assert read.arrival_s == pytest.approx(one.arrival_s - first_s, abs=1e-6)
        assert read.spec.deadline_s == pytest.approx(one.spec.deadline_s, abs=3e-6)
        same = (
            "workload",
            "iterations",
            "requested_gpus",
            "requested_gpu_type",
            "tenant",
            "guaranteed",
        )
        assert all(getattr(read.spec, f) == getattr(one.spec, f) for f in same)
