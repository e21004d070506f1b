"""The options of ``tessera import trace`` that shape a trace, and the cluster that it is shaped for."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from tessera.client import Client
from tessera.formulation.base import limits
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.resources import amounts_of, name_amounts
from tessera.formulation.base.values import Cell, EstimateSource, GpuType, Workload
from tessera.formulation.records.clusters import NodeSpec, TenantSpec
from tessera.formulation.records.estimates import EstimateRecord
from tessera.service.cli import options
from tessera.service.cli.clusters.hostview import stated_host
from tessera.service.cli.names import short_name
from tessera.simulator.traces.files import profiles_of
from tessera.simulator.traces.recipe import Recipe, apply_recipe
from tessera.simulator.traces.redraw import parameter_count
from tessera.simulator.traces.screening import (
    DroppedJob,
    ScreenedTrace,
    in_order,
    screen_durations,
    screen_form,
    screen_jobs,
    screen_profiled,
)
from tessera.simulator.traces.speeds import ClusterRoom, Speeds
from tessera.simulator.traces.trace import Arrival, DurationJob
from tessera.v1 import clusters_pb2, estimates_pb2

_NODES: Final = re.compile(r"([a-z0-9][a-z0-9._-]{0,62})=([0-9]{1,6})x([0-9]{1,2})", re.ASCII)
_NUMBER: Final = r"([0-9]{1,9}(?:\.[0-9]{1,9})?)"
_TIGHTNESS: Final = re.compile(rf"{_NUMBER}(?::{_NUMBER})?", re.ASCII)
MAX_FACTOR: Final = 1e6
_SHARE: Final = {"min": 0.0, "max": 1.0}
_FACTOR: Final = {"min": 1e-6, "max": MAX_FACTOR}


class BadJobTreatment(StrEnum):
    """The treatments of bad jobs."""

    REFUSE = "refuse"
    DROP = "drop"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapingSettings:
    """The shaping of a trace, the cluster that it is for, and the file that it is written to."""

    recipe: Recipe
    profiles: Path | None
    nodes: tuple[NodeSpec, ...]
    on_bad: BadJobTreatment | None
    to: Path | None

    @property
    def is_plain(self) -> bool:
        """Return whether no shaping was requested, so that the trace is submitted unchanged."""
        named = (self.profiles, self.on_bad, self.to)
        return self.recipe.is_empty and not self.nodes and named == (None, None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapingTarget:
    """The profiles and the cluster for which a trace is shaped."""

    profiles: Sequence[EstimateRecord]
    gpu_types: Sequence[GpuType]
    nodes: Sequence[NodeSpec]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapedTrace:
    """A shaped trace. If ``speeds`` is None, the target is unknown."""

    arrivals: list[Arrival]
    tenants: list[TenantSpec]
    resized: int
    """The number of jobs that request another number of GPUs than in the trace."""
    dropped: list[DroppedJob]
    reordered: list[str]
    speeds: Speeds | None


def _option(text: str, *names: str, **rest: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="Shaping", show_default=False, **rest)


def shaping_options(
    *,
    profiles: Annotated[
        Path | None,
        _option(
            "Iteration times, from which the durations of jobs follow. Default: the server's estimates.",
            metavar="FILE.csv",
        ),
    ] = None,
    nodes: Annotated[
        list[str] | None,
        _option(
            "Nodes of the cluster that the trace is shaped for, e.g. a100=80x4: 80 nodes of 4 x a100."
            " Repeatable. Default: the server's.",
            metavar="TYPE=NODESxGPUS",
        ),
    ] = None,
    on_bad: Annotated[
        BadJobTreatment | None,
        _option(
            "What to do about jobs that cannot run, repeat a name, last no time or are out of order. refuse:"
            " refuse the trace. drop: drop them and put the others in order. Default: put jobs in order, and"
            " refuse the other faults."
        ),
    ] = None,
    redraw: Annotated[
        bool,
        _option(
            "Draw new models and sizes that run on the GPUs of each job, at equal GPU-hours."
            " Only where none does, the job gets other GPUs.",
            "--redraw",
        ),
    ] = False,
    large_share: Annotated[
        float | None,
        _option("Share of jobs with large models. As few jobs as needed are redrawn.", **_SHARE),
    ] = None,
    large_from: Annotated[
        str, _option("Size from which a model counts as large. Default: 6B.")
    ] = "6B",
    busiest_hours: Annotated[
        float | None,
        _option("Keep only this many hours: those in which most jobs arrive.", min=0.01, max=1e6),
    ] = None,
    sample: Annotated[
        float | None,
        _option(
            "Keep only this share of the jobs, drawn evenly, e.g. the ratio of this cluster's GPUs to the"
            " traced cluster's.",
            min=1e-6,
            max=1.0,
        ),
    ] = None,
    faster: Annotated[
        float | None, _option("Factor on the arrival rate of jobs.", **_FACTOR)
    ] = None,
    longer: Annotated[float | None, _option("Factor on the iterations of jobs.", **_FACTOR)] = None,
    load: Annotated[
        float | None,
        _option(
            "Keep only as many jobs as result in this load: the requested GPU-hours divided by the cluster's"
            " until the last arrival.",
            **_FACTOR,
        ),
    ] = None,
    guaranteed: Annotated[
        float | None,
        _option(
            "Share of jobs, drawn evenly, that are guaranteed and belong to a tenant with a quota. The others"
            " are best effort.",
            **_SHARE,
        ),
    ] = None,
    quota: Annotated[
        int | None,
        _option(
            "GPUs, of any type, of that tenant's quota. Default: all of the cluster.",
            min=1,
            max=limits.MAX_QUOTA,
        ),
    ] = None,
    tightness: Annotated[
        str | None,
        _option(
            "Deadlines, as a factor on a job's duration on what it requested: a number such as 1.5,"
            " or a range"
            " such as 0.5:1.5 from which it is drawn evenly."
        ),
    ] = None,
    loosen: Annotated[
        float | None,
        _option("Factor on the time to deadlines (5 in Arena's experiments).", **_FACTOR),
    ] = None,
    no_deadlines: Annotated[bool, _option("Remove all deadlines.", "--no-deadlines")] = False,
    seed: Annotated[
        int, _option("Seed of all random draws. Default: 0.", min=0, max=limits.MAX_SEED)
    ] = 0,
    to: Annotated[
        Path | None,
        _option(
            "Write the trace to this file, in Tessera's CSV format, instead of submitting it. Needs"
            " no server.",
            metavar="FILE.csv",
        ),
    ] = None,
) -> ShapingSettings:
    """Return the shaping that the options describe. Raises InvalidInput."""
    if no_deadlines and (tightness is not None or loosen is not None):
        raise InvalidInput("--no-deadlines", "cannot be combined with --tightness or --loosen")
    if quota is not None and guaranteed is None:
        raise InvalidInput("--quota", "needs --guaranteed SHARE")
    recipe = Recipe(
        redraw=redraw,
        large_share=large_share,
        large_from=_size(large_from),
        busiest_hours=busiest_hours,
        share=sample,
        arrival_factor=faster,
        life_factor=longer,
        load=load,
        guaranteed_share=guaranteed,
        quota_gpus=quota,
        tightness=_tightness(tightness),
        deadline_factor=loosen,
        without_deadlines=no_deadlines,
        seed=seed,
    )
    return ShapingSettings(
        recipe=recipe, profiles=profiles, nodes=tuple(_nodes(nodes or [])), on_bad=on_bad, to=to
    )


def with_shaping(command: Callable[..., None]) -> Callable[..., None]:
    """Return ``command`` with the options on shaping in place of its parameter ``wanted``."""
    return options.with_options(command, "wanted", shaping_options)


def target_of(wanted: ShapingSettings, client: Client | None, cluster: str) -> ShapingTarget | None:
    """Return the target of the shaping: from the options, and otherwise from the server, if any.

    Return None if the target is unknown.

    Raises:
        InvalidInput: the file of profiles is wrong or cannot be read.
    """
    profiles: Sequence[EstimateRecord] = []
    if wanted.profiles is not None:
        profiles = profiles_of(wanted.profiles)
    elif client is not None:
        profiles = _stored_estimates(client, cluster)
    nodes: Sequence[NodeSpec] = wanted.nodes
    if not nodes and client is not None:
        nodes = _stored_nodes(client, cluster)
    if not profiles or not nodes:
        return None
    kinds = sorted({node.gpu_type for node in nodes})
    types = [GpuType(name=kind, memory_bytes=0) for kind in kinds]
    return ShapingTarget(profiles=profiles, gpu_types=types, nodes=nodes)


def shape_trace(
    wanted: ShapingSettings,
    jobs: Sequence[Arrival] | Sequence[DurationJob],
    target: ShapingTarget | None,
) -> ShapedTrace:
    """Return the shaped trace.

    Raises:
        InvalidInput: jobs are bad and must not be dropped, or a step is impossible.
    """
    recipe = wanted.recipe
    durations = any(isinstance(job, DurationJob) for job in jobs)
    if target is None and (recipe.needs_speeds or durations):
        raise InvalidInput(
            "--profiles, --nodes",
            "are required, because the durations of jobs follow from them (or use a server that has them)",
        )
    if durations and not recipe.redraw:
        raise InvalidInput("--redraw", "is required, because the trace has durations but no models")
    reordered: list[str] = []
    if wanted.on_bad is None:
        jobs, reordered = _put_in_order(jobs)
    good = _screened(jobs, target, wanted.on_bad or BadJobTreatment.REFUSE, redraw=recipe.redraw)
    speeds = None if target is None else Speeds(target.profiles, ClusterRoom.of(target.nodes))
    arrivals, tenants = apply_recipe(recipe, good.arrivals, speeds)
    if not arrivals:
        raise InvalidInput("trace", "has no jobs left")
    return ShapedTrace(
        arrivals=arrivals,
        tenants=tenants,
        resized=_count_resized(good.arrivals, arrivals),
        dropped=good.dropped,
        reordered=reordered or good.reordered,
        speeds=speeds,
    )


def _screened(
    jobs: Sequence[Arrival] | Sequence[DurationJob],
    target: ShapingTarget | None,
    on_bad: BadJobTreatment,
    *,
    redraw: bool,
) -> ScreenedTrace[Arrival] | ScreenedTrace[DurationJob]:
    asked_for = [job for job in jobs if isinstance(job, DurationJob)]
    if asked_for:
        return screen_durations(asked_for, on_bad.value)
    arrivals = [job for job in jobs if isinstance(job, Arrival)]
    if target is None:
        return screen_form(arrivals, on_bad.value)
    if redraw:
        return screen_profiled(arrivals, target.profiles, on_bad.value)
    return screen_jobs(arrivals, target.profiles, target.gpu_types, target.nodes, on_bad.value)


def resized_lines(resized: int) -> list[str]:
    """Return the line on jobs that request another number of GPUs than in the trace, if any do."""
    if not resized:
        return []
    jobs = "1 job requests" if resized == 1 else f"{resized:,} jobs request"
    return [
        f"{jobs} another number of GPUs than in the trace, because the drawn model does not run on that"
    ]


def _count_resized(
    before: Sequence[Arrival] | Sequence[DurationJob], after: Sequence[Arrival]
) -> int:
    """Return the number of jobs that request another number of GPUs than in the trace."""
    stated = {job.spec.name: job.spec.requested_gpus for job in before}
    return sum(1 for job in after if job.spec.requested_gpus != stated[job.spec.name])


def _put_in_order(
    jobs: Sequence[Arrival] | Sequence[DurationJob],
) -> tuple[list[Arrival] | list[DurationJob], list[str]]:
    asked_for = [job for job in jobs if isinstance(job, DurationJob)]
    if asked_for:
        return in_order(asked_for)
    return in_order([job for job in jobs if isinstance(job, Arrival)])


def _size(text: str) -> float:
    try:
        return parameter_count(text)
    except InvalidInput as wrong:
        raise InvalidInput("--large-from", wrong.problem) from wrong


def _tightness(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    match = _TIGHTNESS.fullmatch(text)
    if match is None or not 0 < float(match[1]) <= float(match[2] or match[1]):
        raise InvalidInput(
            "--tightness", f"must be a number such as 1.5, or a range such as 0.5:1.5, not {text!r}"
        )
    return float(match[1]), float(match[2] or match[1])


def _nodes(texts: Sequence[str]) -> Iterator[NodeSpec]:
    kinds: set[str] = set()
    count = sum(int(match[2]) for text in texts if (match := _NODES.fullmatch(text)))
    if count > limits.MAX_NODES:
        raise InvalidInput("--nodes", f"has {count:,} nodes, and may have {limits.MAX_NODES:,}")
    for text in texts:
        match = _NODES.fullmatch(text)
        if match is None or match[1] in kinds or not (int(match[2]) and int(match[3])):
            raise InvalidInput("--nodes", f"{text!r}: name each GPU type once, as in a100=80x4")
        kinds.add(match[1])
        for i in range(int(match[2])):
            yield NodeSpec(name=f"{match[1]}-{i}", gpu_type=match[1], gpus=int(match[3]))


def _stored_nodes(client: Client, cluster: str) -> list[NodeSpec]:
    request = clusters_pb2.ListNodesRequest(parent=cluster)
    nodes = client.pages(client.stubs.clusters.ListNodes, request, lambda page: page.nodes)
    return [
        NodeSpec(
            name=short_name(node.name),
            gpu_type=node.gpu_type,
            gpus=node.gpus,
            **stated_host(node),
            labels=dict(node.labels),
        )
        for node in nodes
    ]


def _stored_estimates(client: Client, cluster: str) -> list[EstimateRecord]:
    request = estimates_pb2.ListCellsRequest(parent=cluster, page_size=10_000)
    cells = client.pages(client.stubs.estimates.ListCells, request, lambda page: page.cells)
    return [
        EstimateRecord(
            workload=Workload(
                model=e.workload.model,
                params=e.workload.params,
                global_batch=e.workload.global_batch,
            ),
            cell=Cell(
                gpu_type=e.cell.gpu_type,
                gpus=e.cell.gpus,
                nodes=e.nodes,
                pipeline_degree=e.cell.pipeline_degree,
                plan=e.cell.plan,
            ),
            iter_time_s=math.inf if e.infeasible else e.iter_time_s,
            source=EstimateSource.MEASURED,
            **name_amounts(amounts_of(e)),
        )
        for e in cells
    ]
