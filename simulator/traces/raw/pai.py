"""Alibaba's PAI trace of 2020 (Weng et al., NSDI 2022): a folder with its job and task tables.

``pai_job_table.csv`` and ``pai_task_table.csv`` have no header lines; ``pai_*_table.header`` next to
them has. The tables are joined by ``job_name``. Instances repeat what tasks state, and are not read.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from datetime import tzinfo
from pathlib import Path
from typing import Final

from tessera.simulator.traces.csvfile import CsvRow, Mistakes
from tessera.simulator.traces.raw.jobs import MAX_JOB_GPUS, raw_job
from tessera.simulator.traces.raw.rows import (
    NO_DURATION,
    NO_END,
    NO_GPUS,
    NO_START,
    OF_ITS_JOB,
    DroppedRows,
    csv_rows,
)
from tessera.simulator.traces.trace import MAX_TIME_S, DurationJob

ZONE: Final = "UTC"
"""Times are seconds on a clock of the trace, so no zone is read."""
JOBS_FILE: Final = "pai_job_table.csv"
TASKS_FILE: Final = "pai_task_table.csv"
JOB_COLUMNS: Final = ("job_name", "inst_id", "user", "status", "start_time", "end_time")
TASK_COLUMNS: Final = (
    "job_name",
    "task_name",
    "inst_num",
    "status",
    "start_time",
    "end_time",
    "plan_cpu",
    "plan_mem",
    "plan_gpu",
    "gpu_type",
)
ENDS_FIRST: Final = "a task that ends before it starts"
OLDER_TYPES: Final = "misc"
"""The table's word for GPUs of several older types."""

_Held = tuple[float, float, float, str]
"""The earliest start, the latest end, the GPUs and the GPU type of a job's tasks.

A missing start is -inf, and a missing end inf.
"""


def read_pai(folder: Path, _zone: tzinfo, dropped: DroppedRows) -> Iterator[DurationJob]:
    """Yield the jobs with GPUs, whose fractions are rounded up. Their tasks are held in memory.

    Raises:
        InvalidInput: the first 20 mistakes of a table, with their lines.
        OSError: a table cannot be read.
    """
    held = _read_tasks(folder / TASKS_FILE, dropped)
    mistakes = Mistakes(JOBS_FILE)
    for row in csv_rows(folder / JOBS_FILE, mistakes, JOB_COLUMNS, JOB_COLUMNS):
        name = row.get("inst_id") or row.get("job_name")
        submit_s = row.decimal("start_time", 0.0, MAX_TIME_S) if row.get("start_time") else math.nan
        if not name:
            row.wrong("inst_id", "must not be empty")
        if not row.ok:
            continue
        start_s, end_s, gpus, gpu_type = held.pop(row.get("job_name"), (0.0, 0.0, 0.0, ""))
        reason = _fault(submit_s, start_s, end_s, gpus)
        if reason:
            dropped.add(reason, name)
            continue
        yield raw_job(
            name,
            submit_s,
            end_s - start_s,
            math.ceil(gpus - 1e-9),
            gpu_type=gpu_type,
            tenant=row.get("user"),
        )


def _fault(submit_s: float, start_s: float, end_s: float, gpus: float) -> str:
    """Return the reason why a job is dropped, or ""."""
    if not gpus:
        return NO_GPUS
    if math.isnan(submit_s) or math.isinf(start_s):
        return NO_START
    if math.isinf(end_s):
        return NO_END
    return "" if end_s > start_s else NO_DURATION


def _read_tasks(path: Path, dropped: DroppedRows) -> dict[str, _Held]:
    """Return what the tasks of each job with GPUs held."""
    held: dict[str, _Held] = {}
    mistakes = Mistakes(path.name)
    for row in csv_rows(path, mistakes, TASK_COLUMNS, TASK_COLUMNS):
        if not row.get("plan_gpu"):
            continue
        percent = row.decimal("plan_gpu", 0.0, 100.0 * MAX_JOB_GPUS)
        instances = row.decimal("inst_num", 0.0, 1e6) if row.get("inst_num") else 1.0
        start_s, end_s = _time_s(row, "start_time", -math.inf), _time_s(row, "end_time", math.inf)
        gpus = percent / 100 * instances
        if not row.ok or not gpus:
            continue
        if end_s < start_s:
            dropped.add(f"{ENDS_FIRST}{OF_ITS_JOB}", row.get("job_name"))
            continue
        name, gpu_type = row.get("job_name"), row.get("gpu_type").lower()
        gpu_type = "" if gpu_type == OLDER_TYPES else sys.intern(gpu_type)
        if name in held:
            first_s, last_s, others, other_type = held[name]
            start_s, end_s, gpus = min(start_s, first_s), max(end_s, last_s), gpus + others
            gpu_type = gpu_type if gpu_type == other_type else ""
        if gpus > MAX_JOB_GPUS:
            row.wrong("plan_gpu", f"the job has more than {MAX_JOB_GPUS:,} GPUs")
            continue
        held[name] = start_s, end_s, gpus, gpu_type
    return held


def _time_s(row: CsvRow, column: str, missing: float) -> float:
    return row.decimal(column, 0.0, MAX_TIME_S) if row.get(column) else missing
