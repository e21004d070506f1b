"""The speed of the proxy plan relative to the best plan, on cells with estimates of every plan.

Data: ``arena/history/cell_*.csv`` (see ``recorded_cells.py``), with 9 cells and 647 plans, all on
a40. The truth is each plan's iteration time from the authors' profiler. The share of a choice is
the best plan's time over the chosen plan's. A rule chooses among the recorded plans of a cell
without seeing their iteration times. Figures are means over cells.

**Rule.** The rule is Arena's, section 3.3: least computation bias, then least communication load,
by ``tessera.estimator.planning.pareto``. A stage's communication is in bytes per micro-batch as in
the authors' planner (``cell_stage_hints.csv``), never a time. For Wide-ResNet 1B and 4B these are
missing, so those of 2B are scaled with the channels. The variants differ in the source of the
layers' loads:

* ``recorded_roofline``: the artifact's roofline time of each layer. This is the paper's own rule, without
  the position weights that its artifact adds by hand for Wide-ResNet.
* ``learned`` (the figure ``proxy_share``): roofline time multiplied by the layer's efficiency. The
  efficiency is learned from the *other* cells of the family, as the mean of kernel time on one
  device over roofline time. Nothing of the judged cell is used. The BERT cells share a model, and
  so do two of the MoE cells, so that the same operators have been profiled in another cell.
  ``other_sizes`` therefore also leaves out all cells of the same model size (for Wide-ResNet and
  MoE; BERT has one size and is not in that figure).
* ``profiled``: kernel times of the cell's own layers, data parallel, on one device.

**Comparisons.** The other ways of choosing a plan are:

* ``searched``: the plan of least latency under costs that are learned from the other cells of the
  family in the same way. Kernels in either shape go by roofline time and collectives by bytes.
  Transfers between stages cost nothing. This is the quantity that
  ``tessera.estimator.planning.search`` minimises. It needs a unit of time, while the proxy does
  not.
* ``crius``: the partition of least bias by the profiled loads, since Crius' own cut needs boundary
  tensors, which are not recorded. Of its recorded mixtures it takes the one of least latency,
  composed of the times of its stages in both shapes (section 5.1). Transfers between stages were
  not logged and cost nothing. Collectives of Wide-ResNet 1B were not logged either. They are
  derived from its bytes at the rates of the other Wide-ResNets.
* ``even``: equal numbers of layers in all stages, all data parallel.
* ``any``: the mean over all plans.

Nothing is drawn, so seeds have no effect.

Group ``16d_moe`` is unusual: half of its time is transfer, which no planner here sees.
``proxy_share_without_16d_moe`` leaves it out. One choice was made with this data in view, the form
of the communication load. Three readings of Arena's equation 4, which differ in how the stages'
gradients add up, give 0.971, 0.984 and 0.985. The planner has the second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from tessera.benchmarks.estimator.recorded_cells import (
    LAYER_COUNT,
    MICRO_BATCHES,
    STAGE_GPUS,
    RecordedCell,
    read_cells,
)
from tessera.benchmarks.estimator.section import EstimatorSection
from tessera.estimator.planning.options import options_of
from tessera.estimator.planning.pareto import comm_load, find_frontier, proxy_of
from tessera.estimator.planning.search import Latency, best_plan
from tessera.estimator.planning.stages import bias_of, stage_shares
from tessera.formulation.base.tables import Floats
from tessera.simulator.figures import Figure

EXCLUDED_FAMILY: Final = "16d_moe"

Load = Callable[[RecordedCell, Sequence[RecordedCell]], Floats]
"""A function that returns the loads of a cell's layers, (16,), given all cells."""


def run_plan_section(data: Path, seeds: Sequence[int]) -> EstimatorSection:
    """Return the figures and rows of the protocol. ``data`` is the artifact's folder."""
    del seeds
    cells = read_cells(data)
    rows = [_row(cell, cells) for cell in cells]
    kept = [
        row for row, cell in zip(rows, cells, strict=True) if EXCLUDED_FAMILY not in cell.groups
    ]
    figures: dict[str, Figure] = {
        "proxy_share": _mean(rows, "learned"),
        "proxy_share_worst": min(float(row["learned"]) for row in rows),
        "proxy_share_without_16d_moe": _mean(kept, "learned"),
        **{f"proxy_share_{name}": _mean(rows, name) for name in RULES if name != "learned"},
        "proxy_cells": len(cells),
        "proxy_plans": sum(len(cell.ends) for cell in cells),
    }
    return EstimatorSection(figures=figures, rows=rows)


def recorded_roofline(cell: RecordedCell, cells: Sequence[RecordedCell]) -> Floats:
    """Return the recorded roofline times of the layers."""
    del cells
    return cell.roofline_s


def profiled_compute(cell: RecordedCell, cells: Sequence[RecordedCell]) -> Floats:
    """Return kernel times of the layers, data parallel, from the cell's own profile."""
    del cells
    return cell.kernels_of_layers(data_parallel=True)


def learned_compute(cell: RecordedCell, cells: Sequence[RecordedCell]) -> Floats:
    """Return roofline times, corrected by the times of other cells of the family."""
    return _corrected(cell, _others(cell, cells))


def other_sizes(cell: RecordedCell, cells: Sequence[RecordedCell]) -> Floats:
    """Return roofline times, corrected by other sizes of the model, or NaN without any."""
    others = [x for x in cells if x.key[0] == cell.key[0] and x.key[1] != cell.key[1]]
    return _corrected(cell, others)


def _others(cell: RecordedCell, cells: Sequence[RecordedCell]) -> list[RecordedCell]:
    """Return the other cells of the family."""
    return [other for other in cells if other is not cell and other.key[0] == cell.key[0]]


def _corrected(cell: RecordedCell, others: Sequence[RecordedCell]) -> Floats:
    if not others:
        return np.full_like(cell.roofline_s, np.nan)
    corrected: Floats = cell.roofline_s * np.mean([_efficiency(x) for x in others], axis=0)
    return corrected


def _efficiency(cell: RecordedCell) -> Floats:
    """Return kernel time over roofline time of each layer, relative to the whole model, (16,)."""
    kernels = cell.kernels_of_layers(data_parallel=True)
    relative: Floats = kernels / kernels.sum() / (cell.roofline_s / cell.roofline_s.sum())
    return relative


def plan_measures(cell: RecordedCell, load: Floats) -> tuple[Floats, Floats]:
    """Return the computation bias and communication load of the recorded plans, each (P,)."""
    share = stage_shares(load, cell.gpus, cell.starts, cell.ends)
    return (
        bias_of(share, np.full_like(cell.ends, STAGE_GPUS)),
        comm_load(cell.comm_bytes[cell.rows], MICRO_BATCHES),
    )


def proxy_plan(cell: RecordedCell, load: Floats) -> int:
    """Return the recorded plan that Arena's rule chooses."""
    return proxy_of(*plan_measures(cell, load))


def assembled_best(cell: RecordedCell, cells: Sequence[RecordedCell]) -> int:
    """Return the plan that Crius' estimate chooses.

    It is the mixture of least latency in the partition of least bias. The times of a stage in a
    shape are the recorded plan's own. Between plans they differ only by noise.
    """
    bias, _ = plan_measures(cell, profiled_compute(cell, cells))
    at = np.flatnonzero((cell.ends == cell.ends[int(bias.argmin())]).all(axis=1))
    comm_s, sync_s = _collectives_s(cell, cells)
    busy, once = (cell.kernels_s + comm_s)[at], sync_s[at]
    latency = busy.sum(axis=1) + (MICRO_BATCHES - 1) * busy.max(axis=1) + once.max(axis=1)
    return int(at[int(latency.argmin())])


def _collectives_s(cell: RecordedCell, cells: Sequence[RecordedCell]) -> tuple[Floats, Floats]:
    """Return seconds of a micro-batch's collectives and of gradient exchange, each (P, S)."""
    if cell.comm_logged:
        return cell.comm_s, cell.sync_s
    tensor, gradients = _rates(_others(cell, cells))
    sent = cell.comm_bytes[cell.rows]
    return (
        np.where(cell.data_parallel, 0.0, sent * tensor),
        np.where(cell.data_parallel, sent * gradients, 0.0),
    )


def _rates(cells: Sequence[RecordedCell]) -> tuple[float, float]:
    """Return the logged seconds per byte of these cells.

    The first is for collectives inside tensor-parallel stages. The second is for the gradients of
    data-parallel stages, which are exchanged once, by bytes per micro-batch.
    """
    logged = [cell for cell in cells if cell.comm_logged]
    spent, sent = np.zeros(2), np.zeros(2)
    for cell in logged:
        each = cell.comm_bytes[cell.rows]
        spent += cell.comm_s[~cell.data_parallel].sum(), cell.sync_s[cell.data_parallel].sum()
        sent += each[~cell.data_parallel].sum(), each[cell.data_parallel].sum()
    tensor, gradients = spent / sent
    return float(tensor), float(gradients)


def latency_of_candidates(cell: RecordedCell, cells: Sequence[RecordedCell]) -> Latency:
    """Return our cost model's terms of each candidate, learned from other cells of the family."""
    others, c = _others(cell, cells), cell.candidates
    kernels = [
        np.mean([x.kernels_of_layers(shape) / x.roofline_s for x in others], axis=0)
        * cell.roofline_s
        for shape in (True, False)
    ]
    each = [np.concatenate([[0.0], x.cumsum()]) for x in kernels]
    data_parallel, sent = c.dp > 1, cell.comm_bytes
    tensor, gradients = _rates(others)
    busy = np.where(data_parallel, *(x[c.end] - x[c.start] for x in each))
    busy = busy + np.where(data_parallel, 0.0, sent * tensor)
    sync = np.where(data_parallel, sent * gradients, 0.0)
    return Latency(
        added_s=busy, worst_s=np.array([busy, sync]), weight=np.array([MICRO_BATCHES - 1.0, 1.0])
    )


def least_latency(cell: RecordedCell, cells: Sequence[RecordedCell]) -> int:
    """Return the recorded plan of least latency under the learned costs."""
    latency = latency_of_candidates(cell, cells)
    return int(np.argmin([latency.of(rows) for rows in cell.rows]))


def _share_by(load: Load) -> Callable[[RecordedCell, Sequence[RecordedCell]], float]:
    """Return a function for the share of Arena's proxy under these loads, or NaN without loads."""

    def share(cell: RecordedCell, cells: Sequence[RecordedCell]) -> float:
        loads = load(cell, cells)
        return float(cell.share[proxy_plan(cell, loads)]) if np.isfinite(loads).all() else np.nan

    return share


def _crius(cell: RecordedCell, cells: Sequence[RecordedCell]) -> float:
    return float(cell.share[assembled_best(cell, cells)])


def _searched(cell: RecordedCell, cells: Sequence[RecordedCell]) -> float:
    return float(cell.share[least_latency(cell, cells)])


def _even(cell: RecordedCell, cells: Sequence[RecordedCell]) -> float:
    del cells
    ends = np.arange(1, cell.stages + 1) * LAYER_COUNT // cell.stages
    at = (cell.ends == ends).all(axis=1) & cell.data_parallel.all(axis=1)
    return float(cell.share[at].max()) if at.any() else np.nan


def _any(cell: RecordedCell, cells: Sequence[RecordedCell]) -> float:
    del cells
    return float(cell.share.mean())


RULES: Final[dict[str, Callable[[RecordedCell, Sequence[RecordedCell]], float]]] = {
    "learned": _share_by(learned_compute),
    "other_sizes": _share_by(other_sizes),
    "roofline": _share_by(recorded_roofline),
    "profiled": _share_by(profiled_compute),
    "searched": _searched,
    "crius": _crius,
    "even": _even,
    "any": _any,
}


def _row(cell: RecordedCell, cells: Sequence[RecordedCell]) -> dict[str, Figure | str]:
    """Return a cell's shares, and whether the best of *all* plans was recorded.

    All plans are those with two-GPU stages. This is given for either planner. If the best plan was
    not recorded, the share is that of the best recorded plan.
    """
    model, params, gpus, stages = cell.key
    load = learned_compute(cell, cells)
    option, latency = options_of(cell.candidates), latency_of_candidates(cell, cells)
    result = find_frontier(option, load, cell.comm_bytes, gpus, stages, MICRO_BATCHES)
    fastest = best_plan(option, latency, gpus, stages)
    return {
        "section": "choice_of_plan",
        "cell": f"{model}-{params} {gpus} GPUs {stages} stages",
        "groups": " ".join(cell.groups),
        "plans": len(cell.ends),
        **{name: share for name, rule in RULES.items() if np.isfinite(share := rule(cell, cells))},
        "chosen": str(cell.ends[proxy_plan(cell, load)].tolist()),
        "proxy_recorded": bool((cell.rows == result.proxy.rows).all(axis=1).any()),
        "searched_recorded": bool((cell.rows == fastest.rows).all(axis=1).any()),
    }


def _mean(rows: Sequence[dict[str, Figure | str]], name: str) -> float:
    """Return the mean over the cells that have the figure."""
    return float(np.mean([float(row[name]) for row in rows if name in row]))
