"""The GPU types of the papers' clusters, with the figures of their public data sheets."""

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

H100 = Hardware(  # "NVIDIA H100 Tensor Core GPU" data sheet, column H100 SXM; dense is half of sparse
    name="h100", memory_bytes=80 * GIB, fp32_flops=67e12, fp16_flops=989.5e12,
    memory_bytes_per_s=3350e9, gpus_per_node=8,
    link_bytes_per_s=450e9,  # NVLink 4: 900 GB/s both directions (Arena, section 5.1)
    network_bytes_per_s=_HDR,  # ConnectX-6 (Arena, Table 1)
)  # fmt: skip

L20 = Hardware(  # as sold: 59.8 TFLOP/s fp32 (halved as for the A40: Ada's SM shares its lanes too,
    # "NVIDIA Ada GPU Architecture"), 119.5 TFLOP/s fp16, 48 GB at 864 GB/s
    name="l20", memory_bytes=48 * GIB, fp32_flops=59.8e12 / 2, fp16_flops=119.5e12,
    memory_bytes_per_s=864e9, gpus_per_node=16,
    link_bytes_per_s=_PCIE4_STAGED,  # PCI Express 4.0 (Arena, section 5.1)
    network_bytes_per_s=_HDR,  # ConnectX-6 (Arena, Table 1)
)  # fmt: skip

A800 = Hardware(  # the A100 80GB SXM of the A100's data sheet with NVLink cut to 400 GB/s
    name="a800", memory_bytes=80 * GIB, fp32_flops=19.5e12, fp16_flops=312e12,
    memory_bytes_per_s=2039e9, gpus_per_node=8,
    link_bytes_per_s=200e9,  # 400 GB/s both directions (Morphling, section 7)
    network_bytes_per_s=100e9,  # RDMA, 100 GB/s a node (Morphling, section 7)
)  # fmt: skip

ALL: tuple[Hardware, ...] = (A100, V100, A40, A10)
"""The simulated cluster of Crius, Table 1: what sample profiles are made for unless told otherwise."""

CATALOGUE: tuple[Hardware, ...] = (*ALL, H100, L20, A800)
