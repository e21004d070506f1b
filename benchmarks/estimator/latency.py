"""The accuracy of a plan's iteration time when it is composed from the times of its parts.

Data: ``arena/history/cell_plans.csv`` (plans on A40s with the artifact's estimate of their
iteration time) and ``cell_modules.csv`` (for each stage and pass: kernels, collectives inside the
stage, gradient exchange). Transfers between stages were not recorded. They are modelled from the
``send`` tables of ``comm.csv`` and the boundary tensors of :mod:`tessera.estimator.architectures`
at the coarse layers where stages meet. The rest is :mod:`tessera.estimator.pipeline` with 16
micro-batches in the artifact's setting: stages wait for transfers and exchange gradients one after
another. This section therefore checks the formula and the transfers, not the kernels.

**Transfers.** Each stage of these plans is a node of two GPUs. Its GPUs receive their inputs one
after another (the artifact adds up tiles). A GPU's inputs are the samples of its replica, complete
for each tensor part. On the way back, each tensor part sends only its own part if the other stage
has the same number of parts.

**Exceptions.** In ``16d_moe``, half of the time is transfer. It is five times as long as its
tensors take over InfiniBand, and a third as long as they take over Ethernet (the ``default``
tables). The data do not explain why. ``4d`` has no collectives recorded (an older format of the
log). It is counted in the main figure and left out of ``latency_median_error_recorded``.

The baseline is the same without transfers. The error of a plan is abs(rebuilt / recorded - 1). It
does not depend on seeds.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from tessera.benchmarks.estimator.section import EstimatorSection
from tessera.estimator.architectures.published import (
    ARENA_MICRO_BATCHES,
    PublishedModel,
    find_published,
)
from tessera.estimator.collectives import TableNetwork, Tables, read_curves
from tessera.estimator.graph import merge_layers
from tessera.estimator.hardware import A40
from tessera.estimator.pipeline import Overlap, Pipelines, Sync, Transfers, iteration_s, pipelined_s
from tessera.estimator.plans import Groups, Network, Primitive, Shape
from tessera.formulation.base.tables import Floats, Ints
from tessera.simulator.figures import Figure

COARSE_LAYERS: Final = 16
ARTIFACT_OVERLAP: Final = Overlap(transfers=Transfers.ADDED, sync=Sync.IN_TURN)
APART: Final = "16d_moe"
UNRECORDED: Final = "4d"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedPlan:
    """A plan with the times of its parts. Arrays have one entry for each stage, shape (S,)."""

    group: str
    model: str
    params: str
    iter_time_s: float
    forward_s: Floats  # with collectives
    backward_s: Floats
    sync_s: Floats
    update_s: Floats
    handed_bytes: Floats  # a micro-batch's activations to the next stage; 0 for the last stage
    data: Ints
    tensor: Ints

    def rebuilt_s(self, network: Network | None) -> float:
        """Return the iteration time by the formula, without transfers if ``network`` is None."""
        there, back = self.transfers_s(network) if network else (0 * self.sync_s,) * 2
        plan = Pipelines(
            busy_s=(self.forward_s + self.backward_s)[None],
            backward_s=self.backward_s[None],
            send_s=(there + back)[None],
            receive_s=np.roll(there + back, 1)[None],
            sync_s=self.sync_s[None],
            update_s=self.update_s[None],
        )
        return float(iteration_s(plan, ARENA_MICRO_BATCHES, ARTIFACT_OVERLAP)[0])

    def two_phases_s(self, network: Network) -> float:
        """Return the iteration time if all forward passes precede all backward passes.

        Each phase has its own slowest stage.
        """
        slots = (self.forward_s, self.backward_s, *self.transfers_s(network))
        phases = sum(float(pipelined_s(slot[None], ARENA_MICRO_BATCHES)[0]) for slot in slots)
        return phases + float(self.sync_s.sum() + self.update_s.max())

    def transfers_s(self, network: Network) -> tuple[Floats, Floats]:
        """Return seconds of a micro-batch to the next stage and of its gradient back, (S,) each."""
        data, tensor = np.roll(self.data, -1), np.roll(self.tensor, -1)  # of the next stage
        parts = np.where(self.tensor == tensor, self.tensor, 1)
        there = data * tensor * _sends_s(network, self.handed_bytes / data)
        back = self.data * self.tensor * _sends_s(network, self.handed_bytes / self.data / parts)
        return there, back


def _sends_s(network: Network, payload: Floats) -> Floats:
    """Return the seconds of single messages between nodes, which are 0 for empty messages."""
    ones = np.ones(len(payload), dtype=np.int64)
    groups = Groups(size=2 * ones, nodes=2 * ones, node_groups=ones)
    return np.where(payload > 0, network.seconds(Primitive.SEND, payload, groups), 0.0)


def run_latency_section(data: Path, seeds: Sequence[int]) -> EstimatorSection:
    """Return the figures and rows of the protocol. ``data`` is the folder of ``comm.csv``."""
    plans = _read(data / "history")
    curves = [
        curve
        for curve in read_curves(data / "comm.csv")
        if curve.layout.primitive is Primitive.SEND and curve.layout.gpu_type == A40.name
    ]
    tables = Tables.of(curves)
    fast, slow = _network(tables, "ib"), _network(tables, "default")
    errors = {
        "": _errors(plans, [p.rebuilt_s(fast) for p in plans]),
        "_without_transfer": _errors(plans, [p.rebuilt_s(None) for p in plans]),
        "_two_phases": _errors(plans, [p.two_phases_s(fast) for p in plans]),
    }
    ethernet = _errors(plans, [p.rebuilt_s(slow) for p in plans])
    group = np.array([p.group for p in plans])
    together, recorded = group != APART, (group != APART) & (group != UNRECORDED)
    figures: dict[str, Figure] = {"latency_plans": int(together.sum())}
    for name, error in errors.items():
        figures[f"latency_median_error{name}"] = float(np.median(error[together]))
        figures[f"latency_p95_error{name}"] = float(np.quantile(error[together], 0.95))
    figures |= {
        "latency_median_error_recorded": float(np.median(errors[""][recorded])),
        f"latency_median_error_{APART}": float(np.median(errors[""][~together])),
        f"latency_median_error_{APART}_ethernet": float(np.median(ethernet[~together])),
        f"latency_plans_{APART}": int((~together).sum()),
    }
    rows: list[dict[str, Figure | str]] = [
        {
            "section": "latency",
            "group": name,
            "plans": int((group == name).sum()),
            "model": next(p.model for p in plans if p.group == name),
            "median_error": float(np.median(errors[""][group == name])),
            "worst_error": float(errors[""][group == name].max()),
            "without_transfer": float(np.median(errors["_without_transfer"][group == name])),
            "over_ethernet": float(np.median(ethernet[group == name])),
        }
        for name in dict.fromkeys(p.group for p in plans)
    ]
    return EstimatorSection(figures=figures, rows=rows)


def _errors(plans: Sequence[RecordedPlan], rebuilt_s: Sequence[float]) -> Floats:
    recorded = np.array([p.iter_time_s for p in plans])
    return np.asarray(np.abs(np.array(rebuilt_s) / recorded - 1), dtype=np.float64)


def _network(tables: Tables, name: str) -> Network:
    """Return the times of messages between two nodes with an A40 each."""
    shape = Shape(nodes=2, gpus_per_node=1)
    return TableNetwork(tables=tables, hardware=A40, shape=shape, network=name)


def _read(folder: Path) -> list[RecordedPlan]:
    modules: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in _lines(folder / "cell_modules.csv"):
        modules[row["plan_id"]].append(row)
    return [
        _recorded(row, modules[row["plan_id"]])
        for row in _lines(folder / "cell_plans.csv")
        if row["status"] == "ok"
    ]


def _lines(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _recorded(row: dict[str, str], modules: Sequence[dict[str, str]]) -> RecordedPlan:
    stages = int(row["num_stages"])
    parts = {name: np.zeros((stages, 2)) for name in ("forward", "backward", "apply_grad")}
    sync_s = np.zeros(stages)
    for module in modules:
        times = module["kernel_time_s"], module["intra_stage_comm_s"]
        parts[module["pass"]][int(module["stage"])] = [float(text or 0) for text in times]
        sync_s[int(module["stage"])] += float(module["grad_sync_s"] or 0)
    ends = [int(text.split("-")[1]) for text in row["stage_layers"].split("|")]
    shapes = [text.split("x") for text in row["stage_logical_shapes"].split("|")]
    published = find_published(row["model"], row["params"])
    return RecordedPlan(
        group=row["group"],
        model=row["model"],
        params=row["params"],
        iter_time_s=float(row["iter_time_s"]),
        forward_s=parts["forward"].sum(axis=1),
        backward_s=parts["backward"].sum(axis=1),
        update_s=parts["apply_grad"].sum(axis=1),
        sync_s=sync_s,
        handed_bytes=_handed_bytes(published, int(row["global_batch"]), ends),
        data=np.array([int(d) for d, _ in shapes]),
        tensor=np.array([int(t) for _, t in shapes]),
    )


def _handed_bytes(published: PublishedModel, batch: int, ends: Sequence[int]) -> Floats:
    """Return the bytes of a micro-batch's activations after each coarse layer, 0 after the last."""
    graph = merge_layers(published.graph, COARSE_LAYERS)
    handed = graph.boundary[np.array(ends)]
    handed[-1] = 0.0
    return np.asarray(handed * published.at(batch).micro_batch * graph.element_bytes)
