"""The insides of hosts: GPUs, their connections, and the NIC near each GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.state.topologies.drafts import TopologyDraft
from tessera.formulation.state.topologies.topology import Tier

GBIT_BYTES: Final = 1e9 / 8
"""Bytes per second of 1 Gb/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostShape:
    """The hardware of one kind of host.

    Speeds are of one direction. Delays are of one message on one link. Without ``gpu_pcie`` and
    ``nic_pcie``, GPUs and NICs are spread evenly over PCIe switches, in order. If there are several
    PCIe switches, they are joined to one root by links of the same speed.
    """

    gpus: int
    nics: int
    pcie_switches: int
    nic_bytes_per_s: float  # of one, all its ports together
    pcie_bytes_per_s: float  # of a slot
    nvlink_bytes_per_s: float = 0.0  # of one GPU, to all others together; 0 if there is only PCIe
    gpu_pcie: tuple[int, ...] = ()  # switch of each GPU
    nic_pcie: tuple[int, ...] = ()
    nic_delay_s: float = 0.0
    pcie_delay_s: float = 0.0
    nvlink_delay_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a host that cannot be built. The topology checks speeds and delays."""
        for name in ("gpus", "nics", "pcie_switches"):
            if getattr(self, name) < 1:
                raise InvalidInput(name, f"is {getattr(self, name)}; it must be at least 1")
        for name, count in (("gpu_pcie", self.gpus), ("nic_pcie", self.nics)):
            given = getattr(self, name)
            if given and (len(given) != count or not set(given) <= set(range(self.pcie_switches))):
                raise InvalidInput(
                    name,
                    f"must name a PCIe switch, 0 to {self.pcie_switches - 1}, for each of the"
                    f" {count} devices",
                )

    @property
    def links(self) -> int:
        """Return the number of links inside a host, which ``build`` adds."""
        nvlinks = self.gpus if self.nvlink_bytes_per_s else 0
        roots = self.pcie_switches if self.pcie_switches > 1 else 0
        return 2 * (nvlinks + self.gpus + self.nics + roots)

    def build(self, draft: TopologyDraft, name: str) -> list[int]:
        """Add a host and return the vertices of its NICs."""
        host = draft.host(name)
        gpus = [draft.vertex(f"{name}/gpu-{i}", Tier.GPU, host) for i in range(self.gpus)]
        pcie = [
            draft.vertex(f"{name}/pcie-{i}", Tier.PCIE, host) for i in range(self.pcie_switches)
        ]
        nics = [draft.vertex(f"{name}/nic-{i}", Tier.NIC, host) for i in range(self.nics)]
        if self.nvlink_bytes_per_s:
            switch = draft.vertex(f"{name}/nvswitch", Tier.NVSWITCH, host)
            for gpu in gpus:
                draft.cable(gpu, switch, self.nvlink_bytes_per_s, self.nvlink_delay_s)
        slots = [*zip(gpus, self._spread(self.gpu_pcie, self.gpus), strict=True)]
        slots += zip(nics, self._spread(self.nic_pcie, self.nics), strict=True)
        for device, at in slots:
            draft.cable(device, pcie[at], self.pcie_bytes_per_s, self.pcie_delay_s)
        if len(pcie) > 1:
            root = draft.vertex(f"{name}/pcie-root", Tier.PCIE, host)
            for switch in pcie:
                draft.cable(switch, root, self.pcie_bytes_per_s, self.pcie_delay_s)
        return nics

    def _spread(self, given: tuple[int, ...], count: int) -> tuple[int, ...]:
        return given or tuple(i * self.pcie_switches // count for i in range(count))


A100_HOST: Final = HostShape(
    gpus=8,
    nics=4,
    pcie_switches=4,
    nic_bytes_per_s=200 * GBIT_BYTES,
    pcie_bytes_per_s=31.5e9,
    nvlink_bytes_per_s=300e9,
)
"""Crux's testbed (section 6): 8 A100, 4 x 200 Gb/s, and one NIC for every two GPUs.

PCIe is 4.0 x16. NVLink 3 is by NVIDIA's data sheet, 600 GB/s in both directions together. The
wiring of PCIe switches is our assumption.
"""

PCIE_HOST: Final = HostShape(
    gpus=8, nics=2, pcie_switches=2, nic_bytes_per_s=100 * GBIT_BYTES, pcie_bytes_per_s=15.75e9
)
"""A host without NVLink. It is an assumption: PCIe 3.0 x16, and two switches.

Each switch has four GPUs and a NIC of 100 Gb/s.
"""

SHAPES: Final = {"a100": A100_HOST, "pcie": PCIE_HOST}
"""Shapes with a name, as files write them."""
