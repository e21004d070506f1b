"""The certificates and prices that the last round leaves to the next one, as tables of a snapshot."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final, Self

import numpy as np

from tessera.formulation.base.moments import SAME_S
from tessera.formulation.base.tables import Bools, CellTable, Floats, Ints, Table


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CellSpans(CellTable):
    """Base of the tables that have a job, a Cell and its times in each row."""

    job: Ints  # index into Snapshot.jobs
    start_s: Floats  # seconds since 1970
    end_s: Floats
    gpu_type: Ints
    gpus: Ints
    pipeline_degree: Ints
    plan: Ints

    def are_active(self, at_s: float) -> Bools:
        """Return whether each row has begun at a time and not ended, bool[rows]."""
        active: Bools = (self.start_s <= at_s + SAME_S) & (self.end_s > at_s + SAME_S)
        return active


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScheduleSegments(CellSpans):
    """Certificates: the Cells and times that admitted jobs are promised to meet their deadlines."""

    INDEX: ClassVar[str] = "schedule segments"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedStarts(CellSpans):
    """Starts of waiting jobs: the Cells and times that nothing which comes later may take from them.

    A job has at most one. It ends at ``end_s`` if it starts then.
    """

    INDEX: ClassVar[str] = "planned starts"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedNodes(Table):
    """The nodes that planned starts are on, and the GPUs that each has there."""

    INDEX: ClassVar[str] = "planned nodes"
    start: Ints  # index into Snapshot.planned_starts
    node: Ints  # index into Snapshot.nodes
    gpus: Ints

    def by_start(self) -> defaultdict[int, list[tuple[int, int]]]:
        """Return (node, GPUs) of each planned start, by its index."""
        shares: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        columns = self.start.tolist(), self.node.tolist(), self.gpus.tolist()
        for start, node, gpus in zip(*columns, strict=True):
            shares[start].append((node, gpus))
        return shares


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpectedReleases(Table):
    """The GPUs that running jobs can be counted on to leave to planned starts, by job and node."""

    INDEX: ClassVar[str] = "expected releases"
    job: Ints  # index into Snapshot.jobs
    node: Ints  # index into Snapshot.nodes
    from_s: Floats  # seconds since 1970
    kept: Ints  # GPUs that it has there after that; this name is in stored rounds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prices(Table):
    """The shadow prices of rows in the cluster's last decided round. Solvers start from them."""

    INDEX: ClassVar[str] = "prices"
    name: tuple[str, ...]  # of the row, e.g. "gpus/a100"
    price: Floats  # of one unit of the row, in units of that round's last goal

    @classmethod
    def after_round(cls, prices: Mapping[str, float]) -> Self:
        """Return the prices that a round leaves to the next one: finite, and at least 0."""
        finite_prices = sorted(
            (name, max(p, 0.0)) for name, p in prices.items() if math.isfinite(p)
        )
        return cls.from_rows([{"name": name, "price": price} for name, price in finite_prices])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StartPlan:
    """The planned and promised starts that a round leaves to the next one, for the jobs that wait.

    ``start_by_s`` is float64[jobs], the time by which each job is promised to start, in seconds since
    1970. It is inf for a job that runs, or that was promised nothing.
    """

    starts: PlannedStarts
    nodes: PlannedNodes
    start_by_s: Floats
    expected_releases: ExpectedReleases
    moves: Mapping[int, str] = field(default_factory=dict)
    """The cause for which a start was promised for another time than before, by job."""

    def drop_jobs(self, jobs: Bools) -> Self:
        """Return the plan without the starts of ``jobs`` (bool[jobs])."""
        starts, nodes = keep_starts(self.starts, self.nodes, ~jobs[self.starts.job])
        start_by_s = np.where(jobs, np.inf, self.start_by_s)
        return replace(self, starts=starts, nodes=nodes, start_by_s=start_by_s)


NO_SEGMENTS: Final = ScheduleSegments.from_rows([])
NO_PLANNED_STARTS: Final = PlannedStarts.from_rows([])
NO_EXPECTED_RELEASES: Final = ExpectedReleases.from_rows([])
NO_PLANNED_NODES: Final = PlannedNodes.from_rows([])
NO_PRICES: Final = Prices.from_rows([])


def keep_starts(
    starts: PlannedStarts, nodes: PlannedNodes, keeps: Bools
) -> tuple[PlannedStarts, PlannedNodes]:
    """Return the planned starts that ``keeps`` (bool[starts]) selects, and the nodes that these are on."""
    if keeps.all():
        return starts, nodes
    own_nodes, position = nodes.at(keeps[nodes.start]), np.cumsum(keeps) - 1
    return starts.at(keeps), replace(own_nodes, start=position[own_nodes.start])
