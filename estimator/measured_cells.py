"""Cells that jobs of the cluster ran on, with the iteration times that were measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

from tessera.estimator.calibration import Residual
from tessera.formulation.base.values import EstimateSource
from tessera.formulation.records.estimates import EstimateRecord, MeasurementRecord


def measured_cells(measurements: Iterable[MeasurementRecord]) -> list[MeasurementRecord]:
    """Return one record for each Cell and shape, the median of its runs, the latest run last."""
    return [replace(cell, iter_time_s=median(times)) for cell, times in _runs(measurements).items()]


def _runs(measurements: Iterable[MeasurementRecord]) -> dict[MeasurementRecord, list[float]]:
    """Return the iteration times by Cell and shape, i.e. by a record without a time.

    The Cell of the latest run comes last.
    """
    runs: dict[MeasurementRecord, list[float]] = {}
    for one in measurements:
        cell = replace(one, iter_time_s=0.0)
        runs[cell] = [*runs.pop(cell, []), one.iter_time_s]
    return runs


def measured_estimates(measurements: Sequence[MeasurementRecord]) -> list[EstimateRecord]:
    """Return the measurements as estimates, with the noise of runs that calibration assumes."""
    return [
        EstimateRecord(
            workload=r.workload,
            cell=r.cell,
            iter_time_s=median(times),
            source=EstimateSource.MEASURED,
            sd=Residual().noise_sd / math.sqrt(len(times)),
            provenance=f"median of {len(times)} {'run' if len(times) == 1 else 'runs'} here",
            cpus=0 if r.plan is None else r.plan.cpus,
        )
        for r, times in _runs(measurements).items()
    ]
