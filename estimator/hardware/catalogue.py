"""The GPU types of the papers' clusters and their successors, with figures of public data sheets.

The first seven are nodes of the papers' clusters, including network ports. For the others, the node
is the vendor's. If a data sheet quotes FLOP/s with sparsity, or a link in both directions, half of
the value is used. Memory is the data sheet's number of GB taken as GiB, which agrees within 1 %
with what drivers report.
"""

from __future__ import annotations

from tessera.estimator.hardware.types import (
    GIB,
    PCIE3_BYTES_PER_S,
    PCIE5_BYTES_PER_S,
    Hardware,
    Link,
)

_EDR = 12.5e9  # ConnectX-5 product brief: EDR InfiniBand, one port of 100 Gb/s (Crius Table 1)
_HDR = 25e9  # ConnectX-6 product brief: HDR InfiniBand, one port of 200 Gb/s (Crius Table 1)
_NDR = 50e9  # ConnectX-7 product brief: NDR InfiniBand or 400 Gb/s Ethernet, one port
_PCIE4_STAGED = 16e9
"""PCI Express 4.0 x16 carries 32 GB/s per direction. Without peer access, every byte crosses the bus
into host memory and out again, which halves the bandwidth."""

A100 = Hardware(  # "NVIDIA A100 Tensor Core GPU" data sheet, column A100 40GB SXM
    name="a100",
    memory_bytes=40 * GIB,
    fp32_flops=19.5e12,
    fp16_flops=312e12,
    tf32_flops=156e12,
    memory_bytes_per_s=1555e9,
    gpus_per_node=4,
    link_bytes_per_s=300e9,  # NVLink 3: 600 GB/s both directions
    network_bytes_per_s=_EDR,
)

V100 = Hardware(  # "NVIDIA V100 Tensor Core GPU" data sheet, column V100 SXM2 32GB
    name="v100",
    memory_bytes=32 * GIB,
    fp32_flops=15.7e12,
    fp16_flops=125e12,
    bf16_flops=15.7e12,  # its tensor cores only support f16; bf16 is computed as f32
    memory_bytes_per_s=900e9,
    host_bytes_per_s=PCIE3_BYTES_PER_S,  # the data sheet: PCI Express 3.0, 32 GB/s both directions
    gpus_per_node=16,
    link_bytes_per_s=150e9,  # NVLink 2: 300 GB/s both directions
    network_bytes_per_s=_EDR,
)

A40 = Hardware(  # "NVIDIA A40" data sheet: 37.4 TFLOP/s fp32, 149.7 TFLOP/s fp16
    # Half of the quoted fp32 rate. The other half of the lanes is shared with integer work ("NVIDIA
    # Ampere GA102 GPU Architecture", section on the SM), and address arithmetic keeps it busy.
    name="a40",
    memory_bytes=48 * GIB,
    fp32_flops=37.4e12 / 2,
    fp16_flops=149.7e12,
    tf32_flops=74.8e12,
    memory_bytes_per_s=696e9,
    gpus_per_node=2,
    link=Link.PCIE,
    link_bytes_per_s=_PCIE4_STAGED,
    network_bytes_per_s=_EDR,
)

# "NVIDIA A10" data sheet: 31.2 TFLOP/s fp32 (halved as for the A40), 125 TFLOP/s fp16
A10 = Hardware(
    name="a10",
    memory_bytes=24 * GIB,
    fp32_flops=31.2e12 / 2,
    fp16_flops=125e12,
    tf32_flops=62.5e12,
    memory_bytes_per_s=600e9,
    gpus_per_node=2,
    link=Link.PCIE,
    link_bytes_per_s=_PCIE4_STAGED,
    network_bytes_per_s=_HDR,
)

H100 = (
    Hardware(  # "NVIDIA H100 Tensor Core GPU" data sheet, column H100 SXM; dense is half of sparse
        name="h100",
        memory_bytes=80 * GIB,
        fp32_flops=67e12,
        fp16_flops=989.5e12,
        tf32_flops=494.5e12,
        fp8_flops=1979e12,
        memory_bytes_per_s=3350e9,
        host_bytes_per_s=PCIE5_BYTES_PER_S,  # PCI Express 5.0: 128 GB/s both directions
        gpus_per_node=8,
        link_bytes_per_s=450e9,  # NVLink 4: 900 GB/s both directions (Arena, section 5.1)
        network_bytes_per_s=_HDR,  # ConnectX-6 (Arena, Table 1)
    )
)

L20 = Hardware(  # as sold: 59.8 TFLOP/s fp32 (halved as for the A40: Ada's SM shares its lanes too,
    # "NVIDIA Ada GPU Architecture"), 119.5 TFLOP/s fp16, 48 GB at 864 GB/s
    name="l20",
    memory_bytes=48 * GIB,
    fp32_flops=59.8e12 / 2,
    fp16_flops=119.5e12,
    tf32_flops=59.8e12,
    fp8_flops=239e12,
    memory_bytes_per_s=864e9,
    gpus_per_node=16,
    link=Link.PCIE,
    link_bytes_per_s=_PCIE4_STAGED,  # PCI Express 4.0 (Arena, section 5.1)
    network_bytes_per_s=_HDR,  # ConnectX-6 (Arena, Table 1)
)

A800 = Hardware(  # the A100 80GB SXM of the A100's data sheet with NVLink cut to 400 GB/s
    name="a800",
    memory_bytes=80 * GIB,
    fp32_flops=19.5e12,
    fp16_flops=312e12,
    tf32_flops=156e12,
    memory_bytes_per_s=2039e9,
    gpus_per_node=8,
    link_bytes_per_s=200e9,  # 400 GB/s both directions (Morphling, section 7)
    network_bytes_per_s=100e9,  # RDMA, 100 GB/s per node (Morphling, section 7)
)

V100_16 = Hardware(  # "NVIDIA V100 Tensor Core GPU" data sheet, column V100 SXM2, 16 GB
    name="v100-16",
    memory_bytes=16 * GIB,
    fp32_flops=15.7e12,
    fp16_flops=125e12,
    bf16_flops=15.7e12,
    memory_bytes_per_s=900e9,
    host_bytes_per_s=PCIE3_BYTES_PER_S,  # the data sheet: PCI Express 3.0, 32 GB/s both directions
    gpus_per_node=8,
    link_bytes_per_s=150e9,  # NVLink 2: 300 GB/s both directions
    network_bytes_per_s=4 * _EDR,  # "NVIDIA DGX-1 with Tesla V100": four EDR ports
)

A100_80 = Hardware(  # "NVIDIA A100 Tensor Core GPU" data sheet, column A100 80GB SXM
    name="a100-80",
    memory_bytes=80 * GIB,
    fp32_flops=19.5e12,
    fp16_flops=312e12,
    tf32_flops=156e12,
    memory_bytes_per_s=2039e9,
    gpus_per_node=8,
    link_bytes_per_s=300e9,  # NVLink 3: 600 GB/s both directions
    network_bytes_per_s=8 * _HDR,  # "NVIDIA DGX A100" data sheet: eight HDR ports for compute
)

H200 = (
    Hardware(  # "NVIDIA H200 Tensor Core GPU" data sheet, column H200 SXM; dense is half of sparse
        name="h200",
        memory_bytes=140 * GIB,  # 141 GB; drivers report 140.4 GiB
        fp32_flops=67e12,
        fp16_flops=989.5e12,
        tf32_flops=494.5e12,
        fp8_flops=1979e12,
        memory_bytes_per_s=4800e9,
        host_bytes_per_s=PCIE5_BYTES_PER_S,  # PCI Express 5.0: 128 GB/s both directions
        gpus_per_node=8,
        link_bytes_per_s=450e9,  # NVLink 4: 900 GB/s both directions
        network_bytes_per_s=8
        * _NDR,  # "NVIDIA DGX H200" data sheet: eight ports of 400 Gb/s for compute
    )
)

B200 = Hardware(  # "NVIDIA Blackwell Architecture Technical Brief", HGX B200 at 1,000 W; dense
    name="b200",
    memory_bytes=179 * GIB,  # 180 GB ("NVIDIA DGX B200" data sheet: 1,440 GB for eight)
    fp32_flops=80e12,
    fp16_flops=2250e12,
    tf32_flops=1100e12,
    fp8_flops=4500e12,
    memory_bytes_per_s=8000e9,  # DGX B200: 64 TB/s for eight
    host_bytes_per_s=PCIE5_BYTES_PER_S,  # "NVIDIA DGX B200": its processors have PCI Express 5.0
    gpus_per_node=8,
    link_bytes_per_s=900e9,  # NVLink 5: 1.8 TB/s both directions
    network_bytes_per_s=8 * _NDR,  # DGX B200: eight ports of 400 Gb/s for compute
)

MI300X = Hardware(  # "AMD Instinct MI300X Accelerator" data sheet; dense
    name="mi300x",
    memory_bytes=192 * GIB,
    fp32_flops=163.4e12,
    fp16_flops=1307.4e12,
    tf32_flops=653.7e12,
    fp8_flops=2614.9e12,
    memory_bytes_per_s=5300e9,
    host_bytes_per_s=PCIE5_BYTES_PER_S,  # PCI Express 5.0: 128 GB/s both directions
    gpus_per_node=8,
    link=Link.XGMI,
    link_bytes_per_s=448e9,  # seven links of 128 GB/s both directions, one to each neighbour
    network_bytes_per_s=8
    * _NDR,  # "AMD Instinct MI300X Platform": one 400 Gb/s port per GPU by reference design
)

ALL: tuple[Hardware, ...] = (A100, V100, A40, A10)
"""The simulated cluster of Crius, Table 1. Sample profiles are for these types by default."""

CATALOGUE: tuple[Hardware, ...] = (*ALL, H100, L20, A800, V100_16, A100_80, H200, B200, MI300X)
