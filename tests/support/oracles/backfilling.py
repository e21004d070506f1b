"""EASY and conservative backfilling as their papers state them, in plain loops over intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Interval = tuple[float, float, int]
"""The start and the end of a job's hold on GPUs, in seconds from now, and the number of GPUs."""


@dataclass(frozen=True)
class QueuedJob:
    """A waiting job: its GPUs, and its run time in seconds by type, the fastest first."""

    gpus: int
    run_s: dict[int, float]


def count_free(capacity: int, holds: Sequence[Interval], at_s: float) -> int:
    """Return the GPUs that no job holds at ``at_s``."""
    return capacity - sum(gpus for start_s, end_s, gpus in holds if start_s <= at_s < end_s)


def start_by_easy(
    capacity: list[int], running: list[list[Interval]], queue: Sequence[QueuedJob]
) -> list[int]:
    """Return the type on which each job of the queue starts now, or -1.

    ``running`` has the intervals of running jobs by type.
    """
    holds = [list(intervals) for intervals in running]
    starts = []
    head_type, shadow_s, spare = -1, math.inf, 0
    for job in queue:
        start_type = -1
        for gpu_type, run_s in job.run_s.items():
            if count_free(capacity[gpu_type], holds[gpu_type], 0.0) < job.gpus:
                continue
            if gpu_type == head_type and run_s > shadow_s:
                if job.gpus > spare:
                    continue
                spare -= job.gpus
            holds[gpu_type].append((0.0, run_s, job.gpus))
            start_type = gpu_type
            break
        starts.append(start_type)
        if start_type >= 0 or head_type >= 0:
            continue
        for gpu_type in job.run_s:
            ends = sorted(end_s for _, end_s, _ in holds[gpu_type])
            for end_s in ends:
                free = count_free(capacity[gpu_type], holds[gpu_type], end_s)
                if free >= job.gpus and end_s < shadow_s:
                    head_type, shadow_s, spare = gpu_type, end_s, free - job.gpus
    return starts


def plan_conservatively(
    capacity: list[int], running: list[list[Interval]], queue: Sequence[QueuedJob]
) -> list[tuple[float, int]]:
    """Return the planned start of each job, in seconds from now, and its type; (inf, -1) if none."""
    holds = [list(intervals) for intervals in running]
    plans = []
    for job in queue:
        best = math.inf, -1
        for gpu_type, run_s in job.run_s.items():
            for start_s in sorted({0.0, *(end_s for _, end_s, _ in holds[gpu_type])}):
                moments = [
                    start_s,
                    *(s for s, _, _ in holds[gpu_type] if start_s < s < start_s + run_s),
                ]
                if start_s < best[0] and all(
                    count_free(capacity[gpu_type], holds[gpu_type], at_s) >= job.gpus
                    for at_s in moments
                ):
                    best = start_s, gpu_type
        plans.append(best)
        if best[1] >= 0:
            holds[best[1]].append((best[0], best[0] + job.run_s[best[1]], job.gpus))
    return plans
