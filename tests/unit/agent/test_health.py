"""The monitor of a node's health: devices, checks of the site, validation, and requests."""

from __future__ import annotations

import asyncio
import json
import queue
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tessera.service.agent.hardware import command
from tessera.service.agent.hardware.checks import CheckResult, run_check
from tessera.service.agent.hardware.devices import Device, DeviceState, XidEvent
from tessera.service.agent.hardware.memory import HardwareMemory
from tessera.service.agent.hardware.monitor import (
    STUCK_S,
    HealthMonitor,
    HealthSettings,
    start_monitor,
)
from tests.support.agents import is_running, until
from tests.support.patience import PATIENCE_S

WELL = DeviceState(recovery="")


PASS_S = 0.02


class ScriptedDevices:
    """Devices whose states and Xids a test sets. ``failure`` is raised in place of an answer."""

    def __init__(self, gpus: int = 2) -> None:
        self.states = gpus * [WELL]
        self.events: queue.SimpleQueue[XidEvent] = queue.SimpleQueue()
        self.watched: tuple[str, ...] = ()
        self.failure: Exception | None = None

    def list(self) -> tuple[Device, ...]:
        return ()

    def watch(self, uuids: Sequence[str]) -> None:
        self.watched = tuple(uuids)

    def wait(self, seconds: float) -> tuple[XidEvent, ...]:
        try:
            return (self.events.get(timeout=seconds),)
        except queue.Empty:
            return ()

    def read(self) -> tuple[DeviceState, ...]:
        if self.failure is not None:
            raise self.failure
        return tuple(self.states)


class CountedMemory(HardwareMemory):
    """A memory that counts the monitor's passes."""

    passes = 0

    def take_clear_request(self) -> bool:
        self.passes += 1
        return super().take_clear_request()


class Watched:
    """A monitor that runs, with the time and the gangs that a test sets."""

    def __init__(self, memory: CountedMemory, settings: HealthSettings) -> None:
        self.memory = memory
        self.changes, self.now_s, self.idle = 0, 0.0, True
        self.monitor = HealthMonitor(
            settings,
            changed=self._change,
            is_idle=lambda: self.idle,
            clock=lambda: self.now_s,
            pass_s=PASS_S,
        )

    def _change(self) -> None:
        self.changes += 1

    def faults(self) -> list[str] | None:
        """Return the faults that are reported, or None if nothing is."""
        report = self.monitor.report()
        if not report:
            return None
        (health,) = report
        assert health.node == "n"
        return [f"{f.gpu} {f.kind}: {f.detail}" for f in health.faults]

    async def until_faults(self, *faults: str) -> None:
        await until(lambda: self.faults() == list(faults))


@asynccontextmanager
async def a_monitor(tmp_path: Path, **settings: Any) -> AsyncIterator[Watched]:
    memory = CountedMemory.load(tmp_path)
    watched = Watched(memory, HealthSettings(node="n", memory=memory, **settings))
    task = asyncio.create_task(watched.monitor.run())
    yield watched
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def a_script(tmp_path: Path, body: str) -> tuple[str, ...]:
    """Return the command that runs a script of the site."""
    path = tmp_path / "check.py"
    path.write_text(body)
    return sys.executable, str(path)


async def test_nothing_is_reported_before_the_first_results(tmp_path: Path) -> None:
    settings = HealthSettings(
        node="n",
        memory=HardwareMemory.load(tmp_path),
        devices=ScriptedDevices(),
        health_command=("true",),
    )
    monitor = HealthMonitor(settings, changed=lambda: None, is_idle=lambda: True)
    assert monitor.report() == []
    monitor._take((), (WELL,))
    assert monitor.report() == []
    monitor._check = await run_check([str(tmp_path / "nothing")], 1.0, {})
    ((fault,),) = [health.faults for health in monitor.report()]
    assert fault.detail.endswith("nothing: No such file or directory")
    spawned: list[object] = []
    report = start_monitor(None, spawned.append, lambda: None, list)
    assert (report(), spawned) == ([], [])  # an agent that watches nothing


async def test_states_and_xids_are_reported_while_they_are_present(tmp_path: Path) -> None:
    devices = ScriptedDevices()
    async with a_monitor(tmp_path, devices=devices, uuids=("a", "b")) as watched:
        await watched.until_faults()
        assert devices.watched == ("a", "b")
        devices.states[1] = DeviceState(is_lost=True)
        await watched.until_faults("1 lost: the driver has lost it")
        devices.states[1] = WELL
        await watched.until_faults()
        devices.events.put(XidEvent(gpu=0, xid=31))
        devices.events.put(XidEvent(gpu=0, xid=79))
        await watched.until_faults("0 xid: Xid 79, GPU has fallen off the bus")
        assert watched.changes >= 4
    async with a_monitor(tmp_path, devices=ScriptedDevices(), uuids=("a", "b")) as again:
        await again.until_faults("0 xid: Xid 79, GPU has fallen off the bus")
        (tmp_path / "hardware.clear").touch()
        await again.until_faults()
    assert HardwareMemory.load(tmp_path).xids == {}


async def test_a_driver_that_does_not_answer_is_a_fault_of_the_node(tmp_path: Path) -> None:
    devices = ScriptedDevices()
    async with a_monitor(tmp_path, devices=devices) as watched:
        await watched.until_faults()
        devices.failure = ZeroDivisionError("a fault of the agent itself")
        await until(lambda: not any(t.name == "tessera-gpus" for t in threading.enumerate()))
        watched.now_s += STUCK_S + 1.0
        text = f"-1 lost: the driver of the GPUs has not answered for {STUCK_S:g} s"
        await watched.until_faults(text)


async def test_a_check_of_the_site_is_a_fault_until_it_passes(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    look = f"import os, sys; os.path.exists({str(flag)!r}) and sys.exit(os.environ['TESSERA_NODE'])"
    script = a_script(tmp_path, look)
    async with a_monitor(tmp_path, health_command=script, health_period_s=PASS_S) as watched:
        await watched.until_faults()
        flag.touch()
        await watched.until_faults("-1 site: n")
        flag.unlink()
        await watched.until_faults()


async def test_a_repaired_node_is_tested_once_it_is_idle(tmp_path: Path) -> None:
    runs, devices = tmp_path / "runs", ScriptedDevices()
    script = a_script(tmp_path, f"open({str(runs)!r}, 'a').write('x')")
    async with a_monitor(tmp_path, devices=devices, validate_command=script) as watched:
        watched.idle = False
        await watched.until_faults()
        devices.states[0] = DeviceState(uncorrected_errors=1)
        await watched.until_faults("0 ecc: uncorrectable memory errors (ECC)")
        devices.states[0] = WELL
        await watched.until_faults("-1 validation: the validation has not passed yet")
        assert not runs.exists()
        watched.idle = True
        await watched.until_faults()
    assert runs.read_text() == "x"
    assert not HardwareMemory.load(tmp_path).unvalidated


async def test_a_failed_validation_stays_until_it_is_asked_for_again(tmp_path: Path) -> None:
    runs, good = tmp_path / "runs", tmp_path / "good"
    script = a_script(
        tmp_path,
        "import os, sys\n"
        f"open({str(runs)!r}, 'a').write('x')\n"
        f"sys.exit(0 if os.path.exists({str(good)!r}) else 'GPU 1 is slow')\n",
    )
    memory = HardwareMemory.load(tmp_path)
    memory.unvalidated = True  # the agent was restarted before the node was tested
    memory.save()
    async with a_monitor(tmp_path, validate_command=script) as watched:
        await watched.until_faults("-1 validation: validation failed: GPU 1 is slow")
        good.touch()
        passes = watched.memory.passes
        await until(lambda: watched.memory.passes > passes + 2)
        assert runs.read_text() == "x"
        assert command.main(["clear", "--data-dir", str(tmp_path)]) == 0
        await watched.until_faults()
    assert runs.read_text() == "xx"


@pytest.mark.parametrize(
    ("body", "result"),
    [
        ("", CheckResult(passed=True)),
        ("print('all well')", CheckResult(passed=True)),
        ("import sys; sys.exit(7)", CheckResult(passed=False, detail="{} ended with 7")),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
            CheckResult(passed=False, detail="{} ended with -9"),
        ),
        (
            "import sys; print('x' * 10**7); sys.exit('a\\x00b\\n \\n')",
            CheckResult(passed=False, detail="a b"),
        ),
    ],
)
async def test_the_last_line_of_a_failed_check_is_its_detail(
    tmp_path: Path, body: str, result: CheckResult
) -> None:
    argv = a_script(tmp_path, body)
    expected = replace(result, detail=result.detail.format(argv[0]))
    assert await run_check(argv, PATIENCE_S, {}) == expected


async def test_a_check_that_does_not_end_is_killed_with_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    argv = a_script(
        tmp_path,
        "import subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\n"
        "child.wait()\n",
    )
    waiting = asyncio.create_task(run_check(argv, PATIENCE_S, {}))
    await until(lambda: pid.exists() and pid.read_text())
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await until(lambda: not is_running(int(pid.read_text())))
    late = await run_check(argv, 0.01, {})
    assert late == CheckResult(passed=False, detail=f"{argv[0]} did not end within 0.01 s")


def test_the_command_shows_what_is_remembered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = HardwareMemory.load(tmp_path)
    memory.uuids, memory.product = ("GPU-0",), "NVIDIA A40"
    memory.save()
    assert command.main(["show", "--data-dir", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "gpus": ["GPU-0"],
        "product": "NVIDIA A40",
        "xids": {},
        "unvalidated": False,
    }
    assert command.main(["clear", "--data-dir", str(tmp_path / "none")]) == 2
    assert "No such file" in capsys.readouterr().err
