"""The measurement of CPU time and of its percentiles in ``bench reads``."""

from __future__ import annotations

import os

from tessera.benchmarks.service.bench_reads import ReadTimes, cpu_ms, percentile_99


def test_the_99th_percentile_is_a_value_that_was_measured_and_never_below_it() -> None:
    assert percentile_99([5.0]) == 5.0
    assert percentile_99([float(k) for k in range(1, 101)]) == 100.0
    assert percentile_99([float(k) for k in range(1, 1001)]) == 991.0


def test_a_row_has_the_reads_of_its_kind() -> None:
    row = ReadTimes(cpu_ms=[1.0, 3.0, 2.0], wall_ms=[9.0, 7.0, 8.0]).row("list")
    assert (row["read"], row["reads"], row["cpu_ms_p50"], row["cpu_ms_max"]) == (
        "list",
        3,
        2.0,
        3.0,
    )
    assert row["wall_ms_p99"] == 9.0


def test_the_cpu_time_of_a_process_grows_with_its_work() -> None:
    before = cpu_ms(os.getpid())
    assert before > 0
    while cpu_ms(os.getpid()) <= before:  # this loop itself is the work
        pass
