"""The measured plans with ZeRO-Offload, and what their comparison with predictions reports."""

from __future__ import annotations

import json
from pathlib import Path

from tessera.benchmarks.estimator.bench_offload_model import judge_offload_models, read_timed_plans
from tessera.benchmarks.estimator.own_runs import RUNS_H200


def a_row(**changed: object) -> str:
    row = {
        "name": "gpt",
        "layers": 2,
        "hidden": 64,
        "sequence": 8,
        "parameters": 1e6,
        "batch": 4,
        "accumulation": 1,
        "checkpointing": False,
        "threads": 0,
        "iter_time_s": 1.0,
        "forward_s": 0.25,
    }
    return json.dumps(row | changed)


def test_all_plans_of_a_model_have_the_pass_that_was_profiled(tmp_path: Path) -> None:
    measured = tmp_path / "measured.jsonl"
    rows = [a_row(), a_row(accumulation=4, threads=2, forward_s=9.0, iter_time_s=3.0)]
    measured.write_text("\n".join(["{}", "{}", *rows]), encoding="utf-8")
    plain, offloaded = read_timed_plans(measured)
    assert plain.run.configuration.facts == offloaded.run.configuration.facts
    assert plain.run.configuration.facts.forward_s_per_sample == 0.25 / 4
    assert (offloaded.run.iter_time_s, offloaded.run.configuration.cpus_per_gpu) == (3.0, 2)
    assert str(offloaded) == "accumulation 4, offload by 2 threads"


def test_a_plan_that_ran_out_of_memory_is_left_out(tmp_path: Path) -> None:
    failed = json.loads(a_row(accumulation=2)) | {"out_of_memory": True}
    del failed["iter_time_s"]
    measured = tmp_path / "measured.jsonl"
    measured.write_text("\n".join(["{}", "{}", a_row(), json.dumps(failed)]), encoding="utf-8")
    assert len(read_timed_plans(measured)) == 1


def test_every_measured_plan_is_fitted_or_scored() -> None:
    report = judge_offload_models()
    scored = len(report.table)
    assert scored + report.figures["fitted_runs"] == len(read_timed_plans(RUNS_H200))
    assert report.figures["thread_gain"] > 1
