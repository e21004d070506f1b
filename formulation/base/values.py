"""The basic values: GPU types, workloads, and Cells by names and by indices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Final, NamedTuple

BEST_FOUND = 0
"""Pipeline degree of a Cell whose execution plan a full search chose.

The degree exists but was not recorded.
"""

PROFILING = "tessera.profiling"
"""Model of the workloads of profiling tasks, the service's own jobs on otherwise idle GPUs."""

RUN_LABEL = "tessera.measures-plans-of"
"""Label of the service's runs of a job's program, with the job's name. Users may not set it."""


class EstimateSource(IntEnum):
    """The source of an iteration time: those of estimates, best first, and then ``REPLAYED``.

    A replayed time is reported by a runtime that trains nothing. It is the time that the runtime
    was given, so it teaches nothing: no estimate has this source, and nothing is learned from it.
    ``ASSUMED`` is what a round takes for the time of a job of unknown rate, and is never stored.
    """

    MEASURED = 0
    PROFILED = 1
    ANALYTIC = 2
    REPLAYED = 3
    ASSUMED = 4


ESTIMATE_SOURCES: Final = (
    EstimateSource.MEASURED,
    EstimateSource.PROFILED,
    EstimateSource.ANALYTIC,
)
"""The sources that an estimate may have, best first."""


class Hold(IntEnum):
    """The way in which a job holds a GPU.

    A GPU has at most one holder (HELD or RELEASING). In addition, it has at most one successor
    (RESERVED), which becomes the holder once the agent has reported the holder gone.
    """

    HELD = 0
    RELEASING = 1
    RESERVED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuType:
    """A model of GPU with its memory, cost and power."""

    name: str
    memory_bytes: int
    dollars_per_hour: float = 0.0  # of one GPU; 0 if it is not known
    watts: float = 0.0  # of one busy GPU; 0 if it is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model, its size and its global batch. Jobs of one workload share their estimates."""

    model: str
    params: str
    global_batch: int

    @property
    def key(self) -> str:
        """Return the name under which estimates are kept, e.g. ``bert/1.3B/256``."""
        return f"{self.model}/{self.params}/{self.global_batch}"

    def nearest_batches(self, gpus: int) -> list[int]:
        """Return the batches nearest to this one, below and above, that GPUs divide evenly."""
        lower_batch = self.global_batch - self.global_batch % gpus
        return [batch for batch in (lower_batch, lower_batch + gpus) if batch]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """GPUs of one type for a job, with the number of stages into which its model is divided.

    A Cell is the unit that is estimated, chosen and allocated (Crius, section 4; Arena, section
    3.1). Data and tensor parallelism, which those papers leave to a search within the Cell, are its
    execution plan. With ``nodes``, it is a Cell and its shape, as in estimates and measurements. A
    job is given a Cell and is then placed on nodes that have room for it.
    """

    gpu_type: str
    gpus: int
    pipeline_degree: int  # BEST_FOUND if it was not recorded
    plan: str = ""  # id of an execution plan; "" is the best that the Cell's author found
    nodes: int = 0  # nodes with equal numbers of the GPUs; 0 for any number, or the fewest

    def on(self, nodes: int) -> Cell:
        """Return the Cell spread over ``nodes`` nodes. 0 means any number of nodes."""
        return self if nodes == self.nodes else replace(self, nodes=nodes)


class CellKey(NamedTuple):
    """A Cell by indices of a snapshot. It is a tuple because rounds make and compare many."""

    gpu_type: int  # index into Snapshot.gpu_types; -1 if there is no type
    gpus: int
    pipeline_degree: int
    plan: int  # index into Snapshot.plans

    def named(self, gpu_types: Sequence[GpuType], plans: Sequence[str]) -> Cell:
        """Return the Cell by names, on any number of nodes."""
        return Cell(
            gpu_type=gpu_types[self.gpu_type].name,
            gpus=self.gpus,
            pipeline_degree=self.pipeline_degree,
            plan=plans[self.plan],
        )


NO_CELL: Final = CellKey(gpu_type=-1, gpus=0, pipeline_degree=0, plan=0)
"""The Cell of a job that does not run."""


def cell_to_plain(cell: Cell) -> dict[str, str | int]:
    """Return a Cell as JSON's plain values. They do not say on how many nodes it is."""
    return {name: getattr(cell, name) for name in CellKey._fields}


def cell_from_plain(plain: Mapping[str, Any]) -> Cell:
    """Return the Cell that ``cell_to_plain`` wrote, possibly among other values."""
    return Cell(**{name: plain[name] for name in CellKey._fields})
