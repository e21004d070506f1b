"""Laws of Cells on shapes: the columns that there may be, and their rates."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.cells import Cells, build_cells
from tessera.formulation.dominance import find_undominated
from tessera.formulation.snapshot import Snapshot
from tests.support.builders import a_job, a_node, a_snapshot, an_estimate
from tests.support.laws import examples

PLANS = ("", "first", "second")


def a_profiled_cluster(seed: int) -> Snapshot:
    """Return nodes of several sizes, and estimates of random shapes, degrees and plans."""
    rng = np.random.default_rng(seed)
    nodes = [
        a_node(f"n{i}", int(rng.integers(2)), int(rng.choice([1, 2, 4, 8, 8])))
        for i in range(int(rng.integers(1, 10)))
    ]
    estimates = {}
    for _ in range(int(rng.integers(1, 60))):
        gpus = int(rng.choice([1, 2, 3, 4, 5, 8, 16]))
        key = (
            int(rng.integers(2)),
            int(rng.integers(2)),
            gpus,
            int(rng.integers(1, gpus + 1)),
            int(rng.integers(3)),
            int(rng.integers(len(PLANS))),
        )
        time_s = math.inf if rng.random() < 0.2 else float(rng.integers(1, 12))
        estimates[key] = an_estimate(*key[:4], degree=key[4], plan=key[5], iter_time_s=time_s)
    return a_snapshot(
        nodes=nodes,
        jobs=[a_job(f"j{w}", w) for w in range(2)],
        estimates=list(estimates.values()),
        workloads=2,
        plans=PLANS,
    )


snapshots = st.builds(a_profiled_cluster, st.integers(0, 2**32))


def rows_by_count(cells: Cells, rows: list[int]) -> dict[tuple[int, int, int], list[int]]:
    """Return the rows by workload, type and GPU count."""
    grouped = defaultdict(list)
    for row in rows:
        key = (int(cells.workload[row]), int(cells.gpu_type[row]), int(cells.gpus[row]))
        grouped[key].append(row)
    return grouped


def known_rates(snapshot: Snapshot, workload: int, gpu_type: int, gpus: int) -> dict[int, float]:
    """Return the best samples/s of a count on each number of nodes, according to estimates alone."""
    e = snapshot.estimates
    best: defaultdict[int, float] = defaultdict(float)
    batch = snapshot.workloads[workload].global_batch
    for k in range(len(e)):
        if (e.workload[k], e.gpu_type[k], e.gpus[k]) == (workload, gpu_type, gpus):
            nodes = int(e.nodes[k])
            best[nodes] = max(best[nodes], batch / float(e.iter_time_s[k]))
    return dict(best)


@examples(200)
@given(snapshots)
def test_each_wider_shape_that_is_kept_is_faster_and_has_one_column(snapshot: Snapshot) -> None:
    cells = build_cells(snapshot)
    kept = np.flatnonzero(find_undominated(cells)).tolist()
    for (workload, gpu_type, gpus), rows in rows_by_count(cells, kept).items():
        by_width = sorted(rows, key=lambda row: int(cells.nodes[row]))
        widths = [int(cells.nodes[row]) for row in by_width]
        rates = [float(cells.rate[row]) for row in by_width]
        assert len(set(widths)) == len(widths)
        assert all(slower < faster for slower, faster in pairwise(rates))
        known = known_rates(snapshot, workload, gpu_type, gpus)
        size = int(snapshot.node_size()[gpu_type])
        feasible = {nodes for nodes, rate in known.items() if rate > 0} | {-(-gpus // size)}
        assert set(widths) <= feasible


@examples(200)
@given(snapshots)
def test_a_shape_has_the_rate_of_its_own_estimate(snapshot: Snapshot) -> None:
    cells = build_cells(snapshot)
    e = snapshot.estimates
    batch = np.array([w.global_batch for w in snapshot.workloads])
    own = {
        (*(int(getattr(e, name)[k]) for name in ("workload", *e.CELL, "nodes")),): float(
            batch[e.workload[k]] / e.iter_time_s[k]
        )
        for k in range(len(e))
    }
    size = snapshot.node_size()
    for row in range(len(cells)):
        key = (int(cells.workload[row]), *cells.key_at(row), int(cells.nodes[row]))
        assert cells.rate[row] == cells.rate_on(row, int(cells.nodes[row])) > 0
        if key in own:
            assert cells.rate[row] == own[key]
            continue
        # It is inferred: it has the fewest nodes, and no other plan or degree is known there.
        workload, gpu_type, gpus = key[:3]
        assert key[-1] == -(-gpus // int(size[gpu_type]))
        assert key[-1] not in known_rates(snapshot, workload, gpu_type, gpus)
        if snapshot.plans[key[4]]:
            narrower = {k[-1] for k, rate in own.items() if k[:5] == key[:5] and rate > 0}
            assert min(narrower) < key[-1]


@examples(100)
@given(snapshots)
def test_the_rate_of_a_cell_on_a_shape_is_the_same_by_each_of_its_rows(snapshot: Snapshot) -> None:
    cells = build_cells(snapshot)
    rates: dict[tuple[int, ...], float] = {}
    for row in range(len(cells)):
        for nodes in range(1, 17):
            key = (int(cells.workload[row]), *cells.key_at(row), nodes)
            assert rates.setdefault(key, cells.rate_on(row, nodes)) == cells.rate_on(row, nodes)
            placed = cells.row_on(row, nodes)
            assert cells.gpus[placed] == cells.gpus[row]
            assert cells.nodes[placed] == nodes or placed == row
