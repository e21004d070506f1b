"""Morphling's artifact: its measured iteration times and traces, in the columns of our data set."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.records.jobs import JobSpec
from tessera.formulation.values import Cell, EstimateSource, Workload
from tessera.simulator.traces.csvfile import NAME, CsvRow, Mistakes, decode_file, parse_rows
from tessera.simulator.traces.profiles import MAX_COUNT, MAX_ITERATION_S
from tessera.simulator.traces.trace import MAX_ITERATIONS, MAX_TIME_S, PLAN_LABEL, Arrival

GPU_TYPE: Final = "a800"
MODELS: Final[Mapping[str, tuple[str, int]]] = {
    "vit": ("86M", 64),
    "roberta": ("355M", 64),
    "bert": ("336M", 32),
    "t5": ("1.2B", 16),
    "gpt2": ("1.5B", 16),
    "llama7": ("7B", 8),
    "llama30": ("30B", 4),
    "llama7b_bsz16": ("7B", 16),
    "t5_3B": ("3B", 4),
}
"""Size (Morphling, Table 1 and Figures 7 and 8) and global batch (its artifact) of each model."""

MEASURED: Final = (
    "model",
    "exec_plan_raw",
    "pp",
    "placement",
    "num_nodes",
    "num_gpus",
    "global_batch",
    "feasible",
    "iter_time_s",
)
_MEASURED_REST: Final = (
    "plan_family",
    "tp",
    "dp",
    "placement_gpus_per_node",
    "cpu_threads_per_gpu",
    "samples_per_s",
    "forward_ms",
    "overlap_sync_ms",
    "optimize_ms",
    "breakdown_share",
    "breakdown_unit_in_source",
    "source",
    "source_line",
    "note",
)
WORKLOAD: Final = (
    "job_id",
    "submit_s",
    "model",
    "num_gpus",
    "exec_plan_raw",
    "steps",
    "guaranteed",
)
_WORKLOAD_REST: Final = (
    "duration_s",
    "num_cpus",
    "bandwidth_raw",
    "plan_family",
    "pp",
    "tp",
    "dp",
)


def read_measured(path: Path) -> list[EstimateRecord]:
    """Read measurements.

    Raises:
        InvalidInput: the first 20 mistakes of the file.
        OSError: the file cannot be read.
    """
    return parse_measured(path.read_bytes(), path.name)


def read_workload(path: Path) -> list[Arrival]:
    """Read a trace.

    Raises:
        InvalidInput: the first 20 mistakes of the file.
        OSError: the file cannot be read.
    """
    return parse_workload(path.read_bytes(), path.name)


class _MeasuredPlacement(NamedTuple):
    evenness: int  # GPUs on the fullest node; smaller is more even
    iter_time_s: float
    record: EstimateRecord


def parse_measured(data: bytes, file: str) -> list[EstimateRecord]:
    """Return one estimate for each model, plan, pipeline degree, and number of GPUs and nodes.

    If several placements agree in these (4+4, 3+5 and 2+6 GPUs on two nodes), the most even one is
    taken, because our gangs are spread evenly over nodes. Uneven ones take up to 6 times as long
    (ViT). If a placement was measured with several numbers of CPU threads, the fastest is taken. The
    time of a configuration that did not run is inf.

    Raises:
        InvalidInput: the first 20 mistakes, one on each line.
    """
    mistakes = Mistakes(file)
    best: dict[tuple[Workload, Cell], _MeasuredPlacement] = {}
    for row in parse_rows(decode_file(data, file), mistakes, MEASURED, _MEASURED_REST):
        placement = row.get("placement")
        if not (placement.isascii() and placement.isdigit()):
            row.wrong("placement", "must have one digit for each node, its number of GPUs")
        record = _estimate(row, file)
        if not row.ok:
            continue
        measured = _MeasuredPlacement(max(map(int, placement)), record.iter_time_s, record)
        key = record.workload, record.cell
        if key not in best or measured[:2] < best[key][:2]:
            best[key] = measured
    mistakes.check()
    return [measured.record for measured in best.values()]


def parse_workload(data: bytes, file: str) -> list[Arrival]:
    """Return the jobs by arrival, counted from 0.

    The execution plan that a job was submitted with is a label.

    Raises:
        InvalidInput: the first 20 mistakes, one on each line.
    """
    mistakes = Mistakes(file)
    arrivals: list[Arrival] = []
    lines: dict[str, int] = {}
    for row in parse_rows(decode_file(data, file), mistakes, WORKLOAD, _WORKLOAD_REST):
        model = row.choice("model", tuple(MODELS))
        params, batch = MODELS[model]
        submit_s = row.decimal("submit_s", -MAX_TIME_S, MAX_TIME_S)
        spec = JobSpec(
            name=row.name("job_id"),
            workload=Workload(model=model, params=params, global_batch=batch),
            iterations=row.whole("steps", 1, MAX_ITERATIONS),
            requested_gpus=row.whole("num_gpus", 1, 100_000),
            requested_type=GPU_TYPE,
            guaranteed=row.choice("guaranteed", ("0", "1")) == "1",
            labels={PLAN_LABEL: _plan(row)},
        )
        if row.ok and spec.name in lines:
            row.wrong("job_id", f"must be unique; line {lines[spec.name]} has the same")
        if row.ok:
            lines[spec.name] = row.line
            arrivals.append(Arrival(submit_s, spec))
    mistakes.check()
    first_s = min((a.arrival_s for a in arrivals), default=0.0)
    moved = [Arrival(a.arrival_s - first_s, a.spec) for a in arrivals]
    return sorted(moved, key=lambda a: a.arrival_s)


def _estimate(row: CsvRow, file: str) -> EstimateRecord:
    iter_time_s = math.inf
    if row.choice("feasible", ("0", "1")) == "1":
        iter_time_s = row.decimal("iter_time_s", 0.0, MAX_ITERATION_S, above=True)
    model = row.choice("model", tuple(MODELS))
    return EstimateRecord(
        workload=Workload(
            model=model,
            params=MODELS[model][0],
            global_batch=row.whole("global_batch", 1, MAX_COUNT),
        ),
        cell=Cell(
            gpu_type=GPU_TYPE,
            gpus=row.whole("num_gpus", 1, 100_000),
            nodes=row.whole("num_nodes", 1, 100_000),
            pipeline_degree=row.whole("pp", 1, MAX_COUNT),
            plan=_plan(row),
        ),
        iter_time_s=iter_time_s,
        source=EstimateSource.MEASURED,
        provenance=file,
    )


def _plan(row: CsvRow) -> str:
    """Return the artifact's code of an execution plan as a name, e.g. ``zero-offload-gc`` for
    ``zero-offload+gc``."""
    plan = row.get("exec_plan_raw").replace("+", "-")
    if not NAME.fullmatch(plan):
        row.wrong("exec_plan_raw", "must be a plan's code, e.g. 248, ga or zero-offload+gc")
    return plan
