"""The agent's next actions, from the desired state and the actual one."""

from __future__ import annotations

from typing import Any

import pytest

from tessera.service.agent.gangs import (
    Gang,
    GangPhase,
    gang_from_json,
    gang_from_message,
    gang_to_json,
)
from tessera.service.agent.local_gangs import (
    GangActions,
    LocalGang,
    LocalMember,
    reconcile_gangs,
)
from tessera.service.agent.runtimes.protocol import ExitOutcome, MemberExit, Progress
from tessera.v1 import agents_pb2 as pb
from tests.support.agents import a_gang


class LiveProcess:
    """A live process for the planner."""

    async def begun(self) -> None:
        raise AssertionError("a plan does not wait")

    async def ended(self) -> MemberExit:
        return MemberExit(outcome=ExitOutcome.STOPPED)

    def observe(self) -> Progress | None:
        return None

    def stop(self) -> None:
        raise AssertionError("a plan does not stop")

    kill = request_checkpoint = stop


def a_local_gang(gang: Gang, phase: GangPhase = GangPhase.RUNNING, **fields: Any) -> LocalGang:
    """Return a gang whose leader has a process unless it has ended."""
    members = [
        LocalMember(
            node=node,
            phase=phase,
            handle=LiveProcess() if node == gang.leader and phase not in ENDED else None,
        )
        for node, _ in gang.shares
    ]
    stopping = phase is GangPhase.STOPPING
    return LocalGang(gang=gang, members=members, is_stopping=stopping, **fields)


ENDED = (GangPhase.SUCCEEDED, GangPhase.FAILED)
LIVE = (GangPhase.STARTING, GangPhase.RUNNING)
ELSEWHERE: dict[str, Any] = {"leader": "other", "members": ("other", "n0")}


def test_a_missing_gang_is_started() -> None:
    gang = a_gang()
    assert reconcile_gangs([gang], []) == GangActions(start=(gang,))


@pytest.mark.parametrize("phase", LIVE)
def test_an_undesired_gang_is_stopped(phase: GangPhase) -> None:
    assert reconcile_gangs([], [a_local_gang(a_gang(), phase)]) == GangActions(stop=(("a", 1),))


@pytest.mark.parametrize("phase", [*LIVE, *ENDED])
def test_a_desired_running_gang_is_left_alone(phase: GangPhase) -> None:
    gang = a_gang()
    assert reconcile_gangs([gang], [a_local_gang(gang, phase, reported=True)]) == GangActions()


def test_a_stopping_gang_is_not_stopped_again() -> None:
    assert reconcile_gangs([], [a_local_gang(a_gang(), GangPhase.STOPPING)]) == GangActions()


def test_a_newer_generation_waits_for_the_older_process() -> None:
    old, new = a_gang(), a_gang(generation=2, shares=(("n0", (4, 5)),))
    assert reconcile_gangs([new], [a_local_gang(old)]) == GangActions(
        stop=(old.key,), waiting=(new.key,)
    )
    assert reconcile_gangs([new], [a_local_gang(old, GangPhase.STOPPING)]) == GangActions(
        waiting=(new.key,)
    )
    assert reconcile_gangs([new], []) == GangActions(start=(new,))


def test_a_gpu_is_not_given_to_a_second_gang_while_the_first_lives() -> None:
    first, second = a_gang("a"), a_gang("b", shares=(("n0", (1, 2)),))
    assert reconcile_gangs([second], [a_local_gang(first, GangPhase.STOPPING)]).waiting == (
        second.key,
    )


def test_only_one_of_two_desired_gangs_on_one_gpu_starts() -> None:
    first, second = a_gang("a"), a_gang("b")
    assert reconcile_gangs([first, second], []) == GangActions(
        start=(first,), waiting=(second.key,)
    )


def test_the_same_gpu_index_of_another_node_is_another_gpu() -> None:
    first = a_gang("a")
    second = a_gang("b", shares=(("n1", (0, 1)),), leader="n1", members=("n1",))
    assert reconcile_gangs([first, second], [a_local_gang(first)]).start == (second,)


def test_a_member_without_a_process_frees_its_gpus_at_once() -> None:
    old, new = a_gang("a", **ELSEWHERE), a_gang("b")
    assert reconcile_gangs([new], [a_local_gang(old)]) == GangActions(stop=(old.key,), start=(new,))


def test_only_the_newest_of_two_generations_of_a_job_is_started() -> None:
    old, new = a_gang(), a_gang(generation=2, shares=(("n0", (4,)),))
    assert reconcile_gangs([new, old], []).start == (new,)


@pytest.mark.parametrize("phase", ENDED)
def test_an_end_is_forgotten_once_it_was_acknowledged_and_is_not_desired(phase: GangPhase) -> None:
    gang = a_gang()
    assert reconcile_gangs([], [a_local_gang(gang, phase, reported=True)]) == GangActions(
        forget=(gang.key,)
    )
    assert reconcile_gangs([], [a_local_gang(gang, phase)]) == GangActions()


def test_an_ended_gang_occupies_no_gpu() -> None:
    new = a_gang(generation=2)
    assert reconcile_gangs([new], [a_local_gang(a_gang(), GangPhase.FAILED)]).start == (new,)


def test_without_a_desired_state_all_gangs_stop_and_no_end_is_forgotten() -> None:
    running, ended = a_gang("a"), a_gang("b", shares=(("n0", (4,)),))
    here = [a_local_gang(running), a_local_gang(ended, GangPhase.SUCCEEDED, reported=True)]
    assert reconcile_gangs(None, here) == GangActions(stop=(running.key,))


def test_a_gang_reads_back_unchanged_from_disk_and_from_a_message() -> None:
    gang = a_gang(command=("fail-at", "3"), plan="p", model="bert", params="1.3B", global_batch=8)
    assert gang_from_json(gang_to_json(gang)) == gang
    message = pb.DesiredGang(
        job="a",
        generation=1,
        shares=[pb.AgentShare(node="n0", gpu_indices=[0, 1])],
        leader="n0",
        members=["n0"],
        member_gpus=[2],
        model="bert",
        params="1.3B",
        global_batch=8,
        gpus=2,
        plan="p",
        iter_time_s=1.0,
        iterations_total=1000.0,
        command=["fail-at", "3"],
    )
    assert gang_from_message(message) == gang
