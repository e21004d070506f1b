"""The standing of a policy among published schedulers, and the workloads that it is judged on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tessera.benchmarks.schedulers import bench_robust
from tessera.benchmarks.schedulers.bench_robust import robust_figures
from tessera.benchmarks.schedulers.robust_runs import (
    WorkloadRequest,
    WorkloadRun,
    find_standing,
    jct_over,
    run_workload,
)
from tessera.benchmarks.schedulers.robust_workloads import DRAWN_KINDS, make_workload
from tessera.simulator.traces.speeds import Speeds

OUR_POLICY = "ilp:jct"


def a_run(*jct_s: float, wait_s: Sequence[float] = (), **fields: Any) -> WorkloadRun:
    """Return a run with the given times from arrival to end, in which no job waits by default."""
    values: dict[str, Any] = {
        "jct_s": list(jct_s),
        "wait_s": list(wait_s) or [0.0] * len(jct_s),
        "state": ["succeeded" if np.isfinite(jct) else "queued" for jct in jct_s],
        "refused_rounds": 0,
        "restarts": 0,
        "utilisation": 0.5,
        "decide_s": 0.0,
        "longest_round_s": 0.0,
    }
    return WorkloadRun(**values | fields)


def test_a_ratio_is_over_common_jobs_and_geometric_over_seeds() -> None:
    our_runs = [a_run(100.0, np.inf), a_run(800.0)]
    rivals = [a_run(200.0, 1.0), a_run(100.0)]
    assert jct_over(our_runs, rivals) == pytest.approx(2.0)
    assert np.isnan(jct_over([a_run(np.inf)], [a_run(1.0)]))


def test_the_best_rival_may_be_another_one_for_waits() -> None:
    runs = {
        OUR_POLICY: [a_run(100.0, wait_s=[300.0])],
        "easy": [a_run(80.0, wait_s=[900.0])],
        "arena": [a_run(120.0, wait_s=[0.0])],
    }
    standing = find_standing(runs, OUR_POLICY)
    assert (standing.jct.rival, standing.waits.rival) == ("easy", "arena")
    assert standing.jct.ratio == pytest.approx(1.25)
    assert standing.waits.ratio == pytest.approx(2.0)
    assert standing.leader_waits == pytest.approx(0.5)
    assert find_standing(runs, OUR_POLICY, ["arena"]).jct.rival == "arena"


def test_a_scheduler_that_broke_a_rule_or_finished_not_every_job_is_no_rival() -> None:
    runs = {
        OUR_POLICY: [a_run(100.0, 100.0)],
        "srt": [a_run(10.0, np.inf)],
        "sia": [a_run(10.0, 10.0, refused_rounds=1)],
    }
    standing = find_standing(runs, OUR_POLICY)
    assert standing.jct.rival == ""
    assert np.isnan(standing.jct.ratio)


def test_without_kept_requests_all_are_rivals_and_with_all_laws_only_steady_schedulers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_robust, "LAWS", {"keep_requests": "keep_requests=false"})
    runs = {
        "w": {
            OUR_POLICY: [a_run(150.0)],
            f"{OUR_POLICY}@keep_requests=false": [a_run(100.0)],
            "srt": [a_run(50.0)],
            "easy": [a_run(100.0)],
        }
    }
    figures = robust_figures(runs, OUR_POLICY)
    assert figures["worst_ratio_free"] == pytest.approx(2.0)
    assert figures["worst_ratio_laws"] == pytest.approx(1.5)
    assert figures["cost_of_keep_requests"] == pytest.approx(1.5)


@pytest.mark.parametrize("name", DRAWN_KINDS)
def test_a_drawn_workload_is_repeated_by_its_seed_and_runs_as_requested(name: str) -> None:
    scenario = make_workload(name, 1, 20).scenario
    assert scenario.arrivals == make_workload(name, 1, 20).scenario.arrivals
    assert scenario.arrivals != make_workload(name, 2, 20).scenario.arrivals
    assert len(scenario.arrivals) == 20
    assert np.isfinite(Speeds(scenario.profiles).requested_s(scenario.arrivals)).all()
    assert len(scenario.gpu_types) == DRAWN_KINDS[name].types


def test_a_run_waits_as_long_as_it_holds_no_gpus() -> None:
    request = WorkloadRequest(workload="rigid-light", seed=0, jobs=12, policy="fcfs")
    run = WorkloadRun(**run_workload(**request.task().options))
    assert run.is_fair
    assert all(0 <= wait < jct for wait, jct in zip(run.wait_s, run.jct_s, strict=True))
