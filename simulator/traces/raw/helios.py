"""SenseTime's Helios traces (Hu et al., SC 2021): ``cluster_log.csv`` of one of its clusters.

The README of S-Lab-System-Group/HeliosData describes the columns. Durations are in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import tzinfo
from pathlib import Path
from typing import Final

from tessera.simulator.traces.csvfile import Mistakes
from tessera.simulator.traces.raw.jobs import MAX_JOB_GPUS, raw_job, read_time
from tessera.simulator.traces.raw.rows import NO_DURATION, NO_END, NO_GPUS, DroppedRows, csv_rows
from tessera.simulator.traces.trace import MAX_TIME_S, DurationJob

ZONE: Final = "Asia/Shanghai"
"""The zone of the clusters. It has no summer time, so any fixed zone gives the same trace."""
COLUMNS: Final = ("job_id", "vc", "gpu_num", "submit_time", "duration")


def read_helios(path: Path, zone: tzinfo, dropped: DroppedRows) -> Iterator[DurationJob]:
    """Yield the jobs that held GPUs.

    Raises:
        InvalidInput: the first 20 mistakes, with their lines.
        OSError: the file cannot be read.
    """
    mistakes = Mistakes(path.name)
    for row in csv_rows(path, mistakes, COLUMNS):
        name, gpus = row.get("job_id"), row.whole("gpu_num", 0, MAX_JOB_GPUS)
        submitted = read_time(row, "submit_time", zone)
        has_end = row.get("duration") not in ("", "None")
        duration_s = row.decimal("duration", -MAX_TIME_S, MAX_TIME_S) if has_end else 0.0
        if not name:
            row.wrong("job_id", "must not be empty")
        if submitted is None and row.ok:
            row.wrong("submit_time", "must be the time of submission")
        if not row.ok or submitted is None:
            continue
        if not gpus or duration_s <= 0:
            dropped.add(NO_GPUS if not gpus else NO_DURATION if has_end else NO_END, name)
            continue
        yield raw_job(name, submitted.timestamp(), duration_s, gpus, tenant=row.get("vc"))
