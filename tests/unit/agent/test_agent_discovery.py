"""The node that an agent discovers, and its options for hardware and health."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from tessera.estimator.hardware import CATALOGUE
from tessera.formulation.errors import InvalidInput
from tessera.service.agent.hardware import options as hardware
from tessera.service.agent.hardware.devices import Device
from tessera.service.agent.hardware.discovery import (
    GPU_TYPES,
    describe_node,
    expected_uuids,
    gpu_type_of,
)
from tessera.service.agent.hardware.host import add_host_resources
from tessera.service.agent.hardware.memory import HardwareMemory
from tessera.service.agent.main import main
from tessera.v1 import agents_pb2 as pb
from tests.support.logged import logged_lines
from tests.support.nvml import FakeNvml, some_gpus

A100 = "NVIDIA A100-SXM4-40GB"


def some_devices(*products: str) -> list[Device]:
    return [Device(uuid=f"GPU-{i}", product=product) for i, product in enumerate(products)]


def options_of(tmp_path: Path, *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", type=Path)
    hardware.add_options(parser)
    return parser.parse_args(["--data-dir", str(tmp_path), *arguments])


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """Return the library that the options load, with four GPUs."""
    library = FakeNvml(*some_gpus(4))
    monkeypatch.setattr(hardware, "load_nvml", lambda: library)
    return library


@pytest.mark.parametrize(
    ("product", "gpu_type"),
    [
        (A100, "a100"),
        ("A100-SXM4-40GB", "a100"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100 80GB PCIe", "a100-80-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("Tesla V100-SXM2-16GB", "v100-16"),
        ("NVIDIA Tesla T4", "t4"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA B200", "b200"),
    ],
)
def test_a_products_name_gives_the_gpu_type(product: str, gpu_type: str) -> None:
    assert gpu_type_of(product) == gpu_type


def test_every_nvidia_type_of_the_catalogue_can_be_discovered() -> None:
    assert {one.name for one in CATALOGUE} - {"mi300x"} <= set(GPU_TYPES.values())


@pytest.mark.parametrize("product", ["NVIDIA RTX 9090", "", "AMD Instinct MI300X"])
def test_an_unknown_product_is_an_error_that_says_what_to_pass(product: str) -> None:
    with pytest.raises(InvalidInput, match="is not known; pass --node NAME:TYPE:GPUS"):
        gpu_type_of(product)


def test_a_node_has_the_hosts_name_and_all_gpus(tmp_path: Path) -> None:
    node = describe_node("gpu7.lab", some_devices(A100, A100), HardwareMemory.load(tmp_path))
    assert node == pb.AgentNode(node="gpu7.lab", gpu_type="a100", gpus=2)


@pytest.mark.parametrize(
    ("host", "devices", "text"),
    [
        ("a b", some_devices(A100), "cannot be the name of a node"),
        ("n", [], "the driver has no GPUs"),
        ("n", some_devices(A100, "NVIDIA A40"), r"several types \(a100, a40\)"),
        ("n", [Device(uuid="x", product=A100, uses_mig=True)], r"GPU 0 is divided \(MIG\)"),
    ],
)
def test_what_cannot_be_a_node_is_refused(
    tmp_path: Path, host: str, devices: list[Device], text: str
) -> None:
    with pytest.raises(InvalidInput, match=text):
        describe_node(host, devices, HardwareMemory.load(tmp_path))


def test_a_gpu_that_is_missing_after_a_restart_keeps_its_place(tmp_path: Path) -> None:
    memory = HardwareMemory.load(tmp_path)
    memory.uuids = ("GPU-0", "GPU-1", "GPU-2")
    left = [device for device in some_devices(A100, A100, A100) if device.uuid != "GPU-1"]
    assert describe_node("n", left, memory).gpus == 3
    assert expected_uuids(left, memory) == memory.uuids
    grown = some_devices(*4 * [A100])
    assert describe_node("n", grown, memory).gpus == 4
    memory.forget()
    assert describe_node("n", left, memory).gpus == 2


def test_a_node_whose_gpus_are_all_lost_keeps_its_type(tmp_path: Path) -> None:
    memory = HardwareMemory.load(tmp_path)
    memory.uuids, memory.product = ("GPU-0", "GPU-1"), A100
    assert describe_node("n", [], memory) == pb.AgentNode(node="n", gpu_type="a100", gpus=2)


def test_discovery_finds_the_node_and_watches_it(tmp_path: Path, nvml: FakeNvml) -> None:
    nodes, health = hardware.resolve_nodes(options_of(tmp_path, "--discover"), [], "n")
    assert nodes == [add_host_resources(pb.AgentNode(node="n", gpu_type="a100", gpus=4))]
    assert health is not None
    assert health.devices is not None
    assert health.uuids == ("GPU-0", "GPU-1", "GPU-2", "GPU-3")
    options = options_of(tmp_path, "--discover", "--no-watch-gpus")
    assert hardware.resolve_nodes(options, [], "n")[1] is None


def test_a_stated_node_is_watched_on_request_and_its_missing_gpus_are_lost(
    tmp_path: Path, nvml: FakeNvml
) -> None:
    node = pb.AgentNode(node="n", gpu_type="a100", gpus=6)
    nodes, health = hardware.resolve_nodes(options_of(tmp_path, "--watch-gpus"), [node])
    assert nodes == [node]
    assert health is not None
    assert health.uuids == ("GPU-0", "GPU-1", "GPU-2", "GPU-3", "missing-4", "missing-5")
    assert health.devices is not None
    health.devices.watch(health.uuids)
    assert [state.is_lost for state in health.devices.read()] == 4 * [False] + 2 * [True]
    assert hardware.resolve_nodes(options_of(tmp_path), [node]) == ([node], None)


def test_virtual_gpus_need_no_driver(tmp_path: Path) -> None:
    options = options_of(tmp_path, "--discover", "--virtual-gpus", "a40:2")
    nodes, health = hardware.resolve_nodes(options, [], "n")
    assert nodes == [add_host_resources(pb.AgentNode(node="n", gpu_type="a40", gpus=2))]
    assert health is not None
    health.memory.uuids = health.uuids
    health.memory.path.parent.mkdir(exist_ok=True)
    health.memory.save()
    options = options_of(tmp_path, "--discover", "--virtual-gpus", "1")
    expected = add_host_resources(pb.AgentNode(node="n", gpu_type="cpu", gpus=1))
    assert hardware.resolve_nodes(options, [], "n")[0][0] == expected


@pytest.mark.parametrize(
    ("arguments", "nodes", "text"),
    [
        (["--discover"], 1, "--discover: takes the place of --node"),
        (["--virtual-gpus", "2"], 1, "--virtual-gpus: needs --discover"),
        (["--discover", "--virtual-gpus", "0"], 0, "with 1 to 64 GPUs"),
        (["--discover", "--virtual-gpus", "many"], 0, "with 1 to 64 GPUs"),
        (["--health-command", "true"], 2, "needs an agent with one node"),
        (["--health-command", "'"], 1, "cannot be split"),
        (["--health-command", " "], 1, "is empty"),
        (["--validate-command", "/no/such/program -x"], 1, "is not a program"),
        (["--health-period", "0"], 1, "must be a number above 0"),
        (["--validate-timeout", "nan"], 1, "must be a number above 0"),
    ],
)
def test_wrong_options_are_refused(
    tmp_path: Path, arguments: list[str], nodes: int, text: str
) -> None:
    given = [pb.AgentNode(node=f"n{i}", gpu_type="a40", gpus=1) for i in range(nodes)]
    with pytest.raises(InvalidInput, match=text):
        hardware.resolve_nodes(options_of(tmp_path, *arguments), given, "n")


def test_commands_become_lists_of_arguments(tmp_path: Path) -> None:
    options = options_of(tmp_path, "--health-command", "test -e '/a b'")
    node = pb.AgentNode(node="n", gpu_type="a40", gpus=1)
    _, health = hardware.resolve_nodes(options, [node])
    assert health is not None
    assert health.health_command == ("test", "-e", "/a b")
    assert health.devices is None


def test_an_agent_without_nvidias_library_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    always = ("--server", "127.0.0.1:1", "--cluster", "c", "--data-dir", str(tmp_path))
    assert main([*always, "--discover"]) == 2
    (line,) = logged_lines(caplog, "agent_failed")
    assert "pip install 'tessera-scheduler[gpus]'" in line
