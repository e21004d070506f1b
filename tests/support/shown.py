"""Messages that the command line shows: jobs and nodes as a server answers them."""

from __future__ import annotations

from typing import Any, Final

from google.protobuf.timestamp_pb2 import Timestamp

from tessera.v1 import clusters_pb2, estimates_pb2, jobs_pb2

NOW: Final = Timestamp(seconds=1_800_000_000)
"""The time at which jobs are shown, 2027-01-15T08:00:00Z."""


def later(seconds: float) -> Timestamp:
    """Return the time ``seconds`` after NOW, or before it if they are negative."""
    return Timestamp(seconds=NOW.seconds + int(seconds))


def a_shown_job(name: str = "j", **fields: Any) -> jobs_pb2.Job:
    """Return a job that was submitted 200 s ago and waits, with any other fields."""
    job = jobs_pb2.Job(
        name=f"clusters/c/jobs/{name}",
        iterations=1000,
        requested_gpus=8,
        tenant="nlp",
        workload=estimates_pb2.Workload(model="bert", params="1.3B", global_batch=256),
        state=jobs_pb2.QUEUED,
        create_time=later(-200),
        weight=1.0,
        priority=1,
        max_retries=3,
    )
    job.MergeFrom(jobs_pb2.Job(**fields))
    return job


def a_running_job(name: str = "runs", **fields: Any) -> jobs_pb2.Job:
    """Return a job that has done 372.6 of 1,000 iterations on 8 GPUs of two nodes."""
    cell = estimates_pb2.Cell(gpu_type="a100", gpus=8, pipeline_degree=2)
    shares = [
        jobs_pb2.NodeShare(node="clusters/c/nodes/n0", gpu_indices=[0, 1, 2, 3]),
        jobs_pb2.NodeShare(node="clusters/c/nodes/n1", gpu_indices=[0, 1, 2, 6]),
    ]
    held = jobs_pb2.Allocation(cell=cell, rate=123.4, shares=shares)
    return a_shown_job(
        name, state=jobs_pb2.RUNNING, iterations_done=372.6, allocation=held, **fields
    )


def a_waiting_job(name: str = "waits", **fields: Any) -> jobs_pb2.Job:
    """Return a job that waits because others are worth more."""
    reason = jobs_pb2.Reason(
        code="OUTPRICED",
        message="worth 0.5, costs 0.7",
        next_step="raise its weight",
        evidence={"value": "0.5", "price": "0.7"},
        round="clusters/c/rounds/12",
    )
    return a_shown_job(name, reason=reason, **fields)


def some_array_jobs(states: str = "RRQQ") -> list[jobs_pb2.Job]:
    """Return the jobs of the array ``sweep``: one that runs for each R, one that waits for each Q."""
    return [
        a_shown_job(
            f"sweep.{index}",
            state=jobs_pb2.RUNNING if state == "R" else jobs_pb2.QUEUED,
            array=jobs_pb2.ArrayMember(
                array="clusters/c/arrays/sweep", index=index, size=len(states)
            ),
        )
        for index, state in enumerate(states)
    ]


def a_shown_node(name: str = "n", **fields: Any) -> clusters_pb2.Node:
    """Return a node that is ready, with any other fields."""
    node = clusters_pb2.Node(
        name=f"clusters/c/nodes/{name}", gpu_type="a100", gpus=8, state=clusters_pb2.Node.READY
    )
    node.MergeFrom(clusters_pb2.Node(**fields))
    return node
