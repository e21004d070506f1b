"""Options that several commands share, and the notations of times and sizes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, Final, TypeVar, get_type_hints, is_typeddict

import typer
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from tessera.estimator.files.userfiles import read_text
from tessera.formulation.base import limits
from tessera.formulation.base.documents import STATED_PLAN
from tessera.formulation.base.errors import InvalidInput
from tessera.service import durations
from tessera.service.cli.completion import complete_jobs, complete_rounds

DEFAULT_SERVER: Final = "127.0.0.1:7070"
DEFAULT_CLUSTER: Final = "default"

CommandResult = TypeVar("CommandResult")
Value = TypeVar("Value")


class Output(StrEnum):
    """The formats of data on stdout."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


Server = Annotated[
    str, typer.Option(envvar="TESSERA_SERVER", metavar="HOST:PORT", help="Address of the server.")
]
Cluster = Annotated[
    str, typer.Option("--cluster", "-c", envvar="TESSERA_CLUSTER", help="The cluster's id.")
]
FileCluster = Annotated[
    str,
    typer.Option(
        "--cluster",
        "-c",
        envvar="TESSERA_CLUSTER",
        help="The cluster's id. Default: the one in the file, or else 'default'.",
    ),
]
OutputOption = Annotated[
    Output, typer.Option("--output", "-o", help="Format of the output.", show_choices=True)
]
Policy = Annotated[
    str,
    typer.Option(
        envvar="TESSERA_POLICY",
        metavar="YAML",
        show_envvar=False,
        help="The standing policy, e.g. '{objective: deadline then jct, max_changes: 20}'."
        " Default: the value of TESSERA_POLICY.",
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        "--insecure-any-interface",
        help="Accept connections from other machines without TLS and tokens. Everyone who reaches the"
        " server may then do everything.",
    ),
]
ValidateOnly = Annotated[
    bool,
    typer.Option("--validate-only", help="Only check the request on the server; change nothing."),
]

Watch = Annotated[
    bool,
    typer.Option(
        "--watch", "-w", help="Show every change, until the job ends or Ctrl-C is pressed."
    ),
]
WatchList = Annotated[
    bool, typer.Option("--watch", "-w", help="Show every change, until Ctrl-C is pressed.")
]

JobName = Annotated[
    str,
    typer.Argument(metavar="JOB", help="The job's id or full name.", autocompletion=complete_jobs),
]
RoundNumber = Annotated[
    str,
    typer.Argument(
        metavar="ROUND",
        help="The round's number or full name.",
        autocompletion=complete_rounds,
    ),
]
Priority = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=limits.MAX_PRIORITY,
        help="The job's priority. Starts of waiting jobs are planned for priority 1 first. Rounds with"
        " priority_weights also multiply the weights of its jobs.",
    ),
]
Weight = Annotated[
    float | None,
    typer.Option(
        min=limits.MIN_WEIGHT,
        max=limits.MAX_WEIGHT,
        help="Weight of the job's throughput relative to other jobs. New jobs have 1 if it is not given.",
    ),
]
Deadline = Annotated[
    str | None,
    typer.Option(
        help="The job's deadline: a time (RFC 3339), or a real-time duration from now, e.g. 6h. `update`"
        " also accepts 'none'. Rounds with --deadlines promise it, or report the earliest deadline"
        " that could be met."
    ),
]
MinGpus = Annotated[
    int | None,
    typer.Option(
        min=0, max=limits.MAX_GPUS, help="Fewest GPUs that the job may run on. Default: no minimum."
    ),
]
MaxGpus = Annotated[
    int | None,
    typer.Option(
        min=0, max=limits.MAX_GPUS, help="Most GPUs that the job may run on. Default: no maximum."
    ),
]

_BYTES: Final = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_AMOUNT: Final = re.compile(r"([0-9]+(?:\.[0-9]*)?)\s*([A-Za-z]*)")


def parse_seconds(where: str, text: str) -> float:
    """Return a duration such as ``90s``, ``5m``, ``1h30m`` or ``1.5d`` in seconds."""
    return durations.parse_duration_s(where, text)


def size_bytes(where: str, text: str) -> int:
    """Return a size such as ``40GiB`` or ``80 GB`` in bytes. A number without a unit is refused."""
    match = _AMOUNT.fullmatch(text.strip())
    if match is not None and not match[2]:
        raise InvalidInput(where, f"{text!r} has no unit; write e.g. 40GiB or 80GB")
    if match is None or match[2].lower() not in _BYTES:
        raise InvalidInput(where, f"{text!r} is not a size; write e.g. 40GiB or 80GB")
    size = float(match[1]) * _BYTES[match[2].lower()]
    if size > limits.MAX_MEMORY_BYTES:
        raise InvalidInput(where, f"must be at most {limits.MAX_MEMORY_BYTES // 2**40:,} TiB")
    return round(size)


def split_words(text: str) -> list[str]:
    """Return the words of a text such as ``dp,tp``, without spaces."""
    return [word.strip() for word in text.split(",") if word.strip()]


def parse_numbers(where: str, text: str) -> list[int]:
    """Return whole numbers such as ``1,2,4``, without duplicates."""
    parts = [part.strip() for part in text.split(",")]
    if not all(p.isascii() and p.isdigit() and 0 < int(p) <= limits.MAX_GPUS for p in parts):
        raise InvalidInput(where, f"{text!r}: write whole numbers from 1, e.g. 1,2,4")
    return list(dict.fromkeys(map(int, parts)))


def to_duration(length_s: float) -> Duration:
    """Return a length of time in seconds as a Duration."""
    message = Duration()
    message.FromNanoseconds(round(length_s * 1e9))
    return message


def parse_time(where: str, text: str, now: Timestamp) -> Timestamp:
    """Return a time such as ``2026-11-03T12:00:00Z``, or a duration from ``now`` such as ``2h``."""
    if durations.is_duration(text):
        after = timedelta(seconds=parse_seconds(where, text))
        try:
            return to_timestamp(where, now.ToDatetime(UTC) + after)
        except OverflowError:
            raise InvalidInput(where, f"{text!r} from now is after the year 9999") from None
    try:
        parsed = datetime.fromisoformat(text.strip())
    except ValueError:
        raise InvalidInput(
            where,
            f"{text!r} is not a time; write e.g. 2026-11-03T12:00:00Z, or 2h for two hours from now",
        ) from None
    return to_timestamp(where, parsed)


def parse_past(where: str, text: str, now: Timestamp) -> Timestamp:
    """Return a time such as ``2026-11-03T12:00:00Z``, or a length of time before ``now``, such as ``24h``."""
    if durations.is_duration(text):
        return to_timestamp(
            where, now.ToDatetime(UTC) - timedelta(seconds=parse_seconds(where, text))
        )
    return parse_time(where, text, now)


def to_timestamp(where: str, value: datetime) -> Timestamp:
    """Return a time with a time zone as a Timestamp."""
    if value.tzinfo is None:
        raise InvalidInput(where, f"{value.isoformat()} has no time zone; end it with Z for UTC")
    timestamp = Timestamp()
    try:
        timestamp.FromDatetime(value)
    except (OverflowError, ValueError):
        raise InvalidInput(where, f"{value.isoformat()} is outside the years 1 to 9999") from None
    return timestamp


def parse_label(where: str, text: str) -> tuple[str, str]:
    """Return ``key=value`` as a pair."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise InvalidInput(where, f"{text!r}: write a label as KEY=VALUE")
    return key, value


def parse_labels(where: str, texts: Iterable[str] | None) -> dict[str, str]:
    """Return ``key=value`` texts as a mapping. Raises InvalidInput."""
    return unique_pairs(where, (parse_label(where, text) for text in texts or ()))


def unique_pairs(where: str, pairs: Iterable[tuple[str, Value]]) -> dict[str, Value]:
    """Return pairs as a mapping.

    Raises:
        InvalidInput: a key occurs twice. It does not repeat the values.
    """
    mapping: dict[str, Value] = {}
    for key, value in pairs:
        if key in mapping:
            raise InvalidInput(where, f"{key} has a value already; give it once")
        mapping[key] = value
    return mapping


def refuse_options(context: typer.Context) -> None:
    """Refuse options before the name of a subcommand, because they would be ignored silently."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise InvalidInput(
                f"--{name}", f"must follow `{context.invoked_subcommand}`, if that accepts it"
            )


def with_options(
    command: Callable[..., CommandResult],
    parameter: str,
    asked: Callable[..., object],
    epilog: str = "",
) -> Callable[..., CommandResult]:
    """Return ``command`` with all options of ``asked`` in place of its ``parameter``.

    The parameter receives what ``asked`` returns for them. A TypedDict returns all of them, of which
    those that were not given are None.
    """
    own = dict(inspect.signature(command, eval_str=True).parameters)
    shared = _parameters(asked)
    del own[parameter]

    def run(**given: Any) -> CommandResult:
        shared_values = {name: given.pop(name) for name in shared if name in given}
        return command(**{parameter: asked(**shared_values)}, **given)

    run.__name__, run.__module__ = command.__name__, command.__module__
    run.__doc__ = "\n\n".join(t for t in (inspect.cleandoc(command.__doc__ or ""), epilog) if t)
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [p.replace(kind=keyword) for p in (*own.values(), *shared.values())]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _parameters(declaration: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    if not is_typeddict(declaration):
        return inspect.signature(declaration, eval_str=True).parameters
    keyword = inspect.Parameter.KEYWORD_ONLY
    return {
        name: inspect.Parameter(name, keyword, default=None, annotation=hint)
        for name, hint in get_type_hints(declaration, include_extras=True).items()
    }


def read_plan_file(field: str, path: str) -> str:
    """Return the text of an execution plan, or "" without one. The server reads it.

    ``path`` is its file, or a plan in JSON itself.
    """
    if not path or path.lstrip().startswith("{"):
        return path
    try:
        return read_text(path, STATED_PLAN.size_bytes)
    except InvalidInput as error:
        raise InvalidInput(field, f"{path} {error.problem}") from error
