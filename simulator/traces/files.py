"""Readers of files in any of the known formats, which the header identifies."""

from __future__ import annotations

from pathlib import Path

from tessera.estimator.files.userfiles import read_bytes, to_text
from tessera.formulation.records.estimates import EstimateRecord
from tessera.simulator.traces import morphling
from tessera.simulator.traces.csvfile import header_of
from tessera.simulator.traces.profiles import mark_complete, parse_profiles
from tessera.simulator.traces.trace import (
    EXACT_ITERATIONS_COLUMN,
    Arrival,
    DurationJob,
    TraceOptions,
    parse_durations,
    parse_trace,
)


def profiles_of(path: Path, *, complete: bool = False) -> list[EstimateRecord]:
    """Read profiles in our own format, or Morphling's measurements.

    With ``complete``, they have all shapes on which their workloads run on their GPU types.

    Raises:
        InvalidInput: the file cannot be read, or its first 20 mistakes.
    """
    data = read_bytes(path)
    if "exec_plan_raw" in header_of(to_text(path.name, data)):
        return mark_complete(morphling.parse_measured(data, path.name), complete)
    return mark_complete(parse_profiles(data, path.name), complete)


def trace_of(path: Path, options: TraceOptions | None = None) -> list[Arrival] | list[DurationJob]:
    """Read a trace in the format of ours, Arena or Morphling, or one of durations without models.

    Raises:
        InvalidInput: the file cannot be read, or its first 20 mistakes.
    """
    options = options or TraceOptions()
    data = read_bytes(path)
    header = header_of(to_text(path.name, data))
    if "exec_plan_raw" in header:
        return morphling.parse_workload(data, path.name)[: options.limit]
    if "duration_s" in header and not {"num_iterations", EXACT_ITERATIONS_COLUMN} & set(header):
        return parse_durations(data, path.name, options)
    return parse_trace(data, path.name, options)
