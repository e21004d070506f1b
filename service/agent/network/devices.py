"""The kernel's information on RDMA devices and interfaces under /sys."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tessera.service.agent.files import read_trusted

SYSFS_ROOT = Path("/sys")

PORT_SETTING_CALLS = {
    "mlx5_core": "mlx5dv_modify_qp_udp_sport",
    "bnxt_en": "bnxt_re_dv_modify_qp_udp_sport",
}
"""PCI drivers whose library moves a live queue pair to another UDP source port.

The value is the call (rdma-core).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathControl:
    """A statement of whether the paths of a device's queue pairs can be chosen.

    ``reason`` gives the cause if they cannot, and the library call if they can.
    """

    device: str
    steerable: bool
    reason: str


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


def find_steering(
    device: str, *, adaptive_routing: bool, transport_moves_ports: bool, sys: Path = SYSFS_ROOT
) -> PathControl:
    """Return whether a path can be chosen for traffic of ``device``.

    ``adaptive_routing`` means that the fabric spreads packets itself, which the operator knows.
    ``transport_moves_ports`` means that the job's transport sets the source port of its queue pairs
    on request. NCCL's own transport does not.
    """
    base = sys / "class/infiniband" / device
    if not base.is_dir():
        return _not(device, "there is no such RDMA device")
    if link_layers(device, sys) - {"Ethernet"}:
        return _not(device, "InfiniBand routes by local identifier: there is no UDP source port")
    if adaptive_routing:
        return _not(device, "adaptive routing spreads packets whatever their source port")
    driver = (base / "device/driver").resolve().name
    if driver not in PORT_SETTING_CALLS:
        return _not(device, f"driver {driver} cannot modify the UDP source port of a queue pair")
    if not transport_moves_ports:
        return _not(
            device,
            "the job's transport does not set source ports (NCCL's own does not): only more queue"
            " pairs per connection spread its traffic",
        )
    return PathControl(device=device, steerable=True, reason=PORT_SETTING_CALLS[driver])


def _not(device: str, reason: str) -> PathControl:
    return PathControl(device=device, steerable=False, reason=f"not steerable: {reason}")
