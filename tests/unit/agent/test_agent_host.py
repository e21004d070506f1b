"""The CPU cores and the host memory that an agent finds on its machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tessera.service.agent.hardware import host
from tessera.service.agent.hardware.host import (
    add_host_resources,
    find_cores,
    find_host_bytes,
)
from tessera.v1 import agents_pb2 as pb

GIB = 2**30


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the agent's own cgroup, two below the root ``tmp_path``, without any limits."""
    own = tmp_path / "system.slice" / "agent.service"
    own.mkdir(parents=True)
    monkeypatch.setattr(host, "find_own_cgroup", lambda _: own)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    pages = {"SC_PHYS_PAGES": 100, "SC_PAGE_SIZE": GIB}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    return own


def test_without_limits_the_machine_counts(group: Path, tmp_path: Path) -> None:
    (group / "cpu.max").write_text("max 100000\n")
    (group / "memory.max").write_text("max\n")
    assert find_cores(tmp_path) == 16
    assert find_host_bytes(tmp_path) == 95 * GIB


def test_the_least_limit_of_a_cgroup_and_those_above_counts(group: Path, tmp_path: Path) -> None:
    (group / "cpu.max").write_text("800000 100000\n")
    (group.parent / "cpu.max").write_text("250000 100000\n")
    (group / "memory.max").write_text(f"{40 * GIB}\n")
    (group.parent / "memory.max").write_text(f"{60 * GIB}\n")
    (tmp_path.parent / "memory.max").write_text("1\n")  # not a cgroup
    assert find_cores(tmp_path) == 2
    assert find_host_bytes(tmp_path) == 38 * GIB


def test_a_quota_of_less_than_a_core_is_one_core(group: Path, tmp_path: Path) -> None:
    (group / "cpu.max").write_text("50000 100000\n")
    assert find_cores(tmp_path) == 1


def test_a_machine_whose_cgroup_is_not_known_has_no_limit(
    group: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (group / "cpu.max").write_text("100000 100000\n")
    monkeypatch.setattr(host, "find_own_cgroup", lambda _: None)
    assert find_cores(tmp_path) == 16


def test_what_is_found_is_added_to_the_node(group: Path, tmp_path: Path) -> None:
    node = pb.AgentNode(node="n", gpu_type="a100", gpus=4)
    assert group.is_dir()
    assert add_host_resources(node, tmp_path) == pb.AgentNode(
        node="n", gpu_type="a100", gpus=4, cpus=16, host_bytes=95 * GIB
    )
