"""The accuracy of predicted memory, for pure data parallelism and for plans that Alpa chose.

Data: ``arena/dp_memory.csv`` (peak memory per GPU by data-parallel degree) and
``arena/history/alpa_search.csv`` (peak memory of the fullest GPU under a plan of stages, degrees
and coarse layers). The model is :mod:`tessera.estimator.memory` with ZeRO 1 (Alpa divides optimizer
states among replicas), 1F1B and 16 micro-batches. Graphs are those of
:mod:`tessera.estimator.architectures`, merged to the plan's number of coarse layers.

**Ground truth.** Memory is judged on all measured rows. For running out of memory, measured rows
count as fitting and rows without a measurement as not fitting. Three kinds of ``infeasible`` rows
in ``dp_memory.csv`` are left out:

* *untried*: no degree, batch or plan of that model and size was measured, so it may never have been
  tried;
* *above a fit*: a smaller degree of the same model, size and batch fits, and memory falls with the
  degree;
* *ran elsewhere*: the degree is 1, and in ``alpa_search.csv`` the job runs on one GPU.

A plan of ``alpa_search.csv`` that did not run counts as out of memory, although the file gives no
reason. ``oom_accuracy_all_rows`` counts every row of both files. ``oom_accuracy_with_elsewhere``
also counts the third kind.

**Limit.** XLA was given 0.8 of the memory that the device shows. With error correction on, the
device shows 15/16 of its GDDR6.

**Calibration.** XLA holds a number of copies of a layer's activations, of a stage's activations and
of gradients (:class:`tessera.estimator.memory.MemoryCopies`). These numbers are fitted for each model
family and granularity of layers: *coarse* (fewer than 16), *fine* (16, the artifact's default), and
*inside* (more than the model has blocks, so that cuts run through blocks). For each seed, a third
of the (model, size, batch) calibrates and the rest is judged. A group without enough calibration
rows has the defaults. The constants see calibration rows alone. That there are these three
constants, the granularities and the third kind of rows above were settled with all rows in view. If
the replicas of a stage with ``free`` sharding do not fit whole, the stage is predicted with divided
weights (ZeRO 3), which Alpa may choose there.

The baselines are 16 bytes per parameter, and the artifact's gate: 1.2 x memory under data
parallelism over all GPUs must not exceed 0.8 of the GPU's memory. The gate is judged on the rows of
``alpa_search.csv`` for which its input is known.
"""

from __future__ import annotations

import csv
import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np

from tessera.benchmarks.estimator.section import EstimatorSection
from tessera.estimator.architectures.published import find_published
from tessera.estimator.cells import Runtime, Setting
from tessera.estimator.graph import Graph, merge_layers
from tessera.estimator.hardware import A10, A40, GIB, Hardware
from tessera.estimator.memory import FUSED, States, in_flight
from tessera.estimator.plans import Candidates, Groups, Primitive, Shape, Training
from tessera.estimator.rooflines import RooflineCompute
from tessera.formulation.base.tables import Bools, Floats
from tessera.formulation.job.execution_plan import Schedule
from tessera.simulator.figures import Figure

CALIBRATION_SHARE: Final = 1 / 3
ECC_MEMORY_SHARE: Final = 15 / 16
"""The share of GDDR6 left by error correction. The artifact's A40 shows 45,487 MiB of 48 GiB."""
LIMIT_GIB: Final = {h.name: 0.8 * ECC_MEMORY_SHARE * h.memory_bytes / GIB for h in (A40, A10)}
FINE_LAYERS: Final = 16
SHARDED_STATES: Final = (States(zero=1), States(zero=3))
UNITS: Final = (
    replace(FUSED, layer=0.0, gradients=0.0),
    replace(FUSED, layer=1.0, gradients=0.0),
    replace(FUSED, layer=0.0, stage=1.0, gradients=0.0),
    replace(FUSED, layer=0.0, gradients=1.0),
)
DEFAULT_COPIES: Final = np.array([FUSED.layer, FUSED.stage, FUSED.gradients])
MIN_FIT_ROWS: Final = 4
"""The least number of rows from which the three constants are fitted."""

UNTRIED: Final = "untried"
ABOVE: Final = "above a fit"
ELSEWHERE: Final = "ran elsewhere"

Job: TypeAlias = tuple[str, str, int]  # model, size, batch
Group: TypeAlias = tuple[str, str]  # family, granularity


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TriedPlan:
    """A plan that was tried, with the memory of its stages.

    ``parts`` are GiB of each stage, shape (2, S, 4), first by ZeRO 1 and then by ZeRO 3. The first
    of the four is the memory without any copies. The others are one copy of each kind.
    """

    source: str
    job: Job
    hardware: Hardware
    gpus: int
    group: Group
    parts: Floats
    free: Bools  # (S,)
    parameters_gib: float  # 16 bytes each, of the fullest stage
    measured_gib: float | None
    left_out: str = ""

    @property
    def limit_gib(self) -> float:
        """Return the memory of a GPU that a plan may use."""
        return LIMIT_GIB[self.hardware.name]

    def stage(self, copies: Floats) -> Floats:
        """Return the parts of the fullest stage, shape (4,); ``copies`` has shape (3,)."""
        whole, divided = self.parts[:, :, 0] + self.parts[:, :, 1:] @ copies
        splits = self.free & (whole > self.limit_gib)
        fullest = int(np.where(splits, divided, whole).argmax())
        return np.asarray(self.parts[int(splits[fullest]), fullest])

    def predicted_gib(self, copies: Floats) -> float:
        """Return the memory of the fullest stage."""
        parts = self.stage(copies)
        return float(parts[0] + parts[1:] @ copies)


class _NoNetwork:
    """A network with collectives that take no time, since memory does not depend on their speed."""

    def seconds(self, primitive: Primitive, payload_bytes: Floats, groups: Groups) -> Floats:
        return np.zeros(len(payload_bytes))


def run_memory_section(data: Path, seeds: Sequence[int]) -> EstimatorSection:
    """Return the figures and rows of the protocol. ``data`` is the folder of ``dp_memory.csv``."""
    searched = _searched(data / "history" / "alpa_search.csv")
    parallel = _data_parallel(data / "dp_memory.csv", searched)
    runs = [*parallel, *searched]
    trials = [_judged(runs, seed) for seed in seeds]
    tests = [(run, gib) for trial in trials for run, gib in trial]
    figures: dict[str, Figure] = {
        "memory_mape": _mape(tests),
        "memory_median_error": float(np.median(_errors(tests))),
        "memory_rows": sum(r.measured_gib is not None for r in runs),
        "memory_mape_uncalibrated": _mape([(r, r.predicted_gib(DEFAULT_COPIES)) for r in runs]),
        "memory_mape_parameters": _mape([(r, r.parameters_gib) for r in runs]),
        "oom_accuracy": _accuracy(tests),
        "oom_accuracy_all_rows": _accuracy(tests, kinds=(UNTRIED, ABOVE, ELSEWHERE)),
        "oom_accuracy_with_elsewhere": _accuracy(tests, kinds=(ELSEWHERE,)),
        "oom_accuracy_uncalibrated": _accuracy(
            [(r, r.predicted_gib(DEFAULT_COPIES)) for r in runs]
        ),
        "oom_accuracy_parameters": _accuracy([(r, r.parameters_gib) for r in runs]),
        **_confusion(tests, len(seeds)),
        **_gate(data / "dp_memory.csv", searched, tests),
        "oom_rows": sum(not r.left_out for r in runs),
    }
    for reason, count in sorted(Counter(r.left_out for r in runs if r.left_out).items()):
        figures[f"left_out_{reason.replace(' ', '_')}"] = count
    return EstimatorSection(figures=figures, rows=_rows(runs, tests))


def _judged(runs: Sequence[TriedPlan], seed: int) -> list[tuple[TriedPlan, float]]:
    """Return the runs of jobs outside the calibration, with predictions."""
    jobs = sorted({run.job for run in runs})
    drawn = np.random.default_rng(seed).permutation(len(jobs))
    calibrating = {jobs[i] for i in drawn[: round(CALIBRATION_SHARE * len(jobs))]}
    groups: dict[Group, list[TriedPlan]] = defaultdict(list)
    for run in runs:
        if run.job in calibrating and run.measured_gib is not None:
            groups[run.group].append(run)
    copies = {
        g: fit_copies(members) for g, members in groups.items() if len(members) >= MIN_FIT_ROWS
    }
    return [
        (run, run.predicted_gib(copies.get(run.group, DEFAULT_COPIES)))
        for run in runs
        if run.job not in calibrating
    ]


def fit_copies(runs: Sequence[TriedPlan], rounds: int = 8) -> Floats:
    """Return the nonnegative copies of least mean relative error, shape (3,).

    The fullest stage depends on the copies. Fitting and choosing stages therefore alternate, and
    each fit moves the copies half of the way.
    """
    copies = DEFAULT_COPIES.copy()
    measured = np.array([run.measured_gib for run in runs], dtype=np.float64)
    for _ in range(rounds):
        parts = np.stack([run.stage(copies) for run in runs]) / measured[:, None]
        copies = (copies + _least_absolute(parts[:, 1:], 1.0 - parts[:, 0])) / 2
    return copies


def _least_absolute(columns: Floats, target: Floats, rounds: int = 20) -> Floats:
    """Return x >= 0, shape (C,), that about minimizes the sum of abs(columns x - target).

    This is iteratively reweighted least squares. The weight of a row is 1 over its error, where an
    error below 2 % counts as 2 %.
    """
    weight = np.ones(len(target))
    result = np.zeros(columns.shape[1])
    for _ in range(rounds):
        result = _least_squares(columns * weight[:, None], target * weight)
        weight = 1 / np.sqrt(np.maximum(np.abs(columns @ result - target), 0.02))
    return result


def _least_squares(columns: Floats, target: Floats) -> Floats:
    """Return x >= 0 of least squares by trying the sets of positive entries, which are few."""
    count = columns.shape[1]
    best, least = np.zeros(count), float(target @ target)
    for size in range(1, count + 1):
        for chosen in itertools.combinations(range(count), size):
            x, *_ = np.linalg.lstsq(columns[:, chosen], target, rcond=None)
            error = columns[:, chosen] @ x - target
            if (x >= 0).all() and float(error @ error) < least:
                best, least = np.zeros(count), float(error @ error)
                best[list(chosen)] = x
    return best


def _errors(predictions: Sequence[tuple[TriedPlan, float]]) -> Floats:
    """Return the relative errors of the measured runs."""
    pairs = [(run.measured_gib, gib) for run, gib in predictions if run.measured_gib is not None]
    measured, predicted = np.array(pairs).T
    return np.asarray(np.abs(predicted / measured - 1), dtype=np.float64)


def _mape(predictions: Sequence[tuple[TriedPlan, float]]) -> float:
    return float(_errors(predictions).mean())


def _accuracy(
    predictions: Sequence[tuple[TriedPlan, float]], *, kinds: Sequence[str] = ()
) -> float:
    """Return the share of runs correctly predicted to fit or not. ``kinds`` are not left out."""
    right = [
        (gib > run.limit_gib) == (run.measured_gib is None)
        for run, gib in predictions
        if not run.left_out or run.left_out in kinds
    ]
    return float(np.mean(right))


def _confusion(predictions: Sequence[tuple[TriedPlan, float]], seeds: int) -> dict[str, Figure]:
    """Return the numbers of wrongly predicted runs per seed, in each direction."""
    kept = [(run, gib > run.limit_gib) for run, gib in predictions if not run.left_out]
    missed = sum(run.measured_gib is None and not out for run, out in kept)
    refused = sum(run.measured_gib is not None and out for run, out in kept)
    return {
        "oom_missed_rows": missed / seeds,
        "oom_refused_rows": refused / seeds,
        "oom_judged_rows": len(kept) / seeds,
    }


def _gate(
    path: Path, searched: Sequence[TriedPlan], tests: Sequence[tuple[TriedPlan, float]]
) -> dict[str, Figure]:
    """Return the accuracy of the artifact's gate on searched plans, and ours on the same runs."""
    known = {
        (row["model"], row["params"], int(row["global_batch"]), int(row["dp_degree"])): (
            float(row["mem_per_gpu_gib"] or np.inf)
        )
        for row in _lines(path)
    }
    asked = [r for r in searched if (*r.job, r.gpus) in known]
    right = [
        (1.2 * known[*r.job, r.gpus] > 0.8 * r.hardware.memory_bytes / GIB)
        == (r.measured_gib is None)
        for r in asked
    ]
    same = {id(run) for run in asked}
    return {
        "oom_accuracy_gate": float(np.mean(right)),
        "oom_gate_rows": len(asked),
        "oom_accuracy_on_gate_rows": _accuracy([(r, g) for r, g in tests if id(r) in same]),
    }


def _rows(
    runs: Sequence[TriedPlan], tests: Sequence[tuple[TriedPlan, float]]
) -> list[dict[str, Figure | str]]:
    """Return the errors by source and group, with the copies fitted to all rows of the group."""
    groups: dict[tuple[str, Group], list[tuple[TriedPlan, float]]] = defaultdict(list)
    for run, gib in tests:
        groups[run.source, run.group].append((run, gib))
    result: list[dict[str, Figure | str]] = []
    for (source, group), predictions in sorted(groups.items()):
        members = [r for r in runs if r.group == group]
        measured = [r for r in members if r.measured_gib is not None]
        copies = fit_copies(measured)
        of_source = [r for r in members if r.source == source]
        result.append(
            {
                "section": "memory",
                "source": source,
                "model": group[0],
                "layers": group[1],
                "rows": sum(r.measured_gib is not None for r in of_source),
                "mape": _mape(predictions),
                "mape_uncalibrated": _mape(
                    [(r, r.predicted_gib(DEFAULT_COPIES)) for r in of_source]
                ),
                "copies_layer": float(copies[0]),
                "copies_stage": float(copies[1]),
                "copies_gradients": float(copies[2]),
            }
        )
    return result


def _lines(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _data_parallel(path: Path, searched: Sequence[TriedPlan]) -> list[TriedPlan]:
    """Return a run for each row, with the reason why it is left out, if any.

    The GPU type must be the A40: at degree 1, memory is the same as that of the same plan on an A40
    in the other file.
    """
    lines = _lines(path)
    tried = {(r["model"], r["params"]) for r in lines if r["status"] == "ok"}
    ran = {r.job for r in searched if r.gpus == 1 and r.measured_gib is not None}
    fits: dict[Job, int] = {}
    for r in lines:
        if r["status"] == "ok":
            degree, job = int(r["dp_degree"]), _job(r)
            fits[job] = min(degree, fits.get(job, degree))
    result = []
    for r in lines:
        degree, job = int(r["dp_degree"]), _job(r)
        reason = ""
        if r["status"] != "ok":
            if (r["model"], r["params"]) not in tried:
                reason = UNTRIED
            elif degree > fits.get(job, degree):
                reason = ABOVE
            elif degree == 1 and job in ran:
                reason = ELSEWHERE
        plan = StagePlan(layers=((0, FINE_LAYERS),), degrees=((degree, 1),), free=(False,))
        measured = float(r["mem_per_gpu_gib"]) if r["status"] == "ok" else None
        result.append(_run("dp_memory", job, A40, plan, measured, reason))
    return result


def _searched(path: Path) -> list[TriedPlan]:
    by_name = {"a40": A40, "a10": A10}
    return [
        _run(
            "alpa_search",
            _job(r),
            by_name[r["gpu_type"]],
            StagePlan(
                layers=tuple(_layers(text) for text in r["stage_layers"].split("|")),
                degrees=tuple(_degrees(text) for text in r["stage_logical_shapes"].split("|")),
                free=tuple(text == "free" for text in r["stage_sharding"].split("|")),
            ),
            float(r["mem_per_gpu_gib"]) if r["mem_per_gpu_gib"] else None,
        )
        for r in _lines(path)
    ]


def _job(row: dict[str, str]) -> Job:
    return row["model"], row["params"], int(row["global_batch"])


def _layers(text: str) -> tuple[int, int]:
    first, last = text.split("-")
    return int(first), int(last) + 1


def _degrees(text: str) -> tuple[int, int]:
    data, tensor = text.split("x")
    return int(data), int(tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """A plan's stages in order.

    They are given by coarse layers (start, end), degrees (data, tensor), and whether sharding was
    free.
    """

    layers: tuple[tuple[int, int], ...]
    degrees: tuple[tuple[int, int], ...]
    free: tuple[bool, ...]


def _run(
    source: str,
    job: Job,
    hardware: Hardware,
    plan: StagePlan,
    measured: float | None,
    reason: str = "",
) -> TriedPlan:
    model, params, batch = job
    published = find_published(model, params)
    count = plan.layers[-1][1]
    graph = merge_layers(published.graph, count)
    stages = _candidates(plan, len(graph), divides_experts=bool(graph.expert_weights.any()))
    inside = (
        count > len(published.graph) - 2
    )  # all layers are blocks, except the head and the embedding or stem
    granularity = "inside" if inside else "fine" if count >= FINE_LAYERS else "coarse"
    return TriedPlan(
        source=source,
        job=job,
        hardware=hardware,
        gpus=sum(d * t for d, t in plan.degrees),
        group=(model, granularity),
        parts=_parts(graph, published.at(batch), stages),
        free=np.array(plan.free),
        parameters_gib=_parameters_gib(graph, stages),
        measured_gib=measured,
        left_out=reason,
    )


def _candidates(plan: StagePlan, layers: int, *, divides_experts: bool) -> Candidates:
    """Return the stages. A plan's tensor parts divide experts if there are any."""
    start, end = np.minimum(np.array(plan.layers, dtype=np.int64), layers).T
    data, tensor = np.array(plan.degrees, dtype=np.int64).T
    return Candidates(
        start=start,
        end=end,
        dp=data,
        tp=tensor,
        ep=tensor if divides_experts else np.ones_like(tensor),
        sp=np.zeros(len(start), dtype=bool),
    )


def _parts(graph: Graph, training: Training, stages: Candidates) -> Floats:
    """Return the GiB of stages in the form of :attr:`Run.parts`, shape (2, S, 4)."""
    flights = in_flight(Schedule.ONE_F_ONE_B, len(stages), training.micro_batches)
    result = np.zeros((len(SHARDED_STATES), len(stages), len(UNITS)))
    for i, states in enumerate(SHARDED_STATES):
        for j, copies in enumerate(UNITS):
            setting = Setting(
                graph=graph,
                training=training,
                hardware=A40,
                shape=Shape(nodes=1, gpus_per_node=1),
                compute=RooflineCompute(hardware=A40),
                network=_NoNetwork(),
                runtime=Runtime(states=states, copies=copies),
            )
            costs = setting.costs(stages)
            whole = costs.state_bytes + flights * costs.flight_bytes + costs.working_bytes
            result[i, :, j] = whole / GIB - (result[i, :, 0] if j else 0.0)
    return result


def _parameters_gib(graph: Graph, stages: Candidates) -> float:
    parameters = graph.weights + graph.expert_weights + graph.shared_weights
    total = np.concatenate([[0.0], np.cumsum(parameters)])
    return float((16 * (total[stages.end] - total[stages.start]) / stages.tp).max() / GIB)
