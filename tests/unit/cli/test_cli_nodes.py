"""The table of nodes: their states, why they are drained, and their faults."""

from __future__ import annotations

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from tessera.service.cli.nodes import show_nodes
from tessera.service.cli.options import Output
from tessera.v1 import clusters_pb2

DRAINED = clusters_pb2.Node(
    name="clusters/c/nodes/bad",
    gpu_type="a40",
    gpus=2,
    free_gpus=2,
    state=clusters_pb2.Node.DRAINING,
    drained=True,
    drained_by="health",
    drain_reason="GPU 1: Xid 79",
    faults=["GPU 1: Xid 79", "GPU 0: slowed down by heat"],
)


def test_faults_and_the_end_of_probation_are_in_the_wide_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    returning = clusters_pb2.Node()
    returning.CopyFrom(DRAINED)
    returning.name = "clusters/c/nodes/returning"
    returning.ClearField("faults")
    returning.probation_end_time.CopyFrom(Timestamp(seconds=1_800_000_000))
    show_nodes([DRAINED, returning], Output.WIDE)
    head, bad, back = capsys.readouterr().out.splitlines()[:3]
    assert "FAULTS" in head
    assert bad.split()[:2] == ["bad", "DRAINED"]
    assert "GPU 1: Xid 79; GPU 0: slowed down by heat" in bad
    assert back.split()[:2] == ["returning", "PROBATION"]
    assert "2027-01-15T08:00:00Z" in back


def test_cores_and_host_memory_are_shown_as_stated_or_found_or_as_not_stated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stated = clusters_pb2.Node(
        name="clusters/c/nodes/stated", cpus=64, host_bytes=2**39, found_cpus=96
    )
    found = clusters_pb2.Node(name="clusters/c/nodes/found", found_cpus=96, found_host_bytes=2**40)
    neither = clusters_pb2.Node(name="clusters/c/nodes/neither")
    show_nodes([stated, found, neither], Output.TABLE)
    head, *rows = (line.split() for line in capsys.readouterr().out.splitlines()[:4])
    assert head[5:8] == ["CPUS", "HOST", "MEMORY"]
    assert rows[0][-3:] == ["64", "512", "GiB"]
    assert rows[1][-5:] == ["96", "(found)", "1,024", "GiB", "(found)"]
    assert rows[2][-4:] == ["not", "stated", "not", "stated"]


def test_the_labels_that_count_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    node = clusters_pb2.Node(
        name="clusters/c/nodes/n",
        labels={"zone": "a"},
        agent_labels={"zone": "b", "disk": "ssd"},
    )
    show_nodes([node], Output.WIDE)
    assert "disk=ssd, zone=a" in capsys.readouterr().out
