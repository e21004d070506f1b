"""Commands that import files: estimates of workloads, and traces of jobs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Final, TypeVar

import typer
from rich.progress import Progress

from tessera.client import CallError, Client
from tessera.estimator.hardware import CATALOGUE
from tessera.estimator.samples import sample_profiles
from tessera.formulation.base import limits
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.resources import amounts_of, name_amounts
from tessera.formulation.base.values import EstimateSource
from tessera.formulation.records.clusters import TenantSpec
from tessera.formulation.records.estimates import EstimateRecord
from tessera.service.cli.client import (
    CallFailed,
    connect,
    current_timestamp,
    explain_failure,
)
from tessera.service.cli.clusters.tenants import apply_tenants
from tessera.service.cli.names import cluster_name
from tessera.service.cli.options import (
    DEFAULT_CLUSTER,
    DEFAULT_SERVER,
    Cluster,
    Server,
    ValidateOnly,
)
from tessera.service.cli.render import err, print_note
from tessera.service.cli.simulation import traces, traceview
from tessera.service.cli.simulation.rawtraces import NOT_RECORDED, FromOption, RawTrace, ZoneOption
from tessera.service.cli.simulation.submissions import (
    drop_dependencies_on_others,
    make_submissions,
    missing_submissions,
    workload_message,
)
from tessera.simulator.traces.csv_writer import trace_csv
from tessera.simulator.traces.files import profiles_of, trace_of
from tessera.simulator.traces.screening import order_lines, screen_form
from tessera.simulator.traces.trace import Arrival, DurationJob, TraceOptions, parse_trace
from tessera.v1 import clusters_pb2, estimates_pb2, jobs_pb2
from tessera.v1.tenants_pb2 import Tenant

CELLS_PER_CALL: Final = 20_000
JOBS_PER_CALL: Final = limits.MAX_JOBS
DEADLINE_S: Final = 300.0

_SOURCES: Final = {
    EstimateSource.MEASURED: estimates_pb2.MEASURED,
    EstimateSource.PROFILED: estimates_pb2.PROFILED,
    EstimateSource.ANALYTIC: estimates_pb2.ANALYTIC,
}

_T = TypeVar("_T")
_Rows = TypeVar("_Rows", bound=Sequence[object])
_File = Annotated[
    Path,
    typer.Argument(metavar="FILE.csv", help="CSV; docs/traces.md describes the format."),
]


def add_commands(app: typer.Typer) -> None:
    """Add ``import`` and its subcommands."""
    group = typer.Typer(
        help="Import estimates of workloads, or the jobs of a trace.", no_args_is_help=True
    )
    group.command("profiles")(import_profiles)
    group.command("samples")(import_samples)
    group.command("trace")(import_trace)
    app.add_typer(group, name="import", rich_help_panel="Clusters")


def import_profiles(
    file: _File,
    skip_unknown_types: Annotated[
        bool,
        typer.Option(
            "--skip-unknown-types", help="Skip estimates on GPU types that the cluster lacks."
        ),
    ] = False,
    complete: Annotated[
        bool,
        typer.Option(
            "--complete",
            help="The file has every shape on which its workloads run on its GPU types. Other shapes"
            " are taken not to run.",
        ),
    ] = False,
    validate_only: ValidateOnly = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
) -> None:
    """Import measured or estimated iteration times. They replace existing estimates of the same Cells.

    Without `--complete`, the speed on a shape that the file lacks is inferred from the other shapes.
    """
    records = read_rows(partial(profiles_of, complete=complete), file)
    to = cluster_name(cluster)
    with connect(server) as client:
        known = _gpu_types(client, to)
        if unknown := sorted({record.cell.gpu_type for record in records} - known):
            records = _of_known_types(records, known, unknown, file, skip=skip_unknown_types)
        send_estimates(client, to, records, validate_only=validate_only)
    _note_result(len(records), "estimate", validate_only=validate_only)


def import_samples(
    validate_only: ValidateOnly = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
) -> None:
    """Import sample estimates from an analytic model, to try Tessera before anything is measured."""
    with connect(server) as client:
        count = send_samples(client, cluster_name(cluster), validate_only=validate_only)
    _note_result(count, "estimate", validate_only=validate_only)


@traces.with_shaping
def import_trace(
    file: _File,
    wanted: traces.ShapingSettings,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", "-n", min=0, max=limits.MAX_ROWS, help="Import only the first N rows."
        ),
    ] = None,
    divide_iterations: Annotated[
        int,
        typer.Option(
            min=1,
            help="Divide `num_iterations` by this number. Use 1 for traces that are not Arena's.",
        ),
    ] = 5,
    raw: FromOption = None,
    time_zone: ZoneOption = "",
    tenant: Annotated[
        str, typer.Option(help="Tenant to which all jobs are accounted. Default: as in the trace.")
    ] = "",
    validate_only: ValidateOnly = False,
    server: Server = DEFAULT_SERVER,
    cluster: Cluster = DEFAULT_CLUSTER,
) -> None:
    """Submit all jobs of a trace now, in order of arrival. Their deadlines count from now.

    Jobs that the cluster already has are left unchanged, so an import can be repeated after a failure.
    Options under "Shaping" change the trace first. The load, the model sizes and the dropped jobs of the
    result are printed. With --to, the result is written to a file, and no server is needed. A raw trace
    (--from) is only converted if --to is given and no shaping is asked for.
    """
    if tenant and wanted.recipe.guaranteed_share is not None:
        raise InvalidInput(
            "--tenant", "cannot be combined with --guaranteed, which assigns tenants"
        )
    reading = TraceOptions(iteration_divisor=divide_iterations, limit=limit, screened=True)
    jobs: Sequence[Arrival] | Sequence[DurationJob]
    if raw is not None:
        trace = RawTrace(path=file, form=raw, time_zone=time_zone, limit=limit, tenant=tenant)
        if wanted.to is not None and replace(wanted, to=None).is_plain:
            written = _count(trace.convert(wanted.to), "job")
            print_note(f"{written} written to {wanted.to}, as a trace without models")
            print_note(NOT_RECORDED)
            return
        jobs = trace.jobs()
    elif time_zone:
        raise InvalidInput("--time-zone", "is for raw traces; give --from, too")
    else:
        jobs = read_rows(lambda path: trace_of(path, reading), file)
    if wanted.to is not None:
        _write(wanted.to, wanted, jobs, tenant)
        return
    to = cluster_name(cluster)
    with connect(server) as client:
        tenants: Sequence[TenantSpec] = []
        if wanted.is_plain:
            arrivals = _ordered_arrivals(file, jobs, reading)
        else:
            shaped = traces.shape_trace(wanted, jobs, traces.target_of(wanted, client, to))
            traceview.show_shaped_trace(shaped, wanted.recipe)
            arrivals, tenants = shaped.arrivals, shaped.tenants
        requests = make_submissions(to, arrivals, tenant, current_timestamp())
        new = missing_submissions(client, to, requests)
        described = [Tenant(name=spec.name, quotas=spec.quotas) for spec in tenants]
        is_split = bool(tenants) or len(new) > JOBS_PER_CALL
        for validating in _passes(is_split=is_split, validate_only=validate_only):
            if tenants:
                apply_tenants(client, to, described, validate_only=validating)
            _submit(client, to, new, validate_only=validating)
    if len(new) < len(requests):
        print_note(f"{_count(len(requests) - len(new), 'job')} already there, left unchanged")
    _note_result(len(new), "job", validate_only=validate_only)


def _passes(*, is_split: bool, validate_only: bool) -> tuple[bool, ...]:
    """Return whether each pass over the calls of an import only validates.

    A single call is all or nothing. Several calls are all validated before the first changes anything.
    """
    return (True,) if validate_only else (True, False) if is_split else (False,)


def _ordered_arrivals(
    file: Path, jobs: Sequence[Arrival] | Sequence[DurationJob], reading: TraceOptions
) -> list[Arrival]:
    """Return the jobs in order of arrival. Raises InvalidInput with the lines that are wrong."""
    arrivals = [job for job in jobs if isinstance(job, Arrival)]
    screened = screen_form(arrivals, "drop")
    if screened.dropped or len(arrivals) < len(jobs):
        parse_trace(file.read_bytes(), file.name, replace(reading, screened=False))
    for line in order_lines(screened.reordered):
        print_note(f"{line}; put in order")
    return screened.arrivals


def _write(
    to: Path,
    wanted: traces.ShapingSettings,
    jobs: Sequence[Arrival] | Sequence[DurationJob],
    tenant: str,
) -> None:
    """Write the shaped trace and print its facts."""
    shaped = traces.shape_trace(wanted, jobs, traces.target_of(wanted, None, ""))
    traceview.show_shaped_trace(shaped, wanted.recipe)
    arrivals = shaped.arrivals
    if tenant:
        arrivals = [a._replace(spec=replace(a.spec, tenant=tenant)) for a in arrivals]
    try:
        to.write_text(trace_csv(arrivals), encoding="utf-8")
    except OSError as error:
        raise InvalidInput(str(to), f"cannot be written: {error.strerror}") from error
    print_note(f"{_count(len(arrivals), 'job')} written to {to}")
    for spec in shaped.tenants:
        if spec.quotas:
            quota = f"{{{spec.name}: {{quotas: {{any: {spec.quotas['']}}}}}}}"
            print_note(
                f"to submit it, first set its quota with `tessera tenants apply`: tenants: {quota}"
            )


def _submit(
    client: Client, to: str, new: Sequence[jobs_pb2.SubmitJobRequest], *, validate_only: bool
) -> None:
    def send(batch: Sequence[jobs_pb2.SubmitJobRequest]) -> None:
        if validate_only and len(new) > JOBS_PER_CALL:
            batch = drop_dependencies_on_others(batch)
        request = jobs_pb2.SubmitJobsRequest(parent=to, requests=batch, validate_only=validate_only)
        client.call(client.stubs.jobs.SubmitJobs, request, DEADLINE_S)

    _in_batches(client, "jobs", new, JOBS_PER_CALL, send, validate_only=validate_only)


def send_estimates(
    client: Client, to: str, records: Sequence[EstimateRecord], *, validate_only: bool
) -> None:
    """Send estimates in batches, which are all validated before the first is stored."""
    is_split = len(records) > CELLS_PER_CALL
    for validating in _passes(is_split=is_split, validate_only=validate_only):
        send = partial(_send_cells, client, to, validate_only=validating)
        _in_batches(client, "estimates", records, CELLS_PER_CALL, send, validate_only=validating)


def _send_cells(
    client: Client, to: str, batch: Sequence[EstimateRecord], *, validate_only: bool
) -> None:
    request = estimates_pb2.UpsertCellsRequest(
        parent=to,
        cells=map(_estimate, batch),
        validate_only=validate_only,
    )
    client.call(client.stubs.estimates.UpsertCells, request, DEADLINE_S)


def send_samples(client: Client, to: str, *, validate_only: bool = False) -> int:
    """Send the sample estimates of the cluster's GPU types; return their number."""
    known = _gpu_types(client, to)
    profiles = sample_profiles(kind for kind in CATALOGUE if kind.name in known)
    if not profiles:
        have = ", ".join(sorted(kind.name for kind in CATALOGUE))
        raise InvalidInput(
            "samples", f"do not exist for {', '.join(sorted(known))}, only for {have}"
        )
    send_estimates(client, to, profiles, validate_only=validate_only)
    return len(profiles)


def _gpu_types(client: Client, to: str) -> set[str]:
    cluster = client.call(client.stubs.clusters.GetCluster, clusters_pb2.GetClusterRequest(name=to))
    return {kind.name for kind in cluster.gpu_types}


def _of_known_types(
    records: list[EstimateRecord],
    known: set[str],
    unknown: Sequence[str],
    file: Path,
    *,
    skip: bool,
) -> list[EstimateRecord]:
    """Return the estimates of known types.

    Raises:
        InvalidInput: no estimate is of a known type, or ``skip`` is not set.
    """
    lacks = (
        f"the cluster lacks {', '.join(unknown)} (it has {', '.join(sorted(known)) or 'no types'})"
    )
    if not skip:
        raise InvalidInput(
            str(file),
            f"{lacks}; add them with `tessera cluster apply -f FILE`, or skip their estimates"
            " with --skip-unknown-types",
        )
    kept = [record for record in records if record.cell.gpu_type in known]
    if not kept:
        raise InvalidInput(str(file), f"has only estimates of other types: {lacks}")
    print_note(f"{_count(len(records) - len(kept), 'estimate')} skipped: {lacks}")
    return kept


def _estimate(record: EstimateRecord) -> estimates_pb2.CellEstimate:
    cell = record.cell
    message = estimates_pb2.CellEstimate(
        workload=workload_message(record.workload),
        cell=estimates_pb2.Cell(
            gpu_type=cell.gpu_type,
            gpus=cell.gpus,
            pipeline_degree=cell.pipeline_degree,
            plan=cell.plan,
        ),
        nodes=cell.nodes,
        source=_SOURCES[record.source],
        provenance=record.provenance,
        complete=record.complete,
        **name_amounts(amounts_of(record)),
        execution_plan="" if record.plan is None else record.plan.to_json(),
    )
    if math.isfinite(record.iter_time_s):
        message.iter_time_s = record.iter_time_s
    else:
        message.infeasible = True
    return message


def read_rows(read: Callable[[Path], _Rows], file: Path) -> _Rows:
    """Return the rows of a file. Raises InvalidInput if it cannot be read or has no rows."""
    try:
        rows = read(file)
    except OSError as error:
        raise InvalidInput(str(file), f"cannot be read: {error.strerror}") from error
    if not rows:
        raise InvalidInput(str(file), "contains no rows")
    return rows


def _in_batches(
    client: Client,
    what: str,
    items: Sequence[_T],
    size: int,
    send: Callable[[Sequence[_T]], None],
    *,
    validate_only: bool,
) -> None:
    """Send ``items`` in batches, with a progress bar if stderr is a terminal.

    A failure names how many were stored before it.
    """
    with Progress(console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task(what, total=len(items))
        for first in range(0, len(items), size):
            batch = items[first : first + size]
            try:
                send(batch)
            except CallError as error:
                stored = 0 if validate_only else first
                sent = f"{stored:,} of {len(items):,} {what} were stored before the failure"
                failure = explain_failure(error, client)
                raise CallFailed(f"{failure}; {sent}", failure.exit_code) from error
            progress.advance(task, len(batch))


def _note_result(number: int, what: str, *, validate_only: bool) -> None:
    done = "valid; nothing changed" if validate_only else "imported"
    print_note(f"{_count(number, what)} {done}")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
