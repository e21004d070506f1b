"""Limits of profiling: the time of all tasks of a workload together, and the GPU-seconds of each.

A task's own process keeps both limits. The service ends tasks that cannot or do not keep them. This
has no side effects and needs no JAX.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from tessera.formulation.base.values import Workload
from tessera.formulation.job.lifecycle import ACTIVE, JobEvent, is_allowed
from tessera.formulation.records.estimates import ProfileGap, ProfilingJob

SLACK_S: Final = 60.0
"""Seconds for which the service waits longer than a task's own process, so that the process can end
the layer that it measures and send its records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilingLimits:
    """The limits of profiling, in seconds.

    Crius and Arena limit the profiling of a job to 30 minutes. Arena's artifact charges 960 s for
    the profile of a job on one GPU (``--prepend_profile_overhead``).
    """

    workload_s: float = 1800.0
    """Time of all tasks of a workload together, from the first start of one of them."""
    task_gpu_s: float = 960.0
    """GPU-seconds of one task, in all its starts."""

    def time_reason(self) -> str:
        """Return the reason of a task that ends because the workload's time is over."""
        return (
            f"the profiling of the model reached its limit of {self.workload_s:,.0f} s"
            " (setting profile_limit_s)"
        )

    def gpu_reason(self) -> str:
        """Return the reason of a task that has used its GPU-seconds."""
        return (
            f"the task reached its limit of {self.task_gpu_s:,.0f} GPU-seconds"
            " (setting profile_task_gpu_s)"
        )


def elapsed_s(task: ProfilingJob, tasks: Iterable[ProfilingJob]) -> float:
    """Return the seconds since a task of the same step started first, or 0 if none did.

    Only starts after the submission of ``task`` count. A GPU type that joins the cluster later thus
    gets time of its own.
    """
    group = _group(task)
    starts = (t.started_ago_s for t in tasks if _group(t) == group)
    return max((s for s in starts if s is not None and s <= task.age_s), default=0.0)


def time_left_s(
    task: ProfilingJob, tasks: Iterable[ProfilingJob], limits: ProfilingLimits
) -> float:
    """Return the seconds until the limit of the task's workload, at least 0."""
    return max(0.0, limits.workload_s - elapsed_s(task, tasks))


def overdue_tasks(
    tasks: Sequence[ProfilingJob], limits: ProfilingLimits
) -> list[tuple[str, ProfileGap | None]]:
    """Return the tasks that the service has to end, with what they leave out.

    Tasks that run get :data:`SLACK_S` more. The gap is None if it is not known what the task
    measures.
    """
    overdue = []
    for task in tasks:
        if not is_allowed(task.state, JobEvent.CANCEL):
            continue
        if reason := _reason(task, tasks, limits):
            overdue.append((task.name, _gap(task, reason)))
    return overdue


def _reason(task: ProfilingJob, tasks: Sequence[ProfilingJob], limits: ProfilingLimits) -> str:
    """Return why a task has to end, or "" if it may go on."""
    runs = task.state in ACTIVE
    slack_s = SLACK_S if runs else 0.0
    if elapsed_s(task, tasks) > limits.workload_s + slack_s:
        end = "its task did not end" if runs else "its task waited for a GPU"
        return f"{limits.time_reason()}, and {end}"
    if task.service_gpu_s > limits.task_gpu_s + SLACK_S:
        return limits.gpu_reason()
    return ""


def _gap(task: ProfilingJob, reason: str) -> ProfileGap | None:
    if not task.task:
        return None
    plain = json.loads(task.task)
    model, params, batch = plain["workload"]
    return ProfileGap(
        workload=Workload(model=model, params=params, global_batch=batch),
        gpu_type=task.gpu_type,
        task=task.name,
        source=plain["source"],
        left_out=tuple((float(samples), tp) for samples, tp in plain["sizes"]),
        reason=reason,
    )


def _group(task: ProfilingJob) -> str:
    """Return the part of a task's name that all tasks of a step share."""
    return task.name.removesuffix(f"-{task.gpu_type}")
