"""``tessera estimate``: estimate how fast a model trains on a cluster's or a data sheet's GPUs."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from tessera.estimator.cells import Setting, data_sheet_setting
from tessera.estimator.collectives import TableNetwork, Tables, read_curves
from tessera.estimator.hardware import CATALOGUE, Hardware
from tessera.estimator.hardware.files import read_hardware
from tessera.estimator.plan_search import PlanSearch
from tessera.estimator.plans import Shape, shape_of
from tessera.estimator.profiling.compute import ProfiledCompute
from tessera.estimator.profiling.records import ProfileRecord, read_profile_records
from tessera.estimator.rooflines import RooflineCompute
from tessera.estimator.samples import PROVENANCE
from tessera.formulation.base import limits
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.values import Cell, EstimateSource, Workload
from tessera.formulation.records.estimates import EstimateRecord
from tessera.service.cli.estimates import estimateview
from tessera.service.cli.estimates.estimateview import DegreeEstimates
from tessera.service.cli.estimates.modelling import DescribedModel, with_model
from tessera.service.cli.estimates.nodeshapes import NodeShapes, shapes_of
from tessera.service.cli.estimates.planview import compare_stated
from tessera.service.cli.estimates.statedplan import GivenPlan, with_plan
from tessera.service.cli.options import parse_numbers
from tessera.service.cli.render import err, print_note
from tessera.service.cli.simulation.importing import read_rows
from tessera.simulator.traces.csv_writer import profiles_csv


def add_commands(app: typer.Typer) -> None:
    """Add the command."""
    app.command("estimate", rich_help_panel="Estimates")(estimate)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSources:
    """The sources of times other than data sheets."""

    collectives: Path | None
    network: str
    profile: Path | None
    tables: Tables | None
    records: Sequence[ProfileRecord]

    @classmethod
    def of(cls, collectives: Path | None, network: str, profile: Path | None) -> TimeSources:
        """Return the sources in these files. Raises InvalidInput."""
        if network and collectives is None:
            raise InvalidInput("--network", "needs --collectives")
        return cls(
            collectives=collectives,
            network=network,
            profile=profile,
            tables=None if collectives is None else Tables.of(read_curves(collectives)),
            records=[] if profile is None else read_rows(read_profile_records, profile),
        )

    def setting(self, model: DescribedModel, hardware: Hardware, shape: Shape) -> Setting:
        """Return the setting in which a model runs."""
        setting = data_sheet_setting(model.graph, model.training, hardware, shape, model.states)
        if self.records:
            compute = ProfiledCompute(records=self.records, fallback=setting.compute)
            setting = replace(setting, compute=compute)
        if self.tables is None:
            return setting
        network = TableNetwork(
            tables=self.tables, hardware=hardware, shape=shape, network=self.network
        )
        return replace(setting, network=network)

    def check(self, model: DescribedModel) -> None:
        """Print how much of the model was measured. Raises InvalidInput if no layer was."""
        if self.profile is None:
            return
        fallback = RooflineCompute(hardware=CATALOGUE[0])
        measured = ProfiledCompute(records=self.records, fallback=fallback).coverage(model.graph, 1)
        if not measured.measured:
            raise InvalidInput(
                str(self.profile),
                f"contains no layer of {model.name}; give the --step that was profiled, with"
                " the same arguments",
            )
        print_note(
            f"{100 * measured.measured:.0f} % of the work was measured (without tensor parallelism)"
        )

    @property
    def provenance(self) -> str:
        """Return the provenance text of an estimate."""
        parts = [PROVENANCE]
        parts += [f"layers of {self.profile.name}"] if self.profile else []
        parts += [f"collectives of {self.collectives.name}"] if self.collectives else []
        return ", ".join(parts)[:200]

    @property
    def source(self) -> EstimateSource:
        """Return the source of the estimates."""
        return EstimateSource.PROFILED if self.profile else EstimateSource.ANALYTIC


def _option(text: str, *names: str, **rest: Any) -> Any:
    return typer.Option(*names, help=text, show_default=False, **rest)


@with_plan
@with_model
def estimate(
    model: DescribedModel,
    plan: GivenPlan | None,
    count: Annotated[int, _option("Number of GPUs.", "--count", "-n", min=1, max=limits.MAX_GPUS)],
    gpu: Annotated[str, _option("GPU type, e.g. a100.", "--gpu", "-g", metavar="TYPE")] = "",
    nodes: Annotated[
        int | None,
        _option(
            "Number of nodes over which the GPUs are spread. Default: as few as possible.",
            min=1,
            max=limits.MAX_GPUS,
        ),
    ] = None,
    node_gpus: Annotated[
        int | None,
        _option(
            "Number of GPUs of a node. Default: as in the cluster, or without a server as in the data sheet.",
            min=1,
            max=limits.MAX_GPUS_PER_NODE,
        ),
    ] = None,
    server: Annotated[
        str,
        _option(
            "Address of a server that knows the cluster's nodes. Default: TESSERA_SERVER, or"
            " 127.0.0.1:7070 if"
            " a server answers there.",
            envvar="TESSERA_SERVER",
            metavar="HOST:PORT",
            show_envvar=False,
        ),
    ] = "",
    cluster: Annotated[
        str,
        _option(
            "Cluster whose nodes are assumed. Default: TESSERA_CLUSTER, or 'default'.",
            "--cluster",
            "-c",
            envvar="TESSERA_CLUSTER",
            show_envvar=False,
        ),
    ] = "",
    offline: Annotated[
        bool, _option("Do not ask a server: assume the nodes and memory of data sheets.")
    ] = False,
    stages: Annotated[
        str,
        _option(
            "Pipeline degrees. Default: all that divide the number of GPUs, and powers of two.",
            metavar="N,N...",
        ),
    ] = "",
    every: Annotated[
        bool,
        _option(
            "Estimate on all GPU types of the cluster, of --hardware or of the catalogue, and on half,"
            " once and twice the number of GPUs.",
            "--all",
        ),
    ] = False,
    hardware: Annotated[
        Path | None, _option("File with data sheets of further GPU types.", metavar="FILE.yaml")
    ] = None,
    collectives: Annotated[
        Path | None,
        _option("Measured collectives from `tessera profile collectives`.", metavar="FILE.csv"),
    ] = None,
    network: Annotated[str, _option("Name of the network to use from --collectives.")] = "",
    profile: Annotated[
        Path | None,
        _option(
            "Measured layers from `tessera profile`, for the same --step.",
            metavar="FILE.jsonl",
        ),
    ] = None,
    write: Annotated[
        Path | None,
        _option("Write the estimates to a file for `tessera import profiles`.", metavar="FILE.csv"),
    ] = None,
    as_json: Annotated[bool, _option("Print one JSON object.", "--json")] = False,
) -> None:
    """Estimate the speed and memory of a model's training on GPUs, for each pipeline degree.

    If a server answers, the nodes and memory of its cluster are assumed. A job then gets the same estimate
    there, unless measurements of jobs have corrected it. Without a server, those of data sheets are assumed.
    """
    named = bool(server or cluster)
    shapes = shapes_of(
        server,
        cluster,
        offline=offline or (hardware is not None and not named),
        node_gpus=node_gpus,
    )
    known = CATALOGUE if hardware is None else read_hardware(hardware)
    types = [shapes.hardware(kind) for kind in known]
    sources = TimeSources.of(collectives, network, profile)
    sources.check(model)
    if plan is not None:
        _refuse_with_plan({"--all": every, "--stages": stages, "--write": write})
        kind = _type(gpu, types)
        setting = sources.setting(model, kind, _shape(kind, count, nodes))
        compare_stated(model, setting, plan, as_json=as_json)
        print_note(shapes.describe(kind))
        return
    if every:
        if gpu or nodes:
            raise InvalidInput("--all", "cannot be combined with --gpu or --nodes")
        own = {kind.name for kind in known if kind not in CATALOGUE}
        kinds = _chosen(types, shapes, own)
        where = _everywhere(kinds, (count // 2, count, 2 * count))
    else:
        kind = _type(gpu, types)
        where = [(kind, _shape(kind, count, nodes))]
    wanted = [] if not stages else parse_numbers("--stages", stages)
    answers = _answers(model, where, sources, wanted)
    estimateview.show_estimates(model, answers, as_json=as_json, best_only=every)
    for assumption in dict.fromkeys(shapes.describe(kind) for kind, _ in where):
        print_note(assumption)
    if write is not None:
        _write(write, model, answers, sources.provenance, sources.source)


def _refuse_with_plan(given: Mapping[str, object]) -> None:
    for name, value in given.items():
        if value:
            raise InvalidInput(name, "cannot be combined with a stated plan (--plan, --tp ...)")


def _answers(
    model: DescribedModel,
    where: Sequence[tuple[Hardware, Shape]],
    sources: TimeSources,
    wanted: Sequence[int],
) -> list[DegreeEstimates]:
    """Return the Cells on all given GPUs, with a progress bar if stderr is a terminal.

    ``wanted`` are the pipeline degrees. If it is empty, all possible ones are used.
    """
    answers = []
    hidden = not err.is_terminal or len(where) == 1
    with Progress(console=err, transient=True, disable=hidden) as progress:
        task = progress.add_task("Cells", total=len(where))
        for kind, shape in where:
            progress.update(task, description=f"{shape.gpus} x {kind.name}")
            setting = sources.setting(model, kind, shape)
            answers.append(estimate_cells(model, setting, wanted))
            progress.advance(task)
    return answers


def estimate_cells(
    model: DescribedModel, setting: Setting, degrees: Sequence[int] = ()
) -> DegreeEstimates:
    """Return a model's best Cells in one setting, and the degrees that have none.

    If there are no ``degrees``, they are all possible ones.
    """
    search = PlanSearch(
        setting,
        model=f"{model.name}/{model.params}",
        degrees=degrees or None,
        choices=model.choices,
    )
    best = search.best_by_degree()
    return DegreeEstimates(
        hardware=setting.hardware,
        shape=setting.shape,
        cells={degree: price for degree, price in best.items() if price.overflow is None},
        room=setting.runtime.room,
        missed={
            degree: best[degree].overflow if degree in best else None
            for degree in degrees or search.degrees
            if degree not in best or best[degree].overflow is not None
        },
    )


def _type(name: str, types: Sequence[Hardware]) -> Hardware:
    known = {kind.name: kind for kind in types}
    have = ", ".join(known)
    if not name:
        raise InvalidInput("--gpu", f"is required, or --all; the types are {have}")
    if name not in known:
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}? " if near else ""
        raise InvalidInput(
            "--gpu",
            f"unknown GPU type {name!r}; {hint}the types are {have}; describe another one in --hardware",
        )
    return known[name]


def _shape(kind: Hardware, gpus: int, nodes: int | None) -> Shape:
    """Return ``gpus`` on ``nodes`` nodes, or on the fewest that can hold equal shares of them.

    Raises:
        InvalidInput: the GPUs do not fit on the nodes, or cannot be spread evenly.
    """
    if nodes is None:
        return shape_of(gpus, kind.gpus_per_node)
    most = kind.gpus_per_node
    fewest = -(-gpus // most)
    if nodes < fewest:
        raise InvalidInput(
            "--nodes",
            f"a node has {most} x {kind.name}, so {gpus} GPUs need at least {fewest} nodes",
        )
    if gpus % nodes:
        even = ", ".join(str(n) for n in range(fewest, gpus + 1) if gpus % n == 0)
        raise InvalidInput(
            "--nodes", f"{gpus} GPUs cannot be spread evenly over {nodes} nodes; give one of {even}"
        )
    return Shape(nodes=nodes, gpus_per_node=gpus // nodes)


def _chosen(types: Sequence[Hardware], shapes: NodeShapes, own: set[str]) -> Sequence[Hardware]:
    """Return the types of ``--all``: those of the user's file, or the cluster's, or all."""
    in_cluster = [
        kind for kind in types if (known := shapes.kinds.get(kind.name)) and known.node_gpus
    ]
    return [kind for kind in types if kind.name in own] or in_cluster or types


def _everywhere(types: Iterable[Hardware], counts: Iterable[int]) -> list[tuple[Hardware, Shape]]:
    """Return all combinations of types and counts."""
    distinct = list(dict.fromkeys(max(1, n) for n in counts))
    return [(kind, _shape(kind, gpus, None)) for kind in types for gpus in distinct]


def _write(
    path: Path,
    model: DescribedModel,
    answers: Iterable[DegreeEstimates],
    provenance: str,
    source: EstimateSource,
) -> None:
    records = [r for answer in answers for r in _records(model, answer, provenance, source)]
    try:
        path.write_text(profiles_csv(records), encoding="utf-8")
    except OSError as error:
        raise InvalidInput(str(path), f"cannot be written: {error.strerror}") from error
    print_note(
        f"{len(records):,} estimates written to {path}; import them with: tessera import profiles {path}"
    )


def _records(
    model: DescribedModel, answer: DegreeEstimates, provenance: str, source: EstimateSource
) -> Iterable[EstimateRecord]:
    work = Workload(model=model.name, params=model.params, global_batch=model.training.global_batch)
    for degree in sorted({*answer.cells, *answer.missed}):
        price = answer.cells.get(degree)
        record = EstimateRecord(
            workload=work,
            source=source,
            cell=Cell(
                gpu_type=answer.hardware.name,
                gpus=answer.shape.gpus,
                pipeline_degree=degree,
                nodes=answer.shape.nodes,
            ),
            iter_time_s=math.inf if price is None else price.iter_time_s,
            provenance=provenance,
        )
        yield record if price is None else record.with_plan(price.plan)
