"""The cells of which every plan was estimated (``arena/history/cell_*.csv``), as planners see them.

A cell is a model at a batch size on a number of a40 with a pipeline degree. Its plans come from one
or two groups of the authors' experiments. For example, ``8d`` holds the uniform shapes and ``8d_2``
the mixed ones of the same cell, and no plan is in both. The groups of a cell are merged here: 13
groups, 9 cells. All have 16 coarse layers and two GPUs per stage, as 2x1 (data parallel) or 1x2
(tensor parallel). ``gpu_fraction`` and ``sum_gpu_fraction`` are not read. For Wide-ResNet, and in
group ``4d_bert``, they contain a weight of the layer's position that the authors set by hand.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np

from tessera.estimator.plans import Candidates
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats, Ints

LAYER_COUNT: Final = 16
MICRO_BATCHES: Final = 16
STAGE_GPUS: Final = 2
DATA, TENSOR = "2x1", "1x2"
_CHANNELS: Final = {"1B": 320, "2B": 448, "4B": 640}
"""The base channels of the Wide-ResNets (Alpa, OSDI 2022), which scale bytes recorded for 2B."""

CellKey = tuple[str, str, int, int]
"""A model, its size, a number of GPUs and a number of stages."""


@dataclass(frozen=True, eq=False)
class RecordedCell:
    """A cell with its P recorded plans of S stages."""

    key: CellKey
    groups: tuple[str, ...]
    ends: Ints  # (P, S) the layer after each stage's last
    data_parallel: np.ndarray  # (P, S) bool, True for 2x1 and False for 1x2
    iter_time_s: Floats  # (P,) by the authors' profiler
    kernels_s: Floats  # (P, S) of a micro-batch, both passes, on one device
    comm_s: Floats  # (P, S) collectives within a stage, of a micro-batch; 0 where not logged
    sync_s: Floats  # (P, S) gradients, once an iteration; 0 where not logged
    roofline_s: Floats  # (16,) of each layer: comp_load_s
    tensor_bytes: Floats  # (16,) bytes that each layer exchanges per micro-batch as 1x2
    data_bytes: Floats  # (16,) the same as 2x1: gradient bytes divided by micro-batches

    @property
    def gpus(self) -> int:
        """Return the GPUs of the cell."""
        return self.key[2]

    @property
    def stages(self) -> int:
        """Return the pipeline degree."""
        return self.key[3]

    @property
    def comm_logged(self) -> bool:
        """Return whether times of collectives were logged."""
        return bool(self.comm_s.any())

    @property
    def share(self) -> Floats:
        """Return the speed of each plan relative to the best one, (P,)."""
        speed: Floats = float(self.iter_time_s.min()) / self.iter_time_s
        return speed

    @property
    def starts(self) -> Ints:
        """Return the first layer of each stage, (P, S)."""
        starts: Ints = np.roll(self.ends, 1, axis=1)
        starts[:, 0] = 0
        return starts

    @cached_property
    def candidates(self) -> Candidates:
        """Return every stretch of layers as 2x1 (even rows) and 1x2 (odd rows)."""
        first, last = np.triu_indices(LAYER_COUNT)
        count = len(first)
        return Candidates(
            start=np.repeat(first, 2),
            end=np.repeat(last + 1, 2),
            dp=np.tile([2, 1], count),
            tp=np.tile([1, 2], count),
            ep=np.ones(2 * count, dtype=np.int64),
            sp=np.zeros(2 * count, dtype=np.bool_),
        )

    @cached_property
    def rows(self) -> Ints:
        """Return the plans as rows of :attr:`candidates`, (P, S)."""
        place = np.zeros((LAYER_COUNT, LAYER_COUNT + 1), dtype=np.int64)
        place[self.candidates.start, self.candidates.end] = np.arange(len(self.candidates)) // 2 * 2
        rows: Ints = place[self.starts, self.ends] + ~self.data_parallel
        return rows

    @cached_property
    def comm_bytes(self) -> Floats:
        """Return the bytes that each candidate communicates per micro-batch, (K,)."""
        c = self.candidates
        each = [np.concatenate([[0.0], x.cumsum()]) for x in (self.data_bytes, self.tensor_bytes)]
        sums = [x[c.end] - x[c.start] for x in each]
        sent: Floats = np.where(c.dp > 1, *sums)
        return sent

    def kernels_of_layers(self, data_parallel: bool) -> Floats:
        """Return the kernel seconds of each layer in one shape, (16,).

        They are fitted by least squares to the recorded kernels of stages, which are sums over
        layers to within 0.3 %. Layers that no recorded partition separates share their time evenly.
        """
        picked = self.data_parallel == data_parallel
        inside = np.arange(LAYER_COUNT)[None] >= self.starts[picked][:, None]
        inside &= np.arange(LAYER_COUNT)[None] < self.ends[picked][:, None]
        result: Floats = np.linalg.lstsq(inside.astype(np.float64), self.kernels_s[picked])[0]
        return result


def read_cells(data: Path) -> list[RecordedCell]:
    """Return the cells in the file's order. ``data`` is the folder of the artifact's tables.

    Raises:
        InvalidInput: a file is missing.
    """
    folder = data / "history"
    plans = [row for row in _rows(folder / "cell_plans.csv") if row["status"] == "ok"]
    modules = _modules(folder / "cell_modules.csv")
    loads = _loads(folder / "cell_layers.csv")
    traffic = _traffic(folder / "cell_stage_hints.csv")
    by_cell: dict[CellKey, list[dict[str, str]]] = defaultdict(list)
    for row in plans:
        key = row["model"], row["params"], int(row["num_gpus"]), int(row["num_stages"])
        by_cell[key].append(row)
    return [_cell(key, rows, modules, loads, traffic) for key, rows in by_cell.items()]


def _cell(
    key: CellKey,
    rows: list[dict[str, str]],
    modules: dict[tuple[str, int], Floats],
    loads: dict[tuple[str, str], Floats],
    traffic: dict[tuple[str, str], tuple[Floats, Floats]],
) -> RecordedCell:
    shapes = [row["stage_logical_shapes"].split("|") for row in rows]
    if odd := {shape for plan in shapes for shape in plan} - {DATA, TENSOR}:
        raise InvalidInput(
            "cell_plans.csv", f"stages of shape {sorted(odd)}; use 2x1 and 1x2 alone"
        )
    each = np.array([[modules[row["plan_id"], s] for s in range(key[3])] for row in rows])
    tensor_bytes, data_bytes = _scaled(key, traffic)
    return RecordedCell(
        key=key,
        groups=tuple(dict.fromkeys(row["group"] for row in rows)),
        ends=np.array([_ends(row["stage_layers"]) for row in rows], dtype=np.int64),
        data_parallel=np.array(shapes) == DATA,
        iter_time_s=np.array([float(row["iter_time_s"]) for row in rows]),
        kernels_s=each[..., 0],
        comm_s=each[..., 1],
        sync_s=each[..., 2],
        roofline_s=_roofline(key, loads),
        tensor_bytes=tensor_bytes,
        data_bytes=data_bytes,
    )


def _roofline(key: CellKey, loads: dict[tuple[str, str], Floats]) -> Floats:
    """Return the loads of layers. Wide-ResNet 1B has 2B's, scaled by the square of the channels."""
    if key[:2] in loads:
        return loads[key[:2]]
    return loads["wide_resnet", "2B"] * (_CHANNELS[key[1]] / _CHANNELS["2B"]) ** 2


def _scaled(
    key: CellKey, traffic: dict[tuple[str, str], tuple[Floats, Floats]]
) -> tuple[Floats, Floats]:
    """Return the bytes of each layer.

    Of the Wide-ResNets, only 2B is recorded. Activations grow with the channels, weights with their
    square.
    """
    if key[:2] in traffic:
        return traffic[key[:2]]
    tensor, weights = traffic["wide_resnet", "2B"]
    wider = _CHANNELS[key[1]] / _CHANNELS["2B"]
    return tensor * wider, weights * wider**2


def _ends(text: str) -> list[int]:
    return [int(stage.split("-")[1]) + 1 for stage in text.split("|")]


def _modules(path: Path) -> dict[tuple[str, int], Floats]:
    """Return the seconds of kernels, collectives and gradient exchange of each plan's stages."""
    out: dict[tuple[str, int], Floats] = defaultdict(lambda: np.zeros(3))
    for row in _rows(path):
        if row["pass"] not in ("forward", "backward"):
            continue
        names = ("kernel_time_s", "intra_stage_comm_s", "grad_sync_s")
        out[row["plan_id"], int(row["stage"])] += [float(row[name] or 0.0) for name in names]
    return out


def _loads(path: Path) -> dict[tuple[str, str], Floats]:
    out: dict[tuple[str, str], Floats] = defaultdict(lambda: np.zeros(LAYER_COUNT))
    for row in _rows(path):
        out[row["model"], row["params"]][int(row["layer"])] = float(row["comp_load_s"])
    return out


def _traffic(path: Path) -> dict[tuple[str, str], tuple[Floats, Floats]]:
    """Return the bytes of each layer under tensor and data parallelism.

    They are derived from the bytes of two-GPU stages, which are sums over layers.
    """
    seen: dict[tuple[str, str, str], dict[tuple[int, int], float]] = defaultdict(dict)
    for row in _rows(path):
        if (shape := row["logical_shape"]) in (DATA, TENSOR):
            ends = [0, *_ends(row["stage_layers"])]
            column = "tp_comm_bytes" if shape == TENSOR else "dp_comm_bytes_per_microbatch"
            at = int(row["stage"])
            seen[row["model"], row["params"], shape][ends[at], ends[at + 1]] = float(row[column])
    return {
        (model, params): (
            _spread(seen[model, params, TENSOR]),
            _spread(seen[model, params, DATA]),
        )
        for model, params, _ in list(seen)
    }


def _spread(stages: dict[tuple[int, int], float]) -> Floats:
    """Return values of layers, (16,), whose sums match those of the stages by least squares."""
    spans = np.array(list(stages))
    layer = np.arange(LAYER_COUNT)
    inside = (layer >= spans[:, :1]) & (layer < spans[:, 1:])
    result: Floats = np.linalg.lstsq(inside.astype(np.float64), np.array(list(stages.values())))[0]
    return result


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        raise InvalidInput(
            str(path), "no such file; give the folder of the Arena artifact's tables"
        )
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
