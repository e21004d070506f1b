"""Options, files and views on where a job runs and for how long."""

from __future__ import annotations

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from typer.testing import CliRunner

from tessera.formulation.errors import InvalidInput
from tessera.service.cli import main
from tessera.service.cli.clusterfile import read_cluster
from tessera.service.cli.jobfile import read_jobs
from tessera.service.cli.placing import placing_facts, placing_options
from tessera.v1 import jobs_pb2

JOB = "model: bert\nglobal_batch: 256\niterations: 1000\ngpus: 8\n"
NOW = Timestamp(seconds=1_800_000_000)


def test_options_state_only_the_fields_that_were_given() -> None:
    placing = placing_options(gpu_types="h100, a100", longest_run="1h30m")
    assert placing.paths == ["allowed_gpu_types", "longest_run"]
    assert list(placing.job.allowed_gpu_types) == ["h100", "a100"]
    assert placing.job.longest_run == Duration(seconds=5400)
    assert placing_options() == (jobs_pb2.Job(), [])


def test_any_and_none_remove_what_was_stated() -> None:
    placing = placing_options("any", "none", "none", "none")
    assert placing.job == jobs_pb2.Job()
    assert placing.paths == [
        "allowed_gpu_types",
        "node_selector",
        "preferred_labels",
        "longest_run",
    ]


def test_a_job_file_states_the_same() -> None:
    keys = "gpu_types: [h100]\nnode_selector: zone=a\npreferred_labels: rack!=b\nlongest_run: 2h\n"
    (request,) = read_jobs(JOB + keys, "j.yaml", NOW)
    job = request.job
    assert (list(job.allowed_gpu_types), job.node_selector) == (["h100"], "zone=a")
    assert (job.preferred_labels, job.longest_run.seconds) == ("rack!=b", 7200)


def test_a_job_is_shown_with_its_limit_and_how_much_of_it_is_used() -> None:
    job = jobs_pb2.Job(
        allowed_gpu_types=["h100", "a100"],
        node_selector="zone=a",
        preferred_labels="rack!=b",
        longest_run=Duration(seconds=7200),
        run_seconds=3600.0,
    )
    assert dict(placing_facts(job)) == {
        "GPU types": "h100, a100",
        "node selector": "zone=a",
        "prefers nodes": "with rack!=b",
        "longest run": "2h in total, of which it has run 1h",
    }
    assert not any(value for _, value in placing_facts(jobs_pb2.Job()))


def test_a_cluster_file_labels_nodes() -> None:
    text = (
        "gpu_types: {a100: 40GiB}\nnodes:\n"
        '  - {name: "n{}", count: 2, gpu_type: a100, gpus: 4, labels: {zone: a}}\n'
    )
    nodes = read_cluster(text, "c.yaml").nodes
    assert [dict(node.labels) for node in nodes] == [{"zone": "a"}] * 2
    with pytest.raises(InvalidInput, match="labels"):
        read_cluster(text.replace("{zone: a}", "[zone]"), "c.yaml")


def test_a_selector_that_cannot_be_read_is_refused_before_any_call() -> None:
    result = CliRunner().invoke(main.app, ["nodes", "--selector", "zone"])
    assert result.exit_code == 2
    assert "--selector: cannot be read from 'zone' on" in result.output
