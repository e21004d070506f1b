"""The benchmark's section on profiled layers: its figures, and a run on the CPU."""

from pathlib import Path
from typing import Any

import pytest

from tessera.benchmarks.estimator.profiled import run_profiled_section, summarize_report
from tessera.estimator.profiling.records import read_profile_records
from tessera.formulation.errors import Unavailable

STEPS = "tessera.estimator.tracing.models.steps:"


def a_comparison(**changed: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "samples": 2,
        "layers": 4,
        "kinds": 2,
        "summed_s": 1.1,
        "passes_s": 1.0,
        "update_s": 0.2,
        "step_s": 1.0,
        "profile_device_s": 5.0,
        "direct_device_s": 20.0,
        "method": "kernels",
    } | changed


def test_errors_cover_passes_and_whole_steps_and_savings_are_in_device_seconds() -> None:
    found = [a_comparison(), a_comparison(summed_s=0.7, profile_device_s=3.0)]
    figures = summarize_report({"device": "d", "comparisons": found}).figures
    assert figures["profiled_error"] == pytest.approx((0.1 + 0.3) / 2)
    assert figures["profiled_step_error"] == pytest.approx((0.3 + 0.1) / 2)
    assert figures["profiled_worst_error"] == pytest.approx(0.3)
    assert figures["profiled_saving"] == pytest.approx(40 / 8)


def test_a_model_is_profiled_and_measured_on_the_available_device(tmp_path: Path) -> None:
    kept = tmp_path / "records.jsonl"
    source = {"target": f"{STEPS}perceptron", "arguments": {"layers": 3}}
    section = run_profiled_section(
        tmp_path, (), models=[["tiny", source, [2]]], date="2026-11-21", records=kept
    )
    (row,) = section.rows
    assert (row["model"], row["layers"], row["kinds"]) == ("tiny", 3, 3)
    assert section.figures["profiled_saving"] > 0
    assert {r.date for r in read_profile_records(kept)} == {"2026-11-21"}


def test_a_model_that_cannot_be_traced_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="has no function nothing"):
        run_profiled_section(tmp_path, (), models=[["none", {"target": f"{STEPS}nothing"}, [2]]])
