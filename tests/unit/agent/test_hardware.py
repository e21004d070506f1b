"""A node's hardware: the GPUs of NVIDIA's driver, their faults, the cores, and the options."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import logging
import os
import sys
from pathlib import Path

import pytest

from tessera.estimator.hardware import CATALOGUE
from tessera.formulation.base.errors import InvalidInput, Unavailable
from tessera.service.agent.hardware import host
from tessera.service.agent.hardware import options as hardware
from tessera.service.agent.hardware.devices import Device, DeviceState, XidEvent
from tessera.service.agent.hardware.discovery import (
    GPU_TYPES,
    describe_node,
    expected_uuids,
    gpu_type_of,
)
from tessera.service.agent.hardware.faults import (
    LASTING_S,
    WHOLE_NODE,
    Fault,
    FaultTracker,
    RememberedXid,
)
from tessera.service.agent.hardware.host import (
    add_host_resources,
    find_cores,
    find_host_bytes,
)
from tessera.service.agent.hardware.memory import FILE_NAME, HardwareMemory
from tessera.service.agent.hardware.nvml import MAX_EVENTS, REOPEN_S, NvmlDevices
from tessera.service.agent.hardware.xids import (
    APPLICATION_XIDS,
    FATAL_XIDS,
    XidClass,
    classify_xid,
)
from tessera.service.agent.main import main
from tessera.v1 import agents_pb2 as pb
from tests.support.logged import logged_lines
from tests.support.nvml import FakeGpu, FakeNvml, some_gpus

A100 = "NVIDIA A100-SXM4-40GB"


WELL = DeviceState(temperature_c=40, shutdown_c=92, recovery="")


MUTE = DeviceState()  # of a driver that reports no recovery action


GIB = 2**30


def devices_of(*products: str) -> list[Device]:
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
        ("A100-SXM4-40GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100-80-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("Tesla V100-SXM2-16GB", "v100-16"),
        ("NVIDIA Tesla T4", "t4"),
    ],
)
def test_a_products_name_gives_the_gpu_type(product: str, gpu_type: str) -> None:
    assert gpu_type_of(product) == gpu_type
    for unknown in ("NVIDIA RTX 9090", "", "AMD Instinct MI300X"):
        with pytest.raises(InvalidInput, match="is not known; pass --node NAME:TYPE:GPUS"):
            gpu_type_of(unknown)


def test_every_nvidia_type_of_the_catalogue_can_be_discovered() -> None:
    assert {one.name for one in CATALOGUE} - {"mi300x"} <= set(GPU_TYPES.values())


@pytest.mark.parametrize(
    ("host", "devices", "text"),
    [
        ("a b", devices_of(A100), "cannot be the name of a node"),
        ("n", [], "the driver has no GPUs"),
        ("n", devices_of(A100, "NVIDIA A40"), r"several types \(a100, a40\)"),
        ("n", [Device(uuid="x", product=A100, uses_mig=True)], r"GPU 0 is divided \(MIG\)"),
    ],
)
def test_what_cannot_be_a_node_is_refused(
    tmp_path: Path, host: str, devices: list[Device], text: str
) -> None:
    with pytest.raises(InvalidInput, match=text):
        describe_node(host, devices, HardwareMemory.load(tmp_path))


def test_gpus_that_are_missing_after_a_restart_keep_their_places(tmp_path: Path) -> None:
    memory = HardwareMemory.load(tmp_path)
    memory.uuids, memory.product = ("GPU-0", "GPU-1", "GPU-2"), A100
    left = [device for device in devices_of(A100, A100, A100) if device.uuid != "GPU-1"]
    assert describe_node("n", left, memory).gpus == 3
    assert expected_uuids(left, memory) == memory.uuids
    assert describe_node("n", [], memory) == pb.AgentNode(node="n", gpu_type="a100", gpus=3)
    assert describe_node("n", devices_of(*4 * [A100]), memory).gpus == 4
    memory.forget()
    assert describe_node("n", left, memory).gpus == 2


def test_discovery_finds_the_node_and_watches_it(tmp_path: Path, nvml: FakeNvml) -> None:
    nodes, health = hardware.resolve_nodes(options_of(tmp_path, "--discover"), [], "n.lab")
    assert nodes == [add_host_resources(pb.AgentNode(node="n.lab", gpu_type="a100", gpus=4))]
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


@pytest.mark.parametrize(("stated", "gpu_type", "gpus"), [("a40:2", "a40", 2), ("1", "cpu", 1)])
def test_virtual_gpus_need_no_driver(tmp_path: Path, stated: str, gpu_type: str, gpus: int) -> None:
    flags = "--discover", "--virtual-gpus", stated, "--health-command", "test -e '/a b'"
    nodes, health = hardware.resolve_nodes(options_of(tmp_path, *flags), [], "n")
    assert nodes == [add_host_resources(pb.AgentNode(node="n", gpu_type=gpu_type, gpus=gpus))]
    assert health is not None
    assert health.health_command == ("test", "-e", "/a b")
    assert health.devices is not None
    health.devices.watch(health.uuids)
    assert (health.devices.read(), health.devices.wait(0.0)) == (gpus * (DeviceState(),), ())


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


def test_an_agent_without_nvidias_library_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    always = ("--server", "127.0.0.1:1", "--cluster", "c", "--data-dir", str(tmp_path))
    assert main([*always, "--discover"]) == 2
    (line,) = logged_lines(caplog, "agent_failed")
    assert "pip install 'tessera-scheduler[gpus]'" in line


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


def test_the_least_limit_of_a_cgroup_and_those_above_counts_or_else_the_machine(
    group: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (group / "cpu.max").write_text("max 100000\n")
    (group / "memory.max").write_text("max\n")
    node = pb.AgentNode(node="n", gpu_type="a100", gpus=4)
    whole = pb.AgentNode(node="n", gpu_type="a100", gpus=4, cpus=16, host_bytes=95 * GIB)
    assert add_host_resources(node, tmp_path) == whole
    (group / "cpu.max").write_text("800000 100000\n")
    (group.parent / "cpu.max").write_text("250000 100000\n")
    (group / "memory.max").write_text(f"{40 * GIB}\n")
    (group.parent / "memory.max").write_text(f"{60 * GIB}\n")
    (tmp_path.parent / "memory.max").write_text("1\n")  # not a cgroup
    assert (find_cores(tmp_path), find_host_bytes(tmp_path)) == (2, 38 * GIB)
    (group / "cpu.max").write_text("50000 100000\n")
    assert find_cores(tmp_path) == 1
    monkeypatch.setattr(host, "find_own_cgroup", lambda _: None)
    assert find_cores(tmp_path) == 16


def faults_after(*xids: int, state: DeviceState = WELL) -> list[tuple[int, str, str]]:
    """Return the faults of GPU 0 after these Xids."""
    tracker = FaultTracker()
    tracker.note_events(XidEvent(gpu=0, xid=xid) for xid in xids)
    return [(f.gpu, f.kind, f.detail) for f in tracker.find_faults([state], 0.0)]


def test_a_fatal_xid_is_one_fault_however_often_it_comes() -> None:
    for xid, name in FATAL_XIDS.items():
        assert faults_after(xid, xid) == [(0, "xid", f"Xid {xid}, {name}")]
        assert classify_xid(xid) is XidClass.FATAL


@pytest.mark.parametrize(
    ("xids", "level", "kind"),
    [
        ([13, 31, 43, 45, 8, 32, 68, 69, 94], logging.INFO, "application"),
        ([63, 74, 92, 144, 154, 38, 100_000], logging.WARNING, "attention"),
    ],
)
def test_xids_of_applications_those_that_need_attention_and_unknown_ones_are_no_faults(
    xids: list[int], level: int, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert faults_after(*xids) == []
    assert {record.levelno for record in caplog.records} == {level}
    lines = logged_lines(caplog, "xid")
    assert len(lines) == len(xids)
    assert all(line.endswith(f" gpu=0 kind={kind}") for line in lines)
    assert not APPLICATION_XIDS & FATAL_XIDS.keys()


def test_a_fatal_xid_stays_until_the_driver_asks_for_no_recovery_any_more() -> None:
    tracker = FaultTracker()
    tracker.note_events([XidEvent(gpu=0, xid=95)])

    def kinds(state: DeviceState) -> list[str]:
        tracker.settle_xids([state])
        return [fault.kind for fault in tracker.find_faults([state], 0.0)]

    needy = DeviceState(recovery="a reset of the GPU")
    assert kinds(WELL) == ["xid"]  # the driver has not asked yet
    assert kinds(needy) == ["xid", "recovery"]
    assert kinds(MUTE) == ["xid"]
    assert kinds(DeviceState(is_lost=True, recovery="")) == ["xid", "lost"]
    assert kinds(WELL) == []
    assert tracker.xids == {}


def test_a_fatal_xid_stays_without_recovery_actions_and_may_be_of_the_whole_node() -> None:
    tracker = FaultTracker()
    tracker.note_events([XidEvent(gpu=1, xid=79), XidEvent(gpu=-1, xid=79)])
    for _ in range(3):
        tracker.settle_xids([MUTE, MUTE])
    faults = tracker.find_faults([MUTE, MUTE], 1e6)
    assert {fault.gpu for fault in faults} == {1, WHOLE_NODE}


@pytest.mark.parametrize(
    ("state", "kind", "detail"),
    [
        (DeviceState(is_lost=True), "lost", "the driver has lost it"),
        (DeviceState(uncorrected_errors=1), "ecc", "uncorrectable memory errors (ECC)"),
        (DeviceState(remap_failed=True), "ecc", "a row of its memory could not be remapped"),
        (
            DeviceState(remap_pending=True),
            "ecc",
            "a row of its memory waits to be remapped; reset the GPU",
        ),
        (DeviceState(recovery="a reboot of the node"), "recovery", "the driver asks for a reboot"),
    ],
)
def test_a_state_is_a_fault_at_once_and_only_while_it_lasts(
    state: DeviceState, kind: str, detail: str
) -> None:
    tracker = FaultTracker()
    (fault,) = tracker.find_faults([WELL, state], 0.0)
    assert (fault.gpu, fault.kind) == (1, kind)
    assert fault.detail.startswith(detail)
    assert tracker.find_faults([WELL, WELL], 1.0) == ()


@pytest.mark.parametrize(
    ("state", "fault"),
    [
        (DeviceState(is_slowed=True), Fault(gpu=0, kind="thermal", detail="slowed down by heat")),
        (
            DeviceState(temperature_c=92, shutdown_c=92),
            Fault(gpu=0, kind="thermal", detail="as hot as when it shuts down"),
        ),
        (
            DeviceState(problem="Unknown Error"),
            Fault(gpu=0, kind="lost", detail="the driver cannot read it: Unknown Error"),
        ),
    ],
)
def test_heat_and_read_errors_are_faults_only_if_they_last(
    state: DeviceState, fault: Fault
) -> None:
    tracker = FaultTracker()
    assert tracker.find_faults([state], 100.0) == ()
    assert tracker.find_faults([state], 100.0 + LASTING_S - 1.0) == ()
    assert tracker.find_faults([WELL], 100.0 + LASTING_S) == ()
    assert tracker.find_faults([state], 101.0 + LASTING_S) == ()
    assert tracker.find_faults([state], 101.0 + 2 * LASTING_S) == (fault,)
    assert tracker.find_faults([WELL], 102.0 + 2 * LASTING_S) == ()


def test_what_is_remembered_survives_a_restart_and_a_reboot_settles_xids(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = HardwareMemory.load(tmp_path)
    assert (memory.uuids, memory.xids, memory.unvalidated) == ((), {}, False)
    memory.uuids, memory.product, memory.unvalidated = ("a", "b"), "NVIDIA A40", True
    memory.xids = {1: [RememberedXid(xid=79, asked=True)], WHOLE_NODE: [RememberedXid(xid=48)]}
    memory.save()
    again = HardwareMemory.load(tmp_path)
    assert (again.uuids, again.product, again.unvalidated) == (("a", "b"), "NVIDIA A40", True)
    assert again.xids == memory.xids
    path = tmp_path / FILE_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | {"boot": "an earlier one"}))
    rebooted = HardwareMemory.load(tmp_path)
    assert (rebooted.uuids, rebooted.xids, rebooted.unvalidated) == (("a", "b"), {}, True)
    HardwareMemory.load(tmp_path / "missing").save()
    assert "cannot write down the faults" in caplog.text


@pytest.mark.parametrize("text", ["{", "[]", '{"uuids": 3}', '{"uuids": [], "product": ""}'])
def test_a_damaged_memory_is_logged_and_holds_nothing(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    memory = HardwareMemory.load(tmp_path)
    assert (memory.uuids, memory.xids) == ((), {})
    assert "cannot read what is remembered" in caplog.text


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def watch(nvml: FakeNvml, clock: Clock | None = None) -> NvmlDevices:
    """Return the devices of the fake, all watched."""
    clock = clock or Clock()
    devices = NvmlDevices(nvml, clock, clock.sleep)
    devices.watch([device.uuid for device in devices.list()])
    return devices


def test_the_fake_has_the_functions_and_values_of_the_real_module() -> None:
    if importlib.util.find_spec("pynvml") is None:
        pytest.skip("nvidia-ml-py is not installed: the fake is not compared with it")
    real, fake = importlib.import_module("pynvml"), FakeNvml()
    names = [name for name in dir(fake) if name.lower().startswith("nvml")]
    assert len(names) > 35
    for name in names:
        here, there = getattr(fake, name), getattr(real, name)
        if isinstance(here, int):
            assert here == there, name
        elif name != "NVMLError":
            assert list(inspect.signature(here).parameters) == list(
                inspect.signature(inspect.unwrap(there)).parameters
            ), name
    assert issubclass(real.NVMLError, Exception)
    assert real.NVMLError(real.NVML_ERROR_GPU_IS_LOST).value == fake.NVML_ERROR_GPU_IS_LOST


def test_each_value_of_a_broken_gpu_is_read() -> None:
    gpu = FakeGpu(
        uuid="x", uncorrected=3, remapped=(1, 2, 1, 1), throttle=0x44, temperature=93, recovery=1
    )
    (state,) = watch(FakeNvml(gpu)).read()
    assert state == DeviceState(
        uncorrected_errors=3,
        remap_pending=True,
        remap_failed=True,
        is_slowed=True,
        temperature_c=93,
        shutdown_c=92,
        recovery="a reset of the GPU",
    )


@pytest.mark.parametrize(
    "function",
    [
        "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetRemappedRows",
        "nvmlDeviceGetTemperatureThreshold",
        "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetMigMode",
    ],
)
@pytest.mark.parametrize("code", [3, 4, 13])
def test_a_value_that_a_gpu_does_not_have_is_no_fault(function: str, code: int) -> None:
    (state,) = watch(FakeNvml(FakeGpu(uuid="x", fails={function: code}))).read()
    values = (state.is_lost, state.problem, state.recovery or "", state.uncorrected_errors)
    assert values == (False, "", "", 0)


def test_clocks_and_temperatures_are_faults_only_where_the_driver_says_so() -> None:
    (slowed,) = watch(FakeNvml(FakeGpu(uuid="x", throttle=0x20 | 0x4 | 0x80))).read()
    assert not slowed.is_slowed  # software lowers the clocks
    (state,) = watch(FakeNvml(FakeGpu(uuid="x", shutdown=0))).read()
    assert (state.temperature_c, state.shutdown_c) == (40, None)


def test_an_older_driver_is_asked_by_the_older_names() -> None:
    gpu = FakeGpu(
        uuid="x", throttle=0x40, fails={"nvmlDeviceGetCurrentClocksEventReasons": 13, "field": 3}
    )
    (state,) = watch(FakeNvml(gpu)).read()
    assert state.is_slowed
    assert state.recovery is None


def test_a_lost_gpu_an_unreadable_one_and_one_that_needs_a_reset_differ() -> None:
    lost, odd, tired = (FakeGpu(uuid=u) for u in "abc")
    nvml = FakeNvml(lost, odd, tired)
    devices = watch(nvml)
    lost.is_lost = True
    odd.fails["nvmlDeviceGetTemperature"] = nvml.NVML_ERROR_UNKNOWN
    tired.fails["nvmlDeviceGetRemappedRows"] = nvml.NVML_ERROR_RESET_REQUIRED
    states = devices.read()
    assert states[0] == DeviceState(is_lost=True)
    assert states[1] == DeviceState(problem="NVML Error with code 999")
    assert states[2].recovery == "a reset of the GPU"


def test_a_gpu_that_comes_back_is_found_when_the_library_is_opened_again() -> None:
    gpus, clock = some_gpus(3), Clock()
    nvml = FakeNvml(*gpus)
    devices = watch(nvml, clock)
    nvml.gpus.pop(1)
    gpus[1].is_lost = True
    assert [state.is_lost for state in devices.read()] == [False, True, False]
    clock.now_s += REOPEN_S
    assert [state.is_lost for state in devices.read()] == [False, True, False]
    assert (nvml.opened, nvml.freed) == (1, 1)
    nvml.gpus.insert(1, gpus[1])
    gpus[1].is_lost = False
    assert devices.read()[1].is_lost  # it is not looked for each time
    clock.now_s += REOPEN_S
    assert devices.read() == (WELL, WELL, WELL)
    assert nvml.registered == {"GPU-0", "GPU-1", "GPU-2"}


def test_an_unloaded_driver_is_a_loss_of_all_gpus_until_it_is_back() -> None:
    clock, nvml = Clock(), FakeNvml(*some_gpus(2))
    devices = watch(nvml, clock)
    nvml.failure = nvml.NVML_ERROR_DRIVER_NOT_LOADED
    assert all(state.problem for state in devices.read())
    clock.now_s += REOPEN_S
    assert all(state.is_lost for state in devices.read())
    assert devices.wait(5.0) == ()
    nvml.failure, nvml.opened = 0, 0
    clock.now_s += REOPEN_S
    assert devices.read() == (WELL, WELL)


def test_xids_carry_the_index_of_their_gpu_and_are_read_in_parts() -> None:
    gpus, clock = some_gpus(3), Clock()
    nvml = FakeNvml(*gpus)
    devices = watch(nvml, clock)
    gpus[2].is_lost = True
    nvml.send_xid(gpus[2], 79)
    nvml.send_xid(gpus[0], 31)
    nvml.send_xid(gpus[0], 1, kind=0x1)  # another kind of event
    assert devices.wait(5.0) == (XidEvent(gpu=2, xid=79), XidEvent(gpu=0, xid=31))
    assert nvml.waits_ms == [5000, 0, 0, 0]
    for _ in range(MAX_EVENTS + 5):
        nvml.send_xid(gpus[0], 13)
    assert [len(devices.wait(1.0)) for _ in range(2)] == [MAX_EVENTS, 5]
    before_s = clock.now_s
    assert devices.wait(5.0) == ()  # the library ends the wait at once
    assert clock.now_s == before_s + 5.0


def test_gpus_without_events_are_logged_and_still_read(caplog: pytest.LogCaptureFixture) -> None:
    devices = watch(FakeNvml(FakeGpu(uuid="x", fails={"events": 0})))
    (line,) = logged_lines(caplog, "xids_unwatched")
    assert line.endswith(' gpu=0 error="its driver does not report them"')
    assert devices.read() == (WELL,)


def test_a_driver_that_cannot_be_reached_is_an_error_that_says_what_to_do() -> None:
    nvml = FakeNvml()
    nvml.failure = nvml.NVML_ERROR_DRIVER_NOT_LOADED
    with pytest.raises(InvalidInput, match="check it with nvidia-smi, or pass --node NAME"):
        NvmlDevices(nvml)
    nvml.failure = 0
    devices = NvmlDevices(nvml)
    nvml.failure = nvml.NVML_ERROR_UNKNOWN
    with pytest.raises(Unavailable, match="does not list the GPUs"):
        devices.list()
