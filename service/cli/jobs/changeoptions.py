"""The options of jobs that may change after submission, and the view of where jobs may run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, TypedDict

import typer

from tessera.service.cli.completion import complete_nodes
from tessera.service.cli.options import Deadline, MaxGpus, MinGpus, Priority, Weight
from tessera.service.cli.render import format_span
from tessera.v1 import jobs_pb2

ANY: Final = "any"
"""The word for all GPU types. No GPU type has this name."""

NONE: Final = "none"
"""The word for no requirement of any other kind."""

_PANEL: Final = "Where the job runs, and for how long"


def _option(text: str, *names: str, metavar: str) -> Any:
    return typer.Option(*names, help=text, metavar=metavar, rich_help_panel=_PANEL)


class ChangeOptions(TypedDict):
    """The options of `submit` and `update`, by the names of the fields that they state.

    An option that was not given is None.
    """

    weight: Weight
    priority: Priority
    deadline: Deadline
    pinned: Annotated[
        bool | None,
        typer.Option(
            help="Whether the job keeps its GPUs when others are moved to reduce fragmentation."
        ),
    ]
    preemptible: Annotated[
        bool | None,
        typer.Option(help="Whether rounds may suspend or shrink the job at any time for others."),
    ]
    labels: Annotated[
        list[str] | None,
        typer.Option(
            "--label", help="Label, as KEY=VALUE. Repeatable. `update` replaces all present labels."
        ),
    ]
    pinned_gpu_type: Annotated[
        bool | None,
        typer.Option(help="Whether the job must run on the GPU type that --gpu-type names."),
    ]
    avoid_nodes: Annotated[
        list[str] | None,
        typer.Option(
            "--avoid-node",
            help="A node that the job must not run on, or 'none'. Repeatable.",
            autocompletion=complete_nodes,
        ),
    ]
    min_gpus: MinGpus
    max_gpus: MaxGpus
    allowed_gpu_types: Annotated[
        str | None,
        _option(
            "GPU types that the job may run on, e.g. h100,a100. Default: all, or 'any'.",
            metavar="TYPES",
        ),
    ]
    node_selector: Annotated[
        str | None,
        _option(
            "Labels that all nodes of the job must have, e.g. 'zone=a, disk in (ssd, nvme), owner!=lab'."
            " Default: 'none'.",
            metavar="LABELS",
        ),
    ]
    preferred_labels: Annotated[
        str | None,
        _option(
            "Labels of the nodes that the job prefers among equal placements, in the same form."
            " Default: 'none'.",
            metavar="LABELS",
        ),
    ]
    longest_run: Annotated[
        str | None,
        _option(
            "Longest time for which the job may hold GPUs, over all its starts, e.g. 12h. It is then"
            " stopped and has failed; its checkpoint is kept. Default: 'none'.",
            metavar="TIME",
        ),
    ]


def removes_field(name: str, value: object) -> bool:
    """Return whether the value of an option removes what a job states, e.g. ``--deadline none``."""
    if name == "labels" or name not in ChangeOptions.__annotations__:
        return False
    words = [value.strip()] if isinstance(value, str) else value
    return words == [ANY if name == "allowed_gpu_types" else NONE]


def placing_facts(job: jobs_pb2.Job) -> Sequence[tuple[str, str]]:
    """Return where a job may run and for how long, as `tessera job` shows it."""
    longest = ""
    if job.HasField("longest_run"):
        longest_s = job.longest_run.ToNanoseconds() / 1e9
        longest = (
            f"{format_span(longest_s)} in total, of which it has run {format_span(job.run_seconds)}"
        )
    return (
        ("GPU types", ", ".join(job.allowed_gpu_types)),
        ("node selector", job.node_selector),
        ("prefers nodes", f"with {job.preferred_labels}" if job.preferred_labels else ""),
        ("longest run", longest),
    )
