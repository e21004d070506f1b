"""The nodes of the demonstration: two with virtual GPUs, or this machine with its own."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tessera.estimator.hardware import CATALOGUE
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.values import GpuType
from tessera.service.agent.hardware.discovery import describe_node
from tessera.service.agent.hardware.memory import HardwareMemory
from tessera.service.agent.hardware.nvml import NvmlDevices

VIRTUAL_TYPE: Final = "cpu"
"""The GPU type of virtual GPUs, which are processes."""

VIRTUAL_MEMORY_BYTES: Final = 2**30
UNKNOWN_MEMORY_BYTES: Final = 16 * 2**30
"""The memory of a GPU type that the catalogue lacks. The demonstration's models need much less."""

REPEATABLE: Final = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_FLAGS": "--xla_gpu_deterministic_ops=true",
}
"""Variables with which programs in JAX leave room for others on a GPU, and add up in one order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The nodes, which all have GPUs of one type.

    ``is_virtual`` is whether programs run on the CPU in place of GPUs. ``environment`` are variables
    that programs need here, under Tessera and outside of it.
    """

    nodes: tuple[NodeSpec, ...]
    gpu_type: GpuType
    is_virtual: bool
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of all nodes."""
        return sum(node.gpus for node in self.nodes)

    @property
    def node_gpus(self) -> int:
        """Return the number of GPUs of the largest node."""
        return max(node.gpus for node in self.nodes)

    def __str__(self) -> str:
        """Return the fleet in words."""
        count, nodes = self.gpus, len(self.nodes)
        kind = "virtual GPU" if self.is_virtual else f"{self.gpu_type.name} GPU"
        return f"{count} {kind}{'s' * (count > 1)} on {nodes} node{'s' * (nodes > 1)}"


def virtual_fleet(nodes: int, node_gpus: int) -> Fleet:
    """Return nodes whose GPUs are processes of this machine's CPU."""
    return Fleet(
        nodes=tuple(
            NodeSpec(name=f"node-{number}", gpu_type=VIRTUAL_TYPE, gpus=node_gpus, rack="rack")
            for number in range(nodes)
        ),
        gpu_type=GpuType(name=VIRTUAL_TYPE, memory_bytes=VIRTUAL_MEMORY_BYTES),
        is_virtual=True,
    )


def own_fleet(nvml: Any) -> Fleet:
    """Return this machine as a node, with the GPUs that NVIDIA's driver reports.

    ``nvml`` is the module ``pynvml``.

    Raises:
        InvalidInput: the driver cannot be reached, or the GPUs cannot be those of a node.
        Unavailable: the driver does not list them.
    """
    devices = NvmlDevices(nvml).list()
    found = describe_node(socket.gethostname(), devices, HardwareMemory(Path()))
    known = {hardware.name: hardware.gpu_type for hardware in CATALOGUE}
    unknown = GpuType(name=found.gpu_type, memory_bytes=UNKNOWN_MEMORY_BYTES)
    return Fleet(
        nodes=(NodeSpec(name=found.node, gpu_type=found.gpu_type, gpus=found.gpus),),
        gpu_type=known.get(found.gpu_type, unknown),
        is_virtual=False,
        environment=REPEATABLE,
    )
