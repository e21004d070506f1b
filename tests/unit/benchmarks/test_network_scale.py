from __future__ import annotations

import numpy as np

from tessera.benchmarks.harness.cases import find_cases
from tessera.benchmarks.harness.registry import run_case
from tessera.benchmarks.network import bench_network_scale as network_scale
from tessera.benchmarks.network import clos_jobs
from tessera.formulation.network.contention import demand_of
from tessera.solvers.network.compression.dag import dag_of


def test_the_smoke_run_keeps_its_bounds_and_reports_the_density_of_each_graph() -> None:
    case = find_cases()["network-scale"]
    assert case.run is network_scale.network_scale
    result = run_case(case, case.smoke | {"jobs": 60}, ["bench"])
    assert result["ok"]
    assert {"unproven", "differ", "violations"} <= result["bounds"].keys()
    rows = {row["graph"]: row for row in result["table"]}
    assert rows["one-link"]["edges"] == 60 * 59 / 2
    for row in rows.values():
        assert row["lost"] <= row["orders_lost"] + 1e-12 <= row["urgency_lost"] + 2e-12


def test_jobs_on_adjacent_hosts_contend_with_fewer_jobs_than_on_random_hosts() -> None:
    edges = []
    for crowd in (clos_jobs.pack_jobs, clos_jobs.scatter_jobs):
        contention = crowd(80, 3)
        demand = demand_of(contention, np.zeros(len(contention.bundle_bytes), np.int64))
        edges.append(dag_of(demand, np.arange(80)).edges)
    assert edges[0] < edges[1]


def test_half_of_all_pairs_contend() -> None:
    dag = dag_of(clos_jobs.half_shared(400, 0), np.arange(400))
    assert abs(dag.edges / (400 * 399 / 2) - 0.5) < 0.03
