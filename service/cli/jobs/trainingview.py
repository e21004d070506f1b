"""The view of what a job's program has reported of its training."""

from __future__ import annotations

from google.protobuf.timestamp_pb2 import Timestamp

from tessera.formulation.job.exit_reasons import ExitReason
from tessera.service.cli.render import GIB, format_age, format_number
from tessera.v1 import jobs_pb2, launch_pb2


def training_facts(training: jobs_pb2.Training, now: Timestamp) -> list[tuple[str, str]]:
    """Return what the job's program has reported of its training."""
    state = []
    if training.HasField("loss"):
        state.append(f"loss {format_number(training.loss)}")
    if training.memory_bytes:
        state.append(f"{format_number(training.memory_bytes / GIB)} GiB of GPU memory")
    if training.HasField("checkpoint_iterations"):
        state.append(f"checkpoint of iteration {format_number(training.checkpoint_iterations)}")
        if training.HasField("checkpoint_time"):
            state.append(f"{format_age(training.checkpoint_time, now)} old")
    return [
        ("training", ", ".join(state)),
        ("restart", _restart_text(training)),
        ("last failure", _exit_text(training.exit_reason)),
        ("remark", training.remark),
    ]


def _restart_text(training: jobs_pb2.Training) -> str:
    """Return the measured cost of a restart, and the parts of the last one."""
    times = training.restart_times
    parts = {
        "stop": times.stop_s,
        "launch": times.launch_s,
        "first iteration": times.first_iteration_s,
    }
    last = ", ".join(f"{name} {format_number(s)} s" for name, s in parts.items() if s)
    last = f" (the last start: {last})" if last else ""
    if training.restart_seconds:
        return f"costs {format_number(training.restart_seconds)} s, measured{last}"
    return f"not measured yet{last}" if last else ""


def _exit_text(number: launch_pb2.ExitReason.ValueType) -> str:
    """Return why the last failure happened, or "" if that is not known."""
    if number not in launch_pb2.ExitReason.values() or not number:
        return ""
    name = launch_pb2.ExitReason.Name(number).removeprefix("EXIT_").lower()
    return ExitReason(name).sentence
