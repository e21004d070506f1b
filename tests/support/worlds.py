"""Builders of simulated worlds: small scenarios with defaults, and short forms of decisions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tessera.formulation.answer.decisions import Decision, DecisionKind
from tessera.formulation.answer.placement import Gang
from tessera.formulation.base.values import CellKey, EstimateSource, GpuType, Workload
from tessera.formulation.records.clusters import NodeSpec, TenantSpec
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.records.jobs import JobSpec
from tessera.formulation.state.snapshot import Snapshot
from tessera.simulator.hazards import Failure, Straggler
from tessera.simulator.overheads import Overheads
from tessera.simulator.run import Conditions, Decider, Result, simulate
from tessera.simulator.scenario import Scenario
from tessera.simulator.traces.trace import Arrival
from tessera.simulator.world import World
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import RoundOutcome
from tests.support.cells import kind_of, with_cell

BERT = Workload(model="bert", params="1B", global_batch=10)

FREE = Overheads(save_s=0.0, load_s=0.0, search_s={1: 0.0})
"""Overheads without any costs."""

COSTLY = Overheads(save_s=7.0, load_s=11.0, search_s={1: 20.0, 4: 40.0}, checkpoint_every_s=100.0)
"""Overheads of which each has a different cost: 7 s to save, 11 s to load, and 20, 30 or 40 s to
search."""

Members = Sequence[tuple[str, Sequence[int]]]


class StoppedClock:
    """A clock that does not advance. Runs must not depend on the clock."""

    def monotonic_s(self) -> float:
        return 0.0


def an_arrival(name: str, at_s: float = 0.0, **overrides: Any) -> Arrival:
    """Return a job of 1,000 iterations on one GPU."""
    fields: dict[str, Any] = {
        "name": name,
        "workload": BERT,
        "iterations": 1000,
        "requested_gpus": 1,
        "tenant": "t",
    }
    return Arrival(at_s, JobSpec(**fields | overrides))


def a_profile(gpus: int = 1, iter_time_s: float = 1.0, **overrides: Any) -> EstimateRecord:
    """Return a profile of BERT on an A100, on the fewest nodes."""
    fields: dict[str, Any] = {
        "workload": BERT,
        "gpus": gpus,
        "iter_time_s": iter_time_s,
        "source": EstimateSource.MEASURED,
    }
    return EstimateRecord(**with_cell(fields | overrides))


def some_specs(*groups: tuple[str, int, int]) -> list[NodeSpec]:
    """Return nodes a100-0, a100-1, ... for groups of (type, number of nodes, GPUs per node)."""
    return [
        NodeSpec(name=f"{kind}-{i}", gpu_type=kind, gpus=gpus, rack=f"{kind}-rack")
        for kind, count, gpus in groups
        for i in range(count)
    ]


def a_scenario(
    *arrivals: Arrival,
    nodes: Sequence[NodeSpec] = tuple(some_specs(("a100", 2, 4))),
    profiles: Sequence[EstimateRecord] = (
        a_profile(1, 1.0),
        a_profile(2, 0.5),
        a_profile(4, 0.25),
        a_profile(8, 0.125),
    ),
    tenants: Sequence[TenantSpec] = (),
    types: Sequence[str] = (),
) -> Scenario:
    """Return a scenario of BERT jobs, which scale without loss, on two nodes of four A100."""
    names = list(types) or sorted({n.gpu_type for n in nodes})
    return Scenario(
        gpu_types=[GpuType(name=t, memory_bytes=2**35) for t in names],
        nodes=nodes,
        profiles=profiles,
        arrivals=arrivals,
        tenants=tenants,
    )


def a_world(
    scenario: Scenario,
    overheads: Overheads = FREE,
    *,
    visible: Sequence[EstimateRecord] | None = None,
    failures: Sequence[Failure] = (),
    stragglers: Sequence[Straggler] = (),
    at_s: float = 0.0,
) -> World:
    """Return a world in which ``at_s`` seconds have passed."""
    world = World(
        scenario, overheads=overheads, visible=visible, failures=failures, stragglers=stragglers
    )
    world.advance(at_s)
    return world


def run_decision(
    snapshot: Snapshot,
    job: str,
    members: Members,
    kind: DecisionKind = DecisionKind.START,
    degree: int = 1,
) -> Decision:
    """Return the decision that ``job`` runs on ``members``."""
    gang = Gang(members=tuple((snapshot.nodes.name.index(n), tuple(gpus)) for n, gpus in members))
    return Decision(
        job=snapshot.jobs.name.index(job),
        kind=kind,
        cell=CellKey(kind_of(snapshot, gang), gang.gpus, pipeline_degree=degree, plan=0),
        gang=gang,
    )


def wait_decision(
    snapshot: Snapshot, job: str, kind: DecisionKind = DecisionKind.SUSPEND
) -> Decision:
    """Return the decision that ``job`` does not run."""
    return Decision(job=snapshot.jobs.name.index(job), kind=kind)


def carry_out(world: World, *decisions: Callable[[Snapshot], Decision]) -> None:
    """Carry out these decisions in a round, and check the world."""
    snapshot = world.snapshot()
    world.carry_out([decision(snapshot) for decision in decisions])
    world.check()


def give(
    world: World,
    job: str,
    *members: tuple[str, Sequence[int]],
    kind: DecisionKind = DecisionKind.START,
    degree: int = 1,
) -> None:
    """Give ``job`` these GPUs in a round."""
    carry_out(world, lambda snapshot: run_decision(snapshot, job, members, kind, degree))


def take(world: World, job: str) -> None:
    """Suspend ``job`` in a round."""
    carry_out(world, lambda snapshot: wait_decision(snapshot, job))


def end_s(world: World, job: str, until_s: float = 1e9) -> float:
    """Let time pass, and return the time at which ``job`` ended, or inf if it did not."""
    world.advance(until_s)
    world.check()
    return float(world.store.jobs.ended_s[[s.name for s in world.store.specs].index(job)])


def iterations_done(world: World, job: str) -> float:
    """Return the iterations that ``job`` has trained."""
    return float(world.store.jobs.done[[s.name for s in world.store.specs].index(job)])


def simulate_scenario(
    scenario: Scenario,
    options: RoundOptions | None = None,
    decide: Callable[[Snapshot], RoundOutcome] | None = None,
    **conditions: Any,
) -> Result:
    """Run a scenario, by default with greedy rounds every 300 s at no cost."""
    chosen = Conditions(**{"overheads": FREE} | conditions)
    return simulate(scenario, decide or Decider(options or GREEDY), chosen, StoppedClock())


GREEDY = RoundOptions(solver="greedy", defragment_every_rounds=0)
FCFS = RoundOptions(scheduler="fcfs")
ILP = RoundOptions(objective="jct", defragment_every_rounds=4)
ARENA = RoundOptions(scheduler="arena")
DEADLINES = RoundOptions(objective="deadline")
POLICIES = {"greedy": GREEDY, "fcfs": FCFS, "ilp": ILP, "arena": ARENA, "deadlines": DEADLINES}
"""A policy of each kind."""


def a_random_scenario(seed: int, jobs: int = 8) -> Scenario:
    """Return a scenario of three workloads on two types, where some shapes cannot run."""
    rng = np.random.default_rng(seed)
    nodes = some_specs(("a100", 3, 4), ("v100", 4, 2))
    workloads = [Workload(model="m", params=f"{i}B", global_batch=10 + 7 * i) for i in range(3)]
    profiles = []
    for w in workloads:
        for kind, size in (("a100", 4), ("v100", 2)):
            base_s = rng.uniform(0.5, 3.0)
            for gpus in (1, 2, 4, 8):
                for degree in (1, 2):
                    if degree <= gpus:
                        time_s = base_s / gpus ** rng.uniform(0.6, 1.0)
                        profiles += _shapes(rng, w, kind, gpus, size, degree, time_s)
    at_s = np.sort(rng.choice([0.0, 300.0, 600.0, 451.3, 1234.5, 2000.0], jobs)).tolist()
    arrivals = [
        an_arrival(
            f"job-{i}",
            at,
            workload=workloads[int(rng.integers(3))],
            iterations=int(rng.integers(20, 4000)),
            requested_gpus=int(2 ** rng.integers(0, 4)),
            requested_gpu_type=str(rng.choice(["", "a100", "v100"])),
            priority=int(rng.integers(1, 3)),
            guaranteed=bool(rng.random() < 0.2),
            deadline_s=float(rng.uniform(600, 9000)) if rng.random() < 0.5 else math.inf,
        )
        for i, at in enumerate(at_s)
    ]
    return a_scenario(*arrivals, nodes=nodes, profiles=profiles)


def _shapes(
    rng: np.random.Generator,
    workload: Workload,
    kind: str,
    gpus: int,
    size: int,
    degree: int,
    time_s: float,
) -> list[EstimateRecord]:
    """Return a Cell's profiles for its best shape, a worse one or both. Times may be inf."""
    best, shapes = -(-gpus // size), []
    drawn = rng.random()
    if drawn > 0.15:
        shapes.append((0 if drawn > 0.6 else best, math.inf if drawn > 0.93 else time_s))
    if (drawn <= 0.15 or rng.random() < 0.4) and gpus > best:
        worse = int(min(gpus, 2 * best))
        slower_s = math.inf if drawn > 0.15 and rng.random() < 0.2 else time_s * rng.uniform(1, 2)
        shapes.append((worse, slower_s))
    return [
        a_profile(gpus, float(t), workload=workload, gpu_type=kind, nodes=n, pipeline_degree=degree)
        for n, t in shapes
    ]
