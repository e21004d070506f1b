"""The small values that everything else is said in: GPU types, workloads, Cells by names and by indices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final, NamedTuple

BEST_FOUND = 0
"""Pipeline degree of a Cell whose plan a full search chose: the degree exists but was not recorded."""

PROFILING = "tessera.profiling"
"""Model of the workloads of profiling tasks: jobs of the service's own, for GPUs that nobody else wants."""


class Source(IntEnum):
    """Where an estimate comes from, best first."""

    MEASURED = 0
    PROFILED = 1
    ANALYTIC = 2


class Hold(IntEnum):
    """How a job holds a GPU.

    A GPU has at most one holder (HELD or RELEASING) and, beside it, at most one successor
    (RESERVED), which becomes the holder once the agent has reported the holder gone.
    """

    HELD = 0
    RELEASING = 1
    RESERVED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuType:
    """A kind of GPU."""

    name: str
    memory_bytes: int
    dollars_per_hour: float = 0.0  # of one GPU; 0: not known
    watts: float = 0.0  # of one busy GPU; 0: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is trained; jobs of one workload share their estimates."""

    model: str
    params: str
    global_batch: int

    @property
    def key(self) -> str:
        """Return the name under which estimates are kept, e.g. ``bert/1.3B/256``."""
        return f"{self.model}/{self.params}/{self.global_batch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What a job can be given: so many GPUs of a type, and into how many stages its model is cut for them.

    The unit that is estimated, chosen and allocated (Crius, section 4; Arena, section 3.1). What those leave
    to a search within the Cell, data and tensor parallelism, is the plan. With ``nodes`` it is a Cell and its
    shape, as estimates and measurements have it; a job is given a Cell and lies on nodes as there is room.
    """

    gpu_type: str
    gpus: int
    pipeline_degree: int  # BEST_FOUND: not recorded
    plan: str = ""  # id of an execution plan; "": the best that the Cell's author found
    nodes: int = 0  # that the GPUs are spread over, equally many on each; 0: any, or the fewest

    def on(self, nodes: int) -> Cell:
        """Return the Cell spread over ``nodes`` nodes; 0: on any."""
        return self if nodes == self.nodes else replace(self, nodes=nodes)


class CellKey(NamedTuple):
    """A Cell by indices of a snapshot, where a round handles many: a tuple, quickly made and compared."""

    gpu_type: int  # index into Snapshot.gpu_types; -1: none
    gpus: int
    pipeline_degree: int
    plan: int  # index into Snapshot.plans

    def named(self, gpu_types: Sequence[GpuType], plans: Sequence[str]) -> Cell:
        """Return the Cell by names, on any nodes."""
        return Cell(
            gpu_type=gpu_types[self.gpu_type].name,
            gpus=self.gpus,
            pipeline_degree=self.pipeline_degree,
            plan=plans[self.plan],
        )


NO_CELL: Final = CellKey(gpu_type=-1, gpus=0, pipeline_degree=0, plan=0)
"""Of a job that runs on none."""
