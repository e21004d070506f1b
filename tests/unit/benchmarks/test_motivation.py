"""The papers' opening cases, against hand-computed values."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tessera.benchmarks.harness.cases import find_cases
from tessera.benchmarks.papers.bench_motivation import (
    NORMALISED_POLICY,
    RAW_POLICY,
    decide_opening_cases,
    judge_openings,
    plan_gain,
    plan_ratio,
    short_policy,
)
from tessera.benchmarks.papers.opening_cases import (
    NO_CELL,
    OPENING_CASES,
    OpeningCase,
    OpeningScene,
    decide_openings,
    seen_rates,
)
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.values import EstimateSource
from tests.support.worlds import a_profile

GIB = 2**30
BY_NAME = {opening.name: opening for opening in OPENING_CASES}
SWAPPED = BY_NAME["swapped"]


def some_profiles(opening: OpeningCase, *rows: tuple[int, str, int, float]) -> list[EstimateRecord]:
    """Return profiles of an opening's jobs: (job, type, GPUs, samples/s)."""
    return [
        a_profile(
            gpus,
            opening.jobs[job].workload.global_batch / rate,
            gpu_type=kind,
            workload=opening.jobs[job].workload,
            source=EstimateSource.MEASURED,
        )
        for job, kind, gpus, rate in rows
    ]


def a_swap_scene() -> OpeningScene:
    """Return a BERT job with 30 samples/s on A100 and 10 on V100, and another job with 14 and 7."""
    rows = ((0, "a100", 4, 30.0), (0, "v100", 4, 10.0), (1, "a100", 4, 14.0), (1, "v100", 4, 7.0))
    return OpeningScene.of(SWAPPED, some_profiles(SWAPPED, *rows))


def test_totals_are_sums_of_rates() -> None:
    scene = a_swap_scene()
    as_requested, exchanged = SWAPPED.plans
    assert scene.total(as_requested) == pytest.approx(24)
    assert scene.total(exchanged) == pytest.approx(37)
    assert scene.normalised(exchanged) == pytest.approx(30 / 7.5 + 7 / 3.5)  # effective GPUs
    assert scene.total((NO_CELL, NO_CELL)) == 0.0
    assert len(list(scene.plans())) == 3 * 3 - 2  # all but those with both on one type


def test_fcfs_runs_jobs_as_requested_and_tessera_exchanges_them() -> None:
    scene = a_swap_scene()
    as_requested, exchanged = SWAPPED.plans
    assert decide_openings(scene, "fcfs", "estimates", None, 0) == as_requested
    assert decide_openings(scene, RAW_POLICY, "estimates", None, 0) == exchanged
    assert decide_openings(scene, NORMALISED_POLICY, "estimates", None, 0) == exchanged


def test_the_gain_of_an_exchange_is_read_from_the_papers_plans() -> None:
    rows = judge_openings(a_swap_scene(), SWAPPED, ["estimates"], None, 0)
    assert plan_gain(rows) == pytest.approx(37 / 24 - 1)
    best = [row for row in rows if row.policy.startswith("best")]
    assert [row.plan for row in best] == [SWAPPED.plans[1]] * 2
    assert [row.running for row in best] == [2, 2]


def test_ranks_are_inverted_by_the_memory_gate(tmp_path: Path) -> None:
    opening = BY_NAME["inverted"]
    records = some_profiles(
        opening,
        (0, "a100", 4, 12.0),
        (0, "a100", 8, 19.0),
        (1, "a100", 2, 53.0),
        (1, "a100", 4, 100.0),
        (2, "a100", 2, 24.0),
        (2, "a100", 4, 46.0),
        (3, "a100", 2, 65.0),
        (3, "a100", 4, 120.0),
    )
    memory = tmp_path / "dp.csv"
    memory.write_text(
        "model,params,global_batch,dp_degree,mem_per_gpu_gib,status\n"
        "moe,2.4B,512,2,29.5,ok\nmoe,2.4B,512,4,21.5,ok\n"  # 1.2 x 29.5 is more than 0.8 x 40
        "bert,1.3B,256,2,23.9,ok\nbert,1.3B,256,4,15.7,ok\n"
        "moe,1.3B,256,2,14.4,ok\nmoe,1.3B,256,4,11,ok\nwide_resnet,2B,256,4,,infeasible\n"
    )
    scene = OpeningScene.of(opening, records)
    rows = judge_openings(scene, opening, ["estimates", "data-parallel"], memory, 0)
    assert plan_ratio(rows) == {
        # Wide-ResNet, and MoE-2.4B on two GPUs, run out of memory
        "inverted_seen_ratio": pytest.approx((0 + 100) / (24 + 65)),
        "inverted_true_ratio": pytest.approx((12 + 100) / (53 + 24 + 65)),
    }
    seen = seen_rates(scene, opening, "data-parallel", memory)
    assert math.isclose(seen[1]["a100", 4], 100.0)
    assert seen[1].get(("a100", 2), 0.0) == 0.0


def test_an_infeasible_cell_adds_nothing() -> None:
    opening = replace(SWAPPED, plans=((("v100", 4), NO_CELL),))
    scene = OpeningScene.of(
        opening,
        some_profiles(opening, (0, "a100", 4, 30.0), (1, "a100", 4, 14.0), (1, "v100", 4, 7.0)),
    )
    (row,) = [r for r in judge_openings(scene, opening, ["estimates"], None, 0) if not r.policy]
    assert (row.samples_per_s, row.running) == (0.0, 0)


def test_the_benchmark_runs_and_keeps_its_laws_without_data_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_DATA", str(tmp_path / "none"))
    figures = decide_opening_cases(report=tmp_path / "report")
    bounds = find_cases()["motivation"].bounds
    assert set(bounds) == {"raw_share_of_best", "normalised_share_of_best"}
    assert all(bound.holds(figures.figures[name]) for name, bound in bounds.items())
    assert {row["information"] for row in figures.table} == {"estimates"}
    assert "samples, not measurements" in (tmp_path / "report" / "report.html").read_text()


def test_policy_names_are_shortened() -> None:
    assert [short_policy(name) for name in ("fcfs", RAW_POLICY, NORMALISED_POLICY)] == [
        "fcfs",
        "ilp:throughput, raw",
        "ilp:throughput",
    ]
