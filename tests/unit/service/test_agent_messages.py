"""Messages to and from agents: network plans, and what programs report of their training."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera.formulation.exit_reasons import ExitReason
from tessera.formulation.lifecycle import JobState
from tessera.formulation.network.descriptions import MAX_MET_JOBS, find_met_jobs
from tessera.formulation.network.outcome import NetworkDecision, Route
from tessera.formulation.network.plan import NetworkPlan
from tessera.formulation.network.tags import MAX_NAMED_JOBS, FabricCapabilities, assign_tags
from tessera.formulation.records.agents import DesiredGang, DesiredState, ObservedGang
from tessera.formulation.records.jobs import RestartTimes, TrainingRecord
from tessera.service.rpc.convert import agents, jobs
from tessera.v1 import agents_pb2, launch_pb2
from tests.support.execution_plans import a_plan
from tests.support.job_records import a_desired_gang, a_job_record
from tests.support.networks import FluidJob, a_demand

RECORD = a_job_record(state=JobState.RUNNING)


def observed_gang(**fields: Any) -> ObservedGang:
    """Return a gang as a server reads it from an agent's message."""
    message = agents_pb2.ObservedGang(
        job="j", node="n", phase=agents_pb2.ObservedGang.RUNNING, **fields
    )
    (gang,) = agents.to_observed("observed", agents_pb2.Observed(gangs=[message]))
    return gang


def test_reports_of_training_are_read_with_all_their_facts() -> None:
    times = launch_pb2.RestartTimes(checkpoint_s=2, stop_s=6, launch_s=20, first_iteration_s=15)
    gang = observed_gang(
        loss=-0.5,
        memory_bytes=2**36,
        checkpoint_iterations=400.0,
        checkpoint_age_s=35.0,
        resumed_iterations=0.0,
        restart_times=times,
        exit_reason=launch_pb2.EXIT_BAD_CHECKPOINT,
        remark="it passed over a checkpoint",
    )
    assert (gang.loss, gang.memory_bytes, gang.resumed_iterations) == (-0.5, 2**36, 0.0)
    assert (gang.checkpoint_iterations, gang.checkpoint_age_s) == (400.0, 35.0)
    assert gang.restart_times is not None
    assert gang.restart_times.total_s == 41.0
    assert (gang.exit_reason, gang.remark) == (
        ExitReason.BAD_CHECKPOINT,
        "it passed over a checkpoint",
    )


def test_a_report_without_training_says_nothing_of_it() -> None:
    gang = observed_gang()
    facts = (gang.loss, gang.checkpoint_iterations, gang.resumed_iterations, gang.restart_times)
    assert facts == (None,) * 4
    assert (gang.memory_bytes, gang.exit_reason, gang.remark) == (0, None, "")


def test_the_plan_by_which_a_program_runs_is_read_with_its_times() -> None:
    plan = a_plan(RECORD.spec.workload, 2)
    gang = observed_gang(
        executed_plan=plan.to_json(), executed_iter_time_s=0.5, planned_iter_time_s=math.inf
    )
    assert gang.executed_plan == plan
    assert (gang.executed_iter_time_s, gang.planned_iter_time_s) == (0.5, math.inf)


@pytest.mark.parametrize("text", ["", "{}", "[1]", "no JSON", '{"stages":[]}'])
def test_a_plan_that_cannot_be_read_does_not_end_the_stream(text: str) -> None:
    gang = observed_gang(
        executed_plan=text, executed_iter_time_s=-1.0, planned_iter_time_s=math.nan, loss=0.5
    )
    assert (gang.executed_plan, gang.executed_iter_time_s, gang.planned_iter_time_s) == (None, 0, 0)
    assert gang.loss == 0.5


@pytest.mark.parametrize("lie", [math.nan, math.inf, -math.inf, -1e300, 1e300])
def test_meaningless_numbers_of_training_are_unknown_each_alone(lie: float) -> None:
    gang = observed_gang(
        loss=lie,
        checkpoint_iterations=lie,
        checkpoint_age_s=lie,
        resumed_iterations=lie,
        restart_times=launch_pb2.RestartTimes(stop_s=lie, launch_s=20.0, first_iteration_s=lie),
        iterations_done=7.0,
    )
    assert (gang.loss, gang.checkpoint_iterations, gang.resumed_iterations) == (None,) * 3
    assert (gang.checkpoint_age_s, gang.iterations_done) == (None, 7.0)
    assert gang.restart_times == RestartTimes(launch_s=20.0)
    assert gang.restart_times.total_s is None


@pytest.mark.parametrize("lie", [-1, 2**50 + 1, 2**63 - 1])
def test_impossible_memory_is_unknown(lie: int) -> None:
    assert observed_gang(memory_bytes=lie).memory_bytes == 0


def test_a_checkpoint_from_the_future_is_new_because_clocks_differ() -> None:
    gang = observed_gang(checkpoint_iterations=1.0, checkpoint_age_s=-3.0)
    assert (gang.checkpoint_iterations, gang.checkpoint_age_s) == (1.0, 0.0)


def test_an_unknown_exit_reason_is_no_error() -> None:
    gang = agents_pb2.ObservedGang(job="j", node="n", phase=agents_pb2.ObservedGang.FAILED)
    gang.MergeFromString(b"\x88\x01\x63")  # field 17 is 99, as from a later release
    (read,) = agents.to_observed("observed", agents_pb2.Observed(gangs=[gang]))
    assert (read.phase, read.exit_reason) == ("failed", None)


@pytest.mark.parametrize("text", ["x" * 5_000_000, "\x1b[31mred\x1b[0m\0\x07", "a\u202eb\u2028c"])
def test_texts_of_agents_are_short_and_printable(text: str) -> None:
    gang = observed_gang(remark=text, error=text)
    assert gang.remark.isprintable()
    assert gang.error.isprintable()
    assert 0 < len(gang.remark) <= agents.MAX_REMARK_CHARS
    assert 0 < len(gang.error) <= agents.MAX_ERROR_CHARS


def test_an_error_of_several_lines_keeps_them() -> None:
    gang = observed_gang(error="Traceback:\n\tx", remark="two\nlines")
    assert (gang.error, gang.remark) == ("Traceback:\n\tx", "two lines")


def test_a_job_is_sent_with_what_its_program_reported() -> None:
    record = replace(
        RECORD,
        training=TrainingRecord(
            loss=0.0,
            memory_bytes=2**30,
            checkpoint_iterations=0.0,
            checkpoint_s=1.5,
            restart_times=RestartTimes(stop_s=6.0, launch_s=20.0, first_iteration_s=15.0),
            restart_s=40.0,
            exit_reason=ExitReason.REFUSED,
            remark="r",
        ),
    )
    training = jobs.of_job(record).training
    assert training.HasField("loss")
    assert training.HasField("checkpoint_iterations")
    assert (training.loss, training.memory_bytes, training.checkpoint_iterations) == (0, 2**30, 0)
    assert training.checkpoint_time.ToNanoseconds() == 1_500_000_000
    assert (training.restart_times.launch_s, training.restart_seconds) == (20.0, 40.0)
    assert (training.exit_reason, training.remark) == (launch_pb2.EXIT_REFUSED, "r")
    assert not jobs.of_job(replace(record, training=None)).HasField("training")
    empty = jobs.of_job(replace(record, training=TrainingRecord())).training
    assert not empty.HasField("loss")
    assert not empty.HasField("checkpoint_iterations")
    assert not empty.HasField("checkpoint_time")
    assert not empty.HasField("restart_times")


def test_every_exit_reason_of_the_api_has_one_of_ours() -> None:
    numbers = {n for name, n in launch_pb2.ExitReason.items() if name.startswith("EXIT_") and n}
    assert set(jobs.EXIT_NUMBERS.values()) == numbers
    assert {reason for reason in ExitReason if reason.sentence} == jobs.EXIT_NUMBERS.keys()


def _gang_with_routes(*sources: str) -> DesiredGang:
    part = NetworkDecision(
        job="j",
        generation=3,
        rank=0,
        level=2,
        tag=9,
        priority=1.0,
        intensity=1.0,
        routes=tuple(
            Route(source=s, target="n1/gpu-0", via=("t",), sent_bytes=1.0) for s in sources
        ),
    )
    return a_desired_gang(network=part)


@pytest.mark.parametrize(
    ("nodes", "expected"), [({"n2"}, ["n2/gpu-2", "rank 7"]), ({"n1", "n2"}, None)]
)
def test_an_agent_receives_only_the_routes_of_its_own_nodes(
    nodes: set[str], expected: list[str] | None
) -> None:
    sources = ["n1/gpu-0", "n2/gpu-2", "rank 7"]
    desired = DesiredState(revision=5, gangs=(_gang_with_routes(*sources),), network_levels=8)
    (gang,) = agents.of_desired(desired, nodes).gangs
    assert [route.source for route in gang.network.routes] == (expected or sources)
    assert (gang.network.level, gang.network.dscp) == (2, 9)


def test_a_remark_on_thousands_of_jobs_with_one_tag_names_a_few_of_them() -> None:
    assignment = assign_tags({f"j{n:04d}": n % 8 for n in range(3000)}, 8)
    assert set(assignment.tags.values()) <= set(FabricCapabilities().free_tags)
    assert assignment.remarks
    for remark in assignment.remarks:
        assert remark.count("j0") + remark.count("j1") + remark.count("j2") <= 2 * MAX_NAMED_JOBS
        assert " more" in remark


def test_each_job_is_served_at_its_own_level_or_above_if_tags_are_short() -> None:
    levels = np.random.default_rng(0).integers(0, 8, 400).tolist()
    jobs = {f"j{n}": level for n, level in enumerate(levels)}
    assignment = assign_tags(jobs, 8)
    again = assign_tags({**jobs, "new": 3}, 8, assignment.tags)
    for settings in (assignment, again):
        assert all(settings.priorities[settings.tags[job]] >= level for job, level in jobs.items())
    assert all(again.tags[job] == tag for job, tag in assignment.tags.items())


def test_jobs_served_before_a_job_are_named_however_many_come_after_it() -> None:
    """One job on link 0 is far more urgent; many less urgent ones on link 1 are nearer in rank."""
    far = [FluidJob(busy_s={2: 1.0})] * 30
    job = FluidJob(busy_s={0: 1.0, 1: 1.0})
    demand = a_demand(FluidJob(busy_s={0: 1.0}), *far, job, *[FluidJob(busy_s={1: 1.0})] * 20)
    count = demand.jobs
    level = np.where(np.arange(count) == 0, 7, np.where(np.arange(count) <= 31, 3, 0))
    plan = NetworkPlan(
        chosen=np.zeros(0, np.int64),
        priority=np.ones(count),
        order=np.arange(count),
        level=level,
        levels=8,
    )
    met_jobs = find_met_jobs(demand, plan)
    assert met_jobs[31] == [0, *range(32, 32 + MAX_MET_JOBS - 1)]
    assert met_jobs[0] == [31]
