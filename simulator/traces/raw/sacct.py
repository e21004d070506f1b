"""Slurm's accounting: the output of ``sacct --parsable2``.

For example: ``sacct --allusers --allocations --parsable2 --starttime 2026-01-01 --format
JobID,Account,Submit,Start,End,AllocTRES``. Fields are not quoted there. Without a header
(``--noheader``), the fields must be these.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import tzinfo
from pathlib import Path
from typing import Final

from tessera.formulation.base.errors import InvalidInput
from tessera.simulator.traces.csvfile import CsvRow, Mistakes
from tessera.simulator.traces.raw.jobs import MAX_JOB_GPUS, raw_job, read_time, seconds_between
from tessera.simulator.traces.raw.rows import (
    NO_DURATION,
    NO_END,
    NO_GPUS,
    NO_START,
    DroppedRows,
    separated_rows,
)
from tessera.simulator.traces.trace import DurationJob

ZONE: Final = "UTC"
"""The zone unless one is given: sacct prints times of the machine on which it runs."""
COLUMNS: Final = ("JobID", "Submit", "Start", "End", "AllocTRES")
UNNAMED_COLUMNS: Final = ("JobID", "Account", "Submit", "Start", "End", "AllocTRES")
"""The fields of a file without a header, which the documented command prints."""
STEP: Final = "a step, which is part of its job"
NOT_STARTED: Final = "not started"
SLICES: Final = "MIG slices, which are parts of a GPU"

_JOB_ID: Final = re.compile(r"[0-9]+(?:[._+].*)?", re.ASCII)
_SLICE: Final = re.compile(r"(?:.*[^0-9a-z])?[0-9]+g\.[0-9]+gb.*", re.ASCII)
"""A GPU type that is a slice, such as ``a100_3g.20gb``, ``a100.1g.5gb`` or ``1c.3g.20gb``."""
_GPU: Final = re.compile(r"gres/gpu(?::(?P<kind>[^=]+))?=(?P<count>[0-9]{1,9})", re.ASCII)


def read_sacct(path: Path, zone: tzinfo, dropped: DroppedRows) -> Iterator[DurationJob]:
    """Yield the jobs that ended and held GPUs. Their tenant is the account, or else the user.

    Raises:
        InvalidInput: the first 20 mistakes, with their lines.
        OSError: the file cannot be read.
    """
    mistakes = Mistakes(path.name)
    for row in separated_rows(path, mistakes, COLUMNS, "|", _absent_header):
        name = row.get("JobID")
        if "." in name:  # 123.batch, 123.extern, 123.0
            dropped.add(STEP, name)
            continue
        if not name:
            row.wrong("JobID", "must not be empty")
        submitted, start, end = (read_time(row, c, zone) for c in ("Submit", "Start", "End"))
        gpus, kinds = _gpus(row)
        if submitted is None and row.ok:
            row.wrong("Submit", "must be the time of submission")
        if not row.ok or submitted is None:
            continue
        if start is None or "[" in name:  # 123_[4-7]
            dropped.add(NOT_STARTED if end is None or "[" in name else NO_START, name)
        elif end is None:
            dropped.add(NO_END, name)
        elif not gpus:
            dropped.add(NO_GPUS, name)
        elif any(_SLICE.fullmatch(kind) for kind in kinds):
            dropped.add(SLICES, name)
        elif (duration_s := seconds_between(start, end)) <= 0:
            dropped.add(NO_DURATION, name)
        else:
            gpu_type = kinds[0] if len(kinds) == 1 else ""
            tenant = row.get("Account") or row.get("User")
            yield raw_job(
                name, submitted.timestamp(), duration_s, gpus, gpu_type=gpu_type, tenant=tenant
            )


def _absent_header(cells: Sequence[str]) -> Sequence[str] | None:
    """Return the columns of a file that begins with a row, or None if it begins with a header.

    Raises:
        InvalidInput: it has other fields than the documented ones.
    """
    if _JOB_ID.fullmatch(cells[0].strip()) is None:
        return None
    if [cell.strip() for cell in cells[len(UNNAMED_COLUMNS) :]] not in ([], [""]) or len(
        cells
    ) < len(UNNAMED_COLUMNS):
        raise InvalidInput(
            "",
            f"the file has no header line, and not the {len(UNNAMED_COLUMNS)} fields"
            f" {','.join(UNNAMED_COLUMNS)}; print it with a header, or with --format of these",
        )
    return [*UNNAMED_COLUMNS, ""][: len(cells)]


def _gpus(row: CsvRow) -> tuple[int, list[str]]:
    """Return the GPUs that a job was given, and their types, as far as they are stated.

    The trackable resources are e.g. ``cpu=8,gres/gpu=4,gres/gpu:a100=4,mem=64G``. A count without a
    type is that of all types together.
    """
    total, kinds = 0, dict[str, int]()
    for part in filter(None, row.get("AllocTRES").split(",")):
        match = _GPU.fullmatch(part)
        if match is None:
            if "=" not in part:
                row.wrong("AllocTRES", f"{part[:40]!r} must be NAME=AMOUNT, e.g. gres/gpu:a100=4")
            continue
        if match["kind"] is None:
            total = int(match["count"])
        else:
            kinds[match["kind"].lower()] = int(match["count"])
    gpus = total or sum(kinds.values())
    if gpus > MAX_JOB_GPUS:
        row.wrong("AllocTRES", f"has more than {MAX_JOB_GPUS:,} GPUs")
    return gpus, [kind for kind, count in kinds.items() if count]
