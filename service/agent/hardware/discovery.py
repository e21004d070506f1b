"""The node that an agent finds itself on: its name, its GPU type and its number of GPUs."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Final

from tessera.formulation.base.errors import InvalidInput
from tessera.service.agent.hardware.devices import Device
from tessera.service.agent.hardware.memory import HardwareMemory
from tessera.v1 import agents_pb2 as pb

log = logging.getLogger(__name__)

GPU_TYPES: Final = {
    "a10": "a10",
    "a10g": "a10g",
    "a30": "a30",
    "a40": "a40",
    "a100-sxm4-40gb": "a100",
    "a100-sxm4-80gb": "a100-80",
    "a100-pcie-40gb": "a100-pcie",
    "a100-80gb-pcie": "a100-80-pcie",
    "a800-sxm4-80gb": "a800",
    "a800-80gb-pcie": "a800-pcie",
    "b200": "b200",
    "gb200": "gb200",
    "gh200-480gb": "gh200",
    "h20": "h20",
    "h100-80gb-hbm3": "h100",
    "h100-pcie": "h100-pcie",
    "h100-nvl": "h100-nvl",
    "h200": "h200",
    "h200-nvl": "h200-nvl",
    "h800": "h800",
    "l4": "l4",
    "l20": "l20",
    "l40": "l40",
    "l40s": "l40s",
    "t4": "t4",
    "v100-sxm2-16gb": "v100-16",
    "v100-sxm2-32gb": "v100",
    "v100-sxm3-32gb": "v100",
    "v100-pcie-16gb": "v100-16-pcie",
    "v100-pcie-32gb": "v100-pcie",
}
"""GPU types by the products' names, without the vendor's, in lower case and with hyphens. Types that
the catalogue of estimates has carry its names there. Those of PCIe cards have names of their own,
because they are slower.
"""

_VENDOR: Final = re.compile(r"^(nvidia|tesla|graphics device)\s+", re.IGNORECASE)
_NODE_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_BY_HAND: Final = "pass --node NAME:TYPE:GPUS"


def gpu_type_of(product: str) -> str:
    """Return the GPU type of a product. Raises InvalidInput: it is not known."""
    name = product.strip()
    while (shorter := _VENDOR.sub("", name)) != name:
        name = shorter
    gpu_type = GPU_TYPES.get(re.sub(r"\s+", "-", name.lower()))
    if gpu_type is None:
        raise InvalidInput("--discover", f"the GPU {product!r} is not known; {_BY_HAND}")
    return gpu_type


def describe_node(
    host: str, devices: Sequence[Device], memory: HardwareMemory, gpu_type: str = ""
) -> pb.AgentNode:
    """Return the node of ``host`` with these GPUs. Those that were there at an earlier start count, too.

    If ``gpu_type`` is "", it is found by the products' names.

    Raises:
        InvalidInput: there are no GPUs, of several types, of an unknown one, or in MIG mode; or the
            host's name cannot be that of a node.
    """
    if not _NODE_ID.fullmatch(host):
        raise InvalidInput(
            "--discover", f"the host's name {host!r} cannot be the name of a node; {_BY_HAND}"
        )
    products = sorted({device.product for device in devices}) or [memory.product]
    if not devices and not memory.uuids:
        raise InvalidInput(
            "--discover",
            f"the driver has no GPUs; check it with nvidia-smi, or {_BY_HAND}, or --virtual-gpus GPUS",
        )
    for index, device in enumerate(devices):
        if device.uses_mig:
            raise InvalidInput(
                "--discover",
                f"GPU {index} is divided (MIG), and jobs get whole GPUs; run `nvidia-smi -mig 0` as root"
                " on this node, and start the agent again",
            )
    types = [gpu_type] if gpu_type else sorted({gpu_type_of(product) for product in products})
    if len(types) > 1:
        raise InvalidInput(
            "--discover",
            f"there are GPUs of several types ({', '.join(types)}), but a node holds GPUs of one type;"
            f" {_BY_HAND} for each type, with an agent of its own",
        )
    gpus = len(expected_uuids(devices, memory))
    return pb.AgentNode(node=host, gpu_type=types[0], gpus=gpus)


def expected_uuids(devices: Sequence[Device], memory: HardwareMemory) -> tuple[str, ...]:
    """Return the GPUs that should be there: those of an earlier start if some are missing now.

    Otherwise a restart after a GPU was lost would make the node smaller, and the others' indices
    would change under the jobs.
    """
    found = tuple(device.uuid for device in devices)
    missing = [uuid for uuid in memory.uuids if uuid not in found]
    if len(found) >= len(memory.uuids):
        return found
    log.error(
        "GPUs are missing; if they were removed for good, run `tessera-agent health clear` and"
        " restart the agent",
        extra={"event": "gpus_missing", "missing": missing, "expected": len(memory.uuids)},
    )
    return memory.uuids
