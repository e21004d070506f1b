"""A replay of recorded allocations.

The record states the GPUs that each job held and the times. The world computes the training speed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tessera.formulation.decisions import Decision, DecisionKind
from tessera.formulation.errors import InvalidInput
from tessera.formulation.placement import Gang
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.snapshot import Snapshot
from tessera.formulation.tables import Floats
from tessera.formulation.values import Cell
from tessera.simulator.log import Segment
from tessera.simulator.overheads import Overheads
from tessera.simulator.scenario import Scenario
from tessera.simulator.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """A stretch in which a job held the GPUs of a Cell on a shape.

    ``job`` is an index into the arrivals.

    If ``end_s`` is inf, the job held the GPUs until it had trained all of its iterations, however
    long that takes.
    """

    job: int
    start_s: float
    end_s: float
    cell: Cell

    def __post_init__(self) -> None:
        """Refuse a stretch without length or GPUs, or with unequal GPUs on its nodes."""
        if not 0 <= self.start_s < self.end_s:
            raise InvalidInput("holds", "must start at 0 or later and end after their start")
        if self.cell.nodes < 1 or self.gpus_per_node < 1:
            raise InvalidInput("holds", "must have at least one node and one GPU on each node")
        if self.cell.gpus % self.cell.nodes:
            raise InvalidInput("holds", "must have the same number of GPUs on each node")

    @property
    def gpus_per_node(self) -> int:
        """Return the GPUs held on each node."""
        return self.cell.gpus // self.cell.nodes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplayResult:
    """The outcome of a replay.

    Arrays are float64[jobs], with times in seconds since the world began.
    """

    segments: tuple[Segment, ...]
    end_s: Floats  # inf: the job was not done when its last hold ended


def nodes_for_holds(holds: Sequence[Hold], node_gpus: Mapping[str, int]) -> list[NodeSpec]:
    """Return nodes with ``node_gpus`` GPUs by type, enough for each job to have its own.

    Records seldom say which GPUs were held, and a job may take longer in the replay than in the
    record. It would then collide with the next job on the same GPUs. The times in the record
    already include the waiting.
    """
    most: dict[tuple[str, int], int] = {}
    for hold in holds:
        key = (hold.cell.gpu_type, hold.job)
        most[key] = max(most.get(key, 0), hold.cell.nodes)
    count = Counter[str]()
    for (kind, _), nodes in most.items():
        count[kind] += nodes
    return [
        NodeSpec(name=f"{kind}-{i:05d}", gpu_type=kind, gpus=node_gpus[kind], rack=kind)
        for kind in sorted(count)
        for i in range(count[kind])
    ]


def replay_holds(scenario: Scenario, holds: Sequence[Hold], overheads: Overheads) -> ReplayResult:
    """Let jobs hold what was recorded, and train at the scenario's speeds less the overheads.

    A job that is done before a later hold begins does not use that hold. A job whose hold ends early
    keeps what it has trained. If a hold ends before its start is paid, the next start pays it
    (``tessera.simulator.overheads``).

    Raises:
        InvalidInput: holds of a job overlap or begin before it arrives, or the nodes are too few
            (see ``nodes_for_holds``).
    """
    _check_holds(scenario, holds)
    world = World(scenario, overheads=overheads)
    begins = {(h.start_s, h.job): h for h in holds}
    ends = {(h.end_s, h.job) for h in holds if math.isfinite(h.end_s)}
    for at_s in sorted({at_s for at_s, _ in (*begins, *ends)}):
        world.advance(at_s)
        snapshot = world.snapshot()
        world.carry_out(list(_decisions(world, snapshot, at_s, begins, ends)))
        world.check()
    while math.isfinite(world.next_event_s()):
        world.advance(world.next_event_s())
    world.check()
    world.close()
    return ReplayResult(segments=tuple(world.segments), end_s=np.array(world.store.jobs.ended_s))


def _check_holds(scenario: Scenario, holds: Sequence[Hold]) -> None:
    free_s = {job: one.arrival_s for job, one in enumerate(scenario.arrivals)}
    for hold in sorted(holds, key=lambda h: (h.job, h.start_s)):
        if hold.job not in free_s:
            raise InvalidInput("holds", f"name job {hold.job}, which the scenario does not have")
        if hold.start_s < free_s[hold.job]:
            name = scenario.arrivals[hold.job].spec.name
            raise InvalidInput("holds", f"of {name} overlap, or begin before it arrives")
        free_s[hold.job] = hold.end_s


def _decisions(
    world: World,
    snapshot: Snapshot,
    at_s: float,
    begins: Mapping[tuple[float, int], Hold],
    ends: set[tuple[float, int]],
) -> Iterator[Decision]:
    """Yield the decision of each live job at ``at_s``.

    A gang takes free nodes of its GPU type, in order.
    """
    store = world.store
    live = {store.specs[job].name: job for job in store.jobs.live}
    goes = {job for job in store.jobs.live if (at_s, job) in ends and job in store.gpus.gangs}
    taken = {
        n for job, gang in store.gpus.gangs.items() if job not in goes for n, _ in gang.members
    }
    for index, name in enumerate(snapshot.jobs.name):
        job = live[name]
        hold = begins.get((at_s, job))
        if hold is not None:
            gang = _free(snapshot, hold, taken)
            taken |= {n for n, _ in gang.members}
            yield Decision(
                job=index,
                kind=DecisionKind.MOVE if job in goes else DecisionKind.START,
                cell=snapshot.key(hold.cell),
                gang=gang,
            )
        elif job in goes:
            yield Decision(job=index, kind=DecisionKind.SUSPEND)


def _free(snapshot: Snapshot, hold: Hold, taken: set[int]) -> Gang:
    """Return a gang on the first free nodes of the GPU type.

    Raises:
        InvalidInput: there are too few free nodes.
    """
    of_type = np.flatnonzero(
        (snapshot.nodes.gpu_type == snapshot.key(hold.cell).gpu_type)
        & (snapshot.nodes.gpus >= hold.gpus_per_node)
    )
    free = [n for n in of_type.tolist() if n not in taken][: hold.cell.nodes]
    if len(free) < hold.cell.nodes:
        raise InvalidInput(
            "nodes", f"are too few for the {hold.cell.gpu_type} GPUs held at {hold.start_s:g} s"
        )
    return Gang(members=tuple((n, tuple(range(hold.gpus_per_node))) for n in free))
