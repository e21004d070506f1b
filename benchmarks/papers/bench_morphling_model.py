"""Predicted iteration times of reconfigurable training, compared with Morphling's measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer

from tessera.benchmarks.harness.registry import register_case
from tessera.benchmarks.papers.morphling_model.judging import (
    APPENDIX,
    ARTIFACT,
    METHODS,
    OURS,
    Verdict,
    choose_micro_batch,
    judge_author_points,
    judge_methods,
    set_micro_batch,
    split_records,
)
from tessera.benchmarks.papers.morphling_model.records import (
    read_author_points,
    read_records,
)
from tessera.formulation.errors import InvalidInput
from tessera.formulation.tables import Floats
from tessera.simulator.data import MissingData, data_dir
from tessera.simulator.figures import Figure, Report

_LIMIT: Final = 0.15
"""Relative error over which a prediction is counted as wrong: the aim for the largest error."""


@register_case("morphling-model", smoke={}, mape=("<=", 0.05), worst=("<=", 0.15))
def judge_performance_models(
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of Morphling's measurements. Default: next to the repository."),
    ] = None,
) -> Report:
    """Judge models."""
    folder = _folder(data)
    records, left = read_records(folder)
    fitted, others = split_records(records)
    micro_batch = choose_micro_batch(fitted)
    verdict = judge_methods(
        set_micro_batch(fitted, micro_batch), set_micro_batch(others, micro_batch)
    )
    runs, points = read_author_points(folder)
    authors = judge_author_points(runs, points)
    unfitted = authors.of([not point.is_fitted for point in points])
    figures: dict[str, Figure] = {
        **_summary("", verdict.errors[OURS]),
        "median": float(np.median(np.abs(verdict.errors[OURS]))),
        "wrong": int((np.abs(verdict.errors[OURS]) > _LIMIT).sum()),
        "points": len(others),
        "fitted_runs": len(fitted),
        "left_out": len(left),
        **_summary("appendix_", verdict.errors[APPENDIX]),
        **_summary("artifact_", verdict.errors[ARTIFACT]),
        **_summary("authors_", authors.errors[OURS]),
        **_summary("authors_unfitted_", unfitted.errors[OURS]),
        **_summary("authors_published_", authors.errors[ARTIFACT]),
        **_summary("authors_published_unfitted_", unfitted.errors[ARTIFACT]),
        "figure7_micro_batch": micro_batch,
    }
    table = [*_rows("measured", verdict), *_rows("authors", authors)]
    table += [_listed("fitted", record.model, record.plan, record.label) for record in fitted]
    table += [_listed("left out", one.model, one.reason, one.label) for one in left]
    return Report(seed=0, figures=figures, table=table)


def _folder(given: Path | None) -> Path:
    if given is not None:
        if not (given / "measured.csv").is_file():
            raise InvalidInput("data", f"{given} has no measured.csv; give the folder that has it")
        return given
    data = data_dir()
    if data is None or not (data / "morphling" / "measured.csv").is_file():
        raise MissingData("needs Morphling's measurements; give their folder with --data")
    return data / "morphling"


def _summary(prefix: str, errors: Floats) -> dict[str, Figure]:
    """Return the mean and the largest absolute error."""
    sizes = np.abs(errors)
    return {f"{prefix}mape": float(sizes.mean()), f"{prefix}worst": float(sizes.max())}


def _rows(of: str, verdict: Verdict) -> list[dict[str, Figure | str]]:
    """Return a row for each model and plan."""
    groups = dict.fromkeys((record.model, record.plan) for record in verdict.records)
    return [
        _row(
            of,
            model,
            plan,
            verdict.of([(r.model, r.plan) == (model, plan) for r in verdict.records]),
        )
        for model, plan in groups
    ]


def _row(of: str, model: str, plan: str, verdict: Verdict) -> dict[str, Figure | str]:
    row: dict[str, Figure | str] = {
        **_listed(of, model, plan, ""),
        "points": len(verdict.records),
    }
    for method, errors in verdict.errors.items():
        sizes = np.abs(errors)
        row[f"{method}_mean"] = float(sizes.mean())
        row[f"{method}_worst"] = float(sizes.max())
    worst = int(np.abs(verdict.errors[OURS]).argmax())
    row["what"] = f"worst: {verdict.records[worst].label}"
    return row


def _listed(of: str, model: str, plan: str, what: str) -> dict[str, Figure | str]:
    """Return a row of the table without errors."""
    errors: dict[str, Figure | str] = {
        f"{method}_{kind}": np.nan for method in METHODS for kind in ("mean", "worst")
    }
    return {"of": of, "model": model, "plan": plan, "points": np.nan, **errors, "what": what}
