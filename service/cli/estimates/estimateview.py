"""Views of Cells: a row for each with a short execution plan, and the degrees that do not fit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import Any, Final

from tessera.estimator.hardware import GIB, Hardware
from tessera.estimator.memory import Overflow, UsableMemory, limit_bytes
from tessera.estimator.plans import Shape
from tessera.estimator.pricing.price import PlanPrice
from tessera.formulation.job.execution_plan import PlanStage
from tessera.service.cli.estimates.modelling import DescribedModel
from tessera.service.cli.render import Column, format_number, print_line, print_note, show_table

NO_PLAN: Final = "no plan: the layers, the GPUs or the samples cannot be divided so"


@dataclass(frozen=True, slots=True, kw_only=True)
class DegreeEstimates:
    """The Cells of a model on GPUs of one type, by pipeline degree.

    ``missed`` maps each degree that does not fit to its least overflow, or to None if the degree is
    impossible.
    """

    hardware: Hardware
    shape: Shape
    cells: Mapping[int, PlanPrice]
    room: UsableMemory
    missed: Mapping[int, Overflow | None]

    @property
    def limit_bytes(self) -> float:
        """Return the bytes of a GPU's memory that a plan may use."""
        return limit_bytes(self.hardware.memory_bytes, self.room)

    @property
    def best(self) -> int | None:
        """Return the fastest pipeline degree, or None if nothing fits."""
        return min(self.cells, key=lambda d: self.cells[d].iter_time_s, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _CellRow:
    """A Cell in a row of the table."""

    model: DescribedModel
    answer: DegreeEstimates
    degree: int
    price: PlanPrice
    best: bool

    @property
    def samples_per_s(self) -> float:
        return self.model.training.global_batch / self.price.iter_time_s


def show_estimates(
    model: DescribedModel,
    answers: Sequence[DegreeEstimates],
    *,
    as_json: bool,
    best_only: bool,
) -> None:
    """Print the Cells. If ``best_only``, print the fastest of each type and count."""
    plans = [plan for answer in answers for plan in answer.cells.values()]
    best = min(plans, key=lambda plan: plan.iter_time_s, default=None)
    rows = [
        _CellRow(model=model, answer=answer, degree=d, price=plan, best=plan is best)
        for answer in answers
        for d, plan in sorted(answer.cells.items())
        if not best_only or d == answer.best or as_json
    ]
    if as_json:
        print_line(json.dumps(_document(model, answers, rows), indent=2))
        return
    if rows:
        show_table(rows, _COLUMNS if best_only else _COLUMNS[:1] + _COLUMNS[4:])
    for text in _missing_reasons(answers, nothing_only=best_only):
        print_note(text)


def stage_layers(stages: Sequence[PlanStage]) -> str:
    """Return the number of layers of each stage, e.g. ``4+4+4+4``."""
    return "+".join(str(stage.end - stage.start) for stage in stages)


def _memory(row: _CellRow) -> str:
    held = row.price.memory_bytes
    most = max(held)
    used = f"{most / GIB:.1f} of {row.answer.limit_bytes / GIB:.1f} GiB"
    return used if len(held) == 1 else f"{used}, stage {held.index(most)}"


_COLUMNS: Final = [
    Column[_CellRow]("", lambda r: "*" if r.best else ""),
    Column[_CellRow]("GPU", lambda r: r.answer.hardware.name),
    Column[_CellRow]("GPUS", lambda r: str(r.answer.shape.gpus), right=True),
    Column[_CellRow]("NODES", lambda r: str(r.answer.shape.nodes), right=True),
    Column[_CellRow]("STAGES", lambda r: str(r.degree), right=True),
    Column[_CellRow]("ITERATION", lambda r: f"{format_number(r.price.iter_time_s)} s", right=True),
    Column[_CellRow]("SAMPLES/S", lambda r: format_number(r.samples_per_s), right=True),
    Column[_CellRow]("FULLEST GPU", _memory),
    Column[_CellRow]("PLAN", lambda r: str(r.price.plan)),
    Column[_CellRow]("LAYERS", lambda r: stage_layers(r.price.plan.stages)),
]


def _missing_reasons(answers: Sequence[DegreeEstimates], *, nothing_only: bool) -> Iterator[str]:
    """Yield the reasons why degrees are missing.

    If ``nothing_only``, yield only the nearest miss of each type and count on which nothing fits.
    """
    for answer in answers:
        where = f"{answer.shape.gpus} x {answer.hardware.name}"
        near = [o for o in answer.missed.values() if o is not None]
        if nothing_only:
            if not answer.cells and near:
                yield f"{where}: {min(near, key=lambda miss: miss.needed_bytes)}"
            continue
        for degree, miss in sorted(answer.missed.items()):
            yield f"{where}, {degree} stage{'s' * (degree > 1)}: {_missing_reason(miss)}"


def _missing_reason(miss: Overflow | None) -> str:
    return NO_PLAN if miss is None else f"does not fit: {miss}"


def _document(
    model: DescribedModel, answers: Sequence[DegreeEstimates], rows: Sequence[_CellRow]
) -> dict[str, Any]:
    return {
        "model": model.name,
        "params": model.params,
        "parameters": model.graph.parameters,
        "global_batch": model.training.global_batch,
        "dtype": model.graph.dtype,
        "cells": [_cell(row) for row in rows],
        "dropped": [
            _where(answer, degree) | {"reason": why} | numbers
            for answer in answers
            for degree, why, numbers in _dropped(answer)
        ],
    }


def _where(answer: DegreeEstimates, degree: int) -> dict[str, Any]:
    shape = answer.shape
    return {
        "gpu_type": answer.hardware.name,
        "gpus": shape.gpus,
        "nodes": shape.nodes,
        "node_gpus": answer.hardware.gpus_per_node,
        "pipeline_degree": degree,
    }


def _cell(row: _CellRow) -> dict[str, Any]:
    price, plan = row.price, row.price.plan
    return _where(row.answer, row.degree) | {
        "best": row.best,
        "iter_time_s": price.iter_time_s,
        "samples_per_s": row.samples_per_s,
        "micro_batches": plan.accumulation,
        "plan": json.loads(plan.to_json()),
        "memory_limit_bytes": row.answer.limit_bytes,
        "stages": [
            asdict(stage) | {"memory_bytes": held}
            for stage, held in zip(plan.stages, cycle(price.memory_bytes), strict=False)
        ],
    }


def _dropped(answer: DegreeEstimates) -> Iterator[tuple[int, str, dict[str, Any]]]:
    for degree, miss in sorted(answer.missed.items()):
        yield degree, _missing_reason(miss), {} if miss is None else asdict(miss)
