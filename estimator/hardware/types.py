"""Properties of a GPU type that are known without measurements."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import ArrayLike

from tessera.formulation.base.tables import Floats
from tessera.formulation.base.values import GpuType
from tessera.formulation.records.estimates import HostRates

GIB = 2**30
PCIE3_BYTES_PER_S = 16e9
PCIE4_BYTES_PER_S = 32e9
PCIE5_BYTES_PER_S = 64e9
"""PCI Express x16 in one direction as data sheets of GPUs round it, e.g. 64 GB/s in both directions
for 4.0 ("NVIDIA A100 Tensor Core GPU"), and 128 GB/s for 5.0 ("NVIDIA H100 Tensor Core GPU")."""


class Link(StrEnum):
    """A connection of the GPUs in a node."""

    NVLINK = "nvlink"
    XGMI = "xgmi"
    PCIE = "pcie"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A GPU type and its node. Bandwidths are in one direction, and FLOP/s are dense peaks."""

    name: str
    memory_bytes: int
    fp32_flops: float  # per second, without tensor cores
    fp16_flops: float  # per second, on tensor cores, fp32 accumulate
    tf32_flops: float | None = None  # per second, on tensor cores; if None, the type has no tf32
    bf16_flops: float | None = None  # if None, as fp16
    fp8_flops: float | None = None  # per second, on tensor cores; if None, the type has no fp8
    memory_bytes_per_s: float
    gpus_per_node: int
    link: Link = Link.NVLINK
    link_bytes_per_s: float  # from one GPU to its neighbours in the node
    network_bytes_per_s: float  # of one node; shared by its GPUs
    host_bytes_per_s: float = PCIE4_BYTES_PER_S  # between a GPU and its host
    host_update_bytes_per_s: float = 100e9
    """Bytes of optimizer states that the processors of a node read and write in a second. In
    ZeRO-Offload (ATC 2021), Table 4, they update 10 G parameters of some 32 bytes each in 2.6 s."""
    host_cores: int = 48
    """CPU cores that reach ``host_update_bytes_per_s``. Fewer cores reach their share. The node in
    ZeRO-Offload's Table 3 has two Xeon Platinum 8168 of 24 cores each."""
    copied_bytes_per_s: float | None = None
    """Measured bandwidth between pinned memory of the host and one GPU, which copies alone. If it is
    None, it was not measured."""
    core_rates: tuple[tuple[int, float], ...] = ()
    """Measured: numbers of CPU cores, rising, and the bytes of states that they update in a second.
    If it is empty, nothing was measured."""

    @property
    def gpu_type(self) -> GpuType:
        """Return this hardware as the GPU type of a cluster."""
        return GpuType(name=self.name, memory_bytes=self.memory_bytes)

    def with_host(self, rates: HostRates) -> Hardware:
        """Return the type with the rates of hosts that were measured. The others stay."""
        fastest = max((rate for _, rate in rates.updates), default=self.host_update_bytes_per_s)
        return replace(
            self,
            copied_bytes_per_s=rates.copied_bytes_per_s or self.copied_bytes_per_s,
            host_update_bytes_per_s=fastest,
            core_rates=rates.updates or self.core_rates,
        )

    def updated_bytes_per_s(self, cores: ArrayLike) -> Floats:
        """Return the bytes of optimizer states that some cores of a node read and write in a second.

        Rates between measured numbers of cores are interpolated. More cores than were measured, or
        than :attr:`host_cores`, are not faster, because memory limits them.
        """
        points = self.core_rates or ((self.host_cores, self.host_update_bytes_per_s),)
        known, rates = zip((0, 0.0), *points, strict=True)
        asked = np.asarray(cores, dtype=np.float64)
        return np.asarray(np.interp(asked, known, rates), dtype=np.float64)

    def flops(self, dtype: str) -> float:
        """Return the peak FLOP/s of matrix products in ``f32``, ``tf32``, ``bf16`` or ``f16``.

        A type without tf32 uses f32.
        """
        match dtype:
            case "f32":
                return self.fp32_flops
            case "tf32":
                return self.tf32_flops if self.tf32_flops is not None else self.fp32_flops
            case "bf16":
                return self.bf16_flops if self.bf16_flops is not None else self.fp16_flops
            case "f16":
                return self.fp16_flops
        raise ValueError(f"unknown type {dtype!r}")
