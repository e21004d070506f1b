"""The devices of a node, as a port: what they are, and what their driver reports of their health."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU of this node. ``uuid`` stays the same when other GPUs come and go."""

    uuid: str
    product: str
    uses_mig: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class XidEvent:
    """An Xid that the driver reported. A negative ``gpu`` means that its GPU is not known."""

    gpu: int
    xid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """The present state of a GPU. Values that its driver does not report have their defaults.

    ``problem`` is the driver's error if the GPU cannot be read. ``recovery`` is the action that the
    driver asks for ("" if it asks for none), or None if the driver does not say.
    """

    is_lost: bool = False
    problem: str = ""
    uncorrected_errors: int = 0  # since the last reset
    remap_pending: bool = False
    remap_failed: bool = False
    is_slowed: bool = False  # by heat, in hardware
    temperature_c: int | None = None
    shutdown_c: int | None = None
    recovery: str | None = None


class Devices(Protocol):
    """The devices of this node. Calls may block; all but ``list`` belong to one thread."""

    def list(self) -> tuple[Device, ...]:
        """Return the GPUs that the driver has now, in its order. Raises Unavailable."""
        ...

    def watch(self, uuids: Sequence[str]) -> None:
        """Watch these GPUs from now on. Their positions are the indices of states and events."""
        ...

    def wait(self, seconds: float) -> tuple[XidEvent, ...]:
        """Wait for Xids, and return those that came. Without any, return after ``seconds``."""
        ...

    def read(self) -> tuple[DeviceState, ...]:
        """Return the present state of each watched GPU."""
        ...


class VirtualDevices:
    """GPUs that do not exist, for machines without. They are always healthy."""

    def __init__(
        self, gpus: int, gpu_type: str, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        """Remember the number and the type of the GPUs. ``sleep`` blocks its thread."""
        self._devices = tuple(
            Device(uuid=f"virtual-{index}", product=gpu_type) for index in range(gpus)
        )
        self._watched = len(self._devices)
        self._sleep = sleep

    def list(self) -> tuple[Device, ...]:
        """Return the GPUs."""
        return self._devices

    def watch(self, uuids: Sequence[str]) -> None:
        """Watch these GPUs."""
        self._watched = len(uuids)

    def wait(self, seconds: float) -> tuple[XidEvent, ...]:
        """Return no Xid after ``seconds``."""
        self._sleep(seconds)
        return ()

    def read(self) -> tuple[DeviceState, ...]:
        """Return that all GPUs are well."""
        return self._watched * (DeviceState(),)
