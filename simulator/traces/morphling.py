"""Morphling's artifact: its measured iteration times and traces, in the columns of our data set."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from tessera.estimator.files.userfiles import read_bytes, to_text
from tessera.formulation.base.values import Cell, EstimateSource, Workload
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.records.jobs import JobSpec
from tessera.simulator.traces.csvfile import NAME, CsvRow, Mistakes, parse_rows
from tessera.simulator.traces.profiles import MAX_COUNT, MAX_ITERATION_S
from tessera.simulator.traces.redraw import parameter_count
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
RESOURCES: Final = ("model", "plan", "cpu_per_gpu", "mem_per_gpu")
_RESOURCES_REST: Final = ("storage_bw_per_gpu",)
OFFLOADED_BYTES: Final = 16
"""Bytes of host memory for each parameter with ZeRO-Offload: the gradient, the parameter, the
momentum and the variance in 32 bits. DeepSpeed's estimator of ZeRO-2 takes the same number."""
MAX_PER_GPU: Final = 10_000
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResources:
    """The CPU cores and bytes of host memory that plans need for each GPU, as the artifact states.

    ``of_plan`` is by model and plan. The artifact states nothing of some plans that it measured.
    They need as much as the neediest other model does by the same plan.
    """

    of_plan: Mapping[tuple[str, str], tuple[int, int]]

    def needs(self, model: str, plan: str) -> tuple[int, int]:
        """Return the needs for each GPU of ``model`` by the plan of the artifact's code ``plan``."""
        name = "3D" if _is_3d(plan) or plan == "tp-ga" else plan.removesuffix("-gc")
        if (model, name) in self.of_plan:
            return self.of_plan[model, name]
        others = [needs for (_, other), needs in self.of_plan.items() if other == name]
        return max((n for n, _ in others), default=0), max((n for _, n in others), default=0)


NO_RESOURCES: Final = PlanResources(of_plan={})


def read_resources(path: Path) -> PlanResources:
    """Read the resources that plans need.

    Raises:
        InvalidInput: the file cannot be read, or its first 20 mistakes.
    """
    mistakes = Mistakes(path.name)
    of_plan: dict[tuple[str, str], tuple[int, int]] = {}
    text = to_text(path.name, read_bytes(path))
    for row in parse_rows(text, mistakes, RESOURCES, _RESOURCES_REST):
        key = row.choice("model", tuple(MODELS)), row.name("plan")
        gigabytes = row.decimal("mem_per_gpu", 0.0, MAX_PER_GPU)
        of_plan[key] = row.whole("cpu_per_gpu", 0, MAX_PER_GPU), round(gigabytes * 1e9)
    mistakes.check()
    return PlanResources(of_plan=of_plan)


def read_measured(path: Path, resources: PlanResources = NO_RESOURCES) -> list[EstimateRecord]:
    """Read measurements.

    Raises:
        InvalidInput: the file cannot be read, or its first 20 mistakes.
    """
    return parse_measured(read_bytes(path), path.name, resources)


def read_workload(path: Path) -> list[Arrival]:
    """Read a trace.

    Raises:
        InvalidInput: the file cannot be read, or its first 20 mistakes.
    """
    return parse_workload(read_bytes(path), path.name)


class _MeasuredPlacement(NamedTuple):
    evenness: int  # GPUs on the fullest node; smaller is more even
    iter_time_s: float
    record: EstimateRecord


def parse_measured(
    data: bytes, file: str, resources: PlanResources = NO_RESOURCES
) -> list[EstimateRecord]:
    """Return one estimate for each model, plan, pipeline degree, and number of GPUs and nodes.

    If several placements agree in these (4+4, 3+5 and 2+6 GPUs on two nodes), the most even one is
    taken, because our gangs are spread evenly over nodes. Uneven ones take up to 6 times as long
    (ViT). If a placement was measured with several numbers of CPU threads, the fastest is taken.
    With ZeRO-Offload, each known number is a plan of its own instead, e.g.
    ``zero-offload-gc-cpu4``.

    A plan needs the CPUs and host memory of ``resources``. Known threads replace these CPUs. With
    ZeRO-Offload, host memory is at least that of the parameters' states (``OFFLOADED_BYTES``). The
    time of a configuration that did not run is inf.

    Raises:
        InvalidInput: the first 20 mistakes, one on each line.
    """
    mistakes = Mistakes(file)
    best: dict[tuple[Workload, Cell], _MeasuredPlacement] = {}
    for row in parse_rows(to_text(file, data), mistakes, MEASURED, _MEASURED_REST):
        placement = row.get("placement")
        if not (placement.isascii() and placement.isdigit()):
            row.wrong("placement", "must have one digit for each node, its number of GPUs")
        record = _estimate(row, file, resources)
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

    The execution plan that a job was submitted with is recorded. It is a label, too.

    Raises:
        InvalidInput: the first 20 mistakes, one on each line.
    """
    mistakes = Mistakes(file)
    arrivals: list[Arrival] = []
    lines: dict[str, int] = {}
    for row in parse_rows(to_text(file, data), mistakes, WORKLOAD, _WORKLOAD_REST):
        model = row.choice("model", tuple(MODELS))
        params, batch = MODELS[model]
        submit_s = row.decimal("submit_s", -MAX_TIME_S, MAX_TIME_S)
        spec = JobSpec(
            name=row.name("job_id"),
            workload=Workload(model=model, params=params, global_batch=batch),
            iterations=row.whole("steps", 1, MAX_ITERATIONS),
            requested_gpus=row.whole("num_gpus", 1, 100_000),
            requested_cpus=row.whole("num_cpus", 0, MAX_COUNT, default=0),
            requested_gpu_type=GPU_TYPE,
            submitted_plan=_plan(row),
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


def _estimate(row: CsvRow, file: str, resources: PlanResources) -> EstimateRecord:
    iter_time_s = math.inf
    if row.choice("feasible", ("0", "1")) == "1":
        iter_time_s = row.decimal("iter_time_s", 0.0, MAX_ITERATION_S, above=True)
    model, plan = row.choice("model", tuple(MODELS)), _plan(row)
    gpus, threads = (
        row.whole("num_gpus", 1, 100_000),
        row.whole("cpu_threads_per_gpu", 0, 10_000, 0),
    )
    cores, bytes_per_gpu = resources.needs(model, plan)
    host_bytes, offloads = bytes_per_gpu * gpus, plan.startswith(_OFFLOAD)
    if offloads and resources.of_plan:
        host_bytes = max(host_bytes, round(OFFLOADED_BYTES * parameter_count(MODELS[model][0])))
    return EstimateRecord(
        workload=Workload(
            model=model,
            params=MODELS[model][0],
            global_batch=row.whole("global_batch", 1, MAX_COUNT),
        ),
        cell=Cell(
            gpu_type=GPU_TYPE,
            gpus=gpus,
            nodes=row.whole("num_nodes", 1, 100_000),
            pipeline_degree=row.whole("pp", 1, MAX_COUNT),
            plan=f"{plan}-cpu{threads}" if offloads and threads else plan,
        ),
        iter_time_s=iter_time_s,
        source=EstimateSource.MEASURED,
        provenance=file,
        plan_kind=f"3d-pp{plan[0]}-tp{plan[1]}" if _is_3d(plan) else "",
        cpus=(threads or cores) * gpus,
        host_bytes=host_bytes,
    )


_OFFLOAD: Final = "zero-offload"


def _is_3d(plan: str) -> bool:
    """Return whether a plan's code is that of 3D parallelism: its pipeline, tensor, data degrees."""
    return len(plan) == 3 and plan.isdigit()


def _plan(row: CsvRow) -> str:
    """Return the artifact's code of an execution plan as a name, e.g. ``zero-offload-gc`` for
    ``zero-offload+gc``."""
    plan = row.get("exec_plan_raw").replace("+", "-")
    if not NAME.fullmatch(plan):
        row.wrong("exec_plan_raw", "must be a plan's code, e.g. 248, ga or zero-offload+gc")
    return plan
