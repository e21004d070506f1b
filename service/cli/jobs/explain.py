"""The command that explains a job: why it waits, runs or was changed, and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import typer

from tessera.service.cli.client import connect, current_timestamp
from tessera.service.cli.jobs.jobview import start_facts
from tessera.service.cli.names import full_name, short_name
from tessera.service.cli.options import (
    DEFAULT_CLUSTER,
    DEFAULT_SERVER,
    Cluster,
    JobName,
    Output,
    OutputOption,
    Server,
    parse_seconds,
)
from tessera.service.cli.render import (
    Column,
    format_number,
    format_time,
    print_line,
    print_note,
    show_facts,
    show_message,
    show_table,
)
from tessera.v1 import jobs_pb2

BY_TEXTS: Final = {
    "VALUE": "higher value",
    "GUARANTEE": "its guarantee",
    "DEADLINE": "its promised deadline",
    "LIMIT": "a limit on changes",
    "PLAN": "its planned start",
    "SCHEDULER": "the scheduler's choice",
}
"""The text that is shown for the rule by which a job has its GPUs."""

OTHER_TENANT: Final = "(another tenant)"

DISPLACED_COLUMNS: Final[Sequence[Column[jobs_pb2.Displacement]]] = (
    Column("DISPLACED BY", lambda d: short_name(d.job) or OTHER_TENANT),
    Column("HOLDS", lambda d: f"{d.gpus} x {d.gpu_type}"),
    Column("TOOK", lambda d: str(d.taken_gpus or ""), right=True),
    Column("BY", lambda d: BY_TEXTS.get(d.rule, d.rule)),
    Column(
        "VALUE PER GPU",
        lambda d: format_number(d.value_per_gpu) if d.HasField("value_per_gpu") else "",
        right=True,
    ),
)

SPAN_COLUMNS: Final[Sequence[Column[jobs_pb2.RoundSpan]]] = (
    Column("ROUNDS", lambda s: _rounds(s), right=True),
    Column("DECISION", lambda s: s.kind),
    Column("CAUSE", lambda s: s.cause),
    Column("REASON", lambda s: s.code),
    Column("ON", lambda s: s.cell),
    Column("UNTIL", lambda s: format_time(s.last_time)),
)

MAX_SPANS_SHOWN: Final = 20
"""The number of spans of rounds that are shown."""


def add_commands(app: typer.Typer) -> None:
    """Add the command that explains jobs."""
    app.command("explain", rich_help_panel="Jobs")(explain_job)


def explain_job(
    name: JobName,
    number: Annotated[
        int,
        typer.Option(
            "--round",
            min=0,
            help="Round to explain. Default: the next one, if the job waits; else the last one.",
        ),
    ] = 0,
    time_limit: Annotated[
        str, typer.Option(help="Time limit for the answer. It limits the steps that are tried.")
    ] = "30s",
    recorded: Annotated[
        bool,
        typer.Option(
            "--recorded",
            help="Show only what is recorded, at once: no round is decided, no step tried.",
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="The same as -o json.")] = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Explain why a job waits, runs or was changed in a round, and what would help.

    Each step that is shown was tried: the round was decided again with it. Nothing is committed.
    """
    request = jobs_pb2.ExplainJobRequest(
        name=full_name(cluster, "jobs", name), round=number, recorded_only=recorded
    )
    with connect(server) as client:
        limit_s = parse_seconds("--time-limit", time_limit)
        answer = client.call(client.stubs.jobs.ExplainJob, request, limit_s)
    if output is Output.NAME:
        print_line(answer.job)
    elif not show_message(answer, Output.JSON if json else output):
        show_explanation(answer)


def show_explanation(answer: jobs_pb2.ExplainJobResponse) -> None:
    """Print an explanation."""
    show_facts(_facts(answer))
    if answer.displaced_by:
        show_table(answer.displaced_by, DISPLACED_COLUMNS)
    if answer.steps:
        print_line("What would help (each was tried):")
        for k, step in enumerate(answer.steps, start=1):
            print_line(f"  {k}. {step.actor}: {step.message}")
    if answer.note:
        print_note(f"note: {answer.note}")
    if answer.history:
        show_table(answer.history[:MAX_SPANS_SHOWN], SPAN_COLUMNS)
    if len(answer.history) > MAX_SPANS_SHOWN:
        print_note(
            f"{len(answer.history) - MAX_SPANS_SHOWN} earlier entries are shown with -o json"
        )


def _facts(answer: jobs_pb2.ExplainJobResponse) -> list[tuple[str, str]]:
    reason = answer.reason
    when = format_time(answer.round_time)
    explained = f"{short_name(answer.round)} ({when})" if answer.round else f"as of now, {when}"
    cause = f" ({answer.cause})" if answer.cause else ""
    value = f"{format_number(answer.value_per_gpu)} {answer.unit} for each GPU"
    return [
        ("job", answer.job),
        ("round", explained if answer.kind else ""),
        ("decision", answer.kind),
        ("reason", f"{reason.code}{cause}: {reason.message}" if reason.code else ""),
        ("evidence", "; ".join(f"{k}: {v}" for k, v in sorted(reason.evidence.items()))),
        *start_facts(answer, current_timestamp()),
        ("value", value if answer.HasField("value_per_gpu") else ""),
        ("next step", "" if answer.steps else reason.next_step),
    ]


def _rounds(span: jobs_pb2.RoundSpan) -> str:
    if span.first_round == span.last_round:
        return str(span.last_round)
    return f"{span.first_round}-{span.last_round}"
