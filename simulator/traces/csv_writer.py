"""Writers of traces and profiles as CSV that :mod:`tessera.simulator.traces` reads again."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable
from typing import TextIO

from tessera.formulation.base.resources import amounts_of
from tessera.formulation.records.estimates import EstimateRecord
from tessera.simulator.traces.dependencies import AFTER_COLUMN, write_dependencies
from tessera.simulator.traces.profiles import OPTIONAL, REQUIRED
from tessera.simulator.traces.trace import (
    DURATION_COLUMNS,
    EXACT_ITERATIONS_COLUMN,
    PLAN_LABEL,
    Arrival,
    DurationJob,
)

COLUMNS = (
    "job_id",
    "submit_time_s",
    "model",
    "params",
    "global_batch",
    EXACT_ITERATIONS_COLUMN,
    "num_gpus",
    "gpu_type",
    "deadline_s",
    "tenant",
    "guaranteed",
    PLAN_LABEL,
    AFTER_COLUMN,
)


def trace_csv(arrivals: Iterable[Arrival]) -> str:
    """Return the text of a file that is read back as the same jobs, whatever the divisor.

    Times are rounded to the microsecond and counted from the first arrival. Attributes for which a
    trace has no column (queue, weight, pins, other labels) are not kept.
    """
    jobs = list(arrivals)
    first_s = min((a.arrival_s for a in jobs), default=0.0)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for arrival_s, spec in jobs:
        at_s, work = arrival_s - first_s, spec.workload
        deadline = "" if math.isinf(spec.deadline_s) else f"{at_s + spec.deadline_s:.6f}"
        writer.writerow(
            [
                spec.name,
                f"{at_s:.6f}",
                work.model,
                work.params,
                work.global_batch,
                spec.iterations,
                spec.requested_gpus,
                spec.requested_gpu_type,
                deadline,
                spec.tenant,
                int(spec.guaranteed),
                spec.submitted_plan_id or spec.labels.get(PLAN_LABEL, ""),
                write_dependencies(spec),
            ]
        )
    return text.getvalue()


def write_durations(jobs: Iterable[DurationJob], file: TextIO) -> int:
    """Write jobs without models to ``file`` one by one, and return their number.

    The file is read back as the same jobs. Times keep the clock of the trace, to the microsecond.
    """
    writer, written = csv.writer(file, lineterminator="\n"), 0
    writer.writerow((*DURATION_COLUMNS, "gpu_type", "tenant"))
    for arrival_s, duration_s, spec in jobs:
        times = (
            f"{arrival_s:.6f}".rstrip("0").rstrip("."),
            f"{duration_s:.6f}".rstrip("0").rstrip("."),
        )
        request = (spec.requested_gpus, spec.requested_gpu_type, spec.tenant)
        writer.writerow((spec.name, *times, *request))
        written += 1
    return written


def profiles_csv(records: Iterable[EstimateRecord]) -> str:
    """Return the text of a file that is read back as the same estimates."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((*REQUIRED, *OPTIONAL))
    for e in records:
        c = e.cell
        ran = math.isfinite(e.iter_time_s)
        writer.writerow(
            [
                e.workload.model,
                e.workload.params,
                e.workload.global_batch,
                c.gpu_type,
                c.nodes,
                c.gpus // c.nodes,
                repr(e.iter_time_s) if ran else "",
                "ok" if ran else "infeasible",
                c.pipeline_degree,
                c.plan,
                e.source.name.lower(),
                e.provenance,
                "true" if e.complete else "",
                *(amount or "" for amount in amounts_of(e)),
                "" if e.plan is None else e.plan.to_json(),
            ]
        )
    return text.getvalue()
