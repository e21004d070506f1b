"""The certificates and prices that the last round leaves to the next one, as tables of a snapshot."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Self

import numpy as np

from tessera.formulation.tables import Bools, CellTable, Floats, Ints, Table


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Legs(CellTable):
    """Certificates: the Cells and times that admitted jobs are promised to meet their deadlines."""

    INDEX: ClassVar[str] = "legs"
    job: Ints  # index into Snapshot.jobs
    start_s: Floats  # seconds since 1970
    end_s: Floats
    gpu_type: Ints
    gpus: Ints
    pipeline_degree: Ints
    plan: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedStarts(CellTable):
    """Starts of waiting jobs: the Cells and times that nothing which comes later may take from them.

    A job has at most one. It ends at ``end_s`` if it starts then.
    """

    INDEX: ClassVar[str] = "planned starts"
    job: Ints  # index into Snapshot.jobs
    start_s: Floats  # seconds since 1970
    end_s: Floats
    gpu_type: Ints
    gpus: Ints
    pipeline_degree: Ints
    plan: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedNodes(Table):
    """The nodes that planned starts are on, and the GPUs that each has there."""

    INDEX: ClassVar[str] = "planned nodes"
    start: Ints  # index into Snapshot.planned_starts
    node: Ints  # index into Snapshot.nodes
    gpus: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prices(Table):
    """The shadow prices of rows in the cluster's last decided round. Solvers start from them."""

    INDEX: ClassVar[str] = "prices"
    name: tuple[str, ...]  # of the row, e.g. "gpus/a100"
    price: Floats  # of one unit of the row, in units of that round's last goal

    @classmethod
    def after_round(cls, prices: Mapping[str, float]) -> Self:
        """Return the prices that a round leaves to the next one: finite, and at least 0."""
        known = sorted((name, max(p, 0.0)) for name, p in prices.items() if math.isfinite(p))
        return cls.from_rows([{"name": name, "price": price} for name, price in known])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StartPlan:
    """The planned and promised starts that a round leaves to the next one, for the jobs that wait.

    ``start_by_s`` is float64[jobs], the time by which each job is promised to start, in seconds since
    1970. It is inf for a job that runs, or that was promised nothing.
    """

    starts: PlannedStarts
    nodes: PlannedNodes
    start_by_s: Floats


NO_LEGS: Final = Legs.from_rows([])
NO_PLANNED_STARTS: Final = PlannedStarts.from_rows([])
NO_PLANNED_NODES: Final = PlannedNodes.from_rows([])
NO_PRICES: Final = Prices.from_rows([])


def keep_starts(
    starts: PlannedStarts, nodes: PlannedNodes, kept: Bools
) -> tuple[PlannedStarts, PlannedNodes]:
    """Return the planned starts that are ``kept`` (bool[starts]), and the nodes that these are on."""
    if kept.all():
        return starts, nodes
    own, position = nodes.at(kept[nodes.start]), np.cumsum(kept) - 1
    return starts.at(kept), replace(own, start=position[own.start])
