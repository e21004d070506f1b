"""The kernel's information on RDMA devices and interfaces under /sys."""

from __future__ import annotations

import re
from pathlib import Path

from tessera.service.agent.files import read_trusted

SYSFS_ROOT = Path("/sys")


def rdma_devices(interface: str, sys: Path = SYSFS_ROOT) -> tuple[str, ...]:
    """Return the RDMA devices of a network interface."""
    found = (sys / "class/infiniband").glob(f"*/device/net/{interface}")
    return tuple(sorted(path.parents[2].name for path in found))


def link_layers(device: str, sys: Path = SYSFS_ROOT) -> set[str]:
    """Return the link layers of an RDMA device's ports: ``Ethernet`` or ``InfiniBand``."""
    found = (sys / "class/infiniband" / device).glob("ports/*/link_layer")
    return {read_trusted(path).strip() for path in found}


def forced_traffic_class(device: str, sys: Path = SYSFS_ROOT) -> int | None:
    """Return the class that MLNX_OFED forces on all RC queue pairs of ``device``.

    It overrides the jobs' own marks. Return None if none is forced, or if the driver has no such
    file, like the upstream driver.
    """
    for path in sorted((sys / "class/infiniband" / device / "tc").glob("*/traffic_class")):
        found = re.search(r"Global tclass=(-?\d+)|\A\s*(-?\d+)\s*\Z", read_trusted(path))
        if found and int(found[1] or found[2]) >= 0:
            return int(found[1] or found[2])
    return None


def forced_traffic_classes(interface: str, sys: Path = SYSFS_ROOT) -> dict[str, int]:
    """Return the forced traffic class of each RDMA device of ``interface`` that has one."""
    classes = (
        (device, forced_traffic_class(device, sys)) for device in rdma_devices(interface, sys)
    )
    return {device: value for device, value in classes if value is not None}
