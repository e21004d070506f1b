"""Records of jobs as the store returns them, and gangs as agents are to run them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from tessera.formulation.base.values import Cell, Workload
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.records.agents import DesiredGang
from tessera.formulation.records.jobs import AllocationRecord, JobRecord, JobSpec

_OF_SPEC = {field.name for field in fields(JobSpec)}


def a_job_record(**changes: Any) -> JobRecord:
    """Return the record of a queued job of one GPU. ``changes`` may name fields of its spec, too."""
    spec: dict[str, Any] = {
        "name": "j",
        "workload": Workload(model="m", params="", global_batch=8),
        "iterations": 100,
        "requested_gpus": 1,
    }
    spec |= {name: value for name, value in changes.items() if name in _OF_SPEC}
    record: dict[str, Any] = {
        "cluster": "c",
        "version": 1,
        "state": JobState.QUEUED,
        "created_s": 1.0,
        "started_s": None,
        "ended_s": None,
        "iterations_done": 0.0,
        "generation": 0,
        "retries": 0,
        "last_error": "",
        "allocation": None,
        "reason": None,
        "reason_round": 0,
    }
    record |= {name: value for name, value in changes.items() if name not in _OF_SPEC}
    return JobRecord(spec=JobSpec(**spec), **record)


def a_desired_gang(spec: JobSpec | None = None, **changes: Any) -> DesiredGang:
    """Return a gang on GPUs 0, 1 and 7 of n1 and 2 and 3 of n2. ``changes`` are fields of the gang."""
    values: dict[str, Any] = {
        "spec": spec or a_job_record().spec,
        "generation": 3,
        "iterations_done": 2.0,
        "allocation": AllocationRecord(
            cell=Cell(gpu_type="a100", gpus=5, pipeline_degree=1),
            rate=32.0,
            generation=3,
            shares=(("n1", (0, 1, 7)), ("n2", (2, 3))),
        ),
    }
    return DesiredGang(**values | changes)
