"""The output of ``tessera import trace`` about a shaped trace."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import numpy as np

from tessera.formulation.base.errors import InvalidInput
from tessera.service.cli.render import (
    Column,
    format_number,
    format_percent,
    format_span,
    print_note,
    show_facts,
    show_table,
)
from tessera.service.cli.simulation.traces import ShapedTrace, resized_lines
from tessera.simulator.traces.recipe import Recipe
from tessera.simulator.traces.redraw import count_sizes, parameter_count
from tessera.simulator.traces.screening import bad_lines, order_lines
from tessera.simulator.traces.speeds import gpu_seconds, requested_load


@dataclass(frozen=True, slots=True)
class _SizeRow:
    model: str
    params: str
    jobs: int
    share: str
    gpu_hours: str


SIZE_COLUMNS: Final[Sequence[Column[_SizeRow]]] = (
    Column("MODEL", lambda r: r.model),
    Column("SIZE", lambda r: r.params),
    Column("JOBS", lambda r: f"{r.jobs:,}", right=True),
    Column("SHARE %", lambda r: r.share, right=True),
    Column("GPU-HOURS", lambda r: r.gpu_hours, right=True),
)


def show_shaped_trace(shaped: ShapedTrace, recipe: Recipe) -> None:
    """Print a trace's facts, its model sizes, and the dropped jobs with their reasons."""
    show_facts(_facts(shaped, recipe))
    show_table(_rows(shaped), SIZE_COLUMNS)
    for line in chain(
        bad_lines(shaped.dropped), order_lines(shaped.reordered), resized_lines(shaped.resized)
    ):
        print_note(line)


def _facts(shaped: ShapedTrace, recipe: Recipe) -> Iterator[tuple[str, str]]:
    arrivals = shaped.arrivals
    yield "jobs", f"{len(arrivals):,}"
    if shaped.dropped:
        yield "dropped", f"{len(shaped.dropped):,}"
    yield "arrivals", f"over {format_span(max(a.arrival_s for a in arrivals))}"
    if shaped.speeds is not None and shaped.speeds.room is not None:
        gpus = shaped.speeds.room.total_gpus
        seconds = shaped.speeds.requested_s(arrivals)
        hours = float(gpu_seconds(arrivals, shaped.speeds).sum()) / 3600
        yield "GPU-hours", format_number(hours)
        yield "load", f"{requested_load(arrivals, shaped.speeds, gpus):.3g} of {gpus:,} GPUs"
        half, most = (format_span(float(s)) for s in np.percentile(seconds, [50, 90]))
        yield "duration", f"median {half}, 90th percentile {most}, on the requested GPUs"
    large = sum(n for (_, params), n in count_sizes(arrivals).items() if _is_large(params, recipe))
    yield (
        "large models",
        f"{format_percent(large, len(arrivals))} % have"
        f" {format_number(recipe.large_from / 1e9)}B parameters or more",
    )
    due = sum(1 for a in arrivals if math.isfinite(a.spec.deadline_s))
    yield "deadlines", f"{due:,}" if due else "none"
    for tenant in shaped.tenants:
        jobs = sum(1 for a in arrivals if a.spec.tenant == tenant.name)
        quota = f"quota {tenant.quotas['']} GPUs" if tenant.quotas else "best effort"
        yield tenant.name, f"{jobs:,} jobs, {quota}"


def _rows(shaped: ShapedTrace) -> list[_SizeRow]:
    hours: dict[tuple[str, str], float] = {}
    if shaped.speeds is not None:
        work = gpu_seconds(shaped.arrivals, shaped.speeds).tolist()
        for arrival, seconds in zip(shaped.arrivals, work, strict=True):
            key = (arrival.spec.workload.model, arrival.spec.workload.params)
            hours[key] = hours.get(key, 0.0) + seconds / 3600
    total = len(shaped.arrivals)
    return [
        _SizeRow(
            model,
            params,
            jobs,
            format_percent(jobs, total),
            format_number(hours.get((model, params), math.nan)),
        )
        for (model, params), jobs in count_sizes(shaped.arrivals).most_common()
    ]


def _is_large(params: str, recipe: Recipe) -> bool:
    """Return whether a size is large. A text that is not a number of parameters is not."""
    try:
        return parameter_count(params) >= recipe.large_from
    except InvalidInput:
        return False
