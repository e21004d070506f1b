"""The measurement of CPU time and of its percentiles in ``bench reads``."""

from __future__ import annotations

from tessera.benchmarks.service.bench_reads import percentile_99


def test_the_99th_percentile_is_a_value_that_was_measured_and_never_below_it() -> None:
    assert percentile_99([5.0]) == 5.0
    assert percentile_99([float(k) for k in range(1, 101)]) == 100.0
    assert percentile_99([float(k) for k in range(1, 1001)]) == 991.0
