"""The faults of GPUs from what their driver reports, and the agent's memory of them."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from tessera.service.agent.hardware.devices import DeviceState, XidEvent
from tessera.service.agent.hardware.faults import (
    LASTING_S,
    WHOLE_NODE,
    Fault,
    FaultTracker,
    RememberedXid,
)
from tessera.service.agent.hardware.memory import CLEAR_NAME, FILE_NAME, HardwareMemory
from tessera.service.agent.hardware.xids import (
    APPLICATION_XIDS,
    FATAL_XIDS,
    XidClass,
    classify_xid,
)
from tests.support.logged import logged_lines

WELL = DeviceState(temperature_c=40, shutdown_c=92, recovery="")
MUTE = DeviceState()  # of a driver that reports no recovery action


def faults_after(*xids: int, state: DeviceState = WELL) -> list[tuple[int, str, str]]:
    """Return the faults of GPU 0 after these Xids."""
    tracker = FaultTracker()
    tracker.note_events(XidEvent(gpu=0, xid=xid) for xid in xids)
    return [(f.gpu, f.kind, f.detail) for f in tracker.find_faults([state], 0.0)]


@pytest.mark.parametrize("xid", [13, 31, 43, 45, 8, 32, 68, 69, 94])
def test_xids_of_applications_are_no_faults(xid: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert faults_after(xid) == []
    assert [record.levelno for record in caplog.records] == [logging.INFO]


@pytest.mark.parametrize("xid", [63, 74, 92, 144, 154, 38, 100_000])
def test_xids_that_need_attention_and_unknown_ones_are_logged_and_no_faults(
    xid: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert faults_after(xid) == []
    (line,) = logged_lines(caplog, "xid")
    assert line.endswith(f" xid={xid} gpu=0 kind=attention")


@pytest.mark.parametrize("xid", sorted(FATAL_XIDS))
def test_a_fatal_xid_is_a_fault_however_often_it_comes(xid: int) -> None:
    assert faults_after(xid, xid) == [(0, "xid", f"Xid {xid}, {FATAL_XIDS[xid]}")]
    assert classify_xid(xid) is XidClass.FATAL


def test_no_xid_is_both_fatal_and_an_applications() -> None:
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


def test_a_fatal_xid_of_a_driver_without_recovery_actions_stays() -> None:
    tracker = FaultTracker()
    tracker.note_events([XidEvent(gpu=1, xid=79)])
    for _ in range(3):
        tracker.settle_xids([MUTE, MUTE])
    assert [fault.gpu for fault in tracker.find_faults([MUTE, MUTE], 1e6)] == [1]


def test_a_fatal_xid_of_an_unknown_gpu_is_a_fault_of_the_whole_node() -> None:
    tracker = FaultTracker()
    tracker.note_events([XidEvent(gpu=-1, xid=79)])
    tracker.settle_xids([WELL])
    (fault,) = tracker.find_faults([WELL], 0.0)
    assert fault.gpu == WHOLE_NODE


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


def test_what_is_remembered_survives_a_restart_of_the_agent(tmp_path: Path) -> None:
    memory = HardwareMemory.load(tmp_path)
    assert (memory.uuids, memory.xids, memory.unvalidated) == ((), {}, False)
    memory.uuids, memory.product, memory.unvalidated = ("a", "b"), "NVIDIA A40", True
    memory.xids = {1: [RememberedXid(xid=79, asked=True)], WHOLE_NODE: [RememberedXid(xid=48)]}
    memory.save()
    again = HardwareMemory.load(tmp_path)
    assert (again.uuids, again.product, again.unvalidated) == (("a", "b"), "NVIDIA A40", True)
    assert again.xids == memory.xids


def test_a_reboot_settles_xids_but_not_missing_gpus_and_tests(tmp_path: Path) -> None:
    memory = HardwareMemory.load(tmp_path)
    memory.uuids, memory.unvalidated = ("a",), True
    memory.xids = {0: [RememberedXid(xid=79)]}
    memory.save()
    path = tmp_path / FILE_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | {"boot": "an earlier one"}))
    again = HardwareMemory.load(tmp_path)
    assert (again.uuids, again.xids, again.unvalidated) == (("a",), {}, True)


@pytest.mark.parametrize("text", ["{", "[]", '{"uuids": 3}', '{"uuids": [], "product": ""}'])
def test_a_damaged_memory_is_logged_and_holds_nothing(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    memory = HardwareMemory.load(tmp_path)
    assert (memory.uuids, memory.xids) == ((), {})
    assert "cannot read what is remembered" in caplog.text


def test_a_memory_that_cannot_be_written_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = HardwareMemory.load(tmp_path / "missing")
    memory.save()
    assert "cannot write down the faults" in caplog.text


def test_a_request_to_clear_is_taken_once(tmp_path: Path) -> None:
    memory = HardwareMemory.load(tmp_path)
    assert not memory.take_clear_request()
    (tmp_path / CLEAR_NAME).touch()
    assert memory.take_clear_request()
    assert not memory.take_clear_request()
