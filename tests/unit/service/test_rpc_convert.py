"""Conversion of messages to domain values and back, and errors that name the wrong field."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.base import limits
from tessera.formulation.base.access import LOCAL
from tessera.formulation.base.errors import InvalidInput, StaleEtag
from tessera.formulation.base.values import ESTIMATE_SOURCES, Cell, Workload
from tessera.formulation.job.execution_plan import ExecutionPlan, PlanStage
from tessera.formulation.job.launch import LaunchSpec, SecretVariable
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.records.agents import DesiredState
from tessera.formulation.records.clusters import NodeRecord, NodeSpec, TenantSpec
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.records.jobs import JobSpec, PlannedStartRecord, SegmentRecord
from tessera.formulation.records.rounds import DecisionRecord, RoundRecord
from tessera.formulation.round.goals import GoalResult
from tessera.formulation.round.policy import MAX_FAIRNESS_LEVELS
from tessera.service import fields
from tessera.service.server.convert import (
    agents,
    clusters,
    estimates,
    jobs,
    rounds,
    tenants,
)
from tessera.solvers.rounds.plan import RoundOptions
from tessera.v1 import agents_pb2, clusters_pb2, estimates_pb2, jobs_pb2, scheduler_pb2, tenants_pb2
from tests.support.job_records import a_desired_gang, a_job_record
from tests.support.laws import examples
from tests.support.summaries import a_summary, recorded_options

words = st.from_regex(r"[a-z0-9][a-z0-9_.-]{0,20}", fullmatch=True)
workloads = st.builds(
    Workload,
    model=st.from_regex(r"[\w/ .-]{1,40}", fullmatch=True),
    params=words,
    global_batch=st.integers(1, 10**9),
)
variables = st.from_regex(r"[A-Z]{1,8}", fullmatch=True)
launches = st.builds(
    LaunchSpec,
    env=st.dictionaries(variables, words, max_size=4),
    secrets=st.lists(
        st.builds(SecretVariable, variable=variables.map("S_".__add__), name=words),
        max_size=3,
        unique_by=lambda secret: secret.variable,
    ).map(tuple),
    workdir=st.just("") | words.map("/".__add__),
    staging_command=st.lists(words, max_size=3).map(tuple),
    user=st.just("") | st.from_regex(r"[a-z]{1,8}", fullmatch=True),
    progress_pattern=st.sampled_from(["", r"(?P<iteration>\d+)"]),
    stall_limit_s=st.integers(0, 604_800).map(float),
    stop_grace_s=st.integers(0, 3600).map(float),
)
specs = st.builds(
    JobSpec,
    name=words,
    workload=workloads,
    iterations=st.integers(1, 10**12),
    requested_gpus=st.integers(1, 65_536),
    requested_gpu_type=words | st.just(""),
    tenant=words,
    priority=st.integers(1, 100),
    weight=st.floats(1e-6, 1e6),
    guaranteed=st.booleans(),
    pinned=st.booleans(),
    preemptible=st.booleans(),
    deadline_s=st.floats(0, 4e9) | st.just(math.inf),
    restart_s=st.floats(0, 1e5),
    labels=st.dictionaries(words, words, max_size=4),
    command=st.just(()) | st.integers(0, 10**15 - 1).map(lambda n: ("fail-at", str(n))),
    max_retries=st.integers(0, 1000),
    avoid_nodes=st.lists(words, unique=True).map(tuple),
    launch=launches,
)


@examples(40)
@given(specs, st.booleans())
def test_a_job_survives_a_round_trip(requested: JobSpec, pin: bool) -> None:
    spec = replace(
        requested,
        pinned_gpu_type=pin and bool(requested.requested_gpu_type),
        preemptible=requested.preemptible and not requested.guaranteed,
    )
    sent = jobs_pb2.Job.FromString(jobs.of_spec("c", spec).SerializeToString())
    back = jobs.to_job_spec("job", "c", spec.name, sent)
    assert back.deadline_s == pytest.approx(spec.deadline_s, abs=1e-6)
    assert (back.pinned_gpu_type, back.avoid_nodes) == (spec.pinned_gpu_type, spec.avoid_nodes)
    assert back.preemptible == spec.preemptible
    assert back.restart_s == pytest.approx(spec.restart_s, abs=1e-8)
    assert back.launch == replace(spec.launch, runtime="replay")
    assert jobs.of_spec("c", back) == sent


@given(
    st.builds(
        EstimateRecord,
        workload=workloads,
        cell=st.builds(
            Cell,
            gpu_type=words,
            gpus=st.integers(8, 65_536),
            nodes=st.integers(0, 8),
            pipeline_degree=st.integers(0, 8),
            plan=st.just("") | st.from_regex("[0-9a-f]{64}", fullmatch=True),
        ),
        iter_time_s=st.floats(1e-6, 1e7) | st.just(math.inf),
        source=st.sampled_from(ESTIMATE_SOURCES),
        provenance=words,
    )
)
def test_an_estimate_survives_a_round_trip(record: EstimateRecord) -> None:
    def no_job(field: str, name: str) -> Workload:
        raise AssertionError("no job was named")

    assert estimates.to_estimate("cells[0]", estimates.of_estimate(record), no_job) == record


lengths = st.integers(1, 10**6).map(float)
lengths_or_never = lengths | st.just(math.inf)
any_options = st.builds(
    RoundOptions,
    objective=st.sampled_from(["throughput", "max-min within 5% then jct", "2*cost"]),
    raw_throughput=st.booleans(),
    priority_weights=st.sampled_from(["", "1:4,2:0.5"]),
    restart_horizon_s=lengths,
    max_restart_share=st.floats(0, 0.99),
    defragment_every_rounds=st.integers(0, 100),
    round_s=lengths,
    deadlines=st.sampled_from(["", "ignore", "keep", "myopic", "look-ahead"]),
    keep_requests=st.booleans(),
    promise_starts=st.booleans(),
    change_spacing=st.floats(0, 1e6),
    default_run_s=lengths,
    max_changes=st.integers(-1, 100),
    cost_of=st.sampled_from(["dollars", "watts"]),
    rate_floor=st.floats(0, 1),
    fairness_levels=st.integers(1, 64),
    solver=words,
    gap=st.floats(1e-9, 0.5),
    seed=st.integers(0, 2**31 - 1),
    solve_limit_s=lengths_or_never,
    scheduler=st.sampled_from(["", "fcfs"]),
    caution=st.floats(0, 10),
    fair_share=st.sampled_from(["", "gpus", "drf"]),
    fair_half_life_s=lengths,
    replan_spacing=st.floats(0, 1e6),
    network_measure_s=lengths | st.just(0.0),
)
all_options = any_options | any_options.map(
    lambda o: replace(o, scheduler="arena", scheduler_parameters="depth=5,breadth=8")
)


@given(all_options)
def test_round_options_survive_a_round_trip(options: RoundOptions) -> None:
    sent = rounds.of_options(recorded_options(options)).SerializeToString()
    back = scheduler_pb2.RoundOptions.FromString(sent)
    assert rounds.to_options("options", back) == options


def test_every_option_of_a_round_is_a_field_of_the_api() -> None:
    known = scheduler_pb2.RoundOptions.DESCRIPTOR.fields
    names = {f"{f.name}_s" if f.message_type is not None else f.name for f in known}
    assert names == set(recorded_options(RoundOptions()))


@given(all_options)
def test_unset_options_are_those_of_the_standing_policy(standing: RoundOptions) -> None:
    assert rounds.to_options("options", scheduler_pb2.RoundOptions(), standing) == standing
    request = scheduler_pb2.RoundOptions(
        seed=0,
        gap=0,
        objective="",
        priority_weights="",
        deadlines="",
        scheduler="",
        keep_requests=False,
        promise_starts=False,
        change_spacing=0,
    )
    request.solve_limit.seconds = limits.MAX_DURATION_S
    assert rounds.to_options("options", request, standing) == replace(
        standing,
        seed=0,
        priority_weights="",
        deadlines="",
        scheduler="",
        scheduler_parameters="",
        keep_requests=False,
        promise_starts=False,
        change_spacing=0.0,
        solve_limit_s=math.inf,
    )


@pytest.mark.parametrize(
    ("request_", "parameters"),
    [
        (scheduler_pb2.RoundOptions(seed=1), "depth=5"),
        (scheduler_pb2.RoundOptions(scheduler="arena"), "depth=5"),
        (scheduler_pb2.RoundOptions(scheduler="arena-deadline"), ""),
        (scheduler_pb2.RoundOptions(scheduler_parameters=""), ""),
        (scheduler_pb2.RoundOptions(scheduler_parameters="breadth=2"), "breadth=2"),
        (
            scheduler_pb2.RoundOptions(scheduler="sia", scheduler_parameters="fairness=-1"),
            "fairness=-1",
        ),
    ],
)
def test_standing_parameters_apply_to_the_standing_scheduler_only(
    request_: scheduler_pb2.RoundOptions, parameters: str
) -> None:
    standing = RoundOptions(scheduler="arena", scheduler_parameters="depth=5")
    chosen = rounds.to_options("options", request_, standing)
    assert chosen.scheduler_parameters == parameters


@pytest.mark.parametrize(
    ("text", "field", "message"),
    [
        ("objective: speed", "options.objective", "choose from throughput, deadline"),
        ("objective: 0*throughput", "options.objective", "all weights are 0"),
        ("objective: max-min + jct", "options.objective", "cannot be added"),
        (
            "deadlines: strict",
            "options.deadlines",
            "must be one of ignore, keep, myopic, look-ahead",
        ),
        ("priority_weights: '1:4,1:2'", "options.priority_weights", "each priority once"),
        ("queue_order: true", "options.queue_order", "is not an option of a round"),
        ("scheduler_parameters: depth=5", "options.scheduler_parameters", "set scheduler, too"),
        (
            "{scheduler: arena, scheduler_parameters: 'depth=5,depth=6'}",
            "options.scheduler_parameters",
            "sets 'depth' twice",
        ),
        (
            "{scheduler: arena, scheduler_parameters: 'depth 5'}",
            "options.scheduler_parameters",
            "must be NAME=VALUE",
        ),
        ("rate_floor: 2", "options.rate_floor", r"must lie in \[0, 1\]"),
        ("rate_floor: 'NaN'", "options.rate_floor", "must be a number, not 'NaN'"),
        ("max_restart_share: 1", "options.max_restart_share", r"must lie in \[0, 1\)"),
        ("max_changes: -2", "options.max_changes", "must lie in -1 to 1,000,000; it is -2"),
        ("fairness_levels: -1", "options.fairness_levels", "must lie in 1 to 64"),
        ("cost_of: euros", "options.cost_of", "must be dollars or watts"),
        ("solve_limit: 0s", "options.solve_limit", "positive duration"),
        ("change_spacing: -1", "options.change_spacing", "a number of restart times up to"),
        ("round: 0.5s", "options.round", "must be a number in 1 to"),
        ("default_run: -1s", "options.default_run", "'-1s' is not a duration"),
        (f"scheduler: {'x' * 1001}", "options.scheduler", "at most 1000 printable characters"),
        ("default_run: 2 weeks", "options.default_run", "'2 weeks' is not a duration"),
        ("objectiv: jct", "options.objectiv", "not an option of a round; did you mean 'objective'"),
        ("[jct]", "options", "must map names to values"),
        ("{", "options", "is neither JSON nor YAML"),
    ],
)
def test_an_invalid_round_option_is_named_with_the_allowed_values(
    text: str, field: str, message: str
) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        rounds.read_options("options", text)
    assert caught.value.field == field


def test_a_round_lists_its_goals_in_order_and_the_jobs_with_promised_deadlines() -> None:
    goals = (
        GoalResult(
            name="max-min", unit="GPU-s", objective=3.0, bound=2.5, gap=0.2, proved_by="levels"
        ),
        GoalResult(
            name="throughput",
            unit="jobs",
            objective=5.0,
            bound=5.0,
            gap=0.0,
            proved_by="prices",
            certified=True,
        ),
    )
    decision = DecisionRecord(
        job="j",
        kind="start",
        allocation=None,
        reason=None,
        restart_price=0.0,
        applied=True,
        skipped="",
        admitted=True,
        opportunistic=True,
    )
    record = RoundRecord(summary=a_summary(goals=goals), decisions=(decision,))
    message = rounds.of_round(record, LOCAL.sees_tenant, summary_only=False)
    assert [(g.name, g.unit, g.objective, g.bound, g.gap) for g in message.goals] == [
        ("max-min", "GPU-s", 3.0, 2.5, 0.2),
        ("throughput", "jobs", 5.0, 5.0, 0.0),
    ]
    assert [(g.proved_by, g.certified) for g in message.goals] == [
        ("levels", False),
        ("prices", True),
    ]
    assert (message.decisions[0].admitted, message.decisions[0].opportunistic) == (True, True)


tenants_of_any_kind = st.builds(
    TenantSpec,
    name=words,
    weight=st.floats(0, 1e6),
    borrow_gpus=st.integers(-1, 10**7),
    keeps_idle_quota=st.booleans(),
    quotas=st.dictionaries(words | st.just(""), st.integers(0, 10**7), max_size=4),
)


@given(tenants_of_any_kind)
def test_a_tenant_survives_a_round_trip(spec: TenantSpec) -> None:
    sent = tenants_pb2.Tenant.FromString(tenants.of_tenant("c", spec).SerializeToString())
    assert tenants.to_tenant("tenants[0]", "c", sent) == spec


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"name": "clusters/d/tenants/nlp"}, "t.name"),
        ({"name": "clusters/c/tenants/n l p"}, "t.name"),
        ({"weight": -1.0}, "t.weight"),
        ({"weight": math.nan}, "t.weight"),
        ({"borrow_gpus": -1}, "t.borrow_gpus"),
        ({"quotas": {"A100": 1}}, "t.quotas"),
        ({"quotas": {"a100": -1}}, "t.quotas[a100]"),
        ({"quotas": {"": 10**7 + 1}}, "t.quotas[]"),
    ],
)
def test_a_wrong_field_of_a_tenant_is_named(changes: dict[str, Any], field: str) -> None:
    message = tenants_pb2.Tenant(**{"name": "clusters/c/tenants/nlp"} | changes)
    with pytest.raises(InvalidInput) as caught:
        tenants.to_tenant("t", "c", message)
    assert caught.value.field == field


def test_a_stored_job_shows_its_promise_schedule_and_attained_service() -> None:
    segment = SegmentRecord(
        start_s=1e9,
        end_s=1e9 + 600,
        cell=Cell(gpu_type="a100", gpus=8, pipeline_degree=2, plan="p"),
    )
    record = a_job_record(
        admitted=True,
        schedule=(segment,),
        opportunistic=True,
        service_gpu_s=3.5,
        queued_s=1e9 + 1,
    )
    message = jobs.of_job(record, LOCAL.sees_tenant)
    assert (message.admitted, message.opportunistic) == (True, True)
    assert (message.service_gpu_seconds, message.queue_time.seconds) == (3.5, 10**9 + 1)
    (shown,) = message.schedule
    assert (shown.start_time.seconds, shown.end_time.seconds) == (10**9, 10**9 + 600)
    assert shown.cell == estimates_pb2.Cell(gpu_type="a100", gpus=8, pipeline_degree=2, plan="p")


def test_a_stored_job_shows_its_planned_and_its_promised_start() -> None:
    cell = Cell(gpu_type="a100", gpus=8, pipeline_degree=2, plan="p")
    record = PlannedStartRecord(start_s=1e9, end_s=2e9, cell=cell, nodes=(("n1", 8),))
    message = jobs.of_job(
        a_job_record(start_by_s=1e9 + 60, planned_start=record), LOCAL.sees_tenant
    )
    assert (message.start_by.seconds, message.planned_start.start_time.seconds) == (
        10**9 + 60,
        10**9,
    )
    assert message.planned_start.cell.gpus == 8
    bare = jobs.of_job(a_job_record(), LOCAL.sees_tenant)
    assert not bare.HasField("start_by")
    assert not bare.HasField("planned_start")


@given(st.floats(-1e12, 1e12) | st.sampled_from([math.inf, -math.inf]))
def test_any_time_makes_a_valid_timestamp(seconds: float) -> None:
    message = fields.timestamp_of(seconds)
    assert 0 <= message.nanos < 10**9
    back = fields.seconds_since_1970("t", message)
    assert back == pytest.approx(min(max(seconds, -62_135_596_800), 253_402_300_799), abs=1e-4)


def test_unset_fields_take_the_defaults() -> None:
    message = a_job_message()
    spec = jobs.to_job_spec("job", "c", "j", message)
    assert (spec.priority, spec.weight, spec.restart_s, spec.max_retries) == (1, 1.0, 60.0, 3)
    assert spec.deadline_s == math.inf
    assert rounds.to_options("options", scheduler_pb2.RoundOptions()) == RoundOptions()
    tenant = tenants.to_tenant("t", "c", tenants_pb2.Tenant(name="clusters/c/tenants/nlp"))
    assert tenant == TenantSpec(name="nlp")


def a_job_message(**changes: Any) -> jobs_pb2.Job:
    message = jobs_pb2.Job(
        workload=estimates_pb2.Workload(model="bert", params="1.3B", global_batch=256),
        iterations=1000,
        requested_gpus=4,
    )
    message.MergeFrom(jobs_pb2.Job(**changes))
    return message


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"iterations": -1}, "job.iterations"),
        ({"iterations": 10**12 + 1}, "job.iterations"),
        ({"requested_gpus": -4}, "job.requested_gpus"),
        ({"requested_gpus": 65_537}, "job.requested_gpus"),
        ({"requested_gpu_type": "A 100"}, "job.requested_gpu_type"),
        ({"weight": math.nan}, "job.weight"),
        ({"weight": math.inf}, "job.weight"),
        ({"weight": -1.0}, "job.weight"),
        ({"weight": 1e300}, "job.weight"),
        ({"priority": 101}, "job.priority"),
        ({"priority": -1}, "job.priority"),
        ({"restart": Duration(seconds=-1)}, "job.restart"),
        ({"restart": Duration(nanos=-1)}, "job.restart"),
        ({"deadline": Timestamp(seconds=2**60)}, "job.deadline"),
        ({"max_retries": -1}, "job.max_retries"),
        ({"tenant": "a\nb"}, "job.tenant"),
        ({"labels": {str(i): "" for i in range(65)}}, "job.labels"),
        ({"labels": {"": "x"}}, "job.labels"),
        ({"labels": {"k": "x" * 256}}, "job.labels[k]"),
        ({"command": ["a\0b"]}, "job.command[0]"),
        ({"command": [""]}, "job.command"),
        ({"pinned_gpu_type": True}, "job.pinned_gpu_type"),
        ({"preemptible": True, "guaranteed": True}, "job.preemptible"),
        ({"avoid_nodes": ["n1"]}, "job.avoid_nodes[0]"),
        ({"avoid_nodes": ["clusters/d/nodes/n1"]}, "job.avoid_nodes[0]"),
        ({"avoid_nodes": ["clusters/c/nodes/n1"] * 2}, "job.avoid_nodes[1]"),
        ({"avoid_nodes": [f"clusters/c/nodes/n{i}" for i in range(257)]}, "job.avoid_nodes"),
        ({"workload": estimates_pb2.Workload(global_batch=10**9 + 1)}, "job.workload.global_batch"),
        ({"workload": estimates_pb2.Workload(params="a/b")}, "job.workload.params"),
    ],
)
def test_a_wrong_field_of_a_job_is_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        jobs.to_job_spec("job", "c", "j", a_job_message(**changes))
    assert caught.value.field == field


def test_zero_counts_unknown_states_and_costs_that_are_no_numbers_are_refused() -> None:
    for name in ("iterations", "requested_gpus"):
        message = a_job_message()
        message.ClearField(name)
        with pytest.raises(InvalidInput, match=f"job.{name}"):
            jobs.to_job_spec("job", "c", "j", message)
    with pytest.raises(InvalidInput):
        jobs.to_states("states", [jobs_pb2.JOB_STATE_UNSPECIFIED])
    costs: list[dict[str, Any]] = [{"watts": -1.0}, {"dollars_per_hour": math.inf}]
    for cost in costs:
        kind = clusters_pb2.GpuType(name="a100", memory_bytes=1, **cost)
        with pytest.raises(InvalidInput, match=rf"types\[0\].{next(iter(cost))}"):
            clusters.to_gpu_types("types", [kind])


def a_workload(field: str, name: str) -> Workload:
    return Workload(model="m", params="", global_batch=1)


def a_cell(**changes: Any) -> estimates_pb2.CellEstimate:
    message = estimates_pb2.CellEstimate(
        workload=estimates_pb2.Workload(model="bert", global_batch=8),
        cell=estimates_pb2.Cell(gpu_type="a100", gpus=4),
        source=estimates_pb2.MEASURED,
    )
    message.MergeFrom(estimates_pb2.CellEstimate(**changes))
    return message


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({}, "cells[0].iter_time_s"),
        ({"iter_time_s": math.nan}, "cells[0].iter_time_s"),
        ({"iter_time_s": math.inf}, "cells[0].iter_time_s"),
        ({"iter_time_s": -1.0}, "cells[0].iter_time_s"),
        ({"iter_time_s": 1e-300}, "cells[0].iter_time_s"),
        ({"iter_time_s": 1.0, "infeasible": True}, "cells[0]"),
        ({"iter_time_s": math.nan, "infeasible": True}, "cells[0]"),
        ({"iter_time_s": 1.0, "job": "clusters/c/jobs/j"}, "cells[0]"),
        ({"iter_time_s": 1.0, "nodes": 5}, "cells[0].nodes"),
        ({"iter_time_s": 1.0, "cell": estimates_pb2.Cell(gpus=65_537)}, "cells[0].cell.gpus"),
        (
            {"iter_time_s": 1.0, "cell": estimates_pb2.Cell(pipeline_degree=-1)},
            "cells[0].cell.pipeline_degree",
        ),
    ],
)
def test_a_wrong_field_of_an_estimate_is_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        estimates.to_estimate("cells[0]", a_cell(**changes), a_workload)
    assert caught.value.field == field


def test_an_estimate_states_a_source_and_none_is_replayed() -> None:
    message = a_cell(iter_time_s=1.0)
    for source in (estimates_pb2.ESTIMATE_SOURCE_UNSPECIFIED, estimates_pb2.REPLAYED):
        message.source = source
        with pytest.raises(InvalidInput, match="source"):
            estimates.to_estimate("cells[0]", message, a_workload)


@pytest.mark.parametrize(
    ("draining", "silent_s", "state"),
    [
        (False, 0.0, clusters_pb2.Node.READY),
        (False, 31.0, clusters_pb2.Node.UNREACHABLE),
        (False, math.inf, clusters_pb2.Node.UNREACHABLE),
        (True, math.inf, clusters_pb2.Node.DRAINING),
    ],
)
def test_a_node_that_is_silent_for_longer_than_its_lease_is_unreachable(
    draining: bool, silent_s: float, state: int
) -> None:
    record = NodeRecord(
        spec=NodeSpec(name="n", gpu_type="a100", gpus=8),
        draining=draining,
        version=1,
        free_gpus=8,
        jobs=(),
        silent_s=silent_s,
    )
    message = clusters.of_node("c", record, 30.0)
    assert (message.state, message.drained) == (state, draining)
    busy = clusters.of_node("c", replace(record, free_gpus=7), 30.0)
    assert (busy.state, busy.drained) == (state, False)


def test_every_job_state_converts_to_a_number_and_back() -> None:
    numbers = [jobs_pb2.JobState.Value(state.name) for state in JobState]
    assert jobs.to_states("states", numbers) == list(JobState)


def test_an_unknown_mask_path_is_refused_and_a_star_means_all() -> None:
    with pytest.raises(InvalidInput, match="iterations"):
        fields.mask_paths("update_mask", FieldMask(paths=["iterations"]), jobs.CHANGEABLE)
    star = fields.mask_paths("update_mask", FieldMask(paths=["*"]), jobs.CHANGEABLE)
    assert star == list(jobs.CHANGEABLE)


@given(st.integers(0, 10**18 - 1))
def test_an_etag_converts_back_to_its_version_and_a_foreign_one_to_none(version: int) -> None:
    assert fields.version_of(fields.etag_of(version)) == version
    for etag in ("1", "x", '"', '"-1"', '"1" ', "*"):
        with pytest.raises(StaleEtag):
            fields.version_of(etag)


def test_the_request_digest_covers_everything_but_the_request_id() -> None:
    def key(**changes: Any) -> Any:
        request = jobs_pb2.CancelJobRequest(name="clusters/c/jobs/j", **changes)
        return fields.request_key(request, request.request_id)

    first, same, other = key(request_id="a"), key(request_id="b"), key(request_id="a", etag='"1"')
    assert first.digest == same.digest != other.digest
    assert first.method == "CancelJob"
    assert key() is None
    for wrong in ("x" * 65, "a\nb"):
        with pytest.raises(InvalidInput, match="request_id"):
            key(request_id=wrong)


def test_meaningless_numbers_of_an_agent_are_treated_as_unknown() -> None:
    observed = agents_pb2.Observed(
        gangs=[
            agents_pb2.ObservedGang(
                job="j",
                node="n",
                phase=agents_pb2.ObservedGang.RUNNING,
                iterations_done=math.nan,
                iter_time_s=-math.inf,
                error="a\0b",
            )
        ]
    )
    (gang,) = agents.to_observed("observed", observed)
    assert (gang.phase, gang.iterations_done, gang.iter_time_s) == ("running", -1.0, 0.0)
    assert gang.error == "ab"


def test_an_agent_receives_only_its_own_shares_but_all_members() -> None:
    state = DesiredState(revision=5, gangs=(a_desired_gang(),))
    (gang,) = agents.of_desired(state, {"n2"}).gangs
    assert [(s.node, list(s.gpu_indices)) for s in gang.shares] == [("n2", [2, 3])]
    assert (list(gang.members), gang.leader, gang.iter_time_s) == (["n1", "n2"], "n1", 0.25)


def read_batch(size: int) -> object:
    return estimates.to_workload("w", estimates_pb2.Workload(model="m", global_batch=size))


def read_period(period: int) -> object:
    return rounds.to_options("o", scheduler_pb2.RoundOptions(defragment_every_rounds=period))


@pytest.mark.parametrize("excess", [0, 1])
@pytest.mark.parametrize(
    ("convert", "limit"),
    [
        (read_batch, limits.MAX_BATCH),
        (read_period, limits.MAX_DEFRAGMENT_EVERY),
        (lambda n: rounds.read_options("o", f"max_changes: {n}"), limits.MAX_CHANGES),
        (lambda n: rounds.read_options("o", f"fairness_levels: {n}"), MAX_FAIRNESS_LEVELS),
    ],
)
def test_a_limit_is_accepted_and_no_more(
    convert: Callable[[int], object], limit: int, excess: int
) -> None:
    with pytest.raises(InvalidInput) if excess else nullcontext():
        convert(limit + excess)


def test_an_agent_receives_the_plan_or_without_one_the_number_of_stages() -> None:
    gang = a_desired_gang()
    plan = ExecutionPlan(stages=(PlanStage(start=0, end=1),), micro_batch=8)
    gang_with_plan = replace(gang, allocation=replace(gang.allocation, plan=plan))
    state = DesiredState(revision=5, gangs=(gang, gang_with_plan))
    bare_message, message = agents.of_desired(state, {"n2"}).gangs
    assert bare_message.WhichOneof("division") == "pipeline_degree"
    assert bare_message.pipeline_degree == gang.allocation.cell.pipeline_degree
    assert message.WhichOneof("division") == "execution_plan"
    assert message.execution_plan == plan.to_json()
