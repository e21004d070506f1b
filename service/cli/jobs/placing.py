"""The options of jobs on where they run, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, NamedTuple

import typer

from tessera.service.cli import options
from tessera.service.cli.render import format_span
from tessera.v1 import jobs_pb2

ANY: Final = "any"
"""The word for all GPU types. No GPU type has this name."""

NONE: Final = "none"

_PANEL: Final = "Where the job runs, and for how long"


class Placing(NamedTuple):
    """The fields of a job that options state, and the names of those that were given."""

    job: jobs_pb2.Job
    paths: list[str]


def _option(text: str, *names: str, metavar: str) -> Any:
    return typer.Option(*names, help=text, metavar=metavar, rich_help_panel=_PANEL)


def placing_options(
    allowed_gpu_types: Annotated[
        str | None,
        _option(
            "GPU types that the job may run on, e.g. h100,a100. Default: all, or 'any'.",
            metavar="TYPES",
        ),
    ] = None,
    node_selector: Annotated[
        str | None,
        _option(
            "Labels that all nodes of the job must have, e.g. 'zone=a, disk in (ssd, nvme), owner!=lab'."
            " Default: 'none'.",
            metavar="LABELS",
        ),
    ] = None,
    preferred_labels: Annotated[
        str | None,
        _option(
            "Labels of the nodes that the job prefers among equal placements, in the same form."
            " Default: 'none'.",
            metavar="LABELS",
        ),
    ] = None,
    longest_run: Annotated[
        str | None,
        _option(
            "Longest time for which the job may hold GPUs, over all its starts, e.g. 12h. It is then"
            " stopped and has failed; its checkpoint is kept. Default: 'none'.",
            metavar="TIME",
        ),
    ] = None,
) -> Placing:
    """Return what the options state."""
    job = jobs_pb2.Job()
    if allowed_gpu_types is not None and allowed_gpu_types.strip() != ANY:
        job.allowed_gpu_types.extend(options.split_words(allowed_gpu_types))
    if node_selector is not None and node_selector.strip() != NONE:
        job.node_selector = node_selector
    if preferred_labels is not None and preferred_labels.strip() != NONE:
        job.preferred_labels = preferred_labels
    if longest_run is not None and longest_run.strip() != NONE:
        longest_s = options.parse_seconds("--longest-run", longest_run)
        job.longest_run.CopyFrom(options.to_duration(longest_s))
    given = {
        "allowed_gpu_types": allowed_gpu_types,
        "node_selector": node_selector,
        "preferred_labels": preferred_labels,
        "longest_run": longest_run,
    }
    return Placing(job, [path for path, value in given.items() if value is not None])


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
