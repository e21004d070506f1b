"""What a snapshot holds of the network: what Cells send, and the priorities that are in force."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from formulation.tables import Ints, Table


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traffics(Table):
    """What Cells send in one iteration, in the order of the snapshot's estimates."""

    INDEX: ClassVar[str] = "traffic"
    workload: Ints  # index into Snapshot.workloads
    gpu_type: Ints
    gpus: Ints
    nodes: Ints
    pipeline_degree: Ints
    plan: Ints  # index into Snapshot.plans
    document: tuple[str, ...]  # of formulation.network.traffic.CellTraffic, as JSON


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Standing(Table):
    """The network plan in force, by job; a job that is not here has no part in it yet."""

    INDEX: ClassVar[str] = "standing"
    job: Ints  # index into Snapshot.jobs; -1: it has ended since
    generation: Ints  # of the allocation that it was made for
    rank: Ints  # 0 is the most urgent
    level: Ints
    tag: Ints  # DSCP code point, as long as the allocation lasts; -1: none


_NONE = np.zeros(0, np.int64)
NO_TRAFFIC = Traffics(
    workload=_NONE, gpu_type=_NONE, gpus=_NONE, nodes=_NONE, pipeline_degree=_NONE, plan=_NONE, document=()
)  # fmt: skip
NO_STANDING = Standing(job=_NONE, generation=_NONE, rank=_NONE, level=_NONE, tag=_NONE)
