"""A fake of the module ``pynvml``: the functions that the agent calls, on GPUs that a test breaks."""

from __future__ import annotations

import ctypes
from collections import deque
from dataclasses import dataclass, field
from typing import Any


class _Struct(ctypes.Structure):
    pass


class NVMLError(Exception):
    """An error of the library, with its code."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return f"NVML Error with code {self.value}"


@dataclass
class FakeGpu:
    """A GPU, and what its driver reports. An error in ``fails`` is raised by that function."""

    uuid: str
    name: str = "NVIDIA A100-SXM4-40GB"
    is_lost: bool = False
    mig: int = 0
    uncorrected: int = 0
    remapped: tuple[int, int, int, int] = (0, 0, 0, 0)
    throttle: int = 0
    temperature: int = 40
    shutdown: int = 92
    recovery: int = 0
    fails: dict[str, int] = field(default_factory=dict)
    struct: _Struct = field(default_factory=_Struct)

    @property
    def handle(self) -> Any:
        return ctypes.pointer(self.struct)


@dataclass
class _Event:
    device: Any
    eventType: int
    eventData: int


@dataclass
class _Value:
    uiVal: int


@dataclass
class _Field:
    nvmlReturn: int
    value: _Value


class FakeNvml:
    """The module. ``gpus`` are those that the driver has; ``failure`` is an error of every call."""

    NVMLError = NVMLError
    NVML_SUCCESS = 0
    NVML_ERROR_UNINITIALIZED = 1
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_NO_PERMISSION = 4
    NVML_ERROR_NOT_FOUND = 6
    NVML_ERROR_DRIVER_NOT_LOADED = 9
    NVML_ERROR_TIMEOUT = 10
    NVML_ERROR_FUNCTION_NOT_FOUND = 13
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_ERROR_RESET_REQUIRED = 16
    NVML_ERROR_UNKNOWN = 999
    NVML_DEVICE_MIG_ENABLE = 1
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    NVML_TEMPERATURE_GPU = 0
    NVML_TEMPERATURE_THRESHOLD_SHUTDOWN = 0
    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230
    nvmlClocksThrottleReasonHwThermalSlowdown = 0x40
    nvmlEventTypeXidCriticalError = 0x8

    def __init__(self, *gpus: FakeGpu) -> None:
        self.gpus = list(gpus)
        self.failure = 0
        self.opened = 0
        self.freed = 0
        self.registered: set[str] = set()
        self.waits_ms: list[int] = []
        self._known = {gpu.uuid: gpu for gpu in gpus}
        self._events: deque[_Event] = deque()

    def send_xid(self, gpu: FakeGpu, xid: int, kind: int = 0x8) -> None:
        """Let the driver report an Xid to the event sets in which the GPU is registered."""
        if gpu.uuid in self.registered:
            self._events.append(_Event(gpu.handle, kind, xid))

    def nvmlInit(self) -> None:
        self._check("nvmlInit")
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self._check("nvmlShutdown")
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:
        self._check("nvmlDeviceGetCount")
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        self._check("nvmlDeviceGetHandleByIndex")
        return self.gpus[index].handle

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        self._check("nvmlDeviceGetHandleByUUID")
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                return gpu.handle
        raise NVMLError(self.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        return self._gpu("nvmlDeviceGetUUID", handle).uuid

    def nvmlDeviceGetName(self, handle: Any) -> str:
        return self._gpu("nvmlDeviceGetName", handle).name

    def nvmlDeviceGetMigMode(self, device: Any) -> list[int]:
        return 2 * [self._gpu("nvmlDeviceGetMigMode", device).mig]

    def nvmlDeviceGetTotalEccErrors(self, handle: Any, errorType: int, counterType: int) -> int:
        assert (errorType, counterType) == (1, 0)
        return self._gpu("nvmlDeviceGetTotalEccErrors", handle).uncorrected

    def nvmlDeviceGetRemappedRows(self, device: Any) -> tuple[int, int, int, int]:
        return self._gpu("nvmlDeviceGetRemappedRows", device).remapped

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int:
        assert sensor == 0
        return self._gpu("nvmlDeviceGetTemperature", handle).temperature

    def nvmlDeviceGetTemperatureThreshold(self, handle: Any, threshold: int) -> int:
        assert threshold == 0
        return self._gpu("nvmlDeviceGetTemperatureThreshold", handle).shutdown

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Any) -> int:
        return self._gpu("nvmlDeviceGetCurrentClocksEventReasons", handle).throttle

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any) -> int:
        return self._gpu("nvmlDeviceGetCurrentClocksThrottleReasons", handle).throttle

    def nvmlDeviceGetFieldValues(self, handle: Any, fieldIds: list[int]) -> list[_Field]:
        assert fieldIds == [230]
        gpu = self._gpu("nvmlDeviceGetFieldValues", handle)
        status = gpu.fails.get("field", 0)
        return [_Field(status, _Value(gpu.recovery))]

    def nvmlEventSetCreate(self) -> object:
        self._check("nvmlEventSetCreate")
        return object()

    def nvmlEventSetFree(self, eventSet: object) -> None:
        self._check("nvmlEventSetFree")
        self.freed += 1
        self.registered.clear()

    def nvmlDeviceGetSupportedEventTypes(self, handle: Any) -> int:
        gpu = self._gpu("nvmlDeviceGetSupportedEventTypes", handle)
        return gpu.fails.get("events", 0x8)

    def nvmlDeviceRegisterEvents(self, handle: Any, eventTypes: int, eventSet: object) -> None:
        assert eventTypes == 0x8
        self.registered.add(self._gpu("nvmlDeviceRegisterEvents", handle).uuid)

    def nvmlEventSetWait_v2(self, eventSet: object, timeoutms: int) -> _Event:
        self._check("nvmlEventSetWait_v2")
        self.waits_ms.append(timeoutms)
        if not self._events:
            raise NVMLError(self.NVML_ERROR_TIMEOUT)
        return self._events.popleft()

    def _check(self, function: str) -> None:
        if self.failure:
            raise NVMLError(self.failure)
        if function != "nvmlInit" and not self.opened:
            raise NVMLError(self.NVML_ERROR_UNINITIALIZED)

    def _gpu(self, function: str, handle: Any) -> FakeGpu:
        """Return the GPU of a handle, unless it is lost or the function fails on it."""
        self._check(function)
        address = ctypes.cast(handle, ctypes.c_void_p).value
        for gpu in self._known.values():
            if ctypes.addressof(gpu.struct) == address:
                if gpu.is_lost:
                    raise NVMLError(self.NVML_ERROR_GPU_IS_LOST)
                if function in gpu.fails:
                    raise NVMLError(gpu.fails[function])
                return gpu
        raise AssertionError("an unknown handle")


def some_gpus(number: int, name: str = "NVIDIA A100-SXM4-40GB") -> list[FakeGpu]:
    """Return healthy GPUs."""
    return [FakeGpu(uuid=f"GPU-{index}", name=name) for index in range(number)]
