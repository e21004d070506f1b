"""The execution of a sweep, with progress. Finished tasks are skipped, and failures lose no results."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from tessera.formulation.base.errors import InvalidInput
from tessera.simulator.provenance import measured_commit
from tessera.simulator.sweeps.local import run_each
from tessera.simulator.sweeps.tasks import Task, TaskOutcome, TasksFailed, code_digest

Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=0,
        help="Number of runs at a time. 0: one after another in this process. Default: one for each"
        " core.",
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
    """The number of runs at a time, and the folder of their results."""

    workers: int | None = None
    folder: Path | None = None

    def run(self, tasks: Sequence[Task]) -> dict[str, dict[str, Any]]:
        """Run ``tasks`` as ``run_tasks`` does."""
        return run_tasks(tasks, folder=self.folder, workers=self.workers)


def sweep_of_options(*, workers: Workers = None, results: ResultsFolder = None) -> Sweep:
    """Return the sweep that the options describe."""
    return Sweep(workers=workers, folder=results)


def run_tasks(
    tasks: Sequence[Task], *, folder: Path | None = None, workers: int | None = None
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
    if workers == 0 and folder is not None:
        raise InvalidInput(
            "--workers", "0 runs in this process; give another number, or omit --results"
        )
    if len({task.name for task in tasks}) < len(tasks):
        raise InvalidInput("tasks", "must have unique names")
    workers = (os.cpu_count() or 1) if workers is None else workers
    code, commit = code_digest(), measured_commit()
    keys = {task.name: task.key(code) for task in tasks}
    results: dict[str, dict[str, Any]] = {}
    todo: dict[str, Task] = {}
    for task in tasks:
        key = keys[task.name]
        file = folder / f"{key}.json" if folder is not None else None
        if file is not None and file.exists():
            results[key] = _read_result(file)
        else:
            todo.setdefault(key, task)
    failures: dict[str, str] = {}
    with (
        _progress_bar(done=len(results), count=len(results) + len(todo)) as ended,
        closing(run_each(list(todo.values()), workers)) as outcomes,
    ):
        for outcome in outcomes:
            if outcome.failure:
                failures[outcome.task.name] = outcome.failure
            else:
                key = keys[outcome.task.name]
                results[key] = json.loads(outcome.result)
                if folder is not None:
                    _write_result(folder / f"{key}.json", outcome.task, commit, results[key])
            ended(outcome)
    if failures:
        raise TasksFailed(failures, len(tasks))
    return {name: results[key] for name, key in keys.items()}


def _read_result(file: Path) -> dict[str, Any]:
    try:
        result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["result"]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInput(
            str(file), f"is not a result that a sweep wrote ({error}); delete it"
        ) from error
    return result


def _write_result(file: Path, task: Task, commit: str, result: dict[str, Any]) -> None:
    """Write a result atomically: the file is complete or absent, even after a crash."""
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "name": task.name,
        "function": task.function,
        "options": dict(task.options),
        "files": [str(path) for path in task.files],
        "commit": commit,
        "result": result,
    }
    partial = file.with_suffix(f".{os.getpid()}.partial")
    with partial.open("w", encoding="utf-8") as stream:
        json.dump(content, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(file)


@contextmanager
def _progress_bar(done: int, count: int) -> Iterator[Callable[[TaskOutcome], None]]:
    """Show progress on standard error, as a bar on a terminal or else as a line for each task."""
    console = Console(stderr=True, highlight=False, markup=False)
    with Progress(
        MofNCompleteColumn(),
        *Progress.get_default_columns(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        speed_estimate_period=86_400,
    ) as progress:
        bar = progress.add_task("", total=count, completed=done)

        def ended(outcome: TaskOutcome) -> None:
            nonlocal done
            done += 1
            name = outcome.task.name
            if outcome.failure:
                console.print(f"{name} failed: {outcome.failure.strip().splitlines()[-1]}")
            elif not console.is_terminal:
                console.print(f"{done}/{count} {name}")
            progress.update(bar, completed=done, description=name)

        if done:
            console.print(f"{done} of {count} runs had been done before")
        try:
            yield ended
        except KeyboardInterrupt:
            console.print(f"stopped after {done} of {count} runs")
            raise
