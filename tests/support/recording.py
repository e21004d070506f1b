"""Recorded rounds with their decisions, which later versions of the program must repeat.

``python -m tests.support.recording`` records them again in ``tests/replays``. Do that only in a
commit that is meant to change decisions, and explain there why they change.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from tessera.formulation.answer.codec import decode, encode
from tessera.formulation.answer.network.outcome import NetworkOutcome
from tessera.formulation.answer.network.running import running_now
from tessera.formulation.state.network_facts import Traffics
from tessera.formulation.state.snapshot import Snapshot
from tessera.formulation.state.topologies.described import decode_topology
from tessera.formulation.state.traffic import intern_traffic
from tessera.simulator.run import Conditions, Decider, simulate
from tessera.solvers.base import Budget
from tessera.solvers.registry import make_solver as make_solver
from tessera.solvers.registry import solver_names as solver_names
from tessera.solvers.rounds.network import plan_network
from tessera.solvers.rounds.options import RoundOptions, recorded_options
from tessera.solvers.rounds.plan import RoundOutcome, plan_round
from tessera.solvers.schedulers.registry import scheduler_names as scheduler_names
from tessera.solvers.schedulers.registry import scheduler_of
from tests.support.crowded_network import crowd_network
from tests.support.network_families import family_traffic
from tests.support.random_rounds import draw_round
from tests.support.worlds import COSTLY, StoppedClock, a_random_scenario

FOLDER: Final = Path(__file__).parent.parent / "replays"
SOLVE_S: Final = 20.0
"""Seconds that a solver may take while a round is recorded. Replays repeat its work, not its time."""
DRAWN: Final = 24
"""Number of random small rounds with lexicographic objectives."""
NETWORK_HOSTS: Final = 64
"""The hosts of a network that is full of jobs."""
KEPT: Final = (2, 7)
"""The rounds of a simulated world that are recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRound:
    """A snapshot with its options and the decisions."""

    name: str
    snapshot: Snapshot
    options: RoundOptions
    decided: Mapping[str, Any]


def load_rounds() -> list[Path]:
    """Return the files of all recorded rounds."""
    return sorted(FOLDER.glob("*.json.gz"))


def load_round(path: Path) -> RecordedRound:
    """Return a recorded round."""
    held = json.loads(gzip.decompress(path.read_bytes()))
    snapshot = decode(held["snapshot"].encode())
    assert isinstance(snapshot, Snapshot)
    options = recorded_options(held["options"])
    return RecordedRound(
        name=held["name"], snapshot=snapshot, options=options, decided=held["decided"]
    )


def decide(snapshot: Snapshot, options: RoundOptions) -> RoundOutcome:
    """Decide a round by the work in its options, or within ``SOLVE_S`` if they have none."""
    clock_s = math.inf if options.work else SOLVE_S
    budget = Budget(
        remaining_s=lambda: clock_s, seed=options.seed, gap=options.gap, work=dict(options.work)
    )
    solver, scheduler = make_solver(options.solver), scheduler_of(options.scheduler)
    return plan_round(snapshot, options, solver, budget, scheduler=scheduler)


def describe(snapshot: Snapshot, outcome: RoundOutcome) -> dict[str, Any]:
    """Return the decisions as plain JSON, with everything except the texts of reasons."""
    plain = {
        "decisions": [
            {
                "job": snapshot.jobs.name[d.job],
                "kind": str(d.kind),
                "gpu_type": snapshot.gpu_types[d.cell.gpu_type].name
                if d.cell.gpu_type >= 0
                else "",
                "gpus": d.cell.gpus,
                "pipeline_degree": d.cell.pipeline_degree,
                "rate": d.rate,
                "restart_price": d.restart_price,
                "gang": []
                if d.gang is None
                else [[snapshot.nodes.name[node], list(gpus)] for node, gpus in d.gang.members],
                "reason": "" if d.reason is None else str(d.reason.code),
                "admitted": d.admitted,
                "opportunistic": d.opportunistic,
            }
            for d in outcome.decisions
        ],
        "objective": outcome.solution.objective,
        "bound": outcome.solution.bound,
        "status": str(outcome.solution.status),
        "greedy": outcome.greedy_objective,
        "placed_score": outcome.placed_score,
        "goals": [[g.objective, g.bound, g.gap, g.bound_is_trivial] for g in outcome.goals],
        "prices": sorted(outcome.prices.values()),
        "violations": [violation.rule for violation in outcome.violations],
        "given_up": sorted(outcome.given_up),
        "stands_until": outcome.stands_until,
        "network": None if outcome.network is None else _describe_network(outcome.network),
    }
    return dict(json.loads(json.dumps(plain)))


def _describe_network(network: NetworkOutcome) -> dict[str, Any]:
    return {
        "levels": network.levels,
        "decisions": [
            {
                "job": d.job,
                "rank": d.rank,
                "level": d.level,
                "tag": d.tag,
                "priority": d.priority,
                "intensity": d.intensity,
                "meets": list(d.contending_jobs),
                "routes": [[r.source, r.target, list(r.via)] for r in d.routes],
            }
            for d in network.decisions
        ],
    }


def repeat(recorded: RecordedRound) -> dict[str, Any]:
    """Return this program's decisions on a recorded snapshot, in the recorded form."""
    snapshot, options = recorded.snapshot, recorded.options
    if "objective" in recorded.decided:
        return describe(snapshot, decide(snapshot, options))
    network = plan_network(snapshot, running_now(snapshot), options)
    return dict(json.loads(json.dumps(_describe_network(network))))


def record_rounds() -> None:
    """Record every round again, and remove the files of other rounds."""
    FOLDER.mkdir(exist_ok=True)
    for path in load_rounds():
        path.unlink()
    for name, snapshot, options in _rounds():
        first = decide(snapshot, options)
        by_work = replace(options, work=first.solution.work)
        _save(name, snapshot, by_work, describe(snapshot, decide(snapshot, by_work)))
    snapshot, options = crowd_network(NETWORK_HOSTS), RoundOptions()
    network = plan_network(snapshot, running_now(snapshot), options)
    _save("network", snapshot, options, _describe_network(network))


def _save(name: str, snapshot: Snapshot, options: RoundOptions, decided: Mapping[str, Any]) -> None:
    fields = {
        "name": name,
        "options": asdict(options),
        "snapshot": encode(snapshot).decode(),
        "decided": decided,
    }
    text = json.dumps(fields, separators=(",", ":"), sort_keys=True)
    (FOLDER / f"{name}.json.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    print(name, len(snapshot.jobs), "jobs")


def _rounds() -> Iterator[tuple[str, Snapshot, RoundOptions]]:
    """Yield the name, snapshot and options of each round to record."""
    for seed in range(DRAWN):
        snapshot, policy = draw_round(np.random.default_rng([7, seed]))
        yield f"drawn-{seed:02d}", snapshot, RoundOptions(**asdict(policy), gap=1e-6)
    options_by_name = {
        **{f"scheduler-{name}": RoundOptions(scheduler=name) for name in scheduler_names()},
        **{f"solver-{name}": RoundOptions(objective="jct", solver=name) for name in solver_names()},
        **{f"objective-{name}": options for name, options in _OBJECTIVES.items()},
    }
    for turn, (name, options) in enumerate(options_by_name.items()):
        for number, snapshot in _simulated(turn, options):
            yield f"{name}-{number}", snapshot, options
            if turn % 5 == 0:
                yield f"{name}-{number}-network", _with_network(snapshot), options


_OBJECTIVES: Final[Mapping[str, RoundOptions]] = {
    "throughput": RoundOptions(),
    "deadline": RoundOptions(objective="deadline"),
    "planned": RoundOptions(objective="deadline", deadlines="planned"),
    "fairness": RoundOptions(objective="finish-time-fairness", fairness_levels=6),
    "max-min": RoundOptions(objective="max-min within 5% then makespan"),
    "queues": RoundOptions(objective="jct", priority_weights="1:4,2:1"),
    "few-changes": RoundOptions(objective="jct", max_changes=1, keep_requests=False),
    "defragmented": RoundOptions(objective="throughput", defragment_every_rounds=1),
    "cautious": RoundOptions(objective="jct", caution=1.0, raw_throughput=True),
    "preempting": RoundOptions(objective="jct", keep_requests=False, change_spacing=0.0),
}
"""A policy of each kind, by its subject."""


def _simulated(seed: int, options: RoundOptions) -> list[tuple[int, Snapshot]]:
    """Return the rounds ``KEPT`` of a small world, decided greedily or by a scheduler."""
    snapshots: list[Snapshot] = []
    decider = Decider(replace(options, solver="greedy"))

    def look(snapshot: Snapshot) -> RoundOutcome:
        snapshots.append(snapshot)
        return decider(snapshot)

    conditions = Conditions(overheads=COSTLY, horizon_s=300.0 * (max(KEPT) + 1))
    simulate(a_random_scenario(seed, jobs=14), look, conditions, StoppedClock())
    return [(number, snapshots[number]) for number in KEPT if number < len(snapshots)]


def _with_network(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot on a network of three hosts per ToR, with BERT's traffic for all jobs."""
    hosts = list(snapshot.nodes.name)
    topology = {
        "kind": "clos",
        "hosts": hosts,
        "host": "a100",
        "hosts_per_tor": 3,
        "aggregations": 2,
        "tor_bytes_per_s": "25GB/s",
    }
    estimates = snapshot.estimates
    return replace(
        snapshot,
        topology=decode_topology(json.dumps(topology)),
        traffic=Traffics(
            workload=estimates.workload,
            gpu_type=estimates.gpu_type,
            gpus=estimates.gpus,
            pipeline_degree=estimates.pipeline_degree,
            plan=estimates.plan,
            nodes=estimates.nodes,
            document=tuple(
                intern_traffic(family_traffic("bert", "a100", g).to_json())
                for g in estimates.gpus.tolist()
            ),
        ),
    )


if __name__ == "__main__":
    record_rounds()
