"""The files by which Linux describes an RDMA device."""

from __future__ import annotations

from pathlib import Path


def make_rdma_device(
    sys: Path, *, driver: str = "mlx5_core", layer: str = "Ethernet", tclass: str = ""
) -> Path:
    """Make the files of an RDMA device on eth1 below ``sys``, and return it."""
    base = sys / "class/infiniband/mlx5_0"
    (base / "device/net/eth1").mkdir(parents=True)
    (sys / "drivers" / driver).mkdir(parents=True)
    (base / "device/driver").symlink_to(sys / "drivers" / driver)
    (base / "ports/1").mkdir(parents=True)
    (base / "ports/1/link_layer").write_text(layer + "\n")
    (base / "tc/1").mkdir(parents=True)
    (base / "tc/1/traffic_class").write_text(tclass)
    return sys
