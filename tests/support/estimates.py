"""Builders for the estimator: layers, graphs and a simple network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.estimator.cells import Runtime, Setting
from tessera.estimator.graph import Graph, Layer, graph_of
from tessera.estimator.hardware import Hardware
from tessera.estimator.pipeline import Pipelines
from tessera.estimator.plans import (
    Candidates,
    Compute,
    Groups,
    Network,
    Primitive,
    Shape,
    StageCosts,
    Training,
)
from tessera.formulation.base.tables import Floats, Ints


def a_layer(**given: Any) -> Layer:
    """Return a layer of round numbers in which everything is divided and nothing exchanged."""
    amounts: dict[str, Any] = {
        "kind": "block",
        "flops": 1e12,
        "touched": 1e8,
        "kernels": 10.0,
        "weights": 1e8,
        "boundary": 2e6,
        "kept": 3e7,
        "working": 4e7,
        "reduced": 4e6,
        "tensor_limit": 8.0,
    }
    return Layer(**(amounts | given))


def a_graph(*layers: Layer, dtype: str = "f16") -> Graph:
    """Return a graph of these layers, or of four equal ones if none are given."""
    return graph_of("model", dtype, layers or (a_layer(),) * 4)


def one_candidate(
    start: int = 0, end: int = 1, dp: int = 1, tp: int = 1, ep: int = 1, *, sp: bool = False
) -> Candidates:
    """Return a single row."""
    columns = {"start": start, "end": end, "dp": dp, "tp": tp, "ep": ep}
    return Candidates(
        **{name: np.array([value], dtype=np.int64) for name, value in columns.items()},
        sp=np.array([sp]),
    )


@dataclass(frozen=True)
class FlatNetwork:
    """A network where a collective takes a latency and its ring's time.

    The ring's bytes have one rate inside nodes and another between nodes.
    """

    latency_s: float = 0.0
    inside_bytes_per_s: float = 100e9
    across_bytes_per_s: float = 10e9

    def seconds(self, primitive: Primitive, payload_bytes: Floats, groups: Groups) -> Floats:
        passes = 2.0 if primitive is Primitive.ALL_REDUCE else 1.0
        share = 1.0 if primitive is Primitive.SEND else (groups.size - 1) / groups.size
        port = self.across_bytes_per_s / groups.node_groups
        rate = np.where(groups.nodes > 1, port, self.inside_bytes_per_s)
        taken = self.latency_s + passes * share * payload_bytes / rate
        return np.where(groups.size > 1, taken, 0.0)


def stage_costs(
    graph: Graph,
    training: Training,
    hardware: Hardware,
    shape: Shape,
    candidates: Candidates,
    compute: Compute,
    network: Network,
    **runtime: Any,
) -> StageCosts:
    """Return the costs of candidate stages in a setting with these parts."""
    setting = Setting(
        graph=graph,
        training=training,
        hardware=hardware,
        shape=shape,
        compute=compute,
        network=network,
        runtime=Runtime(**runtime),
    )
    return setting.costs(candidates)


def pipelines_of(costs: StageCosts, rows: Ints) -> Pipelines:
    """Return the plans whose stages are the candidates ``rows``, shape (P, S).

    A row is -1 after the last stage of a plan.
    """
    is_stage = rows >= 0

    def select_rows(column: Floats) -> Floats:
        return np.where(is_stage, column[rows], 0.0)

    return Pipelines(
        busy_s=select_rows(costs.busy_s),
        send_s=select_rows(costs.send_s),
        receive_s=select_rows(costs.receive_s),
        backward_s=select_rows(costs.backward_s),
        sync_s=select_rows(costs.sync_s),
        update_s=select_rows(costs.update_s),
    )
