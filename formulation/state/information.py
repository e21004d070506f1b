"""The estimates that a scheduler may see: functions from a snapshot to one with other estimates.

The information that a scheduler sees is chosen separately and is never part of the scheduler. Its
effect can then be separated from the scheduler's own. Jobs still run at their true rates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import numpy as np

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Bools, Floats, Ints, Table, begins_group
from tessera.formulation.base.values import BEST_FOUND, PROFILING, EstimateSource
from tessera.formulation.state.snapshot import Estimates, Snapshot

Information = Callable[[Snapshot], Snapshot]

MEASURED_GPU_COUNTS: Final = (1, 2, 4, 8, 16)
"""The five GPU counts that Arena measures (section 2.3)."""


def all_estimates(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot unchanged: every estimate, whatever its source."""
    return snapshot


def apply_caution(snapshot: Snapshot, caution: float) -> Snapshot:
    """Return the snapshot with uncertain iteration times made longer.

    Each becomes longer by ``caution`` standard deviations of its logarithm. Estimates of unknown
    uncertainty stay unchanged. With ``caution`` 0, all of them do.
    """
    e = snapshot.estimates
    if not caution or not np.nan_to_num(e.sd).any():
        return snapshot
    slower = e.iter_time_s * np.exp(caution * np.nan_to_num(e.sd))
    return replace(snapshot, estimates=replace(e, iter_time_s=slower))


def searched_optimum(snapshot: Snapshot) -> Snapshot:
    """Return only the results of a full search, which is what Arena calls the AP optimum.

    Rows of an execution plan that a full search chose (``BEST_FOUND``) stay. If a workload has
    none, its measured rows stay.
    """
    e = snapshot.estimates
    searched = e.pipeline_degree == BEST_FOUND
    has_searched = np.zeros(len(snapshot.workloads), dtype=np.bool_)
    has_searched[e.workload[searched]] = True
    measured = (e.source == EstimateSource.MEASURED) & ~has_searched[e.workload]
    return _with(snapshot, e.at(searched | measured | _of_tasks(snapshot)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DpMemory(Table):
    """The peak memory of each GPU under pure data parallelism, by workload and GPU count."""

    INDEX: ClassVar[str] = "data-parallel runs"
    workload: tuple[str, ...]  # Workload.key
    gpus: Ints  # the degree of data parallelism
    memory_bytes: Floats  # inf if the run was tried and ran out of memory


def data_parallel(memory: DpMemory, safety: float = 1.2, fraction: float = 0.8) -> Information:
    """Return the optimum behind the memory gate of data parallelism, as in Arena's artifact.

    The artifact has no times of data-parallel runs. A count runs at the optimum's time, but only
    where ``safety`` x the memory of data parallelism is at most ``fraction`` x the GPU's. A
    workload and count that the table lacks, or that ran out of memory, is infeasible on every type.
    """
    if not (safety > 0 and fraction > 0):
        raise InvalidInput("data_parallel", "safety and fraction must be positive")

    def gated(snapshot: Snapshot) -> Snapshot:
        visible = searched_optimum(snapshot)
        pairs = zip(memory.workload, memory.gpus.tolist(), strict=True)
        known = dict(zip(pairs, memory.memory_bytes.tolist(), strict=True))
        e, keys = visible.estimates, [w.key for w in visible.workloads]
        need = np.array(
            [
                known.get((keys[workload], gpus), np.inf)
                for workload, gpus in zip(e.workload.tolist(), e.gpus.tolist(), strict=True)
            ],
            dtype=np.float64,
        )
        have = np.array([t.memory_bytes for t in visible.gpu_types], dtype=np.float64)[e.gpu_type]
        fits = (safety * need <= fraction * have) | _of_tasks(visible)
        return _with(visible, replace(e, iter_time_s=np.where(fits, e.iter_time_s, np.inf)))

    return gated


def single_gpu(measured_counts: int = 1) -> Information:
    """Return Sia's bootstrapping: of the five counts, the first ``measured_counts`` are measured.

    Beyond the largest measured count that runs, throughput is extrapolated linearly in the number
    of GPUs, for each (workload, type). With one count this is single-GPU throughput x GPUs (Arena
    section 2.3, where k goes from 1 to 5).

    Arena leaves open what happens where no measured count runs because the model is too large.
    Here, the smallest count that does run is measured instead. Without it, nothing would be known
    of that model. A count is measured at its best execution plan and shape. Throughput is
    extrapolated only to counts in the optimum's table, in every shape alike, whether they truly run
    or not.

    Raises:
        InvalidInput: ``measured_counts`` is not one of 1 to 5.
    """
    if not 1 <= measured_counts <= len(MEASURED_GPU_COUNTS):
        raise InvalidInput("measured_counts", f"must lie in [1, {len(MEASURED_GPU_COUNTS)}]")
    largest = MEASURED_GPU_COUNTS[measured_counts - 1]

    def extrapolated(snapshot: Snapshot) -> Snapshot:
        return _with(snapshot, _linear_beyond(searched_optimum(snapshot).estimates, largest))

    return extrapolated


def _linear_beyond(e: Estimates, largest: int) -> Estimates:
    """Return the rows, with linear speed-up for larger counts than ``largest``."""
    order = np.lexsort((e.iter_time_s, e.gpus, e.gpu_type, e.workload))
    e = e.at(order)
    pair = _group(e.workload, e.gpu_type)
    runs = np.isfinite(e.iter_time_s)
    base = _base_rows(pair, e.gpus, runs, largest)
    # Each row is extrapolated from the base row of its pair, or not at all if that is -1.
    base_of = base[pair] if len(pair) else base
    beyond = (base_of >= 0) & (e.gpus > np.maximum(largest, e.gpus[base_of]))
    linear_s = e.iter_time_s[base_of] * e.gpus[base_of] / e.gpus
    return replace(
        e,
        iter_time_s=np.where(beyond, linear_s, e.iter_time_s),
        source=np.where(beyond, int(EstimateSource.ANALYTIC), e.source),
    )


def _base_rows(pair: Ints, gpus: Ints, runs: Bools, largest: int) -> Ints:
    """Return the row from which each pair is extrapolated, int64[pairs]. It is -1 if no row runs.

    Rows are sorted by pair, then count, then time. The result is the fastest row of the largest
    count up to ``largest`` that runs. Without such a row, it is the fastest row of the smallest
    count that runs.
    """
    pairs = int(pair.max(initial=-1)) + 1
    base = np.full(pairs, -1, dtype=np.int64)
    for row in np.flatnonzero(runs).tolist():
        best = int(base[pair[row]])
        if best < 0 or (gpus[row] <= largest and gpus[row] > gpus[best]):
            base[pair[row]] = row
    return base


def _group(*keys: Ints) -> Ints:
    """Return a rising number for each distinct combination of sorted ``keys``, int64[rows]."""
    return np.cumsum(begins_group(*keys)) - 1


def _of_tasks(snapshot: Snapshot) -> Bools:
    """Return which estimates are those of profiling tasks, which all may see, bool[estimates]."""
    tasks = np.array([w.model == PROFILING for w in snapshot.workloads], dtype=np.bool_)
    out: Bools = tasks[snapshot.estimates.workload]
    return out


def _with(snapshot: Snapshot, e: Estimates) -> Snapshot:
    """Return the snapshot with these estimates, in the order that snapshots require."""
    return replace(snapshot, estimates=e.in_order())
