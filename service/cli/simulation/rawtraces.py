"""Raw traces on the command line: ``tessera import trace RAW --from FORMAT``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Final, TypeVar

import typer

from tessera.formulation.base.errors import InvalidInput
from tessera.service.cli.render import print_note
from tessera.simulator.traces.csv_writer import write_durations
from tessera.simulator.traces.raw.formats import RawFormat, read_raw
from tessera.simulator.traces.raw.rows import DroppedRows
from tessera.simulator.traces.trace import DurationJob

FromOption = Annotated[
    RawFormat | None,
    typer.Option(
        "--from",
        show_default=False,
        help="Format of a raw trace: philly (cluster_job_log), helios (cluster_log.csv), acme"
        " (trace_seren.csv, trace_kalos.csv), pai (the folder of"
        " pai_job_table.csv and pai_task_table.csv) or sacct (`sacct --parsable2`). Its jobs have"
        " durations and no models; --redraw draws them. Default: a CSV of docs/traces.md.",
    ),
]
ZoneOption = Annotated[
    str,
    typer.Option(
        "--time-zone",
        show_default=False,
        metavar="ZONE",
        help="Zone of a raw trace's times that state none, e.g. Europe/Berlin. Default:"
        " America/Los_Angeles for philly, Asia/Shanghai for helios, UTC for sacct.",
    ),
]
NOT_RECORDED: Final = (
    "models, sizes, batches and iterations are not in the trace; draw them with --redraw --profiles"
    " FILE.csv --nodes TYPE=NODESxGPUS --seed N"
)

_Result = TypeVar("_Result")


@dataclass(slots=True, kw_only=True)
class RawTrace:
    """A raw trace to be read. ``dropped`` is complete once its jobs have been read."""

    path: Path
    form: RawFormat
    time_zone: str
    limit: int | None
    tenant: str
    dropped: DroppedRows = field(default_factory=DroppedRows)

    def jobs(self) -> list[DurationJob]:
        """Return the jobs by arrival, which count from the first, and report dropped rows.

        Raises:
            InvalidInput: the trace cannot be read, is wrong, or has no jobs.
        """
        jobs = self._read(lambda: list(self._stream()))
        if not jobs:
            raise InvalidInput(str(self.path), "contains no jobs that held GPUs and ended")
        first_s = min(job.arrival_s for job in jobs)
        jobs.sort(key=lambda job: job.arrival_s)
        return [job._replace(arrival_s=job.arrival_s - first_s) for job in jobs]

    def convert(self, to: Path) -> int:
        """Write the jobs to a CSV file one by one, and return their number.

        Nothing is written to ``to`` if the trace is wrong.

        Raises:
            InvalidInput: the trace cannot be read or is wrong, or ``to`` cannot be written.
        """
        part = to.with_name(f"{to.name}.part")
        try:
            with part.open("w", encoding="utf-8", newline="") as file:
                written = self._read(lambda: write_durations(self._stream(), file))
            part.replace(to)
        except OSError as error:
            raise InvalidInput(str(to), f"cannot be written: {error.strerror}") from error
        finally:
            part.unlink(missing_ok=True)
        return written

    def _stream(self) -> Iterator[DurationJob]:
        jobs = read_raw(
            self.path, self.form, self.dropped, time_zone=self.time_zone, limit=self.limit
        )
        if not self.tenant:
            return jobs
        return (job._replace(spec=replace(job.spec, tenant=self.tenant)) for job in jobs)

    def _read(self, read: Callable[[], _Result]) -> _Result:
        """Return what ``read`` returns, and report the dropped rows."""
        try:
            result = read()
        except OSError as error:
            place = error.filename or self.path
            raise InvalidInput(str(place), f"cannot be read: {error.strerror}") from error
        for line in self.dropped.lines():
            print_note(line)
        return result
