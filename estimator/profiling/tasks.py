"""Profiling tasks: the measurements that are possible, those that are missing, and their states.

A profiling task is a job of the service's own on one GPU of a type, with the least weight and in
the last priority. Layers do not depend on the batch, so workloads that only differ in it share tasks
and records. Nothing here has side effects.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Final

from tessera.estimator.architectures.published import jax_step
from tessera.estimator.profiling.compute import Point
from tessera.estimator.profiling.host import HostEffort
from tessera.estimator.profiling.limits import ProfilingLimits, time_left_s
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.values import PROFILING, Cell, EstimateSource, Workload
from tessera.formulation.job.lifecycle import ACTIVE, JobState
from tessera.formulation.records.estimates import (
    EstimateRecord,
    EstimationInputs,
    HostRates,
    ModelSpec,
    ProfileGap,
    ProfileRow,
    ProfilingJob,
)
from tessera.formulation.records.jobs import JobSpec

LEAST_WEIGHT: Final = 1e-6
LAST_PRIORITY: Final = 100
"""The least weight and the last priority that users may give, so that no user's job has less value than
a task."""

NOMINAL_S: Final = 60.0
"""Nominal seconds for a size of a task. Rounds need an iteration time; its value has no meaning."""

TASK_WORKLOAD: Final = Workload(model=PROFILING, params="", global_batch=100_000)
"""The nominal workload of all tasks. Its batch is large enough for tasks to count in a sum of raw
samples/s."""

ArgumentValue = int | float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilingOptions:
    """The sizes to measure. ``always`` means all workloads, not only those of jobs that ask for it.

    ``host_parameters`` is the number of parameters whose states the host updates to measure it.
    ``runs`` is the number of plans that are measured by runs of a job's own program, each for about
    ``run_s`` seconds. If it is 0, there are no such runs.
    """

    always: bool = False
    samples: tuple[int, ...] = (1, 2, 4, 8)
    tp: tuple[int, ...] = (1,)
    host_parameters: int = HostEffort().parameters
    runs: int = 0
    run_s: float = 120.0
    limits: ProfilingLimits = field(default_factory=ProfilingLimits)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTarget:
    """A training step in JAX: ``module:function`` and its arguments by name."""

    target: str
    arguments: tuple[tuple[str, ArgumentValue], ...] = ()

    @property
    def source(self) -> str:
        """Return the name of the step that its records contain."""
        return f"{self.target}({', '.join(f'{k}={v}' for k, v in self.arguments)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The times of a whole model on one device of a type: points by tensor degree."""

    points: Mapping[int, Sequence[Point]]
    device: str
    date: str
    records: int
    device_s: float


class TaskState(StrEnum):
    """The state of the profiling of a workload on a GPU type."""

    PLANNED = "planned"
    WAITS = "waits"
    RUNS = "runs"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LIMITED = "limited"  # a limit ended it before anything that it measured could be used


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStatus:
    """The profiling of a workload on a GPU type.

    If ``job`` is "", the cluster has no job for it. ``problem`` says why it failed, or why sizes
    were left out. ``left_s`` is None unless the task can still measure.
    """

    gpu_type: str
    state: TaskState
    job: str = ""
    problem: str = ""
    records: int = 0
    device_s: float = 0.0
    service_gpu_s: float = 0.0
    left_out: tuple[tuple[float, int], ...] = ()  # samples and tensor degree
    left_s: float | None = None  # until the limit of all tasks of the workload
    host: HostRates | None = None  # the latest of the GPU type; None if no task measured them


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilingStatus:
    """The profiling of a workload. ``problem`` says why nothing can be measured, or is ""."""

    asked: bool
    source: str
    problem: str
    tasks: tuple[TaskStatus, ...]


def arguments_of(field: str, texts: Iterable[str]) -> tuple[tuple[str, ArgumentValue], ...]:
    """Return ``key=value`` texts as arguments by name.

    Values become whole numbers or numbers if possible, and otherwise stay texts.

    Raises:
        InvalidInput: a text does not have that form, or repeats a name.
    """
    arguments: dict[str, ArgumentValue] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (equals and key.isidentifier()) or key in arguments:
            raise InvalidInput(field, f"{text[:80]!r}: write NAME=VALUE, with each name once")
        arguments[key] = value_of(value)
    return tuple(sorted(arguments.items()))


def value_of(text: str) -> ArgumentValue:
    """Return a text as a whole number, else as a number, else unchanged."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def step_of(workload: Workload, own: Iterable[ModelSpec]) -> StepTarget | None:
    """Return the step that measures a workload, from a user's model or else from a published one.

    If there is no step, return None.
    """
    key = (workload.model, workload.params)
    spec = next((m for m in own if (m.model, m.params) == key), None)
    if spec is not None:
        arguments = arguments_of("step_arguments", spec.step_arguments)
        return StepTarget(target=spec.step, arguments=arguments) if spec.step else None
    known = jax_step(*key)
    return known and StepTarget(target=known[0], arguments=tuple(sorted(known[1].items())))


def profiles_of(
    rows: Iterable[ProfileRow], workload: Workload, step: StepTarget | None, dtype: str
) -> dict[str, Profile]:
    """Return the measurements of a workload's step in its data type, by GPU type.

    If there are several tasks on a GPU type, the latest counts, so devices and versions are not
    mixed.
    """
    if step is None:
        return {}
    by_type: dict[str, list[ProfileRow]] = defaultdict(list)
    for row in rows:
        if _is_of(row, workload, step) and row.dtype == dtype:
            by_type[row.gpu_type].append(row)
    return {
        gpu_type: _profile([row for row in measured if row.task == measured[-1].task])
        for gpu_type, measured in sorted(by_type.items())
    }


def _is_of(row: ProfileRow | ProfileGap, workload: Workload, step: StepTarget) -> bool:
    same_model = (row.workload.model, row.workload.params) == (workload.model, workload.params)
    return same_model and row.source == step.source


def _profile(rows: Sequence[ProfileRow]) -> Profile:
    sums: dict[tuple[int, float], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in rows:
        total = sums[row.tp, row.samples]
        total[0] += row.layers * row.forward_s
        total[1] += row.layers * row.backward_s
    points: dict[int, list[Point]] = defaultdict(list)
    for (tp, samples), (forward_s, backward_s) in sorted(sums.items()):
        points[tp].append((samples, forward_s, backward_s))
    return Profile(
        points={tp: tuple(series) for tp, series in points.items()},
        device=rows[-1].device,
        date=rows[-1].date,
        records=len(rows),
        device_s=sum(row.device_s for row in rows),
    )


def task_name(workload: Workload, step: StepTarget, gpu_type: str) -> str:
    """Return the id of the measuring job. All creators give it the same id, so that it is unique."""
    text = f"{workload.model}/{workload.params}: {step.source}"
    return f"profile-{hashlib.sha256(text.encode()).hexdigest()[:12]}-{gpu_type}"


def task_of(
    workload: Workload, step: StepTarget, gpu_type: str, options: ProfilingOptions
) -> JobSpec:
    """Return the job that measures ``step`` on a GPU type."""
    samples = [s for s in options.samples if s <= workload.global_batch] or [1]
    sizes = [(s, tp) for tp in options.tp for s in samples]
    task = {
        "step": step.target,
        "arguments": dict(step.arguments),
        "source": step.source,
        "sizes": sizes,
        "workload": [workload.model, workload.params, workload.global_batch],
        "host_parameters": options.host_parameters,
        "limits": asdict(options.limits),
    }
    return JobSpec(
        name=task_name(workload, step, gpu_type),
        workload=TASK_WORKLOAD,
        iterations=len(sizes),
        requested_gpus=1,
        requested_gpu_type=gpu_type,
        pinned_gpu_type=True,
        tenant=PROFILING,
        priority=LAST_PRIORITY,
        weight=LEAST_WEIGHT,
        restart_s=0.0,
        max_retries=1,
        command=(json.dumps(task, sort_keys=True),),
        labels={"profiles": f"{workload.model}/{workload.params}"[:255]},
    )


def nominal_estimates(gpu_types: Iterable[str]) -> list[EstimateRecord]:
    """Return the Cells on which all tasks run: one GPU of a type."""
    return [
        EstimateRecord(
            workload=TASK_WORKLOAD,
            cell=Cell(gpu_type=gpu_type, gpus=1, pipeline_degree=1, nodes=1),
            iter_time_s=NOMINAL_S,
            source=EstimateSource.ANALYTIC,
            provenance="nominal: of one size of a profiling task",
        )
        for gpu_type in gpu_types
    ]


def missing_tasks(
    known: EstimationInputs, catalogue: Iterable[str], options: ProfilingOptions
) -> dict[str, JobSpec]:
    """Return the tasks to create, by name: one for each model and GPU type that was not measured.

    A task that failed or was cancelled is not created again.
    """
    there = {task.name for task in known.profiling}
    types = _types(known, catalogue)
    tasks: dict[str, JobSpec] = {}
    for wanted in known.wanted:
        step = step_of(wanted.workload, known.models)
        if step is None or not (wanted.profile or options.always):
            continue
        measured = {row.gpu_type for row in known.profiles if _is_of(row, wanted.workload, step)}
        for gpu_type in types:
            spec = task_of(wanted.workload, step, gpu_type, options)
            if gpu_type not in measured and spec.name not in there:
                tasks.setdefault(spec.name, spec)
    return tasks


def profiling_status(
    known: EstimationInputs, catalogue: Iterable[str], options: ProfilingOptions, workload: Workload
) -> ProfilingStatus:
    """Return the status of the profiling of a workload."""
    wanted = next((w for w in known.wanted if w.workload == workload), None)
    asked = wanted is not None and (wanted.profile or options.always)
    step = step_of(workload, known.models)
    if step is None:
        problem = (
            f"{workload.model} {workload.params}".rstrip()
            + " has no step in JAX to measure; name one with `tessera models add --step"
            " MODULE:FUNCTION`. Until then its estimates stay analytic"
        )
        return ProfilingStatus(asked=asked, source="", problem=problem, tasks=())
    tasks = [
        _task_status(known, workload, step, t, options.limits) for t in _types(known, catalogue)
    ]
    shown = tuple(t for t in tasks if asked or t.state is not TaskState.PLANNED)
    return ProfilingStatus(asked=asked, source=step.source, problem="", tasks=shown)


def _types(known: EstimationInputs, catalogue: Iterable[str]) -> list[str]:
    """Return the GPU types that have nodes and for which Cells can be estimated."""
    names = set(catalogue)
    return [k.gpu_type.name for k in known.kinds if k.gpus and k.gpu_type.name in names]


_ENDED: Final = {
    JobState.FAILED: TaskState.FAILED,
    JobState.FAILING: TaskState.FAILED,
    JobState.CANCELLED: TaskState.CANCELLED,
    JobState.CANCELLING: TaskState.CANCELLED,
    JobState.REJECTED: TaskState.FAILED,
    JobState.SUCCEEDED: TaskState.FAILED,  # without records
}
"""The state of a task without records or gaps, by that of its job."""


def _task_status(
    known: EstimationInputs,
    workload: Workload,
    step: StepTarget,
    gpu_type: str,
    limits: ProfilingLimits,
) -> TaskStatus:
    name = task_name(workload, step, gpu_type)
    rows = [r for r in known.profiles if r.gpu_type == gpu_type and _is_of(r, workload, step)]
    gaps = [g for g in known.gaps if g.gpu_type == gpu_type and _is_of(g, workload, step)]
    task = next((t for t in known.profiling if t.name == name), None)
    gap = gaps[-1] if gaps and (not rows or gaps[-1].task == rows[-1].task) else None
    state = _state(rows, gap, task)
    waits = task is not None and state in (TaskState.WAITS, TaskState.RUNS)
    problem = gap.reason if gap and not waits else ""
    if task and state is TaskState.FAILED:
        problem = task.last_error or "it ended without a record of any layer"
    return TaskStatus(
        gpu_type=gpu_type,
        state=state,
        job=name if task else "",
        problem=problem,
        records=len(rows),
        device_s=sum(r.device_s for r in rows),
        service_gpu_s=task.service_gpu_s if task else 0.0,
        left_out=gap.left_out if gap and not waits else (),
        left_s=time_left_s(task, known.profiling, limits) if task and waits else None,
        host=next((h.rates for h in known.hosts if h.gpu_type == gpu_type), None),
    )


def _state(
    rows: Sequence[ProfileRow], gap: ProfileGap | None, task: ProfilingJob | None
) -> TaskState:
    if rows:
        return TaskState.DONE
    if gap is not None and (task is None or task.state in _ENDED):
        return TaskState.LIMITED
    if task is None:
        return TaskState.PLANNED
    return _ENDED.get(task.state, TaskState.RUNS if task.state in ACTIVE else TaskState.WAITS)
