"""The GPU types of the papers' simulated cluster, with the figures of their public data sheets."""

from __future__ import annotations

from dataclasses import dataclass

from formulation.snapshot import GpuType

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A GPU type and the node it comes in. Bandwidths are in one direction."""

    name: str
    memory_bytes: int
    fp32_flops: float  # per second, dense, without tensor cores
    fp16_flops: float  # per second, dense, on tensor cores, fp32 accumulate
    memory_bytes_per_s: float
    gpus_per_node: int
    link_bytes_per_s: float  # of one GPU to its neighbours in the node
    network_bytes_per_s: float  # of one node; shared by its GPUs

    @property
    def gpu_type(self) -> GpuType:
        """Return it as a cluster's GPU type."""
        return GpuType(name=self.name, memory_bytes=self.memory_bytes)


_EDR = 12.5e9  # ConnectX-5 product brief: EDR InfiniBand, one port of 100 Gb/s (Crius Table 1)
_HDR = 25e9  # ConnectX-6 product brief: HDR InfiniBand, one port of 200 Gb/s (Crius Table 1)
_PCIE4_STAGED = 16e9
"""PCI Express 4.0 x16 carries 32 GB/s a direction; without peer access every byte crosses the bus into
host memory and out again, which halves it."""

A100 = Hardware(  # "NVIDIA A100 Tensor Core GPU" data sheet, column A100 40GB SXM
    name="a100", memory_bytes=40 * GIB, fp32_flops=19.5e12, fp16_flops=312e12,
    memory_bytes_per_s=1555e9, gpus_per_node=4,
    link_bytes_per_s=300e9,  # NVLink 3: 600 GB/s both directions
    network_bytes_per_s=_EDR,
)  # fmt: skip

V100 = Hardware(  # "NVIDIA V100 Tensor Core GPU" data sheet, column V100 SXM2 32GB
    name="v100", memory_bytes=32 * GIB, fp32_flops=15.7e12, fp16_flops=125e12,
    memory_bytes_per_s=900e9, gpus_per_node=16,
    link_bytes_per_s=150e9,  # NVLink 2: 300 GB/s both directions
    network_bytes_per_s=_EDR,
)  # fmt: skip

A40 = Hardware(  # "NVIDIA A40" data sheet: 37.4 TFLOP/s fp32, 149.7 TFLOP/s fp16
    # Half of the quoted fp32 rate: the other half of the lanes is shared with integer work ("NVIDIA
    # Ampere GA102 GPU Architecture", section on the SM), which address arithmetic keeps busy.
    name="a40", memory_bytes=48 * GIB, fp32_flops=37.4e12 / 2, fp16_flops=149.7e12,
    memory_bytes_per_s=696e9, gpus_per_node=2, link_bytes_per_s=_PCIE4_STAGED,
    network_bytes_per_s=_EDR,
)  # fmt: skip

A10 = Hardware(  # "NVIDIA A10" data sheet: 31.2 TFLOP/s fp32 (halved as for the A40), 125 TFLOP/s fp16
    name="a10", memory_bytes=24 * GIB, fp32_flops=31.2e12 / 2, fp16_flops=125e12,
    memory_bytes_per_s=600e9, gpus_per_node=2, link_bytes_per_s=_PCIE4_STAGED,
    network_bytes_per_s=_HDR,
)  # fmt: skip

ALL: tuple[Hardware, ...] = (A100, V100, A40, A10)
