"""The execution of a sweep, with progress. Finished tasks are skipped, and failures lose no results."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from tessera.formulation.errors import InvalidInput
from tessera.simulator.provenance import measured_commit
from tessera.simulator.sweeps import cluster, local
from tessera.simulator.sweeps.results import Results
from tessera.simulator.sweeps.tasks import Task, TaskOutcome, TasksFailed, code_digest

Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=0,
        help="Number of runs at a time. 0: one after another in this process. Default: one for each"
        " core, or as many as Ray has CPUs.",
    ),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray", help="Run on the Ray cluster at this address. 'auto': the one of this machine."
    ),
]
ResultsFolder = Annotated[
    Path | None,
    typer.Option(
        "--results",
        file_okay=False,
        help="Keep each result in this folder. The same command continues an interrupted sweep.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The place where tasks run, and the folder of their results."""

    workers: int | None = None
    ray: str | None = None
    folder: Path | None = None

    def run(self, tasks: Sequence[Task]) -> dict[str, dict[str, Any]]:
        """Run ``tasks`` as ``run_tasks`` does."""
        return run_tasks(tasks, folder=self.folder, workers=self.workers, ray=self.ray)


def sweep_of_options(
    *, workers: Workers = None, ray: RayAddress = None, results: ResultsFolder = None
) -> Sweep:
    """Return the sweep that the options describe."""
    return Sweep(workers=workers, ray=ray, folder=results)


def run_tasks(
    tasks: Sequence[Task],
    *,
    folder: Path | None = None,
    workers: int | None = None,
    ray: str | None = None,
) -> dict[str, dict[str, Any]]:
    """Run ``tasks`` and return their results by name, in the order of ``tasks``.

    All results have passed through JSON, so that tuples are lists. With ``folder``, each result is
    written when its task ends. A later call runs only tasks that have no result for the same
    function, options, files and code. Tasks that differ only in their name run once.

    If some tasks fail, the others are finished and kept, and one ``TasksFailed`` reports all
    failures. An interrupt keeps the results so far. With 0 ``workers``, tasks run in this process.
    Its libraries may use several threads, so that such results are not kept, and the first error
    ends the sweep.
    """
    if workers == 0 and (folder is not None or ray is not None):
        raise InvalidInput(
            "--workers", "0 runs in this process; give another number, or omit --ray and --results"
        )
    if len({task.name for task in tasks}) < len(tasks):
        raise InvalidInput("tasks", "must have unique names")
    code = code_digest()
    keys = {task.name: task.key(code) for task in tasks}
    kept = Results(folder=folder, commit=measured_commit())
    results = {key: result for key in keys.values() if (result := kept.load(key)) is not None}
    todo: dict[str, Task] = {}
    for task in tasks:
        if keys[task.name] not in results:
            todo.setdefault(keys[task.name], task)
    failures: dict[str, str] = {}
    with (
        _progress_bar(done=len(results), count=len(results) + len(todo)) as ended,
        closing(_outcomes(list(todo.values()), workers, ray)) as runs,
    ):
        for outcome in runs:
            if outcome.failure:
                failures[outcome.task.name] = outcome.failure
            else:
                key = keys[outcome.task.name]
                results[key] = json.loads(outcome.result)
                kept.save(key, outcome.task, results[key])
            ended(outcome)
    if failures:
        raise TasksFailed(failures, len(tasks))
    return {name: results[key] for name, key in keys.items()}


def _outcomes(
    tasks: Sequence[Task], workers: int | None, ray: str | None
) -> Generator[TaskOutcome, None, None]:
    if not tasks:
        return
    if ray is not None:
        yield from cluster.ray_outcomes(tasks, ray, workers)
    elif workers == 0:
        yield from local.inline_outcomes(tasks)
    else:
        yield from local.process_outcomes(tasks, workers or os.cpu_count() or 1)


@contextmanager
def _progress_bar(done: int, count: int) -> Iterator[Callable[[TaskOutcome], None]]:
    """Show progress on standard error, as a bar on a terminal or else as a line for each task."""
    console = Console(stderr=True, highlight=False, markup=False)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    live = console.is_terminal
    with Progress(
        *columns, console=console, transient=True, disable=not live, speed_estimate_period=86_400
    ) as progress:
        bar = progress.add_task("", total=count, completed=done)

        def ended(outcome: TaskOutcome) -> None:
            nonlocal done
            done += 1
            name = outcome.task.name
            if outcome.failure:
                console.print(f"{name} failed: {outcome.failure.strip().splitlines()[-1]}")
            elif not live:
                console.print(f"{done}/{count} {name}")
            progress.update(bar, completed=done, description=name)

        if done:
            console.print(f"{done} of {count} runs had been done before")
        try:
            yield ended
        except KeyboardInterrupt:
            console.print(f"stopped after {done} of {count} runs")
            raise
