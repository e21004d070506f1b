"""``tessera bench``: run a benchmark, or a small version of each of them."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from tessera.benchmarks.harness.cases import find_cases
from tessera.benchmarks.harness.registry import BenchmarkCase, run_case

out, err = Console(), Console(stderr=True)

SMOKE_PROCESSES = 2
"""How many benchmarks ``--smoke`` runs at a time. Its figures are no times."""


def add(app: typer.Typer) -> None:
    """Add ``bench`` to the command line."""
    bench = typer.Typer(
        help="Run benchmarks of Tessera. Each one prints its figures and their bounds."
    )
    bench.callback(invoke_without_command=True)(_all)
    for benchmark in find_cases().values():
        bench.command(benchmark.name, help=inspect.getdoc(benchmark.run))(_command(benchmark))
    app.add_typer(bench, name="bench")


def _all(
    context: typer.Context,
    smoke: Annotated[
        bool,
        typer.Option(
            help="Run a small version of every benchmark. The exit code is 1 if a bound does not hold."
        ),
    ] = False,
) -> None:
    if context.invoked_subcommand is not None:
        return
    if not smoke:
        names = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        for found in find_cases().values():
            names.add_row(
                f"[bold]{found.name}[/]", (inspect.getdoc(found.run) or "").splitlines()[0]
            )
        out.print(names)
        return
    broken = []
    with ProcessPoolExecutor(SMOKE_PROCESSES, mp_context=get_context("spawn")) as processes:
        for result in processes.map(_run_smoke, find_cases()):
            _show(result)
            figures = result["figures"]
            broken += [k for k in result["bounds"] if not _holds(result["bench"], k, figures[k])]
    if broken:
        err.print(f"bounds that do not hold: {', '.join(broken)}", style="red")
        raise typer.Exit(1)


def _run_smoke(name: str) -> dict[str, Any]:
    """Run the small version of a benchmark, and return its result without table and bounds of times.

    Times have no meaning at this size.
    """
    found = find_cases()[name]
    err.print(f"bench {name} (smoke)")
    result = run_case(found, found.smoke, ["bench", "--smoke"])
    result.pop("table", None)
    bounds = result["bounds"]
    result["bounds"] = {k: b for k, b in bounds.items() if not k.endswith("_s")}
    return result


def _command(found: BenchmarkCase) -> Callable[..., None]:
    """Return a command with the case's own options, ``--json`` and ``--check``."""
    own = inspect.signature(found.run, eval_str=True)
    extra = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=False,
            annotation=Annotated[bool, typer.Option(flag, help=text)],
        )
        for name, flag, text in (
            ("as_json", "--json", "Print one JSON object and nothing else."),
            ("check", "--check", "End with exit code 1 if a bound does not hold."),
        )
    ]

    def command(**options: Any) -> None:
        as_json, check = options.pop("as_json"), options.pop("check")
        result = run_case(found, options, sys.argv[1:])
        if as_json:
            sys.stdout.write(json.dumps(result) + "\n")
        else:
            _show(result)
        if check and not result["ok"]:
            raise typer.Exit(1)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own.parameters.values()]
    command.__signature__ = own.replace(  # type: ignore[attr-defined]
        parameters=[*parameters, *extra], return_annotation=None
    )
    command.__annotations__ = {p.name: p.annotation for p in [*parameters, *extra]}
    return command


def _show(result: dict[str, Any]) -> None:
    if "skipped" in result:
        out.print(f"{result['bench']}: skipped: {result['skipped']}", highlight=False)
        return
    if rows := result.get("table"):
        for columns in table_blocks(rows, out.width):
            table = Table(*columns, box=box.SIMPLE, pad_edge=False)
            for row in rows:
                table.add_row(*(_cell(row.get(column, "")) for column in columns))
            out.print(table)
    figures = Table(
        "figure", "value", "bound", "holds", title=f"{result['bench']} at {result['commit']}"
    )
    for name, value in result["figures"].items():
        bound = result["bounds"].get(name)
        limit = f"{bound['comparison']} {bound['limit']}" if bound else ""
        holds = "" if not bound else "yes" if _holds(result["bench"], name, value) else "[red]no[/]"
        figures.add_row(
            name, f"{value:.5g}" if isinstance(value, float) else str(value), limit, holds
        )
    out.print(figures)


def table_blocks(rows: list[dict[str, Any]], width: int) -> list[list[str]]:
    """Return the columns of the tables in which ``rows`` are printed within ``width`` characters.

    Each table begins with the first column, which names the row.
    """
    first, *others = dict.fromkeys(key for row in rows for key in row)

    def needs(column: str) -> int:
        return 2 + max(len(column), *(len(_cell(row.get(column, ""))) for row in rows))

    result, left = [[first]], width - needs(first)
    for column in others:
        if needs(column) > left and len(result[-1]) > 1:
            result.append([first])
            left = width - needs(first)
        result[-1].append(column)
        left -= needs(column)
    return result


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _holds(bench: str, name: str, value: float) -> bool:
    return find_cases()[bench].bounds[name].holds(value)
