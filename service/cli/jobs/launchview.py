"""The part of a job's view that says how its program is started."""

from __future__ import annotations

import shlex
from itertools import starmap
from typing import Final

from google.protobuf.duration_pb2 import Duration

from tessera.formulation.base.secrets import hide_secrets
from tessera.service.cli.render import format_span
from tessera.v1 import jobs_pb2, launch_pb2

MAX_VALUE_CHARS: Final = 80
"""The number of characters of a variable's value that are shown. `-o json` shows all."""


def launch_facts(job: jobs_pb2.Job) -> list[tuple[str, str]]:
    """Return the facts of a job's launch. Those that were not stated are empty."""
    launch = job.launch
    return [
        ("runtime", launch.runtime),
        ("command", shlex.join(job.command)),
        ("env", ", ".join(starmap(_variable, sorted(launch.env.items())))),
        ("secrets", ", ".join(f"{s.variable} from {s.name}" for s in launch.secrets)),
        ("starts in", launch.workdir),
        ("staging", shlex.join(launch.staging_command)),
        ("runs as", launch.user),
        ("progress pattern", launch.progress_pattern),
        ("stall limit", _span(launch.stall_limit)),
        ("stop grace", _span(launch.stop_grace)),
        ("done", "when its program exits with status 0" if launch.until_exit else ""),
        ("tuning", _tuning(launch)),
    ]


def _variable(name: str, value: str) -> str:
    """Return a variable as NAME=VALUE, quoted as in a shell and shortened."""
    shown = hide_secrets(value)
    shown = shown if len(shown) <= MAX_VALUE_CHARS else f"{shown[:MAX_VALUE_CHARS]}..."
    return f"{name}={shlex.quote(shown)}"


def _tuning(launch: launch_pb2.Launch) -> str:
    """Return the space in which the program tunes, with the stated budget, or ""."""
    return ", ".join(filter(None, (launch.tuning_space, _span(launch.tuning_budget))))


def _span(length: Duration) -> str:
    return format_span(length.ToNanoseconds() / 1e9) if length.ToNanoseconds() else ""
