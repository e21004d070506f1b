"""Our own measurements on GPUs, and what their comparison with estimates reports."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tessera.benchmarks.estimator.bench_gpu_estimates import (
    JudgedPlan,
    judge_gpu_estimates,
    read_judged_plans,
)
from tessera.estimator.hardware import H100
from tessera.estimator.memory import UsableMemory


def a_row(**changed: object) -> str:
    row: dict[str, object] = {
        "name": "gpt",
        "layers": 24,
        "hidden": 1_024,
        "sequence": 1_024,
        "head": 64,
        "batch": 16,
        "accumulation": 2,
        "checkpointing": False,
        "threads": 0,
    }
    return json.dumps(row | changed)


def plans_of(folder: Path, *rows: str) -> list[JudgedPlan]:
    measured = folder / "measured.jsonl"
    measured.write_text("\n".join(["{}", "{}", *rows]), encoding="utf-8")
    return read_judged_plans(measured, H100)


def test_a_plan_is_estimated_from_its_sizes_and_plans_of_the_host_are_left_out(
    tmp_path: Path,
) -> None:
    ran = a_row(iter_time_s=0.1, peak_bytes=16e9)
    (plan,) = plans_of(tmp_path, ran, a_row(threads=4, iter_time_s=1.0, peak_bytes=1.0))
    assert plan.estimate is not None
    assert plan.estimate.micro_batches == 2
    assert plan.time_error == pytest.approx(plan.estimate.iter_time_s / 0.1 - 1)
    estimated = max(plan.estimate.memory_bytes) - UsableMemory().context_bytes
    assert plan.memory_error == pytest.approx(estimated / 16e9 - 1)


def test_a_plan_that_ran_out_of_memory_takes_forever_and_is_not_expected_to_fit(
    tmp_path: Path,
) -> None:
    (plan,) = plans_of(tmp_path, a_row(sequence=8_192, accumulation=1, out_of_memory=True))
    assert (plan.measured_s, plan.estimated_s) == (math.inf, math.inf)
    assert not plan.is_judged


def test_no_plan_of_the_stored_measurements_is_left_out_and_memory_is_not_foretold_too_low() -> (
    None
):
    report = judge_gpu_estimates()
    figures = report.figures
    judged = [row for row in report.table if row["time_error"] != "-"]
    assert len(judged) == figures["points_h200"] + figures["points_h100"] == 53
    assert len(report.table) == 53 + figures["ran_out_of_memory"]
    assert min(float(row["memory_error"]) for row in judged) > -0.05
    assert figures["fits_wrong"] == 0
