"""The measured iteration times of Alpa's plans (``arena/alpa_optimal.csv``), and our model."""

from __future__ import annotations

import csv
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np

from tessera.estimator.architectures.published import find_published
from tessera.estimator.calibration import (
    Measurement,
    Parameter,
    Subject,
    TimeModel,
    select_measurements,
)
from tessera.estimator.cells import Runtime, Setting
from tessera.estimator.collectives.records import read_curves
from tessera.estimator.collectives.tables import TableNetwork, Tables
from tessera.estimator.equal_stages import EqualStages
from tessera.estimator.hardware import A10, A40, A100, V100, Hardware
from tessera.estimator.memory import FUSED, States, UsableMemory
from tessera.estimator.pipeline import Overlap, Transfers
from tessera.estimator.plans import Shape
from tessera.estimator.rooflines import RooflineCompute
from tessera.estimator.times import CellTimes
from tessera.formulation.base.tables import Floats

HARDWARE: Final = {kind.name: kind for kind in (A100, V100, A40, A10)}
GPU_COUNTS: Final = (1, 2, 4, 8, 16)
MAX_POINTS: Final = 3
"""The highest number of calibration rows of a model family on a GPU type."""
MEASURABLE_SHARE: Final = 0.5
"""The share of each family's workloads whose rows may be measured for calibration."""
MIN_WORKLOADS: Final = 4
USABLE_MEMORY_SHARE: Final = 0.95
"""The usable share of a GPU's memory. It is high, since all plans that Alpa ran did fit."""
OVERLAP: Final = Overlap(transfers=Transfers.IN_LINE)
"""Alpa's workers compute, send and receive in the order of their instruction lists."""

WorkloadKey: TypeAlias = tuple[str, str, int]  # model, size, batch


@dataclass(frozen=True, slots=True, kw_only=True)
class AlpaCell(Subject):
    """A job on GPUs of one type."""

    params: str

    @property
    def workload(self) -> WorkloadKey:
        """Return the workload of the Cell."""
        return self.family, self.params, self.global_batch

    @property
    def gpus(self) -> int:
        """Return the number of GPUs."""
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRow:
    """A Cell and the seconds of its iteration."""

    cell: AlpaCell
    seconds: float

    @property
    def measurement(self) -> Measurement:
        """Return the row as a measurement for calibration."""
        return Measurement(subject=self.cell, iter_time_s=self.seconds)


def rows_of(data: Path) -> list[MeasuredRow]:
    """Return all rows that ran, in the order of the file."""
    with (data / "alpa_optimal.csv").open(newline="") as lines:
        ran = [line for line in csv.DictReader(lines) if line["status"] == "ok"]
    return [MeasuredRow(cell=_cell(line), seconds=float(line["iter_time_s"])) for line in ran]


def cell_key(line: dict[str, str]) -> tuple[str, str, int, str, int, int]:
    """Return the key of a Cell in the artifact's tables: its workload, GPU type and shape."""
    return (
        line["model"],
        line["params"],
        int(line["global_batch"]),
        line["gpu_type"],
        int(line["num_nodes"]),
        int(line["gpus_per_node"]),
    )


def _cell(line: dict[str, str]) -> AlpaCell:
    model, params, batch, gpu_type, nodes, per_node = cell_key(line)
    return AlpaCell(
        family=model,
        params=params,
        gpu_type=gpu_type,
        nodes=nodes,
        gpus_per_node=per_node,
        global_batch=batch,
        parameters=find_published(model, params).graph.parameters,
    )


class _CellSetting:
    """The settings in which Cells ran.

    They use the tables of the artifact's own collectives (InfiniBand for a40) and its use of ZeRO.
    """

    def __init__(self, data: Path) -> None:
        self._tables = Tables.of(read_curves(data / "comm.csv"))
        self._networks: dict[tuple[str, Shape], TableNetwork] = {}

    def __call__(self, subject: Subject) -> Setting:
        if not isinstance(subject, AlpaCell):
            raise AssertionError("every subject here is a Cell")
        hardware = HARDWARE[subject.gpu_type]
        shape = Shape(nodes=subject.nodes, gpus_per_node=subject.gpus_per_node)
        model = find_published(subject.family, subject.params)
        return Setting(
            graph=model.graph,
            training=model.at(subject.global_batch),
            hardware=hardware,
            shape=shape,
            compute=RooflineCompute(hardware=hardware),
            network=self._network(hardware, shape),
            runtime=Runtime(
                overlap=OVERLAP,
                states=States(zero=model.zero),
                room=UsableMemory(usable=USABLE_MEMORY_SHARE),
                copies=FUSED,
            ),
        )

    def _network(self, hardware: Hardware, shape: Shape) -> TableNetwork:
        key = hardware.name, shape
        if key not in self._networks:
            self._networks[key] = TableNetwork(
                tables=self._tables,
                hardware=hardware,
                shape=shape,
                network="ib" if hardware.name == A40.name else "",
            )
        return self._networks[key]


class CachedTimes:
    """A cache of the results of a model of times."""

    def __init__(self, model: TimeModel) -> None:
        """Store the model."""
        self._model = model
        self._known: dict[tuple[Subject, bytes], tuple[Floats, Floats]] = {}

    @property
    def parameters(self) -> Sequence[Parameter]:
        """Return the model's parameters."""
        return self._model.parameters

    def log_times(self, subjects: Sequence[Subject], log_values: Floats) -> tuple[Floats, Floats]:
        """Return the model's log seconds and gradients, computing only those that are new."""
        keys = [(s, at.tobytes()) for s, at in zip(subjects, log_values, strict=True)]
        new = [i for i, key in enumerate(keys) if key not in self._known]
        values, gradients = self._model.log_times([subjects[i] for i in new], log_values[new])
        for i, value, gradient in zip(new, values, gradients, strict=True):
            self._known[keys[i]] = (value, gradient)
        result = [self._known[key] for key in keys]
        width = len(self.parameters)
        return (
            np.array([value for value, _ in result]),
            np.array([gradient for _, gradient in result]).reshape(-1, width),
        )


def times_of(data: Path) -> TimeModel:
    """Return the model, with Alpa's plans of equal stages and tables of collectives."""
    return CachedTimes(CellTimes(_CellSetting(data), lambda _: GPU_COUNTS, chooser=EqualStages()))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSplit:
    """Rows for calibration, and rows of other workloads for judgement."""

    calibration: list[MeasuredRow]
    test: list[MeasuredRow]


def split_rows(rows: Sequence[MeasuredRow], model: TimeModel, seed: int) -> RowSplit:
    """Return at most three calibration rows for each family and GPU type, and the rows to judge.

    A random half of each family's workloads may be measured. Of their rows, those are measured that
    are most informative about all Cells by the uncalibrated model. Their times are not used for
    this choice. A workload is not judged if any of its rows is measured.
    """
    may = _measurable((row.cell for row in rows), np.random.default_rng(seed))
    choices = [row for row in rows if row.cell.workload in may]
    chosen = select_measurements(
        model, [row.cell for row in choices], [row.cell for row in rows], MAX_POINTS
    )
    calibration = [choices[i] for i in chosen]
    pairs = Counter((row.cell.family, row.cell.gpu_type) for row in calibration)
    if max(pairs.values(), default=0) > MAX_POINTS:
        raise AssertionError("more calibration rows than the protocol has")
    used = {row.cell.workload for row in calibration}
    return RowSplit(
        calibration=calibration, test=[row for row in rows if row.cell.workload not in used]
    )


def _measurable(cells: Iterable[AlpaCell], rng: np.random.Generator) -> set[WorkloadKey]:
    workloads: dict[str, set[WorkloadKey]] = defaultdict(set)
    for cell in cells:
        workloads[cell.family].add(cell.workload)
    chosen: set[WorkloadKey] = set()
    for family in sorted(workloads):
        known = sorted(workloads[family])
        count = min(len(known), max(MIN_WORKLOADS, int(MEASURABLE_SHARE * len(known))))
        chosen |= {known[i] for i in rng.choice(len(known), count, replace=False).tolist()}
    return chosen
