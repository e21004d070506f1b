"""Profiles, i.e. measured or estimated iteration times, from a CSV file (format: docs/traces.md)."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from tessera.estimator.files.userfiles import read_bytes, to_text
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.resources import HOST_NAMES, HOST_RESOURCES, name_amounts
from tessera.formulation.base.values import (
    BEST_FOUND,
    ESTIMATE_SOURCES,
    Cell,
    EstimateSource,
    Workload,
)
from tessera.formulation.job.execution_plan import check_fits, read_execution_plan
from tessera.formulation.records.estimates import EstimateRecord
from tessera.simulator.traces.csvfile import CsvRow, Mistakes, parse_rows

REQUIRED = (
    "model",
    "params",
    "global_batch",
    "gpu_type",
    "num_nodes",
    "gpus_per_node",
    "iter_time_s",
    "status",
)
OPTIONAL = (
    "pipeline_degree",
    "plan",
    "source",
    "provenance",
    "complete",
    *HOST_NAMES,
    "execution_plan",
)
FAILED = ("failed", "oom", "infeasible")
MAX_COUNT = 2**31 - 1
MAX_ITERATION_S = 1e6


def read_profiles(path: Path, *, complete: bool = False) -> list[EstimateRecord]:
    """Read a file. With ``complete``, all its profiles are.

    Raises:
        InvalidInput: the file cannot be read, or its first 20 mistakes.
    """
    return mark_complete(parse_profiles(read_bytes(path), path.name), complete)


def mark_complete(records: list[EstimateRecord], complete: bool) -> list[EstimateRecord]:
    """Return ``records``; if ``complete``, they have all shapes on which their workloads run."""
    return [replace(record, complete=True) for record in records] if complete else records


def parse_profiles(data: bytes, file: str) -> list[EstimateRecord]:
    """Return the estimates in the order of the file. If a row failed, its ``iter_time_s`` is inf.

    ``file`` names the data in messages. It is also the provenance of rows that state none.

    Raises:
        InvalidInput: the first 20 mistakes, one on each line.
    """
    mistakes = Mistakes(file)
    records: list[EstimateRecord] = []
    lines: dict[tuple[Workload, Cell], int] = {}
    for row in parse_rows(to_text(file, data), mistakes, REQUIRED, OPTIONAL):
        record = _record(row, file)
        if not row.ok:
            continue
        key = record.workload, record.cell
        if key in lines:
            row.wrong("", f"must not repeat the configuration of line {lines[key]}")
        lines.setdefault(key, row.line)
        records.append(record)
    mistakes.check()
    return records


def _record(row: CsvRow, file: str) -> EstimateRecord:
    status = row.choice("status", ("ok", *FAILED))
    if status == "ok":
        iter_time_s = row.decimal("iter_time_s", 0.0, MAX_ITERATION_S, above=True)
    else:
        iter_time_s = math.inf
        if row.get("iter_time_s"):
            row.wrong("iter_time_s", f"must be empty where status is {status}")
    nodes = row.whole("num_nodes", 1, 100_000)
    gpus = nodes * row.whole("gpus_per_node", 1, 64)
    degree = row.whole("pipeline_degree", BEST_FOUND, MAX_COUNT, default=BEST_FOUND)
    if row.ok and degree > gpus:
        row.wrong("pipeline_degree", f"must be at most the number of GPUs, {gpus}")
    names = [source.name.lower() for source in ESTIMATE_SOURCES]
    source = EstimateSource[row.choice("source", names, default="measured").upper()]
    record = EstimateRecord(
        workload=Workload(
            model=row.name("model"),
            params=row.name("params"),
            global_batch=row.whole("global_batch", 1, MAX_COUNT),
        ),
        cell=Cell(
            gpu_type=row.gpu_type("gpu_type"),
            gpus=gpus,
            nodes=nodes,
            pipeline_degree=degree,
            plan=row.name("plan", optional=True),
        ),
        iter_time_s=iter_time_s,
        source=source,
        provenance=row.text("provenance", 200) or file,
        complete=row.choice("complete", ("true", "false"), default="false") == "true",
        **name_amounts(row.whole(r.name, 0, r.max_needed, default=0) for r in HOST_RESOURCES),
    )
    return _add_plan(row, record) if row.ok and row.get("execution_plan") else record


def _add_plan(row: CsvRow, record: EstimateRecord) -> EstimateRecord:
    """Return the record with the execution plan of its row, which must be for its workload and GPUs."""
    column = "execution_plan"
    try:
        plan = read_execution_plan(column, row.get(column))
        check_fits(plan, column, record.workload, record.cell.gpus)
    except InvalidInput as error:
        row.wrong(column, error.problem if error.field == column else str(error))
        return record
    for name, text, of_plan in (
        ("plan", record.cell.plan, plan.digest),
        ("pipeline_degree", record.cell.pipeline_degree, plan.pipeline_degree),
    ):
        if text not in ("", BEST_FOUND, of_plan):
            row.wrong(name, f"must be {of_plan}, as in the execution plan, or empty")
    return record.with_plan(plan) if row.ok else record
