"""The estimators of clusters, with what they and their models of plans have learned."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final

from tessera.estimator.cell_estimator import Estimator
from tessera.estimator.hardware import Hardware
from tessera.estimator.measured_cells import measured_cells
from tessera.estimator.models import known_models
from tessera.estimator.plan_corrections import PlanCorrections, priced_runs
from tessera.formulation.records.estimates import EstimationInputs, MeasurementRecord
from tessera.service.server.estimates.tasks import hardware_by_type

log = logging.getLogger(__name__)

MAX_ESTIMATORS: Final = 16
"""Number of clusters whose estimator is kept in memory, because each holds what it has learned.
Those that were built last are kept.
"""


class LearnedEstimators:
    """The estimators of the clusters whose estimates were made last. One thread may use it at a time."""

    def __init__(self, hardware: Mapping[str, Hardware]) -> None:
        self._hardware = hardware
        self._estimators: dict[str, tuple[object, Estimator]] = {}
        self._corrections: dict[str, tuple[tuple[MeasurementRecord, ...], PlanCorrections]] = {}

    def forget(self, cluster: str) -> None:
        """Drop everything that was learned about the cluster."""
        self._estimators.pop(cluster, None)
        self._corrections.pop(cluster, None)

    def estimator(
        self, cluster: str, known: EstimationInputs, measurements: Sequence[MeasurementRecord]
    ) -> Estimator:
        """Return an estimator that has learned from the measurements.

        It is taken from memory if nothing has changed.
        """
        hardware, cells = hardware_by_type(known, self._hardware), measured_cells(measurements)
        key = (hardware, cells, known.models, known.profiles)
        before = self._estimators.get(cluster)
        if before is not None and before[0] == key:
            return before[1]
        models = known_models((m.workload for m in cells), known.models, known.profiles)
        estimator = Estimator(hardware, models, measurements)
        self._estimators.pop(cluster, None)
        self._estimators[cluster] = (key, estimator)
        while len(self._estimators) > MAX_ESTIMATORS:
            self.forget(next(iter(self._estimators)))
        return estimator

    def corrections(
        self, cluster: str, estimator: Estimator, measurements: Sequence[MeasurementRecord]
    ) -> PlanCorrections:
        """Return the models of runs that correct estimates of plans, as of the latest measurements."""
        before, corrections = self._corrections.get(cluster, ((), PlanCorrections()))
        cells = tuple(measured_cells(measurements))
        if cells == before:
            return corrections
        for model, gpu_type in corrections.learn(priced_runs(estimator, cells)):
            choice = corrections.choices[model, gpu_type]
            log.info(
                "chose how plans are corrected",
                extra={
                    "event": "plan_model_chosen",
                    "cluster": cluster,
                    "model": model,
                    "gpu_type": gpu_type,
                    "choice": choice,
                },
            )
        self._corrections[cluster] = (cells, corrections)
        return corrections
