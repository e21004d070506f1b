"""Shanghai AI Lab's Acme traces (Hu et al., NSDI 2024): ``trace_seren.csv`` and ``trace_kalos.csv``.

The README of InternLM/AcmeTrace describes the columns. A job's duration is from its start to its end:
the column ``duration`` of Kalos has the time in the queue, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import tzinfo
from pathlib import Path
from typing import Final

from tessera.simulator.traces.csvfile import Mistakes
from tessera.simulator.traces.raw.jobs import MAX_JOB_GPUS, raw_job, read_time, seconds_between
from tessera.simulator.traces.raw.rows import (
    NO_DURATION,
    NO_END,
    NO_GPUS,
    NO_START,
    DroppedRows,
    csv_rows,
)
from tessera.simulator.traces.trace import DurationJob

ZONE: Final = "Asia/Shanghai"
"""The zone of the clusters. Their times state one."""
COLUMNS: Final = ("job_id", "user", "gpu_num", "submit_time", "start_time", "end_time")


def read_acme(path: Path, zone: tzinfo, dropped: DroppedRows) -> Iterator[DurationJob]:
    """Yield the jobs that held GPUs.

    Raises:
        InvalidInput: the first 20 mistakes, with their lines.
        OSError: the file cannot be read.
    """
    mistakes = Mistakes(path.name)
    for row in csv_rows(path, mistakes, COLUMNS):
        name, gpus = row.get("job_id"), row.whole("gpu_num", 0, MAX_JOB_GPUS)
        submitted, start, end = (
            read_time(row, f"{moment}_time", zone) for moment in ("submit", "start", "end")
        )
        if not name:
            row.wrong("job_id", "must not be empty")
        if submitted is None and row.ok:
            row.wrong("submit_time", "must be the time of submission")
        if not row.ok or submitted is None:
            continue
        if not gpus:
            dropped.add(NO_GPUS, name)
        elif start is None or end is None:
            dropped.add(NO_START if start is None else NO_END, name)
        elif (duration_s := seconds_between(start, end)) <= 0:
            dropped.add(NO_DURATION, name)
        else:
            yield raw_job(name, submitted.timestamp(), duration_s, gpus, tenant=row.get("user"))
