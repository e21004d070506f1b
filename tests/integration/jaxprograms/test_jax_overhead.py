"""The program that compares ``tessera.jax`` with plain JAX, without a judgement of its times."""

from __future__ import annotations

import pytest

from tessera.benchmarks.service.runtime.jaxoverhead import (
    PROCESSES,
    make_contests,
    measure_overhead,
)


@pytest.mark.full
@pytest.mark.slow
def test_both_programs_run_in_turn_in_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    (contest,) = (contest for contest in make_contests() if contest.name == "pp4")
    found = measure_overhead(contest, PROCESSES + 1)  # not a multiple of the processes
    assert len(found.shares) == PROCESSES + 1
    assert found.tessera_s > 0
    assert found.plain_s > 0
