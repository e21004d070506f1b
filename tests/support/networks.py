"""Builders of jobs' demands on links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tessera.formulation.answer.network.contention import LinkDemand


@dataclass(frozen=True, kw_only=True)
class FluidJob:
    """A job given by its numbers.

    ``busy_s`` is the seconds for which it keeps each link busy. If ``start_s`` is None,
    communication does not overlap with compute.
    """

    work: float = 1.0
    compute_s: float = 1.0
    start_s: float | None = None
    delay_s: float = 0.0
    busy_s: Mapping[int, float] = field(default_factory=dict)


def a_demand(*jobs: FluidJob, links: int | None = None) -> LinkDemand:
    """Return the demand of these jobs."""
    link = [e for job in jobs for e in sorted(job.busy_s)]
    return LinkDemand(
        work_flop=_floats([job.work for job in jobs]),
        compute_s=_floats([job.compute_s for job in jobs]),
        start_s=_floats([job.compute_s if job.start_s is None else job.start_s for job in jobs]),
        delay_s=_floats([job.delay_s for job in jobs]),
        link_start=np.cumsum([0, *(len(job.busy_s) for job in jobs)]).astype(np.int64),
        link=np.array(link, dtype=np.int64),
        busy_s=_floats([job.busy_s[e] for job in jobs for e in sorted(job.busy_s)]),
        links=1 + max(link, default=-1) if links is None else links,
    )


def _floats(values: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([float(v) for v in values], dtype=np.float64)
