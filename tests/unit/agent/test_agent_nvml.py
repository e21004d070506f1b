"""The GPUs of NVIDIA's driver, on a fake of its library that has the functions of the real one."""

from __future__ import annotations

import importlib.util
import inspect

import pytest

from tessera.formulation.errors import InvalidInput, Unavailable
from tessera.service.agent.hardware.devices import DeviceState, XidEvent
from tessera.service.agent.hardware.nvml import MAX_EVENTS, REOPEN_S, NvmlDevices
from tests.support.logged import logged_lines
from tests.support.nvml import FakeGpu, FakeNvml, some_gpus


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def watched(nvml: FakeNvml, clock: Clock | None = None) -> NvmlDevices:
    """Return the devices of the fake, all watched."""
    clock = clock or Clock()
    devices = NvmlDevices(nvml, clock, clock.sleep)
    devices.watch([device.uuid for device in devices.list()])
    return devices


WELL = DeviceState(temperature_c=40, shutdown_c=92, recovery="")


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


def test_healthy_gpus_are_listed_and_read() -> None:
    nvml = FakeNvml(*some_gpus(2))
    devices = watched(nvml)
    assert [device.uuid for device in devices.list()] == ["GPU-0", "GPU-1"]
    assert [device.product for device in devices.list()] == 2 * ["NVIDIA A100-SXM4-40GB"]
    assert devices.read() == (WELL, WELL)


def test_each_value_of_a_broken_gpu_is_read() -> None:
    gpu = FakeGpu(
        uuid="x", uncorrected=3, remapped=(1, 2, 1, 1), throttle=0x44, temperature=93, recovery=1
    )
    (state,) = watched(FakeNvml(gpu)).read()
    assert state == DeviceState(
        uncorrected_errors=3,
        remap_pending=True,
        remap_failed=True,
        is_slowed=True,
        temperature_c=93,
        shutdown_c=92,
        recovery="a reset of the GPU",
    )


def test_clocks_that_software_lowers_are_not_a_slowdown() -> None:
    gpu = FakeGpu(uuid="x", throttle=0x20 | 0x4 | 0x80)
    assert not watched(FakeNvml(gpu)).read()[0].is_slowed


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
    (state,) = watched(FakeNvml(FakeGpu(uuid="x", fails={function: code}))).read()
    values = (state.is_lost, state.problem, state.recovery or "", state.uncorrected_errors)
    assert values == (False, "", "", 0)


def test_a_gpu_without_a_temperature_of_shutdown_is_not_too_hot() -> None:
    (state,) = watched(FakeNvml(FakeGpu(uuid="x", shutdown=0))).read()
    assert (state.temperature_c, state.shutdown_c) == (40, None)


def test_an_older_driver_is_asked_by_the_older_names() -> None:
    gpu = FakeGpu(
        uuid="x", throttle=0x40, fails={"nvmlDeviceGetCurrentClocksEventReasons": 13, "field": 3}
    )
    (state,) = watched(FakeNvml(gpu)).read()
    assert state.is_slowed
    assert state.recovery is None


def test_a_lost_gpu_an_unreadable_one_and_one_that_needs_a_reset_differ() -> None:
    lost, odd, tired = (FakeGpu(uuid=u) for u in "abc")
    nvml = FakeNvml(lost, odd, tired)
    devices = watched(nvml)
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
    devices = watched(nvml, clock)
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
    devices = watched(nvml, clock)
    nvml.failure = nvml.NVML_ERROR_DRIVER_NOT_LOADED
    assert all(state.problem for state in devices.read())
    clock.now_s += REOPEN_S
    assert all(state.is_lost for state in devices.read())
    assert devices.wait(5.0) == ()
    nvml.failure, nvml.opened = 0, 0
    clock.now_s += REOPEN_S
    assert devices.read() == (WELL, WELL)


def test_xids_carry_the_index_of_their_gpu_even_if_it_is_lost() -> None:
    gpus = some_gpus(3)
    nvml = FakeNvml(*gpus)
    devices = watched(nvml)
    gpus[2].is_lost = True
    nvml.send_xid(gpus[2], 79)
    nvml.send_xid(gpus[0], 31)
    nvml.send_xid(gpus[0], 1, kind=0x1)  # another kind of event
    assert devices.wait(5.0) == (XidEvent(gpu=2, xid=79), XidEvent(gpu=0, xid=31))
    assert nvml.waits_ms == [5000, 0, 0, 0]


def test_a_storm_of_xids_is_read_in_parts() -> None:
    (gpu,) = some_gpus(1)
    nvml = FakeNvml(gpu)
    devices = watched(nvml)
    for _ in range(MAX_EVENTS + 5):
        nvml.send_xid(gpu, 13)
    assert [len(devices.wait(1.0)) for _ in range(3)] == [MAX_EVENTS, 5, 0]


def test_waiting_without_events_takes_its_time_even_if_the_library_fails_at_once() -> None:
    clock, nvml = Clock(), FakeNvml(*some_gpus(1))
    devices = watched(nvml, clock)
    assert devices.wait(5.0) == ()
    assert clock.now_s == 5.0


def test_gpus_without_events_are_logged_and_still_read(caplog: pytest.LogCaptureFixture) -> None:
    devices = watched(FakeNvml(FakeGpu(uuid="x", fails={"events": 0})))
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
