"""``tessera profile``: measure the layers of a training step, or collectives, on this machine."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.progress import Progress

from tessera.estimator.collectives import CommRecord, write_records
from tessera.estimator.plans import Primitive, Shape
from tessera.estimator.profiling.records import ProfileRecord
from tessera.formulation.base.errors import InvalidInput
from tessera.service.cli import options
from tessera.service.cli.client import current_timestamp
from tessera.service.cli.estimates.modelling import require_jax, step_arguments
from tessera.service.cli.render import (
    Column,
    err,
    format_number,
    print_line,
    print_note,
    show_table,
)

DEFAULT_SIZES: Final = "64KiB,256KiB,1MiB,4MiB,16MiB,64MiB,256MiB"
_GROUP: Final = re.compile(r"([0-9]{1,5})x([0-9]{1,5})", re.ASCII)
_MAX_REPEATS: Final = 10_000

AsJson = Annotated[bool, typer.Option("--json", help="Print the records as one JSON list.")]


def add_commands(app: typer.Typer) -> None:
    """Add ``profile_layers`` and its subcommand."""
    group = typer.Typer(help=profile_layers.__doc__)
    group.callback(invoke_without_command=True)(profile_layers)
    group.command("collectives")(profile_collectives)
    app.add_typer(group, name="profile", rich_help_panel="Estimates")


def _option(text: str, *names: str, **rest: Any) -> Any:
    return typer.Option(*names, help=text, show_default=False, **rest)


def profile_layers(
    context: typer.Context,
    step: Annotated[
        str,
        _option(
            "Function that takes `samples` (and `tp`, if it supports tensor parallelism) and returns the loss"
            " function, the parameters and a batch.",
            metavar="MODULE:FUNCTION",
        ),
    ] = "",
    argument: Annotated[
        list[str] | None, _option("Argument of the function. Repeatable.", metavar="KEY=VALUE")
    ] = None,
    samples: Annotated[
        str, _option("Samples of a micro-batch on one GPU. Default: 1,2,4,8.")
    ] = "1,2,4,8",
    tp: Annotated[str, _option("Degrees of tensor parallelism. Default: 1.")] = "1",
    to: Annotated[
        Path | None,
        _option(
            "File to which the records are appended. Records already in it are not measured again.",
            metavar="FILE.jsonl",
        ),
    ] = None,
    warmups: Annotated[
        int, _option("Runs before each timing. Default: 2.", min=0, max=_MAX_REPEATS)
    ] = 2,
    repeats: Annotated[
        int, _option("Number of timed runs. Default: 5.", min=1, max=_MAX_REPEATS)
    ] = 5,
    as_json: AsJson = False,
) -> None:
    """Measure a step's layers on one device, for `tessera estimate --step ... --profile FILE`.

    Layers of the same kind are measured once. Needs JAX, and uses a GPU if there is one.
    """
    if context.invoked_subcommand is not None:
        return
    if not step:
        raise InvalidInput(
            "--step", "is required, as MODULE:FUNCTION (or use `tessera profile collectives`)"
        )
    sizes = [
        (s, t)
        for t in options.parse_numbers("--tp", tp)
        for s in options.parse_numbers("--samples", samples)
    ]
    require_jax()
    from tessera.service.cli.estimates import measuring  # noqa: PLC0415 - JAX starts slowly

    measured: list[ProfileRecord] = []
    with Progress(console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("layers", total=len(sizes))
        for records in measuring.measure_layers(
            (step, step_arguments(argument)),
            sizes,
            to=to,
            date=_today(),
            warmups=warmups,
            repeats=repeats,
        ):
            measured += records
            progress.advance(task)
    _show(measured, _LAYERS, as_json=as_json)
    print_note(
        f"{len(measured):,} layers measured on {measuring.local_device()} in"
        f" {sum(r.device_s for r in measured):.1f} GPU-seconds"
        + (f"; written to {to}" if to else "")
    )


def profile_collectives(
    to: Annotated[
        Path | None,
        _option(
            "Write the records to this file, for `tessera estimate --collectives`.",
            metavar="FILE.csv",
        ),
    ] = None,
    gpu: Annotated[
        str,
        _option("Name of the GPU type in estimates. Default: the device's own name."),
    ] = "",
    network: Annotated[
        str, _option("Name of the network between nodes. Default: default.")
    ] = "default",
    primitive: Annotated[
        list[Primitive] | None, _option("Collective to measure. Repeatable. Default: all.")
    ] = None,
    sizes: Annotated[str, _option(f"Sizes of tensors. Default: {DEFAULT_SIZES}.")] = DEFAULT_SIZES,
    group: Annotated[
        list[str] | None,
        _option(
            "Group of nodes, with a number of GPUs on each. Repeatable. Default: all powers of two.",
            metavar="NODESxGPUS",
        ),
    ] = None,
    repeats: Annotated[
        int, _option("Number of timed runs. Default: 5.", min=1, max=_MAX_REPEATS)
    ] = 5,
    as_json: AsJson = False,
) -> None:
    """Measure collectives on this machine's devices. Each process of a JAX job is a node. Needs JAX."""
    wanted = list(primitive or Primitive)
    size_bytes = sorted({options.size_bytes("--sizes", text) for text in sizes.split(",")})
    groups = [_group(text) for text in group or ()]
    if to is not None and not to.resolve().parent.is_dir():
        raise InvalidInput("--to", f"the folder {to.resolve().parent} does not exist")
    require_jax()
    from tessera.service.cli.estimates import measuring  # noqa: PLC0415 - JAX starts slowly

    with Progress(console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("collectives", total=len(wanted))
        measured = measuring.measure_collectives(
            wanted,
            size_bytes,
            groups,
            names=(gpu, network),
            date=_today(),
            repeats=repeats,
            report=lambda: progress.advance(task),
        )
    if to is not None:
        write_records(to, measured)
    _show(measured, _COLLECTIVES, as_json=as_json)
    print_note(
        f"{len(measured):,} collectives measured on {measured[0].device}"
        + (f"; written to {to}" if to else "")
    )


_LAYERS: Final = [
    Column[ProfileRecord]("KIND", lambda r: r.kind),
    Column[ProfileRecord]("SAMPLES", lambda r: format_number(r.samples), right=True),
    Column[ProfileRecord]("TP", lambda r: str(r.tp), right=True),
    Column[ProfileRecord](
        "FORWARD", lambda r: f"{format_number(1e3 * r.forward_s)} ms", right=True
    ),
    Column[ProfileRecord](
        "BACKWARD", lambda r: f"{format_number(1e3 * r.backward_s)} ms", right=True
    ),
    Column[ProfileRecord]("METHOD", lambda r: r.method),
]
_COLLECTIVES: Final = [
    Column[CommRecord]("COLLECTIVE", lambda r: r.primitive),
    Column[CommRecord]("GROUP", lambda r: f"{r.group_nodes}x{r.group_gpus_per_node}", right=True),
    Column[CommRecord]("GROUPS", lambda r: str(r.num_groups), right=True),
    Column[CommRecord]("MIB", lambda r: format_number(r.bytes / 2**20), right=True),
    Column[CommRecord]("TIME", lambda r: f"{format_number(1e3 * r.time_s)} ms", right=True),
    Column[CommRecord]("GB/S", lambda r: format_number(r.bytes / r.time_s / 1e9), right=True),
    Column[CommRecord]("SPREAD", lambda r: f"{100 * (r.spread or 0):.0f} %", right=True),
]


def _show(records: Sequence[Any], columns: Sequence[Column[Any]], *, as_json: bool) -> None:
    if as_json:
        print_line(json.dumps([asdict(record) for record in records], indent=2))
    elif records:
        show_table(records, columns)


def _group(text: str) -> Shape:
    match = _GROUP.fullmatch(text)
    if match is None:
        raise InvalidInput(
            "--group", f"must be a number of nodes and the GPUs of each, e.g. 1x4, not {text!r}"
        )
    return Shape(nodes=int(match[1]), gpus_per_node=int(match[2]))


def _today() -> str:
    return current_timestamp().ToJsonString()[:10]
