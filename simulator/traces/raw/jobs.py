"""Jobs of raw traces: their names, times and GPUs in Tessera's terms."""

from __future__ import annotations

import re
from datetime import datetime, tzinfo
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.values import Workload
from tessera.formulation.records.jobs import JobSpec
from tessera.simulator.traces.csvfile import GPU_TYPE, CsvRow
from tessera.simulator.traces.trace import DurationJob

MAX_JOB_GPUS: Final = 100_000
_NO_WORKLOAD: Final = Workload(model="", params="", global_batch=1)
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9._-]")
_LONGEST_NAME: Final = 100


def raw_job(
    name: str,
    submit_s: float,
    duration_s: float,
    gpus: int,
    *,
    gpu_type: str = "",
    tenant: str = "",
) -> DurationJob:
    """Return a job without a model. Its names are made ones that Tessera accepts."""
    spec = JobSpec(
        name=safe_name(name),
        workload=_NO_WORKLOAD,
        iterations=1,
        requested_gpus=gpus,
        requested_gpu_type=gpu_type if GPU_TYPE.fullmatch(gpu_type) else "",
        tenant=safe_name(tenant) if tenant else "",
    )
    return DurationJob(submit_s, duration_s, spec)


def safe_name(text: str) -> str:
    """Return ``text`` as a name: other characters become '-', and it begins with a letter or digit."""
    name = _NOT_IN_NAMES.sub("-", text)
    return (name if name[:1].isalnum() else f"x{name}")[:_LONGEST_NAME]


def zone_of(name: str) -> tzinfo:
    """Return the time zone of that name, e.g. ``America/Los_Angeles`` or ``UTC``.

    Raises:
        InvalidInput: this machine does not know it.
    """
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise InvalidInput(
            "--time-zone",
            f"{name!r} is not a time zone that this machine knows; write e.g. UTC or Europe/Berlin,"
            " or install the package tzdata",
        ) from error


def read_time(row: CsvRow, column: str, zone: tzinfo) -> datetime | None:
    """Return the time in a field, or None for a time that did not come (empty, None, Unknown).

    A time without a zone is in ``zone``. One that is not a time is a mistake, and None.
    """
    text = row.get(column)
    if text in ("", "None", "Unknown", "N/A"):
        return None
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        row.wrong(column, f"{text[:40]!r} must be a time such as 2017-10-07 01:12:09")
        return None
    return time if time.tzinfo else time.replace(tzinfo=zone)


def seconds_between(start: datetime, end: datetime) -> float:
    """Return the seconds from ``start`` to ``end``.

    When clocks go back, an hour occurs twice. An end in that hour that would precede its start is
    in the second one.
    """
    seconds = end.timestamp() - start.timestamp()
    if seconds >= 0:
        return seconds
    later = end.replace(fold=1).timestamp() - start.timestamp()
    return later if later >= 0 else seconds
