"""Reports of agents on jobs that train, in messages as a server reads them."""

from __future__ import annotations

from typing import Any

from tessera.db.agents.observe import record_observation
from tessera.db.store.store import Store
from tessera.service.server.convert.agents import to_observed
from tessera.v1 import agents_pb2, launch_pb2
from tests.support.stored_cluster import C

PHASE = agents_pb2.ObservedGang.Phase

OUT_OF_MEMORY = launch_pb2.EXIT_OUT_OF_MEMORY


def a_member(job: str, node: str, generation: int = 1, **facts: Any) -> agents_pb2.ObservedGang:
    """Return a report on a running member of a gang whose program trains."""
    fields: dict[str, Any] = {
        "phase": PHASE.RUNNING,
        "runtime": "command",
        "iterations_done": -1.0,
    } | facts
    return agents_pb2.ObservedGang(job=job, node=node, generation=generation, **fields)


def report_members(store: Store, *members: agents_pb2.ObservedGang, revision: int = 99) -> bool:
    """Let the agent of the first member's node report these members, and no others."""
    message = agents_pb2.Observed(revision=revision, gangs=members)
    agent = f"agent-{members[0].node}"
    return store.update(
        record_observation, C, agent, "first", to_observed("observed", message), revision
    )


def report_training(store: Store, job: str, node: str, generation: int = 1, **facts: Any) -> bool:
    """Let a node's agent report one member of a gang."""
    return report_members(store, a_member(job, node, generation, **facts))


def start_times(
    stop_s: float, launch_s: float, first_iteration_s: float
) -> launch_pb2.RestartTimes:
    return launch_pb2.RestartTimes(
        stop_s=stop_s, launch_s=launch_s, first_iteration_s=first_iteration_s
    )
