"""The metrics of a run, computed afterwards from its log alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tessera.formulation.answer.decisions import DecisionKind
from tessera.formulation.base.tables import Bools, Floats
from tessera.formulation.round.columns import first_draft
from tessera.formulation.round.draft import Draft
from tessera.formulation.round.objectives.fairness import fair_rate
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.promises import PHYSICAL
from tessera.simulator.overheads import Overheads
from tessera.simulator.run import Result, RoundRow
from tessera.simulator.scenario import Scenario
from tessera.simulator.store.memory import MemoryStore

THROUGHPUT_FLOOR = 100.0
"""Samples/s. Arena's plots average rounds above this (notes of its artifact, section 4)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reference:
    """The rates against which jobs are measured under every policy, float64[jobs]."""

    batch: Floats  # samples in an iteration
    rate: Floats  # samples/s of one effective GPU (Eq. 6)

    @property
    def iterations_per_s(self) -> Floats:
        """Return the reference rate in iterations/s."""
        return self.rate / self.batch


def draft_of(scenario: Scenario) -> Draft:
    """Return the Cells of every job, as if all jobs had arrived on an empty cluster."""
    store = MemoryStore(scenario, np.zeros(len(scenario.arrivals)))
    for job in range(len(scenario.arrivals)):
        store.arrive(job, 0.0)
    return first_draft(store.snapshot(0.0), Policy())


def reference_of(scenario: Scenario) -> Reference:
    """Return the scenario's reference. A job that can never run has a rate of NaN."""
    draft = draft_of(scenario)
    return Reference(batch=draft.snapshot.global_batch.astype(np.float64), rate=draft.unit_rate)


def fair_seconds(scenario: Scenario, present: Floats) -> Floats:
    """Return the seconds of each job alone on 1 / ``present`` of the cluster (Eq. 14), float64[jobs]."""
    draft = draft_of(scenario)
    snapshot = draft.snapshot
    rate = fair_rate(draft, 1.0 / np.maximum(present, 1.0))
    return snapshot.jobs.iterations * snapshot.global_batch / rate


def possible_columns(scenario: Scenario) -> Draft:
    """Return the Cells and shapes on which each job can run on the whole and empty cluster."""
    draft = draft_of(scenario)
    for rule in PHYSICAL:
        draft = rule(draft)
    return draft


def least_start_s(draft: Draft, overheads: Overheads) -> float:
    """Return the lowest cost in seconds of a first start on any Cell, or 0 without Cells."""
    counts = set(draft.cells.gpus.tolist())
    return min((overheads.start_s(n, saved=False, new_cell=True) for n in counts), default=0.0)


def alone_seconds(scenario: Scenario, overheads: Overheads) -> Floats:
    """Return the fewest seconds from arrival to end of each job under any schedule, float64[jobs].

    The job starts immediately at the lowest cost of a start, and always trains on its fastest Cell
    and shape. A job that cannot run has inf.
    """
    draft = possible_columns(scenario)
    snapshot = draft.snapshot
    rate = np.zeros(len(snapshot.jobs))
    np.maximum.at(rate, draft.job, draft.rate)
    start_s = least_start_s(draft, overheads)
    work = snapshot.jobs.iterations * snapshot.global_batch
    return np.where(rate > 0, start_s + work / np.where(rate > 0, rate, 1.0), np.inf)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Series:
    """A run over time in bins of ``bin_s`` seconds.

    Arrays are float64[bins], each the mean over its bin.
    """

    bin_s: float
    normalised: Floats  # sum over jobs of their rate divided by their reference rate
    samples_per_s: Floats
    gpus: Floats  # held
    waiting: Floats  # jobs that have arrived, have not ended and hold no GPUs

    @property
    def at_s(self) -> Floats:
        """Return the beginning of each bin in seconds."""
        return self.bin_s * np.arange(len(self.gpus), dtype=np.float64)


def series_of(result: Result, reference: Reference, until_s: float, bin_s: float) -> Series:
    """Return the series of the run from 0 to ``until_s``."""
    return _series(result, _Log(result), reference, until_s, bin_s)


def _series(
    result: Result, log: _Log, reference: Reference, until_s: float, bin_s: float
) -> Series:
    edges = np.minimum(bin_s * np.arange(np.ceil(until_s / bin_s) + 1), until_s)
    width = np.maximum(np.diff(edges), 1e-9)
    rate = log.iterations / np.maximum(log.end_s - log.ready_s, 1e-9)
    trains = log.end_s > log.ready_s
    norm = np.where(trains, rate / reference.iterations_per_s[log.job], 0.0)
    samples = np.where(trains, rate * reference.batch[log.job], 0.0)

    def mean(start_s: Floats, end_s: Floats, height: Floats) -> Floats:
        return np.diff(_integral(edges, start_s, end_s, height)) / width

    ones = np.ones(len(result.arrival_s))
    left_s = np.minimum(result.end_s, result.ended_s)
    there = mean(result.arrival_s, np.maximum(left_s, result.arrival_s), ones)
    holding = mean(log.start_s, log.end_s, np.ones(len(log.job)))
    return Series(
        bin_s=bin_s,
        normalised=mean(log.ready_s, log.end_s, norm),
        samples_per_s=mean(log.ready_s, log.end_s, samples),
        gpus=mean(log.start_s, log.end_s, log.gpus),
        waiting=np.maximum(there - holding, 0.0),
    )


class _Log:
    """The segments of a run as arrays, one entry for each segment."""

    def __init__(self, result: Result) -> None:
        rows = result.segments
        self.job = np.array([s.job for s in rows], dtype=np.int64)
        self.start_s = np.array([s.start_s for s in rows])
        self.end_s = np.array([s.end_s for s in rows])
        self.ready_s = np.minimum(np.array([s.ready_s for s in rows]), self.end_s)
        self.gpus = np.array([float(s.cell.gpus) for s in rows])
        self.iterations = np.array([s.iterations for s in rows])
        self.lost = np.array([s.lost for s in rows])
        self.replanned = np.array([s.ended_by == DecisionKind.REPLAN for s in rows], dtype=np.bool_)


def _integral(edges: Floats, start_s: Floats, end_s: Floats, height: Floats) -> Floats:
    """Return the integral of a sum of steps up to each edge, from their rises and falls."""
    at = np.concatenate([start_s, end_s])
    step = np.concatenate([height, -height])
    order = np.argsort(at, kind="stable")
    at, step = at[order], step[order]
    level = np.cumsum(step)
    area = np.append(0.0, np.cumsum(level[:-1] * np.diff(at))) if len(at) else np.zeros(0)
    last = np.searchsorted(at, edges, side="right") - 1
    integral = np.zeros(len(edges))
    past = last >= 0
    integral[past] = area[last[past]] + level[last[past]] * (edges[past] - at[last[past]])
    return integral


def run_figures(result: Result, reference: Reference, horizon_s: float) -> dict[str, float]:
    """Return the figures that papers report, in seconds and shares.

    Throughput, utilisation and ``finished`` are over the first ``horizon_s`` seconds, even if the
    run ended sooner. All other figures are over all jobs, to the end of the run. JCT is the time
    from a job's arrival to its end, over the jobs that ended. ``queue`` counts all time without
    GPUs. ``restart_share`` and ``lost_share`` are shares of the GPU-hours held. ``replans`` is the
    mean number of a job's replans, and ``replan_share`` their part of ``restart_share``.
    ``profiling_share`` is a share of the GPU-hours held plus the GPU-hours of profiling.

    ``fairness`` is the JCT divided by the time that the job takes alone on one n-th of the cluster,
    where n is the mean number of jobs present during its life (Themis). ``fairness_worst`` is its
    95th percentile.
    """
    log = _Log(result)
    series = _series(result, log, reference, horizon_s, result.conditions.round_s)
    jct_s = result.end_s - result.arrival_s
    over = np.isfinite(jct_s) & (np.array(result.state) == "succeeded")
    held = float((log.gpus * (log.end_s - log.start_s)).sum())
    idle = float((log.gpus * (log.ready_s - log.start_s)).sum())
    lost = _lost_gpu_s(log)
    busy = series.samples_per_s[series.samples_per_s > THROUGHPUT_FLOOR]
    rho = jct_s[over] / fair_seconds(result.scenario, _present(result))[over]
    decide = np.array([row.decide_s for row in result.rounds if row.decided] or [0.0])
    return {
        "jobs": float(len(jct_s)),
        "finished": float((over & (result.end_s <= horizon_s)).sum()),
        "completed": float(over.sum()),
        "rejected": float(sum(s == "rejected" for s in result.state)),
        **_spread("jct", jct_s[over]),
        **_spread("queue", _queue_s(result, log)),
        "makespan_s": float(result.end_s[over].max(initial=0.0)),
        "throughput": float(series.normalised.mean()),
        "throughput_peak": float(series.normalised.max(initial=0.0)),
        "samples_per_s": float(series.samples_per_s.mean()),
        "samples_per_s_peak": float(series.samples_per_s.max(initial=0.0)),
        "samples_per_s_busy": float(busy.mean()) if len(busy) else 0.0,
        "utilisation": float(series.gpus.mean() / result.scenario.gpus),
        "restarts": float(result.restarts.mean()) if len(jct_s) else 0.0,
        "restart_share": idle / max(held, 1.0),
        "replans": float(log.replanned.sum()) / len(jct_s) if len(jct_s) else 0.0,
        "replan_share": _replanning_gpu_s(log) / max(held, 1.0),
        "lost_share": lost / max(held, 1.0),
        "profiling_share": result.profiling_gpu_s / max(held + result.profiling_gpu_s, 1.0),
        "fairness": float(rho.mean()) if len(rho) else float("nan"),
        "fairness_worst": float(np.quantile(rho, 0.95)) if len(rho) else float("nan"),
        **_deadlines(result, over),
        "rounds": float(len(result.rounds)),
        "refused": float(result.refused),
        "decide_s": float(decide.sum()),
        "decide_p50_s": float(np.median(decide)),
        "decide_max_s": float(decide.max()),
        "worst_gap": worst_gap(result.rounds),
    }


def worst_gap(rounds: Sequence[RoundRow]) -> float:
    """Return the largest proven gap, or NaN if no round has one.

    Published schedulers do not prove gaps.
    """
    proven = [row.gap for row in rounds if not row.bound_is_trivial]
    return max(proven, default=float("nan") if rounds else 0.0)


def _queue_s(result: Result, log: _Log) -> Floats:
    """Return the seconds that each job was present without GPUs, float64[jobs]."""
    held = np.bincount(
        log.job, weights=log.end_s - log.start_s, minlength=len(result.arrival_s)
    ).astype(np.float64)
    left_s = np.minimum(result.end_s, result.ended_s)
    return np.maximum(left_s - result.arrival_s - held, 0.0)


def _replanning_gpu_s(log: _Log) -> float:
    """Return the GPU-seconds without training of the segments that follow a replan."""
    order = np.lexsort((log.start_s, log.job))
    begins = order[1:][log.replanned[order][:-1]]  # a replan's job always has a next
    return float((log.gpus * (log.ready_s - log.start_s))[begins].sum())


def _lost_gpu_s(log: _Log) -> float:
    """Return the GPU-seconds of work that failures undid, at the speed of their segments."""
    seconds = np.maximum(log.end_s - log.ready_s, 0.0)
    some = log.iterations > 0
    return float((log.gpus * seconds * log.lost / np.where(some, log.iterations, 1.0))[some].sum())


def _present(result: Result) -> Floats:
    """Return the mean number of jobs that were present during each job's life, float64[jobs]."""
    start_s = result.arrival_s
    end_s = np.maximum(np.minimum(result.end_s, result.ended_s), start_s)
    edges = np.concatenate([start_s, end_s])
    area = _integral(edges, start_s, end_s, np.ones(len(start_s)))
    count = len(start_s)
    return (area[count:] - area[:count]) / np.maximum(end_s - start_s, 1e-9)


def _deadlines(result: Result, over: Bools) -> dict[str, float]:
    """Return the figures of jobs with a deadline. Without such jobs, return no figures."""
    due_s = np.array([one.arrival_s + one.spec.deadline_s for one in result.scenario.arrivals])
    has = np.isfinite(due_s)
    if not has.any():
        return {}
    met = over & has & (result.end_s <= due_s * (1 + 1e-12))
    admitted = has & result.admitted
    return {
        "deadlines": float(has.sum()),
        "deadlines_met": float(met.sum()),
        "satisfaction": float(met.sum() / has.sum()),
        "deadlines_admitted": float(admitted.sum()),
        "deadlines_started": float((has & np.isfinite(result.first_start_s)).sum()),
        "deadlines_missed_admitted": float((admitted & ~met).sum()),
        "deadlines_late": float((over & has & ~met).sum()),
    }


def _spread(name: str, seconds: Floats) -> dict[str, float]:
    """Return the mean, the median, and the 95th and 99th percentiles, all NaN without values."""
    keys = (f"{name}_mean_s", f"{name}_p50_s", f"{name}_p95_s", f"{name}_p99_s")
    if not len(seconds):
        return dict.fromkeys(keys, float("nan"))
    values = (seconds.mean(), *np.quantile(seconds, (0.5, 0.95, 0.99)))
    return {key: float(value) for key, value in zip(keys, values, strict=True)}
