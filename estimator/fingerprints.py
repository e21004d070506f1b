"""Fingerprints of estimates: digests of everything that they depend on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from tessera.estimator.hardware import Hardware
from tessera.estimator.measured_cells import measured_cells
from tessera.estimator.profiling.tasks import Profile
from tessera.formulation.base.release import installed_version
from tessera.formulation.base.resources import Capacity
from tessera.formulation.base.values import Cell, Workload
from tessera.formulation.job.execution_plan import ExecutionPlan
from tessera.formulation.job.techniques import PlanLimits
from tessera.formulation.records.estimates import MeasurementRecord, ModelSpec


@lru_cache(maxsize=4)
def _measurements_digest(measurements: tuple[MeasurementRecord, ...]) -> str:
    """Return a digest of the measurements to learn from, common to a cluster's workloads."""
    plain = (
        {"workload": asdict(m.workload), "iter_time_s": m.iter_time_s, **asdict(m.cell)}
        for m in measured_cells(measurements)
    )
    return _digest(list(plain))


def _digest(plain: object) -> str:
    text = json.dumps(plain, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


ESTIMATES_VERSION: Final = 5
"""Version of derived estimates, which is part of fingerprints. Version 2 added the traffic of plans,
version 3 the plans themselves and wider shapes, version 4 the memory of a loss
that is not fused, and version 5 the search of all plans for all jobs."""


def estimates_fingerprint(
    workload: Workload,
    spec: ModelSpec | None,
    asked: Mapping[str, Sequence[int]],
    hardware: Mapping[str, Hardware],
    measurements: Sequence[MeasurementRecord],
    profiles: Mapping[str, Profile] = MappingProxyType({}),
    stated: Sequence[ExecutionPlan] = (),
    limits: Sequence[PlanLimits] = (),
    exhausted: Sequence[Cell] = (),
    tunings: Sequence[tuple[str, str]] = (),
    nodes: Mapping[str, Capacity | None] = MappingProxyType({}),
    explained: bool = False,
) -> str:
    """Return a digest of everything that a workload's estimates depend on.

    ``spec`` is None for a published model. ``asked`` has the numbers of GPUs by GPU type, and
    ``profiles`` the measurements of the workload by GPU type. ``stated`` are the plans that users
    state for its jobs, ``limits`` those within which plans are searched separately, and
    ``exhausted`` the Cells by plans that ran out of memory. ``tunings`` are the runtimes and spaces
    for which plans to try are listed. ``nodes`` are what nodes have, by GPU type.
    ``explained`` says that provenances tell which runs a model of plans
    lacks.
    """
    plain = [
        installed_version(),
        ESTIMATES_VERSION,
        asdict(workload),
        spec and asdict(spec),
        {t: list(n) for t, n in asked.items()},
        {t: asdict(h) for t, h in hardware.items() if t in asked},
        _measurements_digest(tuple(measurements)),
        *({t: asdict(p)} for t, p in sorted(profiles.items()) if t in asked),
        *([plan.digest for plan in stated],) * bool(stated),
        *({"limits": list(map(str, limits))},) * bool(limits),
        {"nodes": {t: asdict(n) for t, n in nodes.items() if n and t in asked}},
        *({"exhausted": [asdict(cell) for cell in exhausted]},) * bool(exhausted),
        *({"tunings": [list(pair) for pair in tunings]},) * bool(tunings),
        *({"explained": True},) * explained,
    ]
    return _digest(plain)
