"""Performance models fitted to seven runs of each model, and judged on all other measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

from tessera.benchmarks.papers.morphling_model.artifact import (
    ArtifactParameters,
    artifact_parts_s,
    fit_artifact,
)
from tessera.benchmarks.papers.morphling_model.records import (
    FIGURE_SET,
    AuthorPoint,
    Record,
    records_by_model,
    with_micro_batch,
)
from tessera.estimator.reconfiguration.appendix import AppendixParameters, appendix_iteration_s
from tessera.estimator.reconfiguration.configurations import ConfigurationTable
from tessera.estimator.reconfiguration.fitting import MeasuredRun, fit_appendix
from tessera.estimator.reconfiguration.pooling import choose_runs, fit_pooled
from tessera.formulation.tables import Floats

OURS, APPENDIX, ARTIFACT = "ours", "appendix", "artifact"
METHODS: Final = (OURS, APPENDIX, ARTIFACT)
_FIT_OF: Final = {"llama30": "llama7"}
"""Models without runs with ZeRO-Offload, which have the parameters of another one in the published
models, as in the authors' artifact."""

_FOLDS: Final = 10
"""Parts of the authors' points, a usual number."""

P = TypeVar("P")
Predictor = Callable[[Sequence[Record]], Floats]
"""A fitted model: it returns the iteration times of records in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Records that were not fitted, with the relative errors of each method, shape (K,)."""

    records: list[Record]
    errors: Mapping[str, Floats]

    def of(self, records: Sequence[bool]) -> Verdict:
        """Return the part of the verdict for which ``records`` is true."""
        kept = np.array(records, dtype=bool)
        return Verdict(
            records=[r for r, keep in zip(self.records, records, strict=True) if keep],
            errors={method: errors[kept] for method, errors in self.errors.items()},
        )


def split_records(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """Return the records to fit, seven for each model, and all others."""
    fitted: list[Record] = []
    others: list[Record] = []
    for own in records_by_model(records).values():
        chosen = set(choose_runs([record.run.configuration for record in own]))
        fitted += [record for i, record in enumerate(own) if i in chosen]
        others += [record for i, record in enumerate(own) if i not in chosen]
    return fitted, others


def choose_micro_batch(fitted: Sequence[Record]) -> int:
    """Return the samples of a micro-batch of the Figure 7 set with which its runs fit best.

    The data do not record them. Only fitted runs are looked at.
    """
    own = [record for record in fitted if record.model == FIGURE_SET]
    if not own:
        return 1
    largest = own[0].run.configuration.global_batch
    sizes = [1 << power for power in range(largest.bit_length())]
    losses = [
        fit_pooled([_record_of(record, size).run for record in fitted]).loss for size in sizes
    ]
    _, best = min(zip(losses, sizes, strict=True))
    return best


def set_micro_batch(records: Sequence[Record], samples: int) -> list[Record]:
    """Return the records, with the micro-batch in those of the Figure 7 set."""
    return [_record_of(record, samples) for record in records]


def _record_of(record: Record, samples: int) -> Record:
    return with_micro_batch(record, samples) if record.model == FIGURE_SET else record


def judge_methods(fitted: Sequence[Record], others: Sequence[Record]) -> Verdict:
    """Return the errors of all methods on ``others`` after a fit to ``fitted``."""
    predictors: dict[str, Predictor] = {
        OURS: pooled_predictor([record.run for record in fitted]),
        APPENDIX: appendix_predictor(fitted),
        ARTIFACT: artifact_predictor(fitted),
    }
    measured_s = np.array([record.run.iter_time_s for record in others])
    errors = {name: predict(others) / measured_s - 1 for name, predict in predictors.items()}
    return Verdict(records=list(others), errors=errors)


def judge_author_points(runs: Sequence[MeasuredRun], points: Sequence[AuthorPoint]) -> Verdict:
    """Return the errors on the authors' points: ours, and those of their published predictions."""
    records = [point.record for point in points]
    measured_s = np.array([record.run.iter_time_s for record in records])
    published_s = np.array([point.published_s for point in points])
    ours_s = pooled_predictor(runs)(records)
    return Verdict(
        records=records,
        errors={OURS: ours_s / measured_s - 1, ARTIFACT: published_s / measured_s - 1},
    )


def judge_updated_points(runs: Sequence[MeasuredRun], points: Sequence[AuthorPoint]) -> Verdict:
    """Return our errors on the authors' points, each after learning from most of the others.

    The points are divided into ``_FOLDS`` parts. Each part is predicted from the authors' fitted
    runs and the other parts, as if those had been measured before. Points of one configuration are
    in one part.
    """
    records = [point.record for point in points]
    configurations = [record.run.configuration for record in records]
    order = {own: i for i, own in enumerate(dict.fromkeys(configurations))}
    part = np.array([order[own] % _FOLDS for own in configurations])
    errors = np.zeros(len(records))
    for fold in range(_FOLDS):
        known = [r.run for r, i in zip(records, part, strict=True) if i != fold]
        own = [r for r, i in zip(records, part, strict=True) if i == fold]
        measured_s = np.array([record.run.iter_time_s for record in own])
        errors[part == fold] = pooled_predictor([*runs, *known])(own) / measured_s - 1
    return Verdict(records=records, errors={OURS: errors})


def pooled_predictor(runs: Sequence[MeasuredRun]) -> Predictor:
    """Return our model, learned from runs of all models together."""
    fit = fit_pooled(runs)
    return lambda records: fit.predict_s([record.run.configuration for record in records])


def appendix_predictor(fitted: Sequence[Record]) -> Predictor:
    """Return the published model, fitted to the runs of each model."""
    parameters = {
        model: fit_appendix([record.run for record in own]).parameters
        for model, own in records_by_model(fitted).items()
        if model not in _FIT_OF
    }

    def predict(own: AppendixParameters, table: ConfigurationTable) -> Floats:
        return appendix_iteration_s(table, own)

    return _by_model(parameters, predict)


def artifact_predictor(fitted: Sequence[Record]) -> Predictor:
    """Return the artifact's model, fitted to the runs of each model."""
    parameters = {
        model: fit_artifact([record.run for record in own])
        for model, own in records_by_model(fitted).items()
        if model not in _FIT_OF
    }

    def predict(own: ArtifactParameters, table: ConfigurationTable) -> Floats:
        return artifact_parts_s(table, own)[0]

    return _by_model(parameters, predict)


def _by_model(
    parameters: Mapping[str, P], predict: Callable[[P, ConfigurationTable], Floats]
) -> Predictor:
    """Return a predictor that uses the parameters of each record's model."""

    def predict_all(records: Sequence[Record]) -> Floats:
        times_s = np.zeros(len(records))
        for model in dict.fromkeys(record.model for record in records):
            own = [i for i, record in enumerate(records) if record.model == model]
            table = ConfigurationTable.of([records[i].run.configuration for i in own])
            times_s[own] = predict(parameters[_FIT_OF.get(model, model)], table)
        return times_s

    return predict_all
