"""The GPUs of NVIDIA's driver, through its management library (NVML)."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from tessera.formulation.base.errors import InvalidInput, Unavailable
from tessera.formulation.base.release import install_hint
from tessera.service.agent.hardware.devices import Device, DeviceState, XidEvent

log = logging.getLogger(__name__)

MAX_EVENTS: Final = 100
"""Largest number of Xids that one call returns. The rest follow in the next one."""

REOPEN_S: Final = 30.0
"""Seconds between attempts to open the library again while a GPU cannot be read."""

_RECOVERY_FIELD: Final = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
_RECOVERIES: Final = {
    1: "a reset of the GPU",
    2: "a reboot of the node",
    3: "the end of all peer-to-peer traffic",
    4: "the end of all work on the GPU, and its reset",
    5: "a recovery of the IMEX domain",
    6: "a reset of the GPU's bus",
    7: "a reboot of the system",
}
"""The recovery actions that the driver asks for, by nvmlDeviceGpuRecoveryAction_t. With 0 it
asks for nothing.
"""


def load_nvml() -> Any:
    """Return the module ``pynvml``, opened. Raises InvalidInput: it or the driver is missing."""
    try:
        import pynvml  # noqa: PLC0415 - an extra that few agents have
    except ImportError as error:
        raise InvalidInput(
            "--discover",
            f"needs NVIDIA's library for Python; install it with: {install_hint('gpus')}",
        ) from error
    return pynvml


class NvmlDevices:
    """The GPUs of this node, as NVIDIA's driver reports them.

    ``nvml`` is the module ``pynvml``, or one with the same functions.
    """

    def __init__(
        self,
        nvml: Any,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Open the library.

        Raises:
            InvalidInput: the driver cannot be reached.
        """
        self._nvml, self._clock, self._sleep = nvml, clock, sleep
        self._uuids: tuple[str, ...] = ()
        self._handles: list[Any | None] = []
        self._indices: dict[int, int] = {}  # by the addresses of handles
        self._events: Any = None
        self._opened_s = clock()
        self._silent = frozenset(  # errors that mean that there is no such value
            {
                nvml.NVML_ERROR_NOT_SUPPORTED,
                nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
                nvml.NVML_ERROR_NO_PERMISSION,
            }
        )
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            raise InvalidInput(
                "--discover",
                f"cannot reach NVIDIA's driver ({error}); check it with nvidia-smi, or pass"
                " --node NAME:TYPE:GPUS",
            ) from error

    def list(self) -> tuple[Device, ...]:
        """Return the GPUs that the driver has now, in its order. Raises Unavailable."""
        nvml = self._nvml
        try:
            handles = [
                nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())
            ]
            return tuple(
                Device(
                    uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
                    product=_text(nvml.nvmlDeviceGetName(handle)),
                    uses_mig=self._uses_mig(handle),
                )
                for handle in handles
            )
        except nvml.NVMLError as error:
            raise Unavailable(f"NVIDIA's driver does not list the GPUs: {error}") from error

    def watch(self, uuids: Sequence[str]) -> None:
        """Watch these GPUs from now on."""
        nvml = self._nvml
        self._uuids = tuple(uuids)
        self._handles, self._indices, self._events = [], {}, None
        self._opened_s = self._clock()
        for index, uuid in enumerate(self._uuids):
            try:
                handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
                self._indices[_address(handle)] = index
            except nvml.NVMLError:
                handle = None  # it is lost; ``read`` reports it
            self._handles.append(handle)
        try:
            self._events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError as error:
            log.warning("cannot watch for Xids", extra={"event": "xids_unwatched", "error": error})
            return
        for index, handle in enumerate(self._handles):
            self._register(index, handle)

    def wait(self, seconds: float) -> tuple[XidEvent, ...]:
        """Wait for Xids, and return those that came."""
        nvml, begun_s, found = self._nvml, self._clock(), list[XidEvent]()
        while self._events is not None and len(found) < MAX_EVENTS:
            timeout_ms = 0 if found else int(1000 * seconds)
            try:
                data = nvml.nvmlEventSetWait_v2(self._events, timeout_ms)
            except nvml.NVMLError:
                break  # the time is over, or a GPU is lost, which ``read`` reports
            if data.eventType & nvml.nvmlEventTypeXidCriticalError:
                found.append(XidEvent(gpu=self._index_of(data.device), xid=int(data.eventData)))
        left_s = seconds - (self._clock() - begun_s)
        if not found and left_s > 0:  # it may have failed at once
            self._sleep(left_s)
        return tuple(found)

    def read(self) -> tuple[DeviceState, ...]:
        """Return the present state of each watched GPU.

        While one cannot be read, the library is opened again now and then, because only that shows
        a GPU that was reset.
        """
        states = tuple(self._read(handle) for handle in self._handles)
        is_broken = any(state.is_lost or state.problem for state in states)
        if not is_broken or self._clock() - self._opened_s < REOPEN_S:
            return states
        self._reopen()
        return tuple(self._read(handle) for handle in self._handles)

    def _read(self, handle: Any | None) -> DeviceState:
        nvml = self._nvml
        if handle is None:
            return DeviceState(is_lost=True)
        try:
            _, _, pending, failed = self._ask("nvmlDeviceGetRemappedRows", handle) or (0, 0, 0, 0)
            slowed = nvml.nvmlClocksThrottleReasonHwThermalSlowdown
            return DeviceState(
                uncorrected_errors=self._ask(
                    "nvmlDeviceGetTotalEccErrors",
                    handle,
                    nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                    nvml.NVML_VOLATILE_ECC,
                )
                or 0,
                remap_pending=bool(pending),
                remap_failed=bool(failed),
                is_slowed=bool((self._throttle_reasons(handle) or 0) & slowed),
                temperature_c=self._temperature_c(handle),
                shutdown_c=self._ask(
                    "nvmlDeviceGetTemperatureThreshold",
                    handle,
                    nvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN,
                )
                or None,
                recovery=self._recovery(handle),
            )
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_NOT_FOUND):
                return DeviceState(is_lost=True)
            if error.value == nvml.NVML_ERROR_RESET_REQUIRED:
                return DeviceState(recovery=_RECOVERIES[1])
            return DeviceState(problem=str(error))

    def _ask(self, function: str, *arguments: Any) -> Any:
        """Call a function, and return its value, or None if the GPU or the driver has none.

        Raises:
            NVMLError: the GPU cannot be read.
        """
        call = getattr(self._nvml, function, None)
        if call is None:
            return None
        try:
            return call(*arguments)
        except self._nvml.NVMLError as error:
            if error.value in self._silent:
                return None
            raise

    def _throttle_reasons(self, handle: Any) -> int | None:
        """Return the reasons for lower clocks. Drivers before R535 know the function's older name."""
        newer = self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if newer is not None:
            return int(newer)
        older = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        return None if older is None else int(older)

    def _temperature_c(self, handle: Any) -> int | None:
        """Return the temperature in degrees. CUDA 14 drops the older function."""
        sensor = self._nvml.NVML_TEMPERATURE_GPU
        for function in ("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV"):
            if (value := self._ask(function, handle, sensor)) is not None:
                return int(value)
        return None

    def _recovery(self, handle: Any) -> str | None:
        values = self._ask("nvmlDeviceGetFieldValues", handle, [_RECOVERY_FIELD])
        if not values or values[0].nvmlReturn != self._nvml.NVML_SUCCESS:
            return None
        action = int(values[0].value.uiVal)
        return _RECOVERIES.get(action, f"recovery action {action}") if action else ""

    def _uses_mig(self, handle: Any) -> bool:
        mode = self._ask("nvmlDeviceGetMigMode", handle)
        return mode is not None and mode[0] == self._nvml.NVML_DEVICE_MIG_ENABLE

    def _register(self, index: int, handle: Any | None) -> None:
        if handle is None:
            return
        wanted = self._nvml.nvmlEventTypeXidCriticalError
        try:
            if self._nvml.nvmlDeviceGetSupportedEventTypes(handle) & wanted:
                self._nvml.nvmlDeviceRegisterEvents(handle, wanted, self._events)
                return
            problem = "its driver does not report them"
        except self._nvml.NVMLError as error:
            problem = str(error)
        log.warning(
            "cannot watch a GPU for Xids",
            extra={"event": "xids_unwatched", "gpu": index, "error": problem},
        )

    def _index_of(self, handle: Any) -> int:
        """Return the index of a handle in an event, or -1 if it is not known."""
        index = self._indices.get(_address(handle), -1)
        if index >= 0:
            return index
        try:
            uuid = _text(self._nvml.nvmlDeviceGetUUID(handle))
        except self._nvml.NVMLError:
            return -1
        return self._uuids.index(uuid) if uuid in self._uuids else -1

    def _reopen(self) -> None:
        """Open the library again, and look for the GPUs in it."""
        nvml = self._nvml
        for step in (self._free_events, nvml.nvmlShutdown, nvml.nvmlInit):
            try:
                step()
            except nvml.NVMLError as error:
                log.debug(
                    "cannot open NVML again", extra={"event": "nvml_not_opened", "error": error}
                )
        self.watch(self._uuids)

    def _free_events(self) -> None:
        if self._events is not None:
            self._nvml.nvmlEventSetFree(self._events)


def _address(handle: Any) -> int:
    return int(ctypes.cast(handle, ctypes.c_void_p).value or 0)


def _text(value: str | bytes) -> str:
    """Return a text of the library, which old releases return as bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
