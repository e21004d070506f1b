"""Messages and domain values: what goes out comes back, and what is wrong is refused by its field."""

from __future__ import annotations

import math
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given, settings
from hypothesis import strategies as st

from formulation.errors import InvalidInput, StaleEtag
from formulation.lifecycle import JobState
from formulation.resources import (
    AllocationRecord,
    Desired,
    DesiredGang,
    EstimateRecord,
    JobSpec,
    NodeRecord,
    NodeSpec,
)
from formulation.snapshot import Source, Workload
from service.rounds import RoundOptions
from service.rpc import fields
from service.rpc.convert import agents, clusters, estimates, jobs, rounds
from tessera.v1 import agents_pb2, clusters_pb2, estimates_pb2, jobs_pb2, scheduler_pb2

words = st.from_regex(r"[a-z0-9][a-z0-9_.-]{0,20}", fullmatch=True)
workloads = st.builds(
    Workload, model=st.from_regex(r"[\w/ .-]{1,40}", fullmatch=True), params=words,
    global_batch=st.integers(1, 10**9),
)  # fmt: skip
specs = st.builds(
    JobSpec, name=words, workload=workloads, iterations=st.integers(1, 10**12),
    requested_gpus=st.integers(1, 65_536), requested_type=words | st.just(""), tenant=words,
    queue=st.integers(1, 100), weight=st.floats(1e-6, 1e6), guaranteed=st.booleans(),
    movable=st.booleans(), deadline_s=st.floats(0, 4e9) | st.just(math.inf),
    restart_s=st.floats(0, 1e5), labels=st.dictionaries(words, words, max_size=4),
    command=st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8"))).map(tuple),
    max_retries=st.integers(0, 1000),
)  # fmt: skip


@settings(max_examples=40)
@given(specs)
def test_a_job_comes_back_as_it_went_out(spec: JobSpec) -> None:
    sent = jobs_pb2.Job.FromString(jobs.of_spec(spec).SerializeToString())
    back = jobs.to_job_spec("job", spec.name, sent)
    assert back.deadline_s == pytest.approx(spec.deadline_s, abs=1e-6)
    assert back.restart_s == pytest.approx(spec.restart_s, abs=1e-8)
    assert jobs.of_spec(back) == sent


@given(
    st.builds(
        EstimateRecord, workload=workloads, gpu_type=words, gpus=st.integers(8, 65_536),
        nodes=st.integers(0, 8), pipeline_degree=st.integers(0, 8), plan=words,
        iter_time_s=st.floats(1e-6, 1e7) | st.just(math.inf), source=st.sampled_from(Source),
        provenance=words,
    )
)  # fmt: skip
def test_an_estimate_comes_back_as_it_went_out(record: EstimateRecord) -> None:
    def no_job(field: str, name: str) -> Workload:
        raise AssertionError("no job was named")

    assert estimates.to_estimate("cells[0]", estimates.of_estimate(record), no_job) == record


@given(
    st.builds(
        RoundOptions, raw_throughput=st.booleans(), gap=st.floats(1e-9, 0.5),
        seed=st.integers(0, 2**31 - 1), solver=words,
        solve_limit_s=st.integers(1, 1000).map(float) | st.just(math.inf),
        restart_horizon_s=st.integers(1, 10**6).map(float),
        defragment_every_rounds=st.integers(0, 100),
    )
)  # fmt: skip
def test_round_options_come_back_as_they_went_out(options: RoundOptions) -> None:
    recorded: dict[str, Any] = {
        f: getattr(options, f) for f in RoundOptions.__slots__ if f != "work"
    }
    assert rounds.to_options("options", rounds.of_options(recorded)) == options


@given(st.floats(-1e12, 1e12) | st.sampled_from([math.inf, -math.inf]))
def test_any_time_makes_a_valid_timestamp(seconds: float) -> None:
    message = fields.timestamp_of(seconds)
    assert 0 <= message.nanos < 10**9
    back = fields.seconds_since_1970("t", message)
    assert back == pytest.approx(min(max(seconds, -62_135_596_800), 253_402_300_799), abs=1e-4)


def test_what_is_not_set_takes_the_defaults() -> None:
    message = a_job_message()
    spec = jobs.to_job_spec("job", "j", message)
    assert (spec.queue, spec.weight, spec.restart_s, spec.max_retries) == (1, 1.0, 60.0, 3)
    assert spec.deadline_s == math.inf
    assert rounds.to_options("options", scheduler_pb2.RoundOptions()) == RoundOptions()


def a_job_message(**changes: Any) -> jobs_pb2.Job:
    message = jobs_pb2.Job(
        workload=estimates_pb2.Workload(model="bert", params="1.3B", global_batch=256),
        iterations=1000, requested_gpus=4,
    )  # fmt: skip
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
        ({"workload": estimates_pb2.Workload(global_batch=10**9 + 1)}, "job.workload.global_batch"),
        ({"workload": estimates_pb2.Workload(params="a/b")}, "job.workload.params"),
    ],
)
def test_a_wrong_field_of_a_job_is_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        jobs.to_job_spec("job", "j", a_job_message(**changes))
    assert caught.value.field == field


def test_zero_counts_are_refused() -> None:
    for name in ("iterations", "requested_gpus"):
        message = a_job_message()
        message.ClearField(name)
        with pytest.raises(InvalidInput, match=f"job.{name}"):
            jobs.to_job_spec("job", "j", message)


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
        ({"iter_time_s": 1.0, "cell": estimates_pb2.Cell(pipeline_degree=-1)},
         "cells[0].cell.pipeline_degree"),
    ],
)  # fmt: skip
def test_a_wrong_field_of_an_estimate_is_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        estimates.to_estimate("cells[0]", a_cell(**changes), a_workload)
    assert caught.value.field == field


def test_an_estimate_says_where_it_comes_from() -> None:
    message = a_cell(iter_time_s=1.0)
    message.ClearField("source")
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
        spec=NodeSpec(name="n", gpu_type="a100", gpus=8), draining=draining, version=1, free_gpus=8,
        jobs=(), silent_s=silent_s,
    )  # fmt: skip
    assert clusters.of_node("c", record, 30.0).state == state


def test_every_job_state_has_a_number_and_back() -> None:
    numbers = [jobs_pb2.JobState.Value(state.name) for state in JobState]
    assert jobs.to_states("states", numbers) == list(JobState)
    with pytest.raises(InvalidInput):
        jobs.to_states("states", [jobs_pb2.JOB_STATE_UNSPECIFIED])


def test_an_unknown_mask_path_is_refused_and_a_star_means_all() -> None:
    with pytest.raises(InvalidInput, match="iterations"):
        fields.mask_paths("update_mask", FieldMask(paths=["iterations"]), jobs.CHANGEABLE)
    star = fields.mask_paths("update_mask", FieldMask(paths=["*"]), jobs.CHANGEABLE)
    assert star == list(jobs.CHANGEABLE)


@given(st.integers(0, 10**18 - 1))
def test_an_etag_leads_back_to_its_version(version: int) -> None:
    assert fields.version_of(fields.etag_of(version)) == version


@pytest.mark.parametrize("etag", ["1", "x", '"', '"-1"', '"1" ', "*"])
def test_an_etag_of_nobodys_matches_nothing(etag: str) -> None:
    with pytest.raises(StaleEtag):
        fields.version_of(etag)


def test_the_request_id_is_no_part_of_the_digest_but_all_else_is() -> None:
    def key(**changes: Any) -> Any:
        request = jobs_pb2.CancelJobRequest(name="clusters/c/jobs/j", **changes)
        return fields.request_key(request, request.request_id)

    one, same, other = key(request_id="a"), key(request_id="b"), key(request_id="a", etag='"1"')
    assert one.digest == same.digest != other.digest
    assert one.method == "CancelJob"
    assert key() is None
    for wrong in ("x" * 65, "a\nb"):
        with pytest.raises(InvalidInput, match="request_id"):
            key(request_id=wrong)


def test_numbers_of_an_agent_that_mean_nothing_are_taken_as_unknown() -> None:
    observed = agents_pb2.Observed(
        gangs=[
            agents_pb2.ObservedGang(
                job="j", node="n", phase=agents_pb2.ObservedGang.RUNNING,
                iterations_done=math.nan, iter_time_s=-math.inf, error="a\0b",
            )
        ]
    )  # fmt: skip
    (gang,) = agents.to_observed("observed", observed)
    assert (gang.phase, gang.iterations_done, gang.iter_time_s) == ("running", -1.0, 0.0)
    assert gang.error == "ab"


def test_an_agent_is_told_its_own_shares_but_all_members() -> None:
    gang = DesiredGang(
        spec=JobSpec(name="j", workload=Workload(model="m", params="", global_batch=64),
                     iterations=10, requested_gpus=4),
        generation=3, iterations_done=2.0,
        allocation=AllocationRecord(
            gpu_type="a100", gpus=4, pipeline_degree=1, plan="", rate=32.0, generation=3,
            shares=(("n1", (0, 1)), ("n2", (2, 3))),
        ),
    )  # fmt: skip
    message = agents.of_desired(Desired(revision=5, gangs=(gang,)), {"n2"})
    (told,) = message.gangs
    assert [(s.node, list(s.gpu_indices)) for s in told.shares] == [("n2", [2, 3])]
    assert (list(told.members), told.leader, told.iter_time_s) == (["n1", "n2"], "n1", 2.0)
